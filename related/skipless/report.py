"""Tables and the picture of what compare.py computes."""

from common.reporting.plots import drawing
from common.reporting.tables import markdown_table
from related.skipless.algebra import PROJECTIONS
from related.skipless.exactness import LOGIT_TOLERANCE, PRECISIONS

LETTERS = tuple(letter.upper() for letter in PROJECTIONS)


def exactness_table(lines: list[dict]) -> str:
    """One row per model: its weights; differences of itself and each fold, and the share of weights saved."""
    rows = []
    for name in dict.fromkeys(line["model"] for line in lines):
        itself, *folds = [line for line in lines if line["model"] == name]
        cells = [fold_cell(line, itself["parameters"]) for line in folds]
        rows.append((name, f"{itself['parameters']:,}", differences_cell(itself), *cells))
    table = markdown_table(("model", "weights", "itself", *LETTERS), rows)
    reasons = dict.fromkeys(f"Refused: {line['refused']}." for line in lines if "refused" in line)
    return "\n\n".join((table, *reasons))


def fold_cell(line: dict, before: int) -> str:
    """Differences and the share of weights saved, for example "3e-12 / 5e-05 / 7e-01, 13%"."""
    if "refused" in line:
        return "refused"
    return f"{differences_cell(line)}, {1 - line['parameters'] / before:.0%}"


def differences_cell(line: dict) -> str:
    """Differences in each of PRECISIONS, for example "2e-14 / 2e-07 / 1e-02"."""
    return " / ".join(difference_text(line[name]) for name in PRECISIONS)


def difference_text(difference: float) -> str:
    if difference == 0:
        return "0"
    return f"{difference:.0e}" if difference < 1 else "over 1"


def conditions_table(layers: list[dict]) -> str:
    """One row per layer: condition numbers of Q, K, V and P."""
    rows = []
    for index, conditions in enumerate(layers):
        row = dict.fromkeys(PROJECTIONS, "not square")
        row |= {letter: f"{number:.3g}" for letter, number in conditions.items()}
        rows.append((index, *row.values()))
    return markdown_table(("layer", *LETTERS), rows)


def sweep_table(lines: list[dict]) -> str:
    """One row per condition number."""
    rows = [(f"{line['condition']:.0e}", differences_cell(line)) for line in lines]
    return markdown_table(("condition number of every Q", " / ".join(PRECISIONS)), rows)


@drawing
def picture(plt, name: str, checkpoint: list[dict], trained: dict | None, swept, limit: float):
    """Condition numbers by layer, of the checkpoint and of the trained models, and the differences they make.

    trained and swept may be None: then there is one panel instead of three. limit: the largest condition
    number that a fold accepts.
    """
    panels, width = (3, 15) if trained else (1, 5.4)
    figure, axes = plt.subplots(1, panels, figsize=(width, 3.8), layout="constrained", squeeze=False)
    axes = axes[0]
    draw_conditions(axes[0], checkpoint, "-", "")
    axes[0].set(title=name, yscale="log")
    if trained:
        for (kind, conditions), linestyle in zip(trained.items(), ("-", "--"), strict=True):
            draw_conditions(axes[1], conditions["after"], linestyle, f", {kind}")
        axes[1].set(title="skipless, trained from orthogonal matrices", ylim=(0, None))
        draw_sweep(axes[2], swept, limit)
    return figure


def draw_conditions(axis, layers: list[dict], linestyle: str, label: str) -> None:
    """One line per letter over the layers."""
    for number, letter in enumerate(PROJECTIONS):
        if letter in layers[0]:
            values = [layer[letter] for layer in layers]
            axis.plot(values, color=f"C{number}", marker="o", markersize=3, linestyle=linestyle,
                      label=f"{letter.upper()}{label}")
    axis.set(xlabel="layer", ylabel="condition number")
    axis.xaxis.get_major_locator().set_params(integer=True)
    if axis.lines:  # there are none when no matrix is square
        axis.legend(fontsize=8, ncols=2)


def draw_sweep(axis, swept: list[dict], limit: float) -> None:
    """Differences over the condition number of Q, one line per precision."""
    conditions = [line["condition"] for line in swept]
    for name in reversed(PRECISIONS):
        values = [min(line[name], 10) for line in swept]
        axis.plot(conditions, values, marker="o", markersize=3, label=name)
    axis.axvline(limit, color="black", linewidth=0.8, linestyle="--", label="refused beyond")
    axis.axhline(LOGIT_TOLERANCE, color="grey", linewidth=0.8, linestyle="--", label="allowed in float64")
    axis.set(title="Q removed", xscale="log", yscale="log", ylim=(1e-16, 5),
             xlabel="condition number of every Q", ylabel="logit difference, relative")
    axis.legend(fontsize=8)
