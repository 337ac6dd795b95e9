"""How much training a merged model needs: its perplexity after so many tokens of text.

    python -m bench.recovery                                # the starts of make smollm2, which comes first
    python -m bench.recovery --masks l0 --starts paper      # adds rows to the same table
    python -m bench.recovery --budgets 500000 --text more.jsonl --out runs/recovery-more

Each start RUN/NAME/merged is distilled from the source by 05_prune_train.py --tasks none on the first half of
the text, RUN/text/calibration.txt, which stages 1 and 4 have seen too, and on any --text. Perplexity and
top-1 agreement with the source are stage 5's own held-out figures after the last step, on sequences of the
second half. A budget is a run of its own: the learning rate falls to zero within it. Writes OUT/recovery.json
after every run, then recovery.md and recovery.png. What is measured already is kept.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time

from bench import plots
from bench.machine import machine
from bench.merging import mask_settings
from common.cli import UserError, positive, run_stage
from common.files import write_text
from common.reporting.tables import markdown_table
from common.training.metrics import read_metrics
from pipelines.smollm2 import STARTS

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DISTILLED = ("paper", "output-refit", "attention-refit")  # starts of make smollm2
# --masks of stage 5 -> its name in the table
MASKS = {"off": "no masks", "l0": "masks", "l0-released": "released masks"}
TITLE = "held-out loss after distillation on text"
FREE = ("run", "out", "starts", "masks", "budgets")  # may change between runs


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--run", default="runs/smollm2", help="run directory of make smollm2")
    parser.add_argument("--out", default="runs/recovery")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=DISTILLED)
    parser.add_argument("--masks", choices=MASKS, default="off", help="as --masks of 05_prune_train.py")
    parser.add_argument("--budgets", type=positive, nargs="+", default=[100_000, 500_000, 1_000_000],
                        metavar="TOKENS")
    parser.add_argument("--text", nargs="+", default=[], help="more to train on, as --text of stage 5")
    parser.add_argument("--batch", type=positive, default=8, help="samples of --length tokens per step")
    parser.add_argument("--length", type=positive, default=512)
    parser.add_argument("--heldout-sequences", type=positive, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--dtype", default="bfloat16", help="as --dtype of 05_prune_train.py")
    return parser.parse_args()


def training_flags(args, steps: int) -> list[str]:
    """Flags of stage 5."""
    text = os.path.join(args.run, "text")
    flags = {
        "tasks": "none", "text-length": args.length,
        "heldout-text": os.path.join(text, "heldout.txt"), "heldout-sequences": args.heldout_sequences,
        "heldout-every": steps, "masks": args.masks, "steps": steps, "batch": args.batch, "lr": args.lr,
        "rest-lr-factor": 1, "warmup": max(1, steps // 10), "dtype": args.dtype,
        "print-every": max(1, steps // 10), "save-minutes": 60,
    }  # fmt: skip
    flags |= {name.replace("_", "-"): value for name, value in mask_settings(args.masks, steps).items()}
    words = ["--text", os.path.join(text, "calibration.txt"), *args.text]
    return words + [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def train(args, start: str, tokens: int) -> dict:
    """Held-out figures after training RUN/start/merged on so many tokens."""
    directory, began = os.path.join(args.out, "training"), time.perf_counter()
    shutil.rmtree(directory, ignore_errors=True)
    for name in ("aligned", "merged"):
        shutil.copytree(os.path.join(args.run, start, name), os.path.join(directory, name),
                        copy_function=os.link)
    steps = max(2, round(tokens / args.batch / args.length))
    command = [sys.executable, os.path.join(ROOT, "05_prune_train.py"), "--run", directory]
    subprocess.run([*command, *training_flags(args, steps)], check=True)
    last = read_metrics(os.path.join(directory, "train", "metrics.jsonl"))[-1]
    shutil.rmtree(directory)
    return {"perplexity": math.exp(last["heldout_loss"]), "agreement": last["heldout_agreement"],
            "kl": last["heldout_kl"], "hours": round((time.perf_counter() - began) / 3600, 3)}


def read_starts(args) -> dict[str, dict]:
    """RUN/starts.json of make smollm2: name in its table -> figures, the source's first."""
    path = os.path.join(args.run, "starts.json")
    if not os.path.exists(path):
        raise UserError(f"{path}: expected the starts of make smollm2, found none")
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def read_results(args) -> dict:
    """OUT/recovery.json, or its beginning. Raises UserError if it was made with other settings."""
    path = os.path.join(args.out, "recovery.json")
    fixed = {name: value for name, value in vars(args).items() if name not in FREE}
    if not os.path.exists(path):
        return {"settings": fixed, "machine": machine("cpu"), "trained": {}}
    with open(path, encoding="utf-8") as file:
        results = json.load(file)
    if results["settings"] != fixed:
        raise UserError(f"{path}: expected the results of {fixed}, found those of {results['settings']}; "
                        "pass another --out")
    return results


def by_tokens(results: dict, starts: dict[str, dict]) -> dict[str, dict[int, dict]]:
    """Name -> tokens of training -> figures, 0 tokens: right after merging."""
    rows = {}
    for (start, name), (masks, label) in itertools.product(STARTS.items(), MASKS.items()):
        trained = results["trained"].get(f"{start}, masks {masks}", {})
        if trained:
            figures = {int(tokens): trained[tokens] for tokens in sorted(trained, key=int)}
            rows[f"{name}, {label}"] = {0: starts[name]} | figures
    return rows


def cell(figures: dict | None, source: float) -> str:
    """Perplexity, how far it is above the source's, and top-1 agreement, where measured."""
    if figures is None:
        return ""
    notes = [f"{figures['perplexity'] / source - 1:+,.1%}"]
    if "agreement" in figures:
        notes.append(f"{figures['agreement']:.1%} agree")
    return f"{figures['perplexity']:,.2f} ({', '.join(notes)})"


def table(rows: dict[str, dict[int, dict]], source: float) -> str:
    """A row per start, a column per budget."""
    budgets = sorted(set().union(*rows.values()))
    cells = [[name, *(cell(figures.get(tokens), source) for tokens in budgets)]
             for name, figures in rows.items()]
    return markdown_table(["tokens of training", *(f"{tokens:,}" for tokens in budgets)], cells) + "\n"


def main():
    args = parse()
    starts, results = read_starts(args), read_results(args)
    os.makedirs(args.out, exist_ok=True)
    for tokens, start in itertools.product(args.budgets, args.starts):
        trained = results["trained"].setdefault(f"{start}, masks {args.masks}", {})
        if str(tokens) not in trained:
            trained[str(tokens)] = train(args, start, tokens)
            print(f"{start}, masks {args.masks}, {tokens} tokens: {trained[str(tokens)]}", flush=True)
            write_text(os.path.join(args.out, "recovery.json"), json.dumps(results, indent=1) + "\n")
    rows, source = by_tokens(results, starts), starts["source"]["perplexity"]
    text = table(rows, source)
    write_text(os.path.join(args.out, "recovery.md"), text)
    print(text, f"source: {source:.2f}", sep="\n")
    losses = {name: {tokens: [math.log(figures["perplexity"])] for tokens, figures in row.items()}
              for name, row in rows.items()}
    plots.starts(os.path.join(args.out, "recovery.png"), losses, math.log(source), TITLE, "tokens of text")


if __name__ == "__main__":
    run_stage(main)
