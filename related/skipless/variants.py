"""Do skipless models train alike without Q, K or V, and without P? All of them from scratch, side by side.

Reads   the shape and the tokenizer of a checkpoint (--model), a text
Writes  RUN/seed-N/   the trained models; those that exist are kept
        RUN/variants.json, RUN/variants.md: held-out losses

    python -m related.skipless.variants                              # serial; half an hour on two cores
    python -m related.skipless.variants --parallel --seeds 1

The paper proposes them as architectures, with its parallel ones in Figure 3, and trains none. Serial models
without Q and P have the function of a full one (fold.py), but not its training: other matrices are trained.
"""

import math
import os
import statistics
import sys
from copy import copy

from common.artifacts import claim, make_record, read_record
from common.cli import Clock, positive, run_stage, stage_parser
from common.data.demo import DEMO, resolve_model
from common.families import require_convertible
from common.files import write_json, write_text
from common.models import describe, load_config, load_model
from common.reporting.tables import markdown_table
from common.training.engine import STOPPED
from common.training.sharding import joined_ranks
from related.skipless.training import (
    TRAIN_STAGE,
    check_length,
    model_name,
    require_square,
    train_skipless,
    training_flags,
)

STAGE = "related/skipless/variants.py"
VARIANTS = {None: "full", "q": "without Q and P", "k": "without K and P", "v": "without V and P"}


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless-variants")
    parser.add_argument("--model", default=DEMO, help="checkpoint that gives shape and tokenizer")
    parser.add_argument("--parallel", action="store_true", help="attention beside the FFN")
    parser.add_argument("--seeds", type=positive, default=3, help="trainings of each, from --seed on")
    training_flags(parser)
    return parser.parse_args()


def train_all(args, source: str) -> dict[str, list[float]]:
    """Held-out losses of each variant in nats, by its name in the table; trains those that do not exist."""
    losses = {title: [] for title in VARIANTS.values()}
    for seed in range(args.seed, args.seed + args.seeds):
        settings = copy(args)
        settings.seed, settings.run = seed, os.path.join(args.run, f"seed-{seed}")
        for without, title in VARIANTS.items():
            path = os.path.join(settings.run, model_name(args.parallel, without))
            if not os.path.isdir(path):
                with joined_ranks() as ranks:
                    finished = train_skipless(settings, source, args.parallel, ranks, Clock(), without)
                if not finished:
                    sys.exit(STOPPED)
            summary = read_record(path, TRAIN_STAGE, describe(source))["summary"]
            losses[title].append(math.log(summary["perplexity"]))
    return losses


def table(losses: dict[str, list[float]], parameters: dict[str, int]) -> str:
    """Markdown: parameters, mean loss, and mean distance from the full model of the same seed."""
    rows = []
    for title, by_seed in losses.items():
        apart = [loss - full for loss, full in zip(by_seed, losses["full"], strict=True)]
        error = f" ± {statistics.stdev(apart) / len(apart) ** 0.5:.3f}" if len(apart) > 1 else ""
        distance = "" if title == "full" else f"{statistics.mean(apart):+.3f}{error}"
        rows.append((title, f"{parameters[title]:,}", f"{statistics.mean(by_seed):.3f}", distance))
    return markdown_table(("", "parameters", "loss", "above full"), rows, "<>>>")


def main():
    args, clock = parse(), Clock()
    source = resolve_model(args.model)
    config = load_config(source)
    require_convertible(source, config)
    check_length(args.length, source, config)
    for without in VARIANTS:
        require_square(config, without)
    output = os.path.join(args.run, f"variants{'-parallel' if args.parallel else ''}")
    claim(STAGE, args, output + ".json")
    losses = train_all(args, source)
    first = os.path.join(args.run, f"seed-{args.seed}")
    parameters = {title: load_model(os.path.join(first, model_name(args.parallel, without))).num_parameters()
                  for without, title in VARIANTS.items()}
    text = table(losses, parameters)
    write_text(output + ".md", text + "\n")
    summary = {"losses": losses, "parameters": parameters}
    write_json(output + ".json", make_record(STAGE, args, describe(source), {}, summary, clock()))
    print(f"\n{text}\n\nwrote   {output}.json, {output}.md")
    print(f"variants: held-out loss of {args.seeds} trainings each, in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
