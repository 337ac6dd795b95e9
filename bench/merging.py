"""Comparing merging methods: held-out loss right after merging.

    python -m bench.merging                                    # the demo model
    python -m bench.merging --model DIR --text train.txt --heldout heldout.txt
    python -m bench.recovery --run runs/merging/2 --text demo --heldout demo --starts paper closed-form \\
        --length 256 --batch 4 --lr 5e-4 --dtype float32 --budgets 15000 --seeds 3    # distills some

Stages 1 to 4 make each merged model, OUT/KV_HEADS/NAME/merged: mean-pool; paper (values by distance,
rotations, mean); pairs, the closed form with keys merged RoPE pair by RoPE pair; closed-form, keys merged
RoPE-aware, on adjacent, value and energy groups; with the output projection or the entire attention
layer refitted. Writes OUT/merging.md, and OUT/KV_HEADS/starts.json for bench/recovery.py. Existing models are
kept.
"""

import math
import os
import subprocess
import sys

from common.cli import Parser, run_stage
from common.data.demo import resolve_model
from common.data.text import EVALUATION, load_tokens
from common.evaluate import perplexity
from common.models import load_config, load_model, load_tokenizer
from common.reporting.tables import markdown_table
from common.run.files import write_json, write_text

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CLOSED = ["--merge", "closed-form"]
PAIRS = [*CLOSED, "--merge-keys", "pairs"]
STARTS = {  # name -> --by of stage 3, arguments of stage 4
    "mean-pool": ("none", ["--rotate", "none"]),
    "paper": ("value", []),
    "scaled": ("value", ["--merge", "scaled"]),
    "pairs": ("energy", PAIRS),
    "pairs-output": ("energy", [*PAIRS, "--refit", "output"]),
    "closed-form-adjacent": ("none", CLOSED),
    "closed-form-value": ("value", CLOSED),
    "closed-form": ("energy", CLOSED),
    "closed-form-output": ("energy", [*CLOSED, "--refit", "output"]),
    "closed-form-attention": ("energy", [*CLOSED, "--refit", "attention"]),
}
HELDOUT = 32  # sequences


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--model", default="demo")
    flags.add_argument("--text", default="demo", help="text of the calibration")
    flags.add_argument("--heldout", default="demo", help="text of the loss; demo: its held-out part")
    flags.add_argument("--out", default="runs/merging")
    flags.add_argument("--kv-heads", type=int, nargs="+",
                       help="(default: a half and a quarter of the heads, and one)")
    flags.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS), help="(default: all)")
    flags.add_argument("--length", type=int, default=256, help="tokens per sequence")
    return flags.parse_args()


def call_stage(command: str, run: str, *arguments) -> None:
    """Run a stage as a command; only its errors and bars are seen."""
    words = [sys.executable, os.path.join(ROOT, command), "--run", run, *map(str, arguments), "--force"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def merge(args, run: str, kv_heads: int, name: str) -> str:
    """The directory of one merged model, made by stages 1 to 4 unless it is there."""
    (by, arguments), merged = STARTS[name], os.path.join(run, "merged")
    similarity = os.path.join(args.out, "similarity.safetensors")
    if not os.path.exists(similarity):
        source = "--model", args.model, "--text", args.text, "--length", args.length
        call_stage("01_calibrate.py", args.out, *source)
        call_stage("02_similarity.py", args.out, "--energy")
    if not os.path.exists(merged):
        call_stage("03_group.py", run, "--similarity", similarity, "--kv-heads", kv_heads, "--by", by)
        call_stage("04_align.py", run, "--calibration", f"{args.out}/calibration", *arguments)
    return merged


def main():
    args = parse()
    path = resolve_model(args.model)
    heads = load_config(path).num_attention_heads
    tokens, text = load_tokens(args.heldout, load_tokenizer(path), HELDOUT, args.length, EVALUATION)
    source = perplexity(load_model(path), tokens)
    print(f"held-out loss on {text}\nsource: {math.log(source):.4f}", flush=True)
    losses = {name: {} for name in args.starts}
    for kv_heads in args.kv_heads or [heads // 2, heads // 4, 1]:
        home, starts = os.path.join(args.out, str(kv_heads)), {"source": {"perplexity": source}}
        for name in args.starts:
            merged = merge(args, os.path.join(home, name), kv_heads, name)
            starts[name] = {"perplexity": perplexity(load_model(merged), tokens)}
            losses[name][kv_heads] = f"{math.log(starts[name]['perplexity']):.4f}"
            print(f"{kv_heads} kv heads, {name}: {losses[name][kv_heads]}", flush=True)
        write_json(os.path.join(home, "starts.json"), starts)
    header = ["merged to", *(f"{kv_heads} kv heads" for kv_heads in losses[args.starts[0]])]
    table = markdown_table(header, [[name, *cells.values()] for name, cells in losses.items()])
    write_text(os.path.join(args.out, "merging.md"), table + "\n")
    print(table)


if __name__ == "__main__":
    run_stage(main)
