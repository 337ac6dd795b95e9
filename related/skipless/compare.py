"""Skipless transformers without Q and P: weights saved, exactness of folds, conditioning of real matrices.

Reads   a checkpoint (--model) for its condition numbers; configs for the table of weights; RUN/serial/ and
        RUN/parallel/, which train.py writes
Writes  RUN/compare/   the tables, compare.md, and the picture, compare.png

    python -m related.skipless.compare                                            # a minute on two cores
    python -m related.skipless.compare --run runs/x --model meta-llama/Llama-2-7b-hf --report-only
    python -m related.skipless.compare --run runs/y --report-only --config Qwen/Qwen2.5-7B my-config.json

Weights are those of matrices, as in the paper; the possible speed-up, total over remaining weights, is that
of one sequence when reading them takes all the time. Exactness is the largest logit difference over the
largest logit after removing Q, K, V or P, in float64 and with weights stored in float32 and in bfloat16, of
models that are random, with biases; or made of the matrices of the stock model that gave the trained ones
their shape (its own function needs its norms); or trained. "Itself" is the model without a fold.
"""

import os
from pathlib import Path

import torch

from common.data.demo import DEMO, resolve_model
from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.models.families import allowed_kv_heads, geometry
from common.models.layers import Layers
from common.models.load import describe, load_config, load_model, load_tokenizer
from common.reporting.plots import drawing
from common.reporting.tables import markdown_table
from common.run.artifact import begin_stage, read_record, verify_files, write_directory, write_record
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import positive, stage_parser
from common.run.progress import Progress
from related.skipless import fold, train
from related.skipless.modeling import SkiplessConfig, SkiplessForCausalLM

STAGE = "related/skipless/compare.py"
CONFIGS = sorted(map(str, Path(__file__).parent.glob("configs/*.json")))
PYTHIA = "gpt_neox"
LIKE_LLAMA = "llama", "mistral", "qwen2", "qwen3", "gemma", "olmo", "olmo2", "olmo3"  # Q, K and V are apart
COUNTED = (*LIKE_LLAMA, "phi3", SkiplessConfig.model_type, PYTHIA)  # model types
COLUMNS = ("model", "blocks", "attention", "Q + P per layer", "weights", "without Q and P", "saved, speed-up",
           "by an exact fold")
