"""Means of repeated measurements with their standard errors: as text, and as lines with bars."""

import math
import statistics
from collections.abc import Sequence

from common.reporting.plots import drawing


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of independent measurements; NaN for a single one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def mean_and_error(values: Sequence[float]) -> str:
    """The mean to three digits, "± standard error" if there are several values; "" if there is none."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {standard_error(values):.3f}" if len(values) > 1 else mean


@drawing
def starts(
    plt,
    losses: dict[str, dict[int, list[float]]],  # name -> distillation steps -> held-out loss of each seed
    source: float,  # the source model's held-out loss
    title: str,
    budget: str = "distillation steps",  # label of the horizontal axis
):
    """Held-out loss against distillation, one line per merging method; bars of one standard error.

    Names that differ only after their last comma are variants of a method: same colour, the second dashed,
    the third dotted, the fourth both.
    """
    figure, axis = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    budgets = sorted(set().union(*losses.values()))
    variants: dict[str, int] = {}
    for name, by_steps in losses.items():
        method = name.rpartition(",")[0]
        variants[method] = variants.get(method, 0) + 1
        colour, style = f"C{list(variants).index(method)}", ("-", "--", ":", "-.")[variants[method] - 1]
        means = [statistics.mean(seeds) for seeds in by_steps.values()]
        errors = [standard_error(seeds) if len(seeds) > 1 else 0.0 for seeds in by_steps.values()]
        axis.errorbar([budgets.index(steps) for steps in by_steps], means, errors, color=colour,
                      linestyle=style, marker="o", markersize=3, capsize=2, label=name)
    axis.plot([0, len(budgets) - 1], [source, source], color="black", linewidth=0.8, label="source")
    axis.set(title=title, xlabel=budget, ylabel="held-out loss, nats",
             xticks=range(len(budgets)), xticklabels=budgets)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
