"""Skipless transformers without Q and P: weights saved, exactness of folds, conditioning of real matrices.

Reads   a checkpoint (--model) for its condition numbers; configs for the table of weights; a shape and a text
        to train on
Writes  RUN/serial/, RUN/parallel/   two skipless models trained as by train.py; skipped if they already exist
        RUN/compare.json, .md, .png  the tables and the picture

    python -m related.skipless.compare                                            # minutes on two cores
    python -m related.skipless.compare --run runs/x --model meta-llama/Llama-2-7b-hf --report-only
    python -m related.skipless.compare --run runs/y --report-only --config Qwen/Qwen2.5-7B my-config.json

Exactness: models are compared with themselves after removing Q, K, V or P. They are random (serial and
parallel; MHA, GQA and MQA, and MHA with a plain FFN; with biases), or made of the matrices of --shape (a real
model's, although its function needs its norms), or the two trained ones. The figure is the largest logit
difference over the largest logit, in float64 and with weights stored in float32 and in bfloat16; "itself" is
the model without a fold. A fold that does not apply is refused with the reason.

Conditioning: a fold multiplies by T and by T^-1, and rounding errors grow with T's condition number. The
sweep gives the trained serial model's Q ever larger ones and folds it all the same; fold.py refuses above
--max-condition.
"""

import glob
import os
import sys

import torch

from common.artifacts import claim, make_record, read_record, verify_files
from common.cli import Clock, UserError, positive_float, run_stage, stage_parser
from common.cli import device as device_flag
from common.data.demo import DEMO, resolve_model
from common.data.text import load_tokens
from common.families import SUPPORTED, geometry, require_convertible
from common.files import write_json, write_text
from common.layers import Layers
from common.models import FUSED, describe, load_config, load_model, load_tokenizer, pick_device
from common.progress import Progress
from common.records import FILES, POSITIVE, STRING, mismatch
from common.reporting.tables import markdown_table
from common.training.engine import STOPPED
from common.training.sharding import joined_ranks
from related.skipless.algebra import MAX_CONDITION, SINGULAR, condition_numbers
from related.skipless.exactness import PRECISIONS, every_fold, random_model, sweep, transplanted
from related.skipless.modeling import SkiplessConfig
from related.skipless.report import conditions_table, exactness_table, picture, sweep_table
from related.skipless.training import (
    TRAIN_STAGE,
    check_length,
    skipless_config,
    train_skipless,
    training_flags,
)
from related.skipless.weights import COLUMNS, cells, count

STAGE = "related/skipless/compare.py"
CONFIGS = sorted(glob.glob(os.path.join(glob.escape(os.path.dirname(__file__)), "configs", "*.json")))
KINDS = ("serial", "parallel")
BIASES = {"attention_bias": True, "mlp_bias": True}
CONDITIONS = [{STRING: POSITIVE}]
TRAINED = {"files": FILES, "summary": {"conditions_before": CONDITIONS, "conditions_after": CONDITIONS}}


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint whose condition numbers are reported")
    parser.add_argument("--config", nargs="+", default=[], metavar="CONFIG",
                        help="more rows of the table of weights: directories, hub names or .json files")
    parser.add_argument("--shape", default=DEMO, metavar="MODEL",
                        help="small checkpoint that gives the skipless models their shape and tokenizer")
    parser.add_argument("--report-only", action="store_true",
                        help="only weights and condition numbers: make no skipless model")
    parser.add_argument("--max-condition", type=positive_float, default=MAX_CONDITION,
                        help="largest condition number of a matrix that is inverted")
    parser.add_argument("--device", type=device_flag, default="auto",
                        help="device for the condition numbers: auto, cpu, cuda or cuda:N")
    training_flags(parser)
    return parser.parse_args()


def checkpoint_conditions(path: str, device: str) -> list[dict[str, float]]:
    """Condition numbers of each layer's square matrices, with one layer in memory at a time."""
    conditions, layers = [], Layers(path, torch.float32, device, layerwise=True)
    numbers = range(layers.config.num_hidden_layers)
    for index in Progress(numbers, desc="condition numbers", unit="layer", leave=False):
        with layers.layer(index) as layer:
            conditions.append(condition_numbers(layer.self_attn))
    return conditions


def count_all(args, config) -> dict:
    """Name -> Weights of the checkpoint, the paper's configs and those of --config."""
    configs = {args.model: config}
    for path in (*CONFIGS, *args.config):
        name = os.path.basename(path).removesuffix(".json")
        configs[path if name in configs else name] = load_config(path)
    return {name: count(config) for name, config in configs.items()}


def check_shape(source: str, length: int):
    """The config of --shape. Raises UserError unless a model of this shape can be trained and folded."""
    config = load_config(source)
    require_convertible(source, config)
    shape = geometry(config)
    if shape.heads * shape.head_dim != shape.hidden:
        raise UserError(f"--shape: expected a square Q, found {shape.heads} heads of {shape.head_dim} for "
                        f"width {shape.hidden} in {source}")
    check_length(length, source, config)
    return config


def train_missing(args, source: str, clock: Clock) -> None:
    """Train the models that do not exist yet (with --force: both). Exits when a signal stops the training."""
    missing = [kind for kind in KINDS if args.force or not os.path.isdir(os.path.join(args.run, kind))]
    with joined_ranks() as ranks:
        finished = all(train_skipless(args, source, kind == "parallel", ranks, clock) for kind in missing)
    if not finished:
        sys.exit(STOPPED)