KINDS = {"serial": False, "parallel": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SINGULAR = 1e14  # condition number from which the smallest singular value is float64's rounding
LETTERS = [letter.upper() for letter in fold.PROJECTIONS]


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint of the condition numbers reported")
    parser.add_argument("--config", nargs="+", default=[], metavar="CONFIG",
                        help="more rows of the table of weights: directories, hub names or .json files")
    parser.add_argument("--report-only", action="store_true",
                        help="only weights and condition numbers, which need no skipless model")
    parser.section("folds")
    parser.add_argument("--text", default=DEMO, help="text for the logits, as --text of fold.py")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence, at least 2")
    return parser.parse_args()


def count(config) -> dict:
    """Numbers of weights of a model with this transformers config; q, p, kv and ffn are those of a layer.

    untied: what untying adds, as a tied embedding must be stored twice once Q is multiplied into it;
    without_q_p: with neither Q nor P, as in the paper's table; folded: what an exact fold leaves, as P of a
    parallel block stays, which no matrix of its own follows. Raises UserError for an unknown model_type.
    """
    if config.model_type not in COUNTED:
        raise UserError(f"--config: expected model_type in {sorted(COUNTED)}, found {config.model_type!r}")
    shape, embedding = geometry(config), config.vocab_size * config.hidden_size
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gated, tied = getattr(config, "gated", config.model_type != PYTHIA), config.tie_word_embeddings
    weights = {
        "parallel": getattr(config, "parallel", getattr(config, "use_parallel_residual", False)),
        "attention": {1: "MQA", shape.heads: "MHA"}.get(shape.kv_heads, "GQA"),
        "square": width == shape.hidden,  # otherwise neither Q nor P can be removed
        "layers": shape.layers, "q": shape.hidden * width, "p": width * shape.hidden,
        "kv": 2 * shape.hidden * kv_width,
        "ffn": (3 if gated else 2) * shape.hidden * config.intermediate_size,
        "embeddings": embedding if tied else 2 * embedding, "untied": embedding if tied else 0,
    }
    total = shape.layers * sum(weights[part] for part in ("q", "p", "kv", "ffn")) + weights["embeddings"]
    without_q_p = total - shape.layers * (weights["q"] + weights["p"]) + weights["untied"]
    kept = shape.layers * weights["p"] * weights["parallel"]
    return weights | {"total": total, "without_q_p": without_q_p, "folded": without_q_p + kept}


def count_all(args, config) -> dict[str, dict]:
    """Name -> weights of the checkpoint, the paper's configs and those of --config."""
    configs = {args.model: config}
    for path in (*CONFIGS, *args.config):
        name = os.path.basename(path).removesuffix(".json")
        configs[path if name in configs else name] = load_config(path)
    return {name: count(config) for name, config in configs.items()}


def weights_table(weights: dict[str, dict]) -> str:
    """One row per model: weights, the share saved, and the possible speed-up."""
    rows = []
    for name, counted in weights.items():
        total, without = counted["total"], f"{counted['without_q_p']:,}"
        saved, folded = (f"{1 - after / total:.0%}, {total / after:.2f}x"
                         for after in (counted["without_q_p"], counted["folded"]))
        if not counted["square"]:
            without, saved, folded = "-", "Q is not square", "-"
        blocks, q_p = "parallel" if counted["parallel"] else "serial", f"{counted['q'] + counted['p']:,}"
        rows.append((name, blocks, counted["attention"], q_p, f"{total:,}", without, saved, folded))
    return markdown_table(COLUMNS, rows)


def checkpoint_conditions(path: str) -> list[dict[str, float]]:
    """Condition numbers of each layer's square matrices, with one layer in memory at a time."""
    found, layers = [], Layers(path, torch.float32, "cpu", layerwise=True)
    numbers = range(layers.config.num_hidden_layers)
    for index in Progress(numbers, desc="condition numbers", unit="layer", leave=False):
        with layers.layer(index) as layer:
            found.append(fold.condition_numbers(layer.self_attn))
    return found


def conditions_table(layers: list[dict]) -> str:
    """One row per layer: condition numbers of Q, K, V and P."""
    rows = [(index, *(f"{numbers[letter]:.3g}" if letter in numbers else "not square"
                      for letter in fold.PROJECTIONS)) for index, numbers in enumerate(layers)]
    return markdown_table(("layer", *LETTERS), rows)


def differences(reference: list[torch.Tensor], model, tokens: torch.Tensor) -> dict[str, float]:
    """Relative differences between a float64 model and the reference, in each of PRECISIONS."""
    return {name: fold.rounded_difference(reference, model, tokens, dtype)
            for name, dtype in PRECISIONS.items()}


@torch.no_grad()
def random_model(config: SkiplessConfig, seed: int = 0):
    """A float64 model with Gaussian weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    model = SkiplessForCausalLM(config).double().eval()
    for parameter in model.parameters():
        std = 1.0 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        parameter.normal_(std=std, generator=generator)
    return model


@torch.no_grad()
def transplanted(source, parallel: bool):
    """A float64 skipless model with a stock model's matrices, if not its function."""
    bias = source.model.layers[0].self_attn.q_proj.bias is not None
    model = SkiplessForCausalLM(train.skipless_config(source.config, parallel, attention_bias=bias)).double()
    for parameter in model.parameters():
        parameter.zero_()  # P may have a bias here alone
    model.load_state_dict(source.state_dict(), strict=False)
    return model.eval()


def every_fold(name: str, model, tokens: torch.Tensor) -> list[dict]:
    """Differences of a float64 model from itself and of each of its folds, or why a fold was refused."""
    reference = fold.exact_logits(model, tokens)
    itself = {"remove": None, "parameters": model.num_parameters()} | differences(reference, model, tokens)
    lines = [{"model": name} | itself]
    for letter in fold.PROJECTIONS:
        line = {"model": name, "remove": letter}
        try:
            folded = fold.fold(model, letter)
            line |= {"parameters": folded.num_parameters()} | differences(reference, folded, tokens)
        except UserError as error:
            line["refused"] = str(error)
        lines.append(line)
    return lines


def models_to_fold(shape, name: str, stock, paths: dict[str, str]) -> dict:
    """Name -> float64 model: random ones of this shape, those of a stock model's matrices, trained ones."""
    divisors, models = allowed_kv_heads(shape.num_attention_heads), {}
    kv_heads = {"MHA": shape.num_attention_heads, "GQA": divisors[len(divisors) // 2], "MQA": 1}
    for kind, parallel in KINDS.items():
        for heads, number in kv_heads.items():
            config = train.skipless_config(shape, parallel, num_key_value_heads=number, **BIASES)
            models[f"random {kind} {heads}"] = random_model(config)
        config = train.skipless_config(shape, parallel, gated=False, hidden_act="gelu", **BIASES)
        models[f"random {kind}, plain FFN"] = random_model(config)
    for kind, parallel in KINDS.items():
        models[f"{kind} of {name}'s matrices"] = transplanted(stock, parallel)
    for kind, path in paths.items():
        print(f"reads   {path}")
        models[f"trained {kind}"] = load_model(path, torch.float64)
    return models


def fold_all(args) -> list[dict]:
    """Lines of the exactness table.

    Raises UserError unless the two trained models are there, complete, and of the same shape.
    """
    paths = {kind: train.model_path(args.run, parallel) for kind, parallel in KINDS.items()}
    model = read_record(paths["serial"], train.STAGE)["model"]
    source, name = model["path"], model["name"]
    shape = train.load_shape(source, args.length, "q")
    for path in paths.values():
        verify_files(path, read_record(path, train.STAGE, describe(source)))
    tokens, text = load_tokens(args.text, load_tokenizer(source), fold.CHECKED, args.length, EVALUATION)
    print(f"reads   {text}, for the logit differences")
    models = models_to_fold(shape, name, load_model(source, torch.float64), paths)
    return [line for name, model in models.items() for line in every_fold(name, model, tokens)]


def exactness_table(lines: list[dict]) -> str:
    """One row per model: its weights; differences of itself and each fold, and the share of weights saved."""
    rows = []
    for name in dict.fromkeys(line["model"] for line in lines):
        itself, *folds = [line for line in lines if line["model"] == name]
        before = itself["parameters"]
        cells = ["refused" if "refused" in line
                 else f"{differences_cell(line)}, {1 - line['parameters'] / before:.0%}" for line in folds]
        rows.append((name, f"{before:,}", differences_cell(itself), *cells))
    table = markdown_table(("model", "weights", "itself", *LETTERS), rows)
    reasons = dict.fromkeys(f"Refused: {line['refused']}." for line in lines if "refused" in line)
    return "\n\n".join((table, *reasons))


def differences_cell(line: dict) -> str:
    """Differences in each of PRECISIONS, for example "2e-14 / 2e-07 / over 1"."""
    numbers = (line[name] for name in PRECISIONS)
    return " / ".join("0" if number == 0 else f"{number:.0e}" if number < 1 else "over 1"
                      for number in numbers)


def closing_line(name: str, layers: list[dict], lines: list[dict] | None) -> str:
    """How exact the folds were, and which of the checkpoint's attention matrices are invertible."""
    numbers = [(value, f"{letter.upper()} of layer {index}")
               for index, layer in enumerate(layers) for letter, value in layer.items()]
    text = f"no attention matrix of {name} is square"
    if numbers:
        worst, place = max(numbers)
        invertible = sum(value < SINGULAR for value, _ in numbers)
        text = (f"{invertible} of {len(numbers)} square attention matrices of {name} invertible, "
                f"worst condition number {worst:.3g}, {place}")
    if not lines:
        return text
    exact = [line["float64"] for line in lines if line["remove"] and "refused" not in line]
    refused = sum("refused" in line for line in lines)
    return f"{len(exact)} folds exact to {max(exact, default=0):.0e}, {refused} refused; {text}"


@drawing
def picture(plt, name: str, layers: list[dict]):
    """Condition numbers of a checkpoint's matrices by layer."""
    figure, axis = plt.subplots(figsize=(5.4, 3.8), layout="constrained")
    for letter in layers[0]:
        axis.plot([layer[letter] for layer in layers], marker="o", markersize=3, label=letter.upper())
    axis.axhline(fold.MAX_CONDITION, color="black", linewidth=0.8, linestyle="--", label="not folded beyond")
    axis.set(title=name, xlabel="layer", ylabel="condition number", yscale="log")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8, ncols=2)
    return figure


def main():
    args = parse()
    output, path = os.path.join(args.run, "compare"), resolve_model(args.model)
    config = load_config(path)
    separate = [*LIKE_LLAMA, SkiplessConfig.model_type]
    if config.model_type not in separate:
        raise UserError(f"{path}: expected model_type in {separate}, found {config.model_type!r}")
    weights = count_all(args, config)
    started = begin_stage(STAGE, args, output)
    lines = None if args.report_only else fold_all(args)
    print(f"reads   {path}; {len(weights) - 1} configs")
    numbers = checkpoint_conditions(path)
    tables = {"Weights of skipless models of these shapes, without biases and norms": weights_table(weights),
              f"Condition numbers of {args.model}": conditions_table(numbers)}
    if lines:
        precisions = " / ".join(PRECISIONS)
        tables[f"Largest logit difference over the largest logit, {precisions}"] = exactness_table(lines)
    report = "\n\n".join(f"{title}:\n\n{table}" for title, table in tables.items())
    record = started.record(describe(path, args.model), {}, weights=weights, conditions=numbers,
                            exactness=lines)
    with write_directory(output) as aside:
        write_text(os.path.join(aside, "compare.md"), report + "\n")
        picture(os.path.join(aside, "compare.png"), args.model, numbers)
        write_record(aside, record)
    print(f"\n{report}\n\nwrote   {output}")
    print(f"compare: {closing_line(args.model, numbers, lines)}; in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
