"""Skipless transformers without Q and P: what would be saved, whether it is exact, and what the matrices of a real model are like.

Reads   a checkpoint (--model) for its condition numbers; configs for the table of weights; a shape and a text to train on
Writes  RUN/serial/, RUN/parallel/   two skipless models, trained by train.py; what stands there already is not trained again
        RUN/compare.json, .md, .png  the tables and the picture

    python -m related.skipless.compare                                                     # minutes on two cores
    python -m related.skipless.compare --run runs/x --model meta-llama/Llama-2-7b-hf --report-only
    python -m related.skipless.compare --run runs/y --report-only --config Qwen/Qwen2.5-7B my-config.json

Exactness: random models (serial and parallel; MHA, GQA and MQA; with biases), models of the matrices of --shape, which are a real
model's but make no sense without its norms, and the two trained ones, without Q, K, V and P, against themselves: largest difference of a logit over the largest logit, in float64, and with the weights stored in float32 and in bfloat16;
and the share of the weights that are gone. "Itself" is the model that was not folded. What does not apply is refused, with the reason.

Conditioning: a fold multiplies by T and by T^-1, and rounding grows with T's condition number. The sweep gives the trained serial
model's Q ever worse ones and folds it all the same; fold.py refuses above --max-condition.
"""

import copy
import glob
import math
import os
import signal
import sys

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from common.artifacts import read_record, record, refuse_overwrite, write_json, write_text
from common.cli import Clock, UserError, run_stage, stage_parser
from common.data.demo import resolve_model
from common.data.text import load_tokens
from common.layers import Layers
from common.models import (
    DEMO,
    SUPPORTED,
    describe,
    load_config,
    load_model,
    load_tokenizer,
    pick_device,
    require_convertible,
)
from common.reporting.plots import drawing
from common.training.sharding import joined_ranks
from related.skipless.algebra import MAX_CONDITION, PROJECTIONS, condition_numbers, fold, inverts
from related.skipless.fold import TOLERANCE, exact_logits, relative_difference, rounded
from related.skipless.modeling import SkiplessConfig
from related.skipless.train import skipless_config, train_skipless, training_flags
from related.skipless.weights import count, rows

CONFIGS = sorted(glob.glob(os.path.join(os.path.dirname(__file__), "configs", "*.json")))
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KINDS = ("float64", *STORED)
SWEEP = [10.0**power for power in range(0, 13, 2)]  # condition numbers


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint whose matrices are reported on")
    parser.add_argument("--config", nargs="+", default=[], metavar="CONFIG", help="more rows of the table of weights: directories, hub names or .json files")
    parser.add_argument("--shape", default=DEMO, metavar="MODEL", help="small checkpoint that gives the skipless models their shape and tokenizer")
    parser.add_argument("--report-only", action="store_true", help="weights and condition numbers alone: no skipless model is made")
    parser.add_argument("--max-condition", type=float, default=MAX_CONDITION, help="largest condition number of a matrix that is inverted")
    parser.add_argument("--device", default="auto", help="of the condition numbers: auto, cpu or cuda")
    training_flags(parser)
    return parser.parse_args()


def checkpoint_conditions(path: str, device: str) -> list[dict[str, float]]:
    """Per layer the condition numbers of a checkpoint's square Q, K, V and P, one layer in memory at a time."""
    found, layers = [], Layers(path, torch.float32, device, one_by_one=True)
    for index in tqdm(range(layers.config.num_hidden_layers), desc="condition numbers", unit="layer", leave=False):
        with layers.layer(index) as layer:
            found.append(condition_numbers(layer.self_attn))
    return found


def random_model(config: SkiplessConfig, seed: int):
    """Gaussian weights and biases, float64."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.ndim == 1 else parameter.shape[1] ** -0.5, generator=generator)
    return model


def transplanted(source, parallel: bool):
    """A skipless model of a stock one's matrices, float64. Not its function: it shows folds of matrices as real training leaves them."""
    state = source.state_dict()
    config = skipless_config(source.config, parallel, attention_bias="model.layers.0.self_attn.q_proj.bias" in state)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.load_state_dict({name: state.get(name, torch.zeros_like(tensor)) for name, tensor in model.state_dict().items()})
    return model


def measured(reference: list[torch.Tensor], model, tokens: torch.Tensor) -> dict[str, float]:
    """A float64 model's differences from the reference logits, as it is and with its weights stored in fewer bits."""
    models = {"float64": model} | {kind: rounded(model, dtype) for kind, dtype in STORED.items()}
    return {kind: relative_difference(reference, exact_logits(found, tokens)) for kind, found in models.items()}


