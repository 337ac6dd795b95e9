"""Comparing merging methods: held-out loss right after merging and after short distillation.

    python -m bench.merging                                    # the demo model
    python -m bench.merging --model DIR --text train.txt --heldout heldout.txt --name NAME
    python -m bench.merging --masks l0 --starts paper --seeds 1     # adds a row to the same tables

Stages 1 to 4 make each start. Each is then distilled from the source model by the steps of stage 5, with
masks or without, on calibration text (KL on every token, BiLD on the last of each sample), and its loss on
held-out text is measured. The seeds change the order of the samples and the noise of the masks.

Starts: mean-pool; paper (values by distance, rotations, mean); closed form (pairs), keys merged RoPE pair by
RoPE pair; closed form, keys merged with RoPE in mind, on adjacent, value and energy groups; with the output
projection or the whole attention layer refitted. Writes OUT/merging.json after every measurement, then
merging.md and merging.png. Starts and losses that are there already are kept.
"""

import argparse
import importlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from bench import plots
from bench.machine import machine
from common.cli import UserError, run_stage
from common.data.demo import resolve_model
from common.data.rows import Sample
from common.data.text import load_tokens
from common.evaluate import perplexity
from common.files import write_text
from common.method.masks import blended_name
from common.models import load_config, load_model, load_tokenizer
from common.reporting.tables import markdown_table
from common.training import checkpoints, distill, engine, students
from common.training.engine import Job, Schedule
from common.training.sharding import Execution, Ranks, joined_ranks
from common.training.students import read_pair
from common.training.teacher import frozen

stage5 = importlib.import_module("05_prune_train")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAIRS, ROPE = ["--merge", "closed-form", "--merge-keys", "pairs"], ["--merge", "closed-form"]
STARTS = {  # name -> --by of stage 3, arguments of stage 4
    "mean-pool": ("none", ["--rotate", "none"]),
    "paper": ("value", []),
    "closed form (pairs)": ("energy", PAIRS),
    "closed form (pairs) + output": ("energy", [*PAIRS, "--refit", "output"]),
    "closed form, adjacent heads": ("none", ROPE),
    "closed form, value groups": ("value", ROPE),
    "closed form": ("energy", ROPE),
    "closed form + output": ("energy", [*ROPE, "--refit", "output"]),
    "closed form + attention": ("energy", [*ROPE, "--refit", "attention"]),
}
GROUPINGS = ("closed form, adjacent heads", "closed form, value groups")  # merged, but not distilled
# --masks of stage 5, or follow -> its name in the tables
MASKS = {"off": "no masks", "l0": "masks", "l0-released": "released masks", "follow": "masks at T"}
SAMPLES, HELDOUT = 2048, 32  # sequences to distil on, and of the held-out loss
FREE = ("out", "name", "kv_heads", "starts", "masks", "budgets", "seeds")  # may change between runs


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
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS),
                        help="(default: all; the groupings are only merged)")
    parser.add_argument("--masks", choices=MASKS, default="off",
                        help="as --masks of 05_prune_train.py; follow: every mask is T of Eq. 29, not learnt")
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 40, 150], help="distillation steps")
    parser.add_argument("--seeds", type=int, default=3, help="distillations of each start and budget")
    parser.add_argument("--batch", type=int, default=4, help="samples of --length tokens per step")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--lr", type=float, default=5e-4)
    return parser.parse_args()


