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
from types import SimpleNamespace

import torch
from tqdm import trange

from common.cli import positive, run_stage
from common.files import write_json, write_text
from common.method import masks, released_masks
from common.reporting import plots
from common.reporting.tables import markdown_table, standard_error
from common.training import jobs
from common.training.distill import switch_step
from common.training.engine import learning_rate
from common.training.plans import PUBLISHED_SETTINGS

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


class Printed:
    """A step of the printed masks: log_alpha is what they are drawn from."""

    adam, distribution = jobs.MASK_ADAM, masks

    def __init__(self, log_alpha: torch.nn.Parameter, steps: int):
        self.log_alpha, self.steps = log_alpha, steps

    def parameter(self, step: int) -> torch.Tensor:
        return self.log_alpha

    def after_update(self, step: int) -> None:
        masks.clamp(self.log_alpha)


class Released(Printed):
    """A step of the released masks: they are drawn from a pulled copy, with which log_alpha is averaged."""

    adam, distribution, size = jobs.RELEASED_MASK_ADAM, released_masks, torch.ones(())

    def progress(self, step: int) -> tuple[float, float]:
        return masks.target(step, self.steps), step / switch_step(self.steps)

    def parameter(self, step: int) -> torch.Tensor:
        self.copy = released_masks.pulled(self.log_alpha, self.size, *self.progress(step))
        return self.copy

    def after_update(self, step: int) -> None:
        self.size = released_masks.settle(self.log_alpha, self.copy, *self.progress(step + 1))


def simulate(kind: str, steps: int, seed: int) -> list[float]:
    """Mean z in each masked step of a training of `steps` steps. kind: one of KINDS."""
    cls = Printed if kind == "printed" else Released
    plan = SimpleNamespace(steps=steps, warmup=PUBLISHED_SETTINGS["warmup"], final_share=0.0)
    log_alpha = torch.nn.Parameter(cls.distribution.start((LAYERS, KV_HEADS), seed))
    rule, rate = cls(log_alpha, steps), PUBLISHED_SETTINGS["mask_lr"]
    optimizer = torch.optim.AdamW([log_alpha], **cls.adam)
    means = []
    for step in trange(switch_step(steps), desc=f"{kind}, {steps} steps, seed {seed}", leave=False):
        parameter = rule.parameter(step)
        means.append(float(cls.distribution.draw(parameter, seed, step).detach().mean()))
        if kind != "released, no gradient":
            loss = masks.l0_loss(cls.distribution.expected(parameter).mean(), masks.target(step, steps))
            (PUBLISHED_SETTINGS["l0_weight"] * loss).backward()
            optimizer.param_groups[0]["lr"] = rate * learning_rate(step, plan)
            optimizer.step()
            optimizer.zero_grad()
        rule.after_update(step)
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