def every_fold(name: str, model, tokens: torch.Tensor, max_condition: float) -> list[dict]:
    """A model, float64, and its folds: differences of logits, and the condition number of the worst matrix inverted, or why it was refused."""
    reference, parallel = exact_logits(model, tokens), model.config.parallel
    common = {"model": name, "parallel": parallel, "kv_heads": model.config.num_key_value_heads}
    lines = [common | {"remove": None, "parameters": model.num_parameters()} | measured(reference, model, tokens)]
    for letter in PROJECTIONS:
        try:
            folded = fold(model, letter, max_condition)
            found = measured(reference, folded, tokens)
            if not found["float64"] <= TOLERANCE:
                raise UserError(f"expected logits without {letter.upper()} to differ by at most {TOLERANCE:.0e}, found {found['float64']:.1e}")
        except UserError as error:
            lines.append(common | {"remove": letter, "refused": str(error)})
            continue
        worst = max(condition_numbers(layer.self_attn)[letter] for layer in model.model.layers) if inverts(letter, parallel) else None
        lines.append(common | {"remove": letter, "gone": folded.config.removed, "parameters": folded.num_parameters(), "condition": worst} | found)
    return lines


@torch.no_grad()
def sweep(model, tokens: torch.Tensor) -> list[dict]:
    """Folds of Q out of a model whose every Q has been given a condition number: the differences that they make."""
    lines = []
    for condition in SWEEP:
        spoilt = copy.deepcopy(model)
        for layer in spoilt.model.layers:
            weight = layer.self_attn.q_proj.weight
            left, values, right = torch.linalg.svd(weight)
            spread = torch.logspace(0, -math.log10(condition), len(values), dtype=weight.dtype)
            weight.copy_(left * (spread * values.norm() / spread.norm()) @ right)
        lines.append({"condition": condition} | measured(exact_logits(spoilt, tokens), fold(spoilt, "q", math.inf), tokens))
    return lines


@drawing
def picture(plt, name: str, checkpoint: list[dict], trained: dict[str, dict] | None, swept: list[dict] | None, limit: float):
    """Condition numbers by layer, of the checkpoint and of the trained models; and the differences that a condition number makes."""
    figure, axes = plt.subplots(1, 3 if trained else 1, figsize=(15 if trained else 5.4, 3.8), layout="constrained", squeeze=False)
    axes = axes[0]

    def by_layer(axis, layers: list[dict], linestyle: str, label: str):
        for number, letter in enumerate(PROJECTIONS):
            if letter in layers[0]:
                axis.plot([layer[letter] for layer in layers], color=f"C{number}", marker="o", markersize=3, linestyle=linestyle, label=f"{letter.upper()}{label}")
        axis.set(xlabel="layer", ylabel="condition number")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8, ncols=2)

    by_layer(axes[0], checkpoint, "-", "")
    axes[0].set(title=name, yscale="log")
    if trained:
        for (kind, found), linestyle in zip(trained.items(), ("-", "--"), strict=True):
            by_layer(axes[1], found["after"], linestyle, f", {kind}")
        axes[1].set(title="skipless, trained from orthogonal matrices", ylim=(0, None))
        for kind in reversed(KINDS):
            axes[2].plot([line["condition"] for line in swept], [min(line[kind], 10) for line in swept], marker="o", markersize=3, label=kind)
        axes[2].axvline(limit, color="black", linewidth=0.8, linestyle="--", label="refused beyond")
        axes[2].axhline(TOLERANCE, color="grey", linewidth=0.8, linestyle="--", label="allowed in float64")
        axes[2].set(title="Q removed", xscale="log", yscale="log", ylim=(1e-16, 5), xlabel="condition number of every Q", ylabel="logit difference, relative")
        axes[2].legend(fontsize=8)
    return figure