def read_trained(path: str, model: dict) -> dict:
    """The summary of a model trained with the shape of `model`. Raises UserError for others or if damaged."""
    sidecar = read_record(path, TRAIN_STAGE, model)
    fault = mismatch(sidecar, TRAINED, "record")
    if fault:
        raise UserError(f"{path}: {fault}; run {TRAIN_STAGE} again with --force")
    verify_files(path, sidecar)
    return sidecar["summary"]


def head_counts(heads: int) -> dict[str, int]:
    """Name -> key/value heads of the random models. No GQA where no number of them divides the heads."""
    counts = {"MHA": heads}
    for number in range(2, min(max(heads // 4, 2), heads - 1) + 1):
        if heads % number == 0:
            counts["GQA"] = number
    return counts | {"MQA": 1}


def fold_everything(args, source: str, config, tokens: torch.Tensor) -> list[dict]:
    """Lines of the exactness table: random models, models of real matrices, trained models."""
    lines, stock = [], load_model(source, torch.float64)
    for kind in KINDS:
        for name, kv_heads in head_counts(config.num_attention_heads).items():
            model = random_model(skipless_config(config, kind == "parallel", kv_heads, **BIASES), args.seed)
            lines += every_fold(f"random {kind} {name}", model, tokens, args.max_condition)
        plain = skipless_config(config, kind == "parallel", gated=False, hidden_act="gelu", **BIASES)
        lines += every_fold(f"random {kind}, plain FFN", random_model(plain, args.seed), tokens,
                            args.max_condition)
    for kind in KINDS:
        model = transplanted(stock, kind == "parallel")
        lines += every_fold(f"{kind} of {args.shape}'s matrices", model, tokens, args.max_condition)
    for kind in KINDS:
        path = os.path.join(args.run, kind)
        print(f"reads   {path}")
        lines += every_fold(f"trained {kind}", load_model(path, torch.float64), tokens, args.max_condition)
    return lines


def make_skipless(args, source: str, config, clock: Clock) -> tuple[list[dict], dict, list[dict]]:
    """Lines of the exactness table, condition numbers before and after training, lines of the sweep."""
    claim(TRAIN_STAGE, args)
    model, trained = describe(source), {}
    paths = {kind: os.path.join(args.run, kind) for kind in KINDS}
    if not args.force:
        for path in filter(os.path.isdir, paths.values()):
            read_trained(path, model)  # refused before the other one is trained
    train_missing(args, source, clock)
    for kind, path in paths.items():
        summary = read_trained(path, model)
        trained[kind] = {"before": summary["conditions_before"], "after": summary["conditions_after"]}
    tokens, text = load_tokens(args.heldout, load_tokenizer(source), 4, args.length, split="heldout")
    print(f"reads   {text}, for the logit differences")
    lines = fold_everything(args, source, config, tokens)
    return lines, trained, sweep(load_model(paths["serial"], torch.float64), tokens)


def sections(args, weights: dict, conditions: list[dict], lines, swept) -> str:
    """The Markdown report."""
    rows = [cells(name, entry) for name, entry in weights.items()]
    parts = {
        "Weights of skipless models of these shapes, without biases and norms": markdown_table(COLUMNS, rows),
        f"Condition numbers of {args.model}": conditions_table(conditions),
    }
    if lines:
        title = f"Largest logit difference over the largest logit, {' / '.join(PRECISIONS)}"
        parts[title] = exactness_table(lines)
        parts["The same, with every Q of the trained serial model ill-conditioned"] = sweep_table(swept)
    return "\n\n".join(f"{title}:\n\n{table}" for title, table in parts.items())


def closing_line(name: str, conditions: list[dict], lines: list[dict] | None) -> str:
    """How exact the folds were, and which of the checkpoint's attention matrices are invertible."""
    numbers = [(value, f"{letter.upper()} of layer {index}")
               for index, layer in enumerate(conditions) for letter, value in layer.items()]
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


def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "compare")
    path = resolve_model(args.model)
    separate = (kind for kind in SUPPORTED if kind not in FUSED)  # q, k and v in matrices of their own
    config, supported = load_config(path), (*separate, SkiplessConfig.model_type)
    if config.model_type not in supported:
        raise UserError(f"{path}: expected model_type in {list(supported)}, found {config.model_type!r}")
    weights = count_all(args, config)
    lines = trained = swept = None
    if not args.report_only:
        source = resolve_model(args.shape)
        shape = check_shape(source, args.length)
    claim(STAGE, args, output + ".json")
    print(f"reads   {path}; {len(weights) - 1} configs")
    conditions = checkpoint_conditions(path, pick_device(args.device))
    if not args.report_only:
        lines, trained, swept = make_skipless(args, source, shape, clock)

    report = sections(args, weights, conditions, lines, swept)
    os.makedirs(args.run, exist_ok=True)
    write_text(output + ".md", report + "\n")
    picture(output + ".png", args.model, conditions, trained, swept, args.max_condition)
    figures = {"weights": {name: entry.figures() for name, entry in weights.items()},
               "conditions": conditions, "exactness": lines, "trained": trained, "sweep": swept}
    sidecar = make_record(STAGE, args, describe(path, args.model), {}, {}, clock())
    write_json(output + ".json", sidecar | figures)
    print(f"\n{report}\n\nwrote   {output}.json, {output}.md")
    print(f"compare: {closing_line(args.model, conditions, lines)}; in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
