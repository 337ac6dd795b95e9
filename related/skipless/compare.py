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
their shape (its own function needs its norms); or trained. "Itself" is the model without a fold. The sweep
gives the trained serial model's Q ever larger condition numbers, as rounding errors grow with them, and folds
it all the same; fold.py refuses above --max-condition.
"""

import copy
import math
import os
from pathlib import Path

import torch

from common.data import demo
from common.data.demo import resolve_model
from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.models import families
from common.models.layers import Layers
from common.models.load import describe, load_config, load_model, load_tokenizer, pick_device
from common.reporting.plots import drawing
from common.reporting.tables import markdown_table
from common.run.artifact import begin_stage, read_record, verify_files, write_directory, write_record
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import device as device_flag
from common.run.flags import positive, positive_float, seed, stage_parser
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
SWEEP = [10.0**power for power in range(0, 13, 2)]  # condition numbers
LETTERS = [letter.upper() for letter in fold.PROJECTIONS]


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=demo.DEMO, help="checkpoint of the condition numbers reported")
    parser.add_argument("--config", nargs="+", default=[], metavar="CONFIG",
                        help="more rows of the table of weights: directories, hub names or .json files")
    parser.add_argument("--report-only", action="store_true",
                        help="only weights and condition numbers, which need no skipless model")
    parser.add_argument("--device", type=device_flag, default="auto",
                        help="device for the condition numbers: auto, cpu, cuda or cuda:N")
    parser.section("folds")
    parser.add_argument("--max-condition", type=positive_float, default=fold.MAX_CONDITION,
                        help="largest condition number of a matrix that is inverted")
    parser.add_argument("--text", default=demo.DEMO, help="text for the logits, as --text of fold.py")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence, at least 2")
    parser.add_argument("--seed", type=seed, default=0, help="random seed of the random models")
    return parser.parse_args()


def count(config) -> dict:
    """Numbers of weights of a model with this transformers config; q, p, kv and ffn are those of a layer.

    untied: what untying adds, as a tied embedding must be stored twice once Q is multiplied into it;
    without_q_p: with neither Q nor P, as in the paper's table; folded: what an exact fold leaves, as P of a
    parallel block stays, which no matrix of its own follows. Raises UserError for an unknown model_type.
    """
    if config.model_type not in COUNTED:
        raise UserError(f"--config: expected model_type in {sorted(COUNTED)}, found {config.model_type!r}")
    shape, embedding = families.geometry(config), config.vocab_size * config.hidden_size
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


def checkpoint_conditions(path: str, device: str) -> list[dict[str, float]]:
    """Condition numbers of each layer's square matrices, with one layer in memory at a time."""
    found, layers = [], Layers(path, torch.float32, device, layerwise=True)
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
def random_model(config: SkiplessConfig, seed: int):
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


def every_fold(name: str, model, tokens: torch.Tensor, max_condition: float) -> list[dict]:
    """Differences of a float64 model from itself and of each of its folds, or why a fold was refused.

    condition: that of the worst matrix inverted.
    """
    reference, parallel = fold.exact_logits(model, tokens), model.config.parallel
    shape = {"model": name, "parallel": parallel, "kv_heads": model.config.num_key_value_heads}
    itself = differences(reference, model, tokens)
    lines = [shape | {"remove": None, "parameters": model.num_parameters()} | itself]
    for letter in fold.PROJECTIONS:
        line = shape | {"remove": letter}
        lines.append(line)
        try:
            folded = fold.fold(model, letter, max_condition)
            metrics = differences(reference, folded, tokens)
            if not metrics["float64"] <= fold.LOGIT_TOLERANCE:
                raise UserError(f"expected logits without {letter.upper()} to differ by at most "
                                f"{fold.LOGIT_TOLERANCE:.0e}, found {metrics['float64']:.1e}")
        except UserError as error:
            line["refused"] = str(error)
            continue
        line |= metrics | {"gone": folded.config.removed, "parameters": folded.num_parameters()}
        line["condition"] = None
        if fold.inverts(letter, parallel):
            line["condition"] = max(layer[letter] for layer in fold.conditions(model))
    return lines


