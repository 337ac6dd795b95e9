"""In which order the masks close, layer by layer: are heads nearer the input pruned last, as the paper says?

    python -m bench.mask_order                                  # runs/demo, made by make demo
    python -m bench.mask_order runs/seed-0 runs/seed-1 runs/seed-2

Reads RUN/train/metrics.jsonl of trainings with masks. A layer's closing time is the sum of its mean applied
mask over the steps before the switch, as a share of all steps: 0.3 if all its masks close at 30 % of the
training, or half of them at 20 and half at 40 %. Prints the time of each layer, mean and standard error over
the runs; the last line is JSON.
"""

import argparse
import json
import os

from bench.plots import mean_and_error
from common.cli import UserError, run_stage
from common.reporting.tables import markdown_table
from common.training.metrics import METRICS, read_metrics


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="*", default=["runs/demo"], help="run directories of one model")
    return parser.parse_args()


def closing_times(lines: list[dict]) -> list[float]:
    """Share of the steps at which each layer's masks close, from the lines of metrics.jsonl."""
    masked = [line["mask_mean_per_layer"] for line in lines if "mask_mean_per_layer" in line]
    if not masked:
        raise UserError("expected a training with masks, found one without mask_mean_per_layer")
    return [sum(layer) / len(lines) for layer in zip(*masked, strict=True)]


def main():
    args = parse()
    times = {run: closing_times(read_metrics(os.path.join(run, "train", METRICS))) for run in args.runs}
    by_layer = list(zip(*times.values(), strict=True))
    rows = [[index, mean_and_error(layer)] for index, layer in enumerate(by_layer)]
    print(markdown_table(["layer", "masks close after, share of the steps"], rows))
    print(json.dumps({"closing_times": times}))


if __name__ == "__main__":
    run_stage(main)
