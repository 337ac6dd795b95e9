"""Comparing merging methods: held-out loss right after merging and after short distillation.

    python -m bench.merging                                    # the demo model
    python -m bench.merging --model DIR --text train.txt --heldout heldout.txt --name NAME

Stages 1 to 4 make each start. Each is then distilled from the source model by the phases and loop of stage
5, with masks and without, on calibration text (KL on every token, BiLD on the last of each sample), and its
loss on held-out text is measured. Starts: mean-pool; paper (values by distance, rotations, mean); closed form
on the paper's, adjacent and energy groups; with the output refit. Writes OUT/merging.json, merging.md and
merging.png; existing starts are reused.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from bench.machine import machine
from common.data.demo import resolve_model
from common.data.tasks import Sample
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.models import load_config, load_model, load_tokenizer
from common.reporting import plots
from common.reporting.tables import markdown_table
from common.training import checkpoints, distill
from common.training.engine import Plan, train
from common.training.inputs import read_pair
from common.training.sharding import Execution, Ranks, joined_ranks

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
MASKS = {"l0": "masks", "off": "no masks"}  # --masks of stage 5 -> its name in the tables


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default="demo", help="text of calibration and distillation")
    parser.add_argument("--heldout", default="demo", help="text of the loss; demo: its held-out part")
    parser.add_argument("--name", default="demo", help="title of the picture")
    parser.add_argument("--out", default="runs/merging")
    parser.add_argument("--kv-heads", type=int, nargs="+",
                        help="(default: a half and a quarter of the heads, and one)")
    parser.add_argument("--distil-kv-heads", type=int, help="which of them is distilled (default: a quarter)")
    parser.add_argument("--budgets", type=int, nargs="+", default=(15, 40, 150), help="distillation steps")
    parser.add_argument("--batch", type=int, default=8, help="samples of --length tokens per step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    return parser.parse_args()


def run_stage(run: str, command: str, *arguments) -> None:
    """Run a stage as a command, its output unseen."""
    words = [sys.executable, os.path.join(ROOT, command), "--run", run, *map(str, arguments)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def calibrate(args) -> None:
    """Stages 1 and 2, which all starts share."""
    if not os.path.exists(os.path.join(args.out, "similarity.safetensors")):
        source = ["--model", args.model, "--text", args.text, "--length", args.length]
        run_stage(args.out, "01_calibrate.py", *source, "--force")
        run_stage(args.out, "02_similarity.py", "--force")


def make_start(out: str, kv_heads: int, name: str) -> str:
    """The run directory of one start, after stages 3 and 4."""
    by, arguments = STARTS[name]
    run = os.path.join(out, f"{kv_heads}-{name.replace(' ', '-').replace(',', '')}")
    if not os.path.exists(os.path.join(run, "merged")):
        similarity = ["--similarity", os.path.join(out, "similarity.safetensors")]
        run_stage(run, "03_group.py", *similarity, "--kv-heads", kv_heads, "--by", by, "--force")
        calibration = ["--calibration", os.path.join(out, "calibration")]
        run_stage(run, "04_align.py", *calibration, "--force", *arguments)
    return run


@dataclass(frozen=True)
class Distiller:
    """What all distillations share."""

    args: argparse.Namespace
    ranks: Ranks
    teacher: torch.nn.Module  # the source model, frozen
    samples: list[Sample]

    def distil(self, run: str, kind: str, steps: int):
        """The model in run/merged after `steps` of stage 5's pruning. kind: --masks of stage 5."""
        args, directory = self.args, os.path.join(run, "bench-train")
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        # masks travel 15 units of log alpha at mask_lr a step, so a short budget needs a larger rate
        settings = distill.Settings(lr=args.lr, mask_lr=max(0.5, 20 / steps), l0_weight=30.0, kl_on="all")
        plan = Plan(steps=steps, batch=args.batch, warmup=max(1, steps // 10), clip=1.0, seed=0,
                    tokens_per_microbatch=args.batch * args.length, save_steps=None, save_minutes=1e9,
                    print_every=10**9)
        pair, setup = read_pair(run, self.ranks), distill.Setup(directory, self.ranks, Execution())
        saved, switch = None, distill.switch_step(steps)
        if kind == "l0":
            job = distill.masked_job(pair, settings, setup)
            phase = distill.MaskedDistillation(job.trainee, self.teacher, steps, settings)
            train(job, phase, self.samples, plan, switch)
            saved = checkpoints.steps_saved(directory)[-1]
        job = distill.gqa_job(pair, settings, setup, saved, switched=kind == "l0")
        train(job, distill.Distillation(job.trainee, self.teacher, settings), self.samples, plan)
        model = AutoModelForCausalLM.from_config(load_config(pair.merged), dtype=torch.float32).eval()
        model.load_state_dict(checkpoints.whole_weights(checkpoints.steps_saved(directory)[-1]))
        shutil.rmtree(directory)
        return model


def measure(args, ranks) -> dict:
    """All losses; also prints them as they come."""
    os.makedirs(args.out, exist_ok=True)
    path = resolve_model(args.model)
    tokenizer, heads = load_tokenizer(path), load_config(path).num_attention_heads
    distilled_kv_heads = args.distil_kv_heads or heads // 4
    calibrate(args)
    heldout, description = load_tokens(args.heldout, tokenizer, 32, args.length, split="heldout")
    print(f"held-out loss on {description}")

    def loss(model) -> float:
        return math.log(perplexity(model, heldout))

    merged, runs = {}, {}
    for kv_heads in args.kv_heads or [heads // 2, heads // 4, 1]:
        runs[kv_heads] = {name: make_start(args.out, kv_heads, name) for name in STARTS}
        paths = {name: os.path.join(run, "merged") for name, run in runs[kv_heads].items()}
        merged[kv_heads] = {name: loss(load_model(path)) for name, path in paths.items()}
        print(kv_heads, {name: round(value, 3) for name, value in merged[kv_heads].items()}, flush=True)

    text, _ = load_tokens(args.text, tokenizer, 512, args.length)
    samples = [Sample(tuple(row[:-1]), (row[-1],)) for row in text.tolist()]
    distiller = Distiller(args, ranks, distill.frozen(path, ranks, Execution()), samples)
    distilled = {}
    for name in DISTILLED:
        run = runs[distilled_kv_heads][name]
        for kind, label in MASKS.items():
            losses = distilled[f"{name}, {label}"] = {0: merged[distilled_kv_heads][name]}
            for steps in args.budgets:
                losses[steps] = loss(distiller.distil(run, kind, steps))
                print(f"{name}, {kind}, {steps} steps: {losses[steps]:.3f}", flush=True)
    return {"name": args.name, "source": loss(load_model(path)), "merged": merged, "distilled": distilled,
            "settings": vars(args), "machine": machine("cpu"), "heads": heads,
            "distilled_kv_heads": distilled_kv_heads}


def tables(results: dict, budgets) -> str:
    """Losses right after merging, and after each budget, as Markdown."""
    merged = [[f"{kv_heads} kv heads", *(f"{losses[name]:.3f}" for name in STARTS)]
              for kv_heads, losses in results["merged"].items()]
    distilled = [[name, *(f"{losses[steps]:.3f}" for steps in budgets)]
                 for name, losses in results["distilled"].items()]
    header = [f"{results['distilled_kv_heads']} kv heads, then", *(f"{steps} steps" for steps in budgets)]
    return markdown_table(["merged to", *STARTS], merged) + "\n\n" + markdown_table(header, distilled) + "\n"


def main():
    args = parse()
    with joined_ranks() as ranks:
        results = measure(args, ranks)
    with open(os.path.join(args.out, "merging.json"), "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    text = tables(results, args.budgets)
    with open(os.path.join(args.out, "merging.md"), "w", encoding="utf-8") as file:
        file.write(text)
    print(text, f"source: {results['source']:.3f}", sep="\n")
    title = f"{args.name}: {results['heads']} -> {results['distilled_kv_heads']} kv heads"
    plots.starts(os.path.join(args.out, "merging.png"), results["distilled"], results["source"], title)


if __name__ == "__main__":
    main()