def markdown(lines: list[tuple[str, ...]]) -> str:
    """Rows of cells, the first a heading, as a Markdown table."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]])


def exactness_table(lines: list[dict]) -> str:
    """A row a model: its weights, then for itself and for each fold the three differences and the share of weights gone."""
    table = [("model", "weights", "itself", *(letter.upper() for letter in PROJECTIONS))]
    for name in dict.fromkeys(line["model"] for line in lines):
        own, *folds = [line for line in lines if line["model"] == name]
        cells = ["refused" if "refused" in line else f"{differences(line)}, {1 - line['parameters'] / own['parameters']:.0%}" for line in folds]
        table.append((name, f"{own['parameters']:,}", differences(own), *cells))
    reasons = dict.fromkeys(f"Refused: {line['refused']}." for line in lines if "refused" in line)
    return "\n\n".join((markdown(table), *reasons))


def differences(line: dict) -> str:
    """"2e-14 / 2e-07 / 1e-02": exact, and stored in each of the dtypes."""
    return " / ".join("0" if line[kind] == 0 else f"{line[kind]:.0e}" if line[kind] < 1 else "over 1" for kind in KINDS)


def conditions_table(layers: list[dict]) -> str:
    table = [("layer", *(letter.upper() for letter in PROJECTIONS))]
    table += [(str(index), *(f"{found[letter]:.3g}" if letter in found else "not square" for letter in PROJECTIONS)) for index, found in enumerate(layers)]
    return markdown(table)


def sweep_table(lines: list[dict]) -> str:
    return markdown([("condition of every Q", " / ".join(KINDS)), *((f"{line['condition']:.0e}", differences(line)) for line in lines)])


def make_skipless(args, clock: Clock) -> tuple[list[dict], dict, list[dict]]:
    """Train, fold, spoil: lines of the exactness table, condition numbers before and after training, lines of the sweep."""
    source = resolve_model(args.shape)
    config = load_config(source)
    require_convertible(source, config)
    paths = {kind: os.path.join(args.run, kind) for kind in ("serial", "parallel")}
    with joined_ranks() as ranks:
        for kind, path in paths.items():
            if (args.force or not os.path.isdir(path)) and not train_skipless(args, source, kind == "parallel", ranks, clock):
                sys.exit()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # training had signals wait for the end of a step
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tokens, said = load_tokens(args.heldout, load_tokenizer(source), 4, args.length, split="heldout")
    print(f"reads   {said}, for the differences")
    heads, lines, trained = config.num_attention_heads, [], {}
    for kind in paths:
        for name, kv_heads in {"MHA": heads, "GQA": max(heads // 4, 2), "MQA": 1}.items():
            shape = skipless_config(config, kind == "parallel", kv_heads, attention_bias=True, mlp_bias=True)
            lines += every_fold(f"random {kind} {name}", random_model(shape, args.seed), tokens, args.max_condition)
    stock = load_model(source, torch.float64)
    for kind in paths:
        lines += every_fold(f"{kind} of {args.shape}'s matrices", transplanted(stock, kind == "parallel"), tokens, args.max_condition)
    for kind, path in paths.items():
        print(f"reads   {path}")
        model = load_model(path, torch.float64)
        lines += every_fold(f"trained {kind}", model, tokens, args.max_condition)
        made = read_record(path, "related/skipless/train.py")["summary"]
        trained[kind] = {"before": made["conditions_before"], "after": made["conditions_after"]}
    return lines, trained, sweep(load_model(paths["serial"], torch.float64), tokens)


def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "compare")
    refuse_overwrite(output + ".json", args.force)
    path = resolve_model(args.model)
    config = load_config(path)
    if config.model_type not in (*SUPPORTED, SkiplessConfig.model_type):
        raise UserError(f"{path}: expected model_type in {[*SUPPORTED, SkiplessConfig.model_type]}, found {config.model_type!r}")
    configs = {os.path.splitext(os.path.basename(name))[0]: load_config(name) for name in (*CONFIGS, *args.config)}
    weights = {name: count(found) for name, found in ({args.model: config} | configs).items()}
    print(f"reads   {path}; {len(configs)} configs")
    conditions = checkpoint_conditions(path, pick_device(args.device))
    lines, trained, swept = (None, None, None) if args.report_only else make_skipless(args, clock)

    parts = {"Weights of skipless models of these shapes, without biases and norms": markdown(rows(weights)),
             f"Condition numbers of {args.model}": conditions_table(conditions)}
    if lines:
        parts |= {f"Largest logit difference over the largest logit, {' / '.join(KINDS)}": exactness_table(lines), "The same, where every Q of the trained serial model is spoilt": sweep_table(swept)}
    os.makedirs(args.run, exist_ok=True)
    write_text(output + ".md", "\n\n".join(f"{title}:\n\n{table}" for title, table in parts.items()) + "\n")
    picture(output + ".png", args.model, conditions, trained, swept, args.max_condition)
    found = {"weights": {name: vars(of) | {"total": of.total, "without_q_p": of.without_q_p, "folded": of.folded} for name, of in weights.items()},
             "conditions": conditions, "exactness": lines, "trained": trained, "sweep": swept}
    write_json(output + ".json", record("related/skipless/compare.py", args, describe(path, args.model), [], {}, clock()) | found)
    print("\n" + "\n\n".join(f"{title}:\n\n{table}" for title, table in parts.items()) + f"\n\nwrote   {output}.json, .md")
    worst = max((layer[letter], f"{letter.upper()} of layer {index}") for index, layer in enumerate(conditions) for letter in layer)
    exact = ""
    if lines:
        folded = [line for line in lines if line["remove"] and "refused" not in line]
        exact = (f"{len(folded)} folds exact to {max(line['float64'] for line in folded):.0e}, "
                 f"{sum('refused' in line for line in lines)} refused; ")
    print(f"compare: {exact}worst condition number of {args.model} {worst[0]:.3g}, {worst[1]}; in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