@torch.no_grad()
def ill_conditioned(model, condition: float):
    """A copy with this condition number of every Q, whose norms stay the same."""
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        weight = layer.self_attn.q_proj.weight
        left, values, right = torch.linalg.svd(weight)
        spread = torch.logspace(0, -math.log10(condition), len(values), dtype=weight.dtype)
        weight.copy_(left * (spread * values.norm() / spread.norm()) @ right)
    return changed


def sweep(model, tokens: torch.Tensor) -> list[dict]:
    """For each condition number of SWEEP: give it to every Q of the model, fold Q out, compare logits."""
    lines = []
    for condition in SWEEP:
        changed = ill_conditioned(model, condition)
        reference, folded = fold.exact_logits(changed, tokens), fold.fold(changed, "q", math.inf)
        lines.append({"condition": condition} | differences(reference, folded, tokens))
    return lines


def head_counts(heads: int) -> dict[str, int]:
    """Name -> key/value heads of the random models. No GQA where no number of them divides the heads."""
    grouped = [number for number in range(2, min(max(heads // 4, 2), heads - 1) + 1) if heads % number == 0]
    return {"MHA": heads} | ({"GQA": grouped[-1]} if grouped else {}) | {"MQA": 1}


def fold_trained(args) -> tuple[list[dict], dict, list[dict]]:
    """Lines of the exactness table, condition numbers before and after training, lines of the sweep.

    Raises UserError unless the two trained models are there, complete, and of the same shape.
    """
    paths = {kind: train.model_path(args.run, parallel) for kind, parallel in KINDS.items()}
    recorded, trained, skipless = read_record(paths["serial"], train.STAGE)["model"], {}, {}
    source, name = recorded["path"], recorded["name"]
    model, shape = describe(source, name), train.load_shape(source, args.length, "q")
    for kind, path in paths.items():
        record = read_record(path, train.STAGE, model)
        verify_files(path, record)
        trained[kind] = {when: record["summary"][f"conditions_{when}"] for when in ("before", "after")}
    tokens, text = load_tokens(args.text, load_tokenizer(source), 4, args.length, EVALUATION)
    print(f"reads   {text}, for the logit differences")
    for kind, parallel in KINDS.items():
        for heads, kv_heads in head_counts(shape.num_attention_heads).items():
            config = train.skipless_config(shape, parallel, num_key_value_heads=kv_heads, **BIASES)
            skipless[f"random {kind} {heads}"] = random_model(config, args.seed)
        config = train.skipless_config(shape, parallel, gated=False, hidden_act="gelu", **BIASES)
        skipless[f"random {kind}, plain FFN"] = random_model(config, args.seed)
    stock = load_model(source, torch.float64)
    for kind, parallel in KINDS.items():
        skipless[f"{kind} of {name}'s matrices"] = transplanted(stock, parallel)
    for kind, path in paths.items():
        print(f"reads   {path}")
        skipless[f"trained {kind}"] = load_model(path, torch.float64)
    lines = [line for name, model in skipless.items()
             for line in every_fold(name, model, tokens, args.max_condition)]
    return lines, trained, sweep(skipless["trained serial"], tokens)


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
        invertible = sum(value < fold.SINGULAR for value, _ in numbers)
        text = (f"{invertible} of {len(numbers)} square attention matrices of {name} invertible, "
                f"worst condition number {worst:.3g}, {place}")
    if not lines:
        return text
    exact = [line["float64"] for line in lines if line["remove"] and "refused" not in line]
    refused = sum("refused" in line for line in lines)
    return f"{len(exact)} folds exact to {max(exact, default=0):.0e}, {refused} refused; {text}"


@drawing
def picture(plt, name: str, checkpoint: list[dict], trained: dict | None, swept, limit: float):
    """Condition numbers by layer, of the checkpoint and of the trained models, and the differences they make.

    trained and swept may be None: then there is one panel instead of three. limit: the largest condition
    number that a fold accepts.
    """
    panels, width = (3, 15) if trained else (1, 5.4)
    figure, (axes,) = plt.subplots(1, panels, figsize=(width, 3.8), layout="constrained", squeeze=False)
    draw_conditions(axes[0], checkpoint, "-", "")
    axes[0].set(title=name, yscale="log")
    if trained:
        for (kind, numbers), linestyle in zip(trained.items(), ("-", "--"), strict=True):
            draw_conditions(axes[1], numbers["after"], linestyle, f", {kind}")
        axes[1].set(title="skipless, trained from orthogonal matrices", ylim=(0, None))
        axis, allowed = axes[2], fold.LOGIT_TOLERANCE
        for precision in reversed(PRECISIONS):
            axis.plot([line["condition"] for line in swept], [min(line[precision], 10) for line in swept],
                      marker="o", markersize=3, label=precision)
        axis.axvline(limit, color="black", linewidth=0.8, linestyle="--", label="refused beyond")
        axis.axhline(allowed, color="grey", linewidth=0.8, linestyle="--", label="allowed in float64")
        axis.set(title="Q removed", xscale="log", yscale="log", ylim=(1e-16, 5),
                 xlabel="condition number of every Q", ylabel="logit difference, relative")
        axis.legend(fontsize=8)
    return figure


def draw_conditions(axis, layers: list[dict], linestyle: str, label: str) -> None:
    """One line per letter over the layers."""
    for number, letter in enumerate(fold.PROJECTIONS):
        if letter in layers[0]:
            axis.plot([layer[letter] for layer in layers], color=f"C{number}", marker="o", markersize=3,
                      linestyle=linestyle, label=f"{letter.upper()}{label}")
    axis.set(xlabel="layer", ylabel="condition number")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if axis.lines:  # there are none when no matrix is square
        axis.legend(fontsize=8, ncols=2)


def main():
    args = parse()
    output, path = os.path.join(args.run, "compare"), resolve_model(args.model)
    config = load_config(path)
    separate = [*LIKE_LLAMA, SkiplessConfig.model_type]
    if config.model_type not in separate:
        raise UserError(f"{path}: expected model_type in {separate}, found {config.model_type!r}")
    weights, lines, trained, swept = count_all(args, config), None, None, None
    started = begin_stage(STAGE, args, output)
    if not args.report_only:
        lines, trained, swept = fold_trained(args)
    print(f"reads   {path}; {len(weights) - 1} configs")
    numbers = checkpoint_conditions(path, pick_device(args.device))
    tables = {"Weights of skipless models of these shapes, without biases and norms": weights_table(weights),
              f"Condition numbers of {args.model}": conditions_table(numbers)}
    if lines:
        precisions = " / ".join(PRECISIONS)
        tables[f"Largest logit difference over the largest logit, {precisions}"] = exactness_table(lines)
        rows = [(f"{line['condition']:.0e}", differences_cell(line)) for line in swept]
        tables["The same, with every Q of the trained serial model ill-conditioned"] = markdown_table(
            ("condition number of every Q", precisions), rows)
    report = "\n\n".join(f"{title}:\n\n{table}" for title, table in tables.items())
    record = started.record(describe(path, args.model), {}, weights=weights, conditions=numbers,
                            exactness=lines, trained=trained, sweep=swept)
    with write_directory(output) as aside:
        write_text(os.path.join(aside, "compare.md"), report + "\n")
        drawn = os.path.join(aside, "compare.png")
        picture(drawn, args.model, numbers, trained, swept, args.max_condition)
        write_record(aside, record)
    print(f"\n{report}\n\nwrote   {output}")
    print(f"compare: {closing_line(args.model, numbers, lines)}; in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
