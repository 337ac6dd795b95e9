"""How much training a merged model needs: its perplexity after so many tokens of text.

    python -m bench.recovery                                # the models of make smollm2, which comes first
    python -m bench.recovery --masks l0 --starts paper      # adds lines to the same table
    python -m bench.recovery --budgets 500000 --out runs/recovery-more \\
        --text runs/smollm2/text/calibration.txt more.jsonl

Each RUN/NAME/merged is distilled from the source by 05_prune_train.py --tasks none on the first half of the
text, RUN/text/calibration.txt, which stages 1 and 4 have seen too, or on --text. Perplexity and top-1
agreement with the source are stage 5's own on held-out text after the last step, by default on sequences of
the second half. A budget is a run of its own: the learning rate falls to zero within it. Writes
OUT/recovery.json after every run, then recovery.md: means over the seeds, which change the order of samples
and the noise of masks. Existing measurements are kept.
"""

import itertools
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from bench.machine import machine, standard_error
from common.data.text import EVALUATION, TOKEN, load_tokens
from common.models.load import load_tokenizer
from common.reporting.tables import markdown_table
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from common.run.files import read_json, write_json, write_text
from common.run.flags import Parser, positive
from common.training.lines import OPEN_MASKS

STAGE_5 = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "05_prune_train.py")
# --masks of stage 5 -> its name in the table
MASKS = {"off": "no masks", "l0": "masks", "l0-released": "released masks"}
HELDOUT = "heldout.npy"  # in OUT
FREE = ("run", "out", "starts", "masks", "budgets", "seeds")  # may change between runs


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--run", default="runs/smollm2", help="of make smollm2")
    flags.add_argument("--out", default="runs/recovery")
    flags.add_argument("--starts", nargs="+", default=["paper", "output-refit", "attention-refit"],
                       metavar="NAME", help="directories in RUN")
    flags.add_argument("--masks", choices=MASKS, default="off", help="as --masks of 05_prune_train.py")
    flags.add_argument("--budgets", type=positive, nargs="+", default=[100_000, 500_000, 1_000_000],
                       metavar="TOKENS")
    flags.add_argument("--seeds", type=positive, default=1, help="trainings of each model and budget")
    flags.add_argument("--text", nargs="+", help="to train on, as --text of stage 5")
    flags.add_argument("--heldout", help="as --heldout-text of stage 5")
    flags.add_argument("--batch", type=positive, default=8, help="samples of --length tokens per step")
    flags.add_argument("--length", type=positive, default=512)
    flags.add_argument("--heldout-sequences", type=positive, default=16)
    flags.add_argument("--lr", type=float, default=2e-4)
    flags.add_argument("--dtype", default="bfloat16", help="as --dtype of 05_prune_train.py")
    return flags.parse_args()


