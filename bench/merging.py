"""Where to start pruning from: held-out loss of every way to merge, right after merging and after short
distillations.

    python -m bench.merging                                    # the embedded model
    python -m bench.merging --model DIR --text train.txt --heldout heldout.txt --name NAME

Stages 1 to 4 make each start; each is then distilled from the untouched model by stage 5's own loop, with
masks and without, on calibration text (KL on every token, BiLD on the last of each sample), and its loss on
held-out text is taken. Starts: mean-pool; paper (values by distance, rotations, means); closed form on the
paper's, adjacent and energy groups; with the output refit. Writes OUT/merging.json, merging.md and
merging.png; what stands there already is not made again.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM

from bench.machine import machine
from common.data.demo import resolve_model
from common.data.tasks import Sample
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.models import load_config, load_model, load_tokenizer
from common.reporting import plots
from common.training import checkpoints, distill
from common.training.engine import Plan, train
from common.training.inputs import read_pair
from common.training.sharding import Execution, build, joined_ranks

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
STARTS = {  # name -> --by of stage 3, arguments of stage 4
    "mean-pool": ("none", ["--rotate", "none"]),
    "paper": ("value", []),
    "closed form, adjacent": ("none", ["--merge", "closed-form"]),
    "closed form, value groups": ("value", ["--merge", "closed-form"]),
    "closed form": ("energy", ["--merge", "closed-form"]),
    "closed form + refit": ("energy", ["--merge", "closed-form", "--refit"]),
}
DISTILLED = ("mean-pool", "paper", "closed form", "closed form + refit")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default="demo", help="text of calibration and distillation")
    parser.add_argument("--heldout", default="demo", help="text of the loss; demo: its held-out part")
    parser.add_argument("--name", default="demo", help="on the picture")
    parser.add_argument("--out", default="runs/merging")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=None, help="(default: a half, a quarter of the heads, and one)")
    parser.add_argument("--distil-kv-heads", type=int, default=None, help="which of them is distilled (default: a quarter)")
    parser.add_argument("--budgets", type=int, nargs="+", default=(15, 40, 150), help="distillation steps")
    parser.add_argument("--batch", type=int, default=8, help="samples of --length tokens per step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    return parser.parse_args()


def made(run: str, command: str, *arguments) -> None:
    subprocess.run([sys.executable, os.path.join(ROOT, command), "--run", run, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_from(out: str, kv_heads: int, name: str, by: str, arguments: list) -> str:
    """The run directory of one start, after stages 3 and 4."""
    run = os.path.join(out, f"{kv_heads}-{name.replace(' ', '-').replace(',', '')}")
    if not os.path.exists(os.path.join(run, "merged")):
        made(run, "03_group.py", "--similarity", os.path.join(out, "similarity.safetensors"), "--kv-heads", kv_heads, "--by", by, "--force")
        made(run, "04_align.py", "--calibration", os.path.join(out, "calibration"), "--force", *arguments)
    return run


def distilled(args, run: str, frozen, samples: list, kv_heads: int, kind: str, steps: int, ranks):
    """The model after `steps` of stage 5's pruning, masks "l0" or "off", on text."""
    merged, directory = os.path.join(run, "merged"), os.path.join(run, "bench-train")
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    # masks travel 15 units of log alpha at mask_lr a step, so a short budget needs a larger rate
    settings = distill.Settings(lr=args.lr, mask_lr=max(0.5, 20 / steps), l0_weight=30.0, kl_on="all")
    plan = Plan(steps=steps, batch=args.batch, warmup=max(1, steps // 10), clip=1.0, seed=0,
                tokens_per_microbatch=args.batch * args.length, save_steps=None, save_minutes=1e9, print_every=10**9)
    pair, setup = read_pair(run, ranks), distill.Setup(directory, ranks, Execution())
    saved = None
    if kind == "l0":
        switch = distill.switch_step(steps)
        job = distill.masked_job(pair, settings, setup)
        train(job, distill.MaskedDistillation(job.trainee, frozen, steps, settings), samples, plan, switch)
        saved = checkpoints.steps_saved(directory)[-1]
    job = distill.gqa_job(pair, settings, setup, saved, switched=bool(saved))
    train(job, distill.Distillation(job.trainee, frozen, settings), samples, plan)
    model = AutoModelForCausalLM.from_config(load_config(merged), dtype=torch.float32).eval()
    model.load_state_dict(checkpoints.whole_weights(checkpoints.steps_saved(directory)[-1]))
    shutil.rmtree(directory)
    return model


def measure(args, ranks) -> dict:
    """All losses; also prints them as they come."""
    os.makedirs(args.out, exist_ok=True)
    path = resolve_model(args.model)
    config, tokenizer = load_config(path), load_tokenizer(path)
    heads = config.num_attention_heads
    all_kv_heads = args.kv_heads or [heads // 2, heads // 4, 1]
    distil = args.distil_kv_heads or heads // 4
    if not os.path.exists(os.path.join(args.out, "similarity.safetensors")):
        made(args.out, "01_calibrate.py", "--model", args.model, "--text", args.text, "--length", args.length, "--force")
        made(args.out, "02_similarity.py", "--force")
    heldout, said = load_tokens(args.heldout, tokenizer, 32, args.length, split="heldout")
    print(f"held-out loss on {said}")

    def loss(model) -> float:
        return math.log(perplexity(model, heldout))

    results = {"name": args.name, "source": loss(load_model(path)), "merged": {}, "distilled": {}, "settings": vars(args), "machine": machine("cpu")}
    runs = {}
    for kv_heads in all_kv_heads:
        for name, (by, arguments) in STARTS.items():
            runs[kv_heads, name] = run = start_from(args.out, kv_heads, name, by, arguments)
            results["merged"].setdefault(kv_heads, {})[name] = loss(load_model(os.path.join(run, "merged")))
        print(kv_heads, {name: round(value, 3) for name, value in results["merged"][kv_heads].items()}, flush=True)

    text, _ = load_tokens(args.text, tokenizer, 512, args.length)
    samples = [Sample(tuple(row[:-1]), (row[-1],)) for row in text.tolist()]
    frozen = build(config, ranks, Execution(), lambda name: (path, name)).eval().requires_grad_(False)
    for name in DISTILLED:
        for kind in ("l0", "off"):
            row = results["distilled"].setdefault(f"{name}, {'masks' if kind == 'l0' else 'no masks'}", {0: results["merged"][distil][name]})
            for steps in args.budgets:
                row[steps] = loss(distilled(args, runs[distil, name], frozen, samples, distil, kind, steps, ranks))
                print(f"{name}, {kind}, {steps} steps: {row[steps]:.3f}", flush=True)
    return results | {"heads": heads, "distilled_kv_heads": distil}


def main():
    args = parse()
    with joined_ranks() as ranks:
        results = measure(args, ranks)
    heads, distil = results["heads"], results["distilled_kv_heads"]
    with open(os.path.join(args.out, "merging.json"), "w") as file:
        json.dump(results, file, indent=1)
    lines = ["| merged to | " + " | ".join(STARTS) + " |", "| --- " * (len(STARTS) + 1) + "|"]
    lines += [f"| {kv} kv heads | " + " | ".join(f"{row[name]:.3f}" for name in STARTS) + " |" for kv, row in results["merged"].items()]
    lines += ["", f"| {distil} kv heads, then | " + " | ".join(f"{steps} steps" for steps in args.budgets) + " |", "| --- " * (len(args.budgets) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{row[steps]:.3f}" for steps in args.budgets) + " |" for name, row in results["distilled"].items()]
    with open(os.path.join(args.out, "merging.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines), f"\nsource: {results['source']:.3f}")
    plots.starts(os.path.join(args.out, "merging.png"), results["distilled"], results["source"], f"{args.name}: {heads} -> {distil} kv heads")


if __name__ == "__main__":
    main()
