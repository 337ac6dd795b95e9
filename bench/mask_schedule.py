"""How masks follow their target T if Eq. 29 is the only loss: mean z by step, printed and released masks.

    python -m bench.mask_schedule                           # 400, 3000 and 11,530 steps; minutes, no model
    python -m bench.mask_schedule --steps 5000 34590 --seeds 1

1024 masks, as LLaMA2-7B has (32 layers of 32 kv heads), are trained as stage 5 trains them, with its
distributions, AdamW and schedule at the published rate and warm-up, but without distillation. "no gradient"
is the released masks' pull alone; printed masks then stay open. z is drawn, with noise, as a step applies
it. The last column is the last step before the switch sets every mask to 0. Writes OUT/mask_schedule.md,
.png and .json.
"""

import argparse
import os
import statistics

import torch

from bench.plots import standard_error
from common.cli import positive, run_stage
from common.files import write_json, write_text
from common.method import masks
from common.method.masks import l0_loss
from common.progress import Progress
from common.reporting import plots
from common.reporting.tables import markdown_table
from common.training.defaults import PUBLISHED
from common.training.distill import Masks, ReleasedMasks, switch_step
from common.training.engine import Schedule

LAYERS, KV_HEADS = 32, 32
TENTHS = range(9)  # of the steps; masks end after eight
KINDS = ("printed", "released", "released, no gradient")
Curves = dict[str, dict[int, list[list[float]]]]  # kind -> steps -> mean z of each seed in each step


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=positive, nargs="+", default=[400, 3000, 11530],
                        help="steps of whole trainings, of which 80 %% have masks")
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--out", default="runs/mask-schedule")
    return parser.parse_args()


def simulate(kind: str, count: int, seed: int) -> list[float]:
    """Mean z in each masked step of a training of `count` steps. kind: one of KINDS."""
    cls = Masks if kind == "printed" else ReleasedMasks
    replicated = cls.start((LAYERS, KV_HEADS), seed)
    log_alpha = replicated["log_alpha"].requires_grad_()
    trained, rate = cls(replicated, count, seed), PUBLISHED["mask_lr"]
    optimizer = torch.optim.AdamW([log_alpha], **cls.ADAM)
    schedule = Schedule(count, batch=1, warmup=PUBLISHED["warmup"], clip=0.0, seed=seed, save_steps=None,
                        tokens_per_microbatch=1, save_minutes=0.0, print_every=1)
    means = []
    for step in Progress(range(switch_step(count)), f"{kind}, {count} steps, seed {seed}", leave=False):
        means.append(float(trained.draw(step).detach().mean()))
        if kind != "released, no gradient":
            loss = l0_loss(trained.expected().mean(), trained.target(step))
            (PUBLISHED["l0_weight"] * loss).backward()
            optimizer.param_groups[0]["lr"] = rate * schedule.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        trained.settle(step)
    return means


def step_at(tenth: int, steps: int) -> int:
    """The step after this many tenths of them; the last with masks, if those have just ended."""
    return min(tenth * steps // 10, switch_step(steps) - 1)


def cell(seeds: tuple[float, ...]) -> str:
    """The mean of the seeds to two digits, with its standard error where that shows."""
    error = standard_error(seeds)
    return f"{statistics.mean(seeds):.2f}" + (f" ± {error:.2f}" if error >= 0.005 else "")


def at_tenths(curves: Curves) -> Curves:
    """Mean z after each tenth of the steps."""
    return {kind: {steps: [[means[step_at(tenth, steps)] for tenth in TENTHS] for means in seeds]
                   for steps, seeds in by_steps.items()} for kind, by_steps in curves.items()}


def table(curves: Curves) -> str:
    """T and mean z at tenths of the steps, as Markdown."""
    target = [f"{masks.target(tenth, 10):.2f}" for tenth in TENTHS]
    rows = [["T", "", *target]]
    for kind, by_steps in at_tenths(curves).items():
        rows += [[kind, steps, *map(cell, zip(*seeds, strict=True))] for steps, seeds in by_steps.items()]
    return markdown_table(["masks", "steps", *(f"{10 * tenth} %" for tenth in TENTHS)], rows) + "\n"


@plots.drawing
def draw(plt, curves: Curves):
    """Mean z against the share of the steps, a panel for each number of steps; a line for each seed."""
    steps = list(curves["printed"])
    figure, axes = plt.subplots(1, len(steps), figsize=(4 * len(steps), 3.4), sharey=True, squeeze=False,
                                layout="constrained")
    for axis, count in zip(axes[0], steps, strict=True):
        shares = [100 * step / count for step in range(switch_step(count))]
        axis.plot(shares, [masks.target(step, count) for step in range(len(shares))], color="black",
                  linewidth=1, label="T")
        for number, (kind, by_steps) in enumerate(curves.items()):
            for seed, means in enumerate(by_steps[count]):
                axis.plot(shares, means, color=f"C{number}", linewidth=0.8, alpha=0.8,
                          label=kind if seed == 0 else None)
        axis.set(title=f"{count:,} steps", xlabel="% of the steps")
    axes[0, 0].set(ylabel="mean z", ylim=(-0.02, 1.02))
    axes[0, 0].legend(fontsize=8)
    return figure


def main():
    args = parse()
    seeds = range(args.seeds)
    curves = {kind: {steps: [simulate(kind, steps, seed) for seed in seeds] for steps in args.steps}
              for kind in KINDS}
    text = table(curves)
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "mask_schedule")
    write_text(f"{path}.md", text)
    print(text)
    draw(f"{path}.png", curves)
    write_json(f"{path}.json", {"mean_z": at_tenths(curves), "settings": vars(args)})


if __name__ == "__main__":
    run_stage(main)