def training_flags(args, steps: int, seed: int) -> list[str]:
    """Flags of stage 5."""
    text = os.path.join(args.run, "text")
    # printed masks travel 15 units of log alpha at mask-lr a step, so a short budget needs a larger mask-lr;
    # the released ones have the published mask-lr and weight at any number of steps
    rate, weight = (max(0.5, 20 / steps), 30.0) if args.masks == "l0" else (1e-2, 1.0)
    flags = {
        "tasks": "none", "text-length": args.length, "steps": steps, "batch": args.batch, "seed": seed,
        "heldout-text": os.path.join(args.out, HELDOUT), "heldout-every": steps,
        "heldout-sequences": args.heldout_sequences, "lr": args.lr, "rest-lr-factor": 1,
        "warmup": max(1, steps // 10), "masks": args.masks, "mask-lr": rate, "l0-weight": weight,
        "dtype": args.dtype, "print-every": max(1, steps // 10), "save-minutes": 60,
    }  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return ["--text", *(args.text or [os.path.join(text, "calibration.txt")]), *words]


def write_heldout(args) -> None:
    """Write the texts that untrained models are measured on, each twice: stage 5 measures every second."""
    source = args.heldout or os.path.join(args.run, "text", "heldout.txt")
    tokenizer = load_tokenizer(os.path.join(args.run, args.starts[0], "merged"))
    rows, _ = load_tokens(source, tokenizer, args.heldout_sequences, args.length, EVALUATION)
    np.save(os.path.join(args.out, HELDOUT), rows.repeat_interleave(2, 0).numpy().astype(TOKEN))


def train(args, start: str, tokens: int, seed: int) -> dict:
    """What stage 5 measures on held-out text after training RUN/start/merged on so many tokens."""
    directory, began = tempfile.mkdtemp(prefix="training-", dir=args.out), time.perf_counter()
    for name in ("aligned", "merged"):
        shutil.copytree(os.path.join(args.run, start, name), os.path.join(directory, name),
                        copy_function=os.link)
    write_heldout(args)
    steps = max(2, round(tokens / args.batch / args.length))
    command = [sys.executable, STAGE_5, "--run", directory, *training_flags(args, steps, seed)]
    subprocess.run(command, check=True)
    trained = read_record(os.path.join(directory, "train"), "05_prune_train.py")["summary"]
    shutil.rmtree(directory)
    return {"perplexity": math.exp(trained["heldout_loss"]), "agreement": trained["heldout_agreement"],
            "kl": trained["heldout_kl"], "hours": round((time.perf_counter() - began) / 3600, 3),
            OPEN_MASKS: trained.get(OPEN_MASKS)}


def read_results(args) -> dict:
    """OUT/recovery.json, or its beginning. Raises UserError if it was made with other settings."""
    path = os.path.join(args.out, "recovery.json")
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    results = read_json(path) or {"settings": settings, "machine": machine("cpu"), "trained": {}}
    if results["settings"] != settings:
        raise UserError(f"{path}: expected the results of {settings}, found those of {results['settings']}; "
                        "pass another --out")
    return results


def cell(measured: list[dict], source: float) -> str:
    """Perplexity, how far it is above the source's, and top-1 agreement, where measured: means over seeds;
    and how many masks were open when they were removed, of each seed, if any were.
    """
    if not measured:
        return ""
    perplexities = [seed["perplexity"] for seed in measured]
    mean = statistics.mean(perplexities)
    error = f" ± {standard_error(perplexities):.2f}" if len(measured) > 1 else ""
    notes = [f"{mean / source - 1:+,.1%}"]
    if "agreement" in measured[0]:
        notes.append(f"{statistics.mean(seed['agreement'] for seed in measured):.1%} agree")
    opened = [seed.get(OPEN_MASKS) or 0 for seed in measured]
    if any(opened):
        notes.append(f"masks open at removal: {'/'.join(map(str, opened))}")
    return f"{mean:,.2f}{error} ({', '.join(notes)})"


def table(trained: dict, untrained: dict[str, dict]) -> str:
    """A line per merged model and kind of masks, a column per budget; 0 tokens: right after merging."""
    budgets = sorted({int(tokens) for by_tokens in trained.values() for tokens in by_tokens})
    lines = []
    for name, by_tokens in trained.items():
        start, _, masks = name.rpartition(", masks ")
        columns = [[untrained[start]], *(list(by_tokens.get(str(tokens), {}).values()) for tokens in budgets)]
        cells = (cell(measured, untrained["source"]["perplexity"]) for measured in columns)
        lines.append([f"{start}, {MASKS[masks]}", *cells])
    return markdown_table(["tokens of training", 0, *(f"{tokens:,}" for tokens in budgets)], lines)


def main():
    args = parse()
    path = os.path.join(args.run, "starts.json")
    untrained = read_json(path)  # name -> what was measured right after merging, the source first
    if untrained is None:
        raise UserError(f"{path}: expected the merged models of make smollm2, found none")
    missing = {"source", *args.starts} - untrained.keys()
    if missing:
        raise UserError(f"{path}: expected source and --starts, found no {', '.join(sorted(missing))}; make "
                        "it again")
    results = read_results(args)
    os.makedirs(args.out, exist_ok=True)
    for tokens, seed, start in itertools.product(args.budgets, range(args.seeds), args.starts):
        by_tokens = results["trained"].setdefault(f"{start}, masks {args.masks}", {})
        measured = by_tokens.setdefault(str(tokens), {})
        if str(seed) not in measured:
            measured[str(seed)] = train(args, start, tokens, seed)
            print(start, args.masks, tokens, seed, measured[str(seed)], sep=" | ", flush=True)
            write_json(os.path.join(args.out, "recovery.json"), results)
    text = table(results["trained"], untrained)
    write_text(os.path.join(args.out, "recovery.md"), text + "\n")
    print(text, f"source: {untrained['source']['perplexity']:.2f}", sep="\n")


if __name__ == "__main__":
    run_stage(main)