def call_stage(run: str, command: str, *arguments) -> None:
    """Run a stage as a command; only its errors and bars are seen."""
    words = [sys.executable, os.path.join(ROOT, command), "--run", run, *map(str, arguments)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def calibrate(args) -> None:
    """Stages 1 and 2, which all starts share."""
    if not os.path.exists(os.path.join(args.out, "similarity.safetensors")):
        source = ["--model", args.model, "--text", args.text, "--length", args.length]
        call_stage(args.out, "01_calibrate.py", *source, "--force")
        call_stage(args.out, "02_similarity.py", "--energy", "--force")


def start_run(out: str, kv_heads: int, name: str) -> str:
    """The run directory of one start."""
    for mark in "(),+":
        name = name.replace(mark, "")
    return os.path.join(out, f"{kv_heads}-{'-'.join(name.split())}")


def merged_model(out: str, kv_heads: int, name: str):
    """One start, made by stages 3 and 4 unless it is there."""
    (by, arguments), run = STARTS[name], start_run(out, kv_heads, name)
    merged = os.path.join(run, "merged")
    if not os.path.exists(merged):
        similarity = ["--similarity", os.path.join(out, "similarity.safetensors")]
        call_stage(run, "03_group.py", *similarity, "--kv-heads", kv_heads, "--by", by, "--force")
        calibration = ["--calibration", os.path.join(out, "calibration")]
        call_stage(run, "04_align.py", *calibration, "--force", *arguments)
    return load_model(merged)


def mask_settings(name: str, steps: int) -> dict[str, float]:
    """Rate and weight of the masks: the released ones take the published values at any number of steps."""
    if name == "follow":
        return {"mask_lr": 0.0, "l0_weight": 0.0}
    if name == "l0-released":
        return {"mask_lr": 1e-2, "l0_weight": 1.0}
    # these travel 15 units of log alpha at mask_lr a step, so a short budget needs a larger rate
    return {"mask_lr": max(0.5, 20 / steps), "l0_weight": 30.0}


class FollowingMasks(distill.Masks):
    """Masks that follow T of Eq. 29 exactly: each is T. log_alpha, which stage 5's step trains, is unused."""

    def draw(self, step: int) -> torch.Tensor:
        self.z = torch.full_like(self.log_alpha, self.target(step))
        return self.z + 0 * self.log_alpha

    def noiseless(self) -> torch.Tensor:
        return self.z


@dataclass(frozen=True)
class Distiller:
    """What all distillations share."""

    args: argparse.Namespace
    ranks: Ranks
    teacher: torch.nn.Module  # the source model, frozen
    samples: list[Sample]

    def distil(self, run: str, count: int, seed: int):
        """The model in run/merged after `count` steps of stage 5."""
        args, directory = self.args, os.path.join(run, "bench-train")
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        options = SimpleNamespace(kl_on="all", temperature=1.0, loss_chunk=512,
                                  **mask_settings(args.masks, count))
        schedule = Schedule(steps=count, batch=args.batch, warmup=max(1, count // 10), clip=1.0, seed=seed,
                            tokens_per_microbatch=args.batch * args.length, save_steps=None,
                            save_minutes=1e9, print_every=10**9)
        pair, rates = read_pair(run, self.ranks), students.Rates(args.lr, beta2=0.999, weight_decay=0.0)
        if args.masks != "off":
            kind = "l0" if args.masks == "follow" else args.masks  # FollowingMasks have l0's parameters
            student = students.masked_student(pair, self.ranks, Execution(), kind, seed)
            optimizer = students.masked_optimizer(student, rates, kind, options.mask_lr)
            masks = distill.MASKS.get(args.masks, FollowingMasks)(student.replicated, count, seed)
            job = Job(student, optimizer, directory, self.ranks)
            for step in self.steps(job, schedule, distill.switch_step(count)):
                stage5.masked_step(step, masks, self.teacher, options)
        student = students.gqa_student(pair, self.ranks, Execution(), fresh=args.masks == "off")
        job = Job(student, students.gqa_optimizer(student, rates, pair.blended), directory, self.ranks)
        if args.masks != "off":
            saved = checkpoints.saved_checkpoints(directory)[-1]
            checkpoints.load(job, saved, lambda name: blended_name(name, pair.blended))
        for step in self.steps(job, schedule):
            stage5.gqa_step(step, self.teacher, options)
        model = AutoModelForCausalLM.from_config(
            load_config(pair.merged), dtype=torch.float32, trust_remote_code=False).eval()
        model.load_state_dict(checkpoints.whole_weights(checkpoints.saved_checkpoints(directory)[-1]))
        shutil.rmtree(directory)
        return model

    def steps(self, job: Job, schedule: Schedule, until: int | None = None):
        """Stage 5's loop. A signal ends the bench: a model whose training it cut short is not measured."""
        yield from engine.steps(job, schedule, self.samples, until)
        if job.stopped:
            raise KeyboardInterrupt


class Results:
    """All losses, written to merging.json whenever one is added."""

    def __init__(self, args, heads: int, heldout: torch.Tensor):
        self.path, self.heldout = os.path.join(args.out, "merging.json"), heldout
        fixed = {name: value for name, value in vars(args).items() if name not in FREE}
        self.figures = {"settings": fixed, "machine": machine("cpu"), "heads": heads}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                self.figures = json.load(file)
            if self.figures["settings"] != fixed:
                raise UserError(f"{self.path}: expected the results of {fixed}, found those of "
                                f"{self.figures['settings']}; pass another --out")

    def measure(self, make_model, *place: str) -> None:
        """Put the held-out loss of make_model() at this place in the results, unless it has one."""
        at = self.figures
        for name in place[:-1]:
            at = at.setdefault(name, {})
        if place[-1] not in at:
            at[place[-1]] = math.log(perplexity(make_model(), self.heldout))
            print(f"{' | '.join(place)}: {at[place[-1]]:.4f}", flush=True)
            write_text(self.path, json.dumps(self.figures, indent=1) + "\n")


def measure(args, ranks) -> dict:
    """All figures: those in merging.json, and those that the arguments add."""
    os.makedirs(args.out, exist_ok=True)
    path = resolve_model(args.model)
    tokenizer, heads = load_tokenizer(path), load_config(path).num_attention_heads
    args.kv_heads = args.kv_heads or [heads // 2, heads // 4, 1]
    args.distil_kv_heads = args.distil_kv_heads or heads // 4
    heldout, description = load_tokens(args.heldout, tokenizer, HELDOUT, args.length, split="heldout")
    print(f"held-out loss on {description}")
    results = Results(args, heads, heldout)
    calibrate(args)
    results.measure(partial(load_model, path), "source")
    for kv_heads, name in itertools.product(args.kv_heads, args.starts):
        results.measure(partial(merged_model, args.out, kv_heads, name), "merged", str(kv_heads), name)

    text, _ = load_tokens(args.text, tokenizer, SAMPLES, args.length)
    samples = [Sample(row[:-1], row[-1:]) for row in text.tolist()]
    distiller = Distiller(args, ranks, frozen(path, ranks, Execution()), samples)
    starts = [name for name in args.starts if name not in GROUPINGS]
    for steps, seed, name in itertools.product(args.budgets, range(args.seeds), starts):
        run = start_run(args.out, args.distil_kv_heads, name)
        row = f"{name}, {MASKS[args.masks]}"
        results.measure(partial(distiller.distil, run, steps, seed), "distilled", row, str(steps), str(seed))
    return results.figures


def rows(figures: dict) -> dict[str, dict[int, list[float]]]:
    """name -> steps -> losses of all seeds; 0 steps: right after merging. In the order of STARTS."""
    kept = {}
    merged = figures["merged"][str(figures["settings"]["distil_kv_heads"])]
    for start in STARTS:
        for label in MASKS.values():
            name = f"{start}, {label}"
            if name in figures["distilled"]:
                kept[name] = {0: [merged[start]]}
                for steps, seeds in sorted(figures["distilled"][name].items(), key=lambda item: int(item[0])):
                    kept[name][int(steps)] = list(seeds.values())
    return kept


def tables(figures: dict) -> str:
    """Losses right after merging, and after each budget (mean and standard error of the seeds)."""
    merged, losses = figures["merged"], rows(figures)
    measured = [name for name in STARTS if name in set().union(*merged.values())]
    starts = [[name, *(f"{merged[kv_heads][name]:.3f}" for kv_heads in merged)] for name in measured]
    text = markdown_table(["merged to", *(f"{kv_heads} kv heads" for kv_heads in merged)], starts) + "\n"
    budgets = sorted(set().union(*losses.values()))
    if budgets:
        distilled = [[name, *(plots.mean_and_error(by_steps.get(steps, [])) for steps in budgets)]
                     for name, by_steps in losses.items()]
        header = [f"{figures['settings']['distil_kv_heads']} kv heads, after steps", *budgets]
        text += "\n" + markdown_table(header, distilled) + "\n"
    return text


def main():
    args = parse()
    with joined_ranks() as ranks:
        figures = measure(args, ranks)
    text = tables(figures)
    write_text(os.path.join(args.out, "merging.md"), text)
    print(text, f"source: {figures['source']:.3f}", sep="\n")
    title = f"{args.name}: {figures['heads']} -> {args.distil_kv_heads} kv heads"
    if figures["distilled"]:
        plots.starts(os.path.join(args.out, "merging.png"), rows(figures), figures["source"], title)


if __name__ == "__main__":
    run_stage(main)
