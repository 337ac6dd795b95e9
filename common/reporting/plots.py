"""Plots, drawn if matplotlib is installed.

A failed plot must not fail the stage: one that cannot be drawn or written is skipped with a message.
"""

import functools
import os
from statistics import median
from typing import NamedTuple

import numpy as np

from common.method.losses import TERMS
from common.run.files import write_file
from common.training.lines import START


class Score(NamedTuple):
    """What the colours of two heads mean. most: where the scale of all matrices ends; None: scores cannot be
    compared between layers, so that each matrix has the scale of its pairs, and no diagonal.
    """

    label: str
    most: float | None = None


SCORES = {
    "cos": Score("mean cosine of the two heads", 1.0),
    "dist": Score("minus the mean squared distance of the two heads"),
    "both": Score("keys + values, each over its standard deviation"),
    "energy": Score("minus the energy lost by merging the two heads, a share of the layer's"),
}


def drawing(figure_of):
    """Turn figure_of(pyplot, ...) -> Figure into draw(path, ...), which writes the figure to a PNG file.

    If matplotlib is missing or the file cannot be written, draw() prints one line and returns. figure_of is
    available as draw.__wrapped__.
    """

    @functools.wraps(figure_of)
    def draw(path: str, *args, **kwargs) -> None:
        try:
            import matplotlib
            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError as error:
            print(f"skipped {path}: matplotlib cannot be imported ({error})")
            return
        try:
            figure = figure_of(pyplot, *args, **kwargs)
            with write_file(path) as file:
                figure.savefig(file, format="png", dpi=110, bbox_inches="tight")
            print(f"drew    {os.path.basename(path)}")
        except Exception as error:  # a name that it takes for mathematics, a full disk
            print(f"skipped {path}: cannot be drawn ({error})")
        finally:
            pyplot.close("all")

    return draw


@drawing
def heatmaps(
    plt,
    matrices: dict[str, list],  # row label ("keys before", ...) -> one [heads, heads] array per column
    layers: list[int],  # the layer of each column
    title: str,
    groups: list | None = None,  # one [G, D] array of heads per column: to order and frame them by
    kind: str = "cos",  # of SCORES
):
    """Pairwise similarity of heads, numbered: the paper's Figure 2.

    Cosines have one scale: from 0, or from the least if that is negative, to 1.
    """
    score, least = SCORES[kind], None
    if score.most is not None:
        least = min(0.0, *(float(image.min()) for images in matrices.values() for image in images))
    heads = len(next(iter(matrices.values()))[0])
    groups = groups or [[range(heads)]] * len(layers)
    side = max(2.3, 0.12 * heads)  # inches, for legible numbers
    size = (side * len(layers) + 1.2, side * len(matrices) + 0.4)
    figure, axes = plt.subplots(len(matrices), len(layers), squeeze=False, layout="constrained", figsize=size)
    for row, (label, images) in zip(axes, matrices.items(), strict=True):
        for axis, image, shared in zip(row, images, groups, strict=True):
            order = [head for group in shared for head in group]
            colours = image[order][:, order]
            if least is None:
                colours = np.where(np.eye(heads, dtype=bool), np.nan, colours)
            drawn = axis.imshow(colours, vmin=least, vmax=score.most, cmap="viridis")
            if least is None:
                figure.colorbar(drawn, ax=axis, shrink=0.6)
            _frame_groups(plt, axis, order, len(shared[0]))
        row[0].set_ylabel(label)
    for axis, layer in zip(axes[0], layers, strict=True):
        axis.set_title(f"layer {layer}")
    if least is None:
        figure.supxlabel(f"colours: {score.label}", fontsize="medium")
    else:
        figure.colorbar(drawn, ax=axes, shrink=0.6, label=score.label)
    figure.suptitle(title)
    return figure


def _frame_groups(plt, axis, order: list[int], size: int) -> None:
    """Number the heads of a heatmap and frame each `size` of them, unless that is all."""
    axis.set_xticks(range(len(order)), order)
    axis.set_yticks(range(len(order)), order)
    axis.tick_params(length=0, labelsize=7)
    for first in range(0, len(order) if size < len(order) else 0, size):
        place = (first - 0.5, first - 0.5)
        axis.add_patch(plt.Rectangle(place, size, size, fill=False, color="red", linewidth=1.5,
                                     clip_on=False))


def spaced_layers(count: int) -> list[int]:
    """Four layers of `count`, evenly spaced, or all if there are fewer."""
    return sorted({round(i * (count - 1) / 3) for i in range(4)})


@drawing
def pairs(
    plt,
    cosines: dict[str, dict[str, list]],  # panel -> "before", "after" -> each pair's cosine, a list per layer
    title: str,
):
    """How similar the pairs of heads of each layer are, before and after alignment: median and range.

    Version 1's Figure 2 shows the same cosines, absolute, before alignment.
    """
    figure, axes = plt.subplots(1, len(cosines), figsize=(5.2 * len(cosines), 3.8), layout="constrained",
                                squeeze=False)
    for axis, (name, series) in zip(axes.flat, cosines.items(), strict=True):
        for label, layers in series.items():
            values = [sorted(map(abs, layer)) for layer in layers]
            least, most = [layer[0] for layer in values], [layer[-1] for layer in values]
            (line,) = axis.plot([median(layer) for layer in values], "o-", markersize=3, label=label)
            axis.fill_between(range(len(values)), least, most, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(title=name, xlabel="layer", ylabel="|mean cosine| of a pair: median, range", ylim=(0, 1.03))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    figure.suptitle(title)
    return figure


@drawing
def curves(
    plt,
    records: list[dict],  # the lines of metrics.jsonl
    title: str,
):
    """Training curves: losses; target and size of the masks; mean mask per layer (the paper's Figure 3).

    Held-out metrics, if any, get three more panels; dashed lines are those of merged/, before the first step.
    Without masks there are none for masks. All panels have the same steps.
    """
    masked = [record for record in records if "mask_mean" in record]
    measured = [record for record in records if "heldout_seconds" in record]
    panels = 1 + 2 * bool(masked) + 3 * bool(measured)
    rows = 2 if panels > 3 else 1
    size = (5.2 * panels / rows, 3.8 * rows)
    figure, axes = plt.subplots(rows, panels // rows, figsize=size, layout="constrained", squeeze=False,
                                sharex=True)
    losses, *others = axes.flat
    _draw_losses(losses, records)
    if masked:  # a one-step run, or --masks off, has no masked steps
        _draw_masks(*others[:2], masked, plt.cm.viridis)
    if measured:
        _draw_heldout(others[-3:], measured, records[0])
    switched = masked and masked[-1] is not records[-1]
    for axis in axes.flat:
        axis.tick_params(labelbottom=True)
        if switched:
            axis.axvline(masked[-1]["step"], color="grey", linestyle=":", linewidth=1)
    figure.suptitle(f"{title} (dotted: without masks from here on)" if switched else title)
    return figure


@drawing
def frontier(
    plt,
    rows: list[tuple[str, str, dict]],  # of scores.cache_rows
    layouts: list[str],
    title: str,
):
    """Bytes a token against KL from the first checkpoint, for all checkpoints and caches, a panel per layout.

    A line joins those that none beats: with as few bytes, none has a lower KL.
    """
    figure, axes = plt.subplots(1, len(layouts), figsize=(5.2 * len(layouts), 4.2), layout="constrained",
                                sharey=True, squeeze=False)
    for axis, layout in zip(axes.flat, layouts, strict=True):
        points = [(metrics["bytes_per_token"], metrics[layout]["kl"]) for _, _, metrics in rows]
        names = [name for name, _, _ in rows]
        for name in dict.fromkeys(names):
            own = [point for point, owner in zip(points, names, strict=True) if owner == name]
            axis.plot(*zip(*own, strict=True), "o", label=name)
        best = sorted(points)
        best = [point for index, point in enumerate(best)
                if all(point[1] < earlier[1] for earlier in best[:index])]
        axis.plot(*zip(*best, strict=True), color="grey", linewidth=1, zorder=0)
        for point, (_, form, _) in zip(points, rows, strict=True):
            axis.annotate(form, point, (4, 4), textcoords="offset points", fontsize=7, rotation=40)
        axis.set(title=layout, xlabel="KV bytes per token", xscale="log", xmargin=0.1)
        axis.set_yscale("symlog", linthresh=1e-3)
    axes[0, 0].set_ylabel("KL from the first, nats")
    axes[0, 0].legend()
    figure.suptitle(title)
    return figure


def _draw_losses(axis, records: list[dict]) -> None:
    for name in ("loss", *TERMS):
        points = [(record["step"], record[name]) for record in records if record.get(name, 0) > 0]
        # the loss as a band under its terms, one of which may be all of it
        style = {"linewidth": 3, "alpha": 0.3, "color": "black"} if name == "loss" else {"linewidth": 0.9}
        if points:
            axis.plot(*zip(*points, strict=True), label=name, **style)
    axis.set(title="losses", xlabel="step", yscale="log")
    if axis.lines:
        low, high = axis.get_ylim()
        axis.set_ylim(bottom=min(low, high / 10))  # a decade, or noise would look like a trend
        axis.legend()


def _draw_masks(means, by_layer, masked: list[dict], colour_map) -> None:
    steps, layers = [record["step"] for record in masked], len(masked[0]["mask_mean_per_layer"])
    means.plot(steps, [record["mask_target"] for record in masked], "k--", label="target T")
    means.plot(steps, [record["mask_expected"] for record in masked], label="expected mask (Eq. 29)")
    means.plot(steps, [record["mask_mean"] for record in masked], label="mean of the sampled masks",
               alpha=0.7)
    for layer in range(layers):
        values = [record["mask_mean_per_layer"][layer] for record in masked]
        by_layer.plot(steps, values, color=colour_map(layer / max(layers - 1, 1)), label=f"layer {layer}")
    for axis, title in ((means, "masks"), (by_layer, "mean mask per layer")):
        axis.set(title=title, xlabel="step", ylim=(-0.03, 1.03))
    means.legend()
    if layers <= 8:  # a longer legend would cover the curves
        by_layer.legend()


def _draw_heldout(axes: list, measured: list[dict], first: dict) -> None:
    """Curves of the lines that were measured; dashed, the student before the first line's step."""
    divergence, loss, agreement = axes
    divergence.set(title="held-out KL to the teacher", ylabel="nats")
    loss.set(title="held-out next-token loss above the teacher's", ylabel="nats")
    agreement.set(title="held-out top-1 agreement", ylabel="share of tokens", ylim=(0, 1.03))
    loss.axhline(0, color="grey", linewidth=1)
    sets = {"text": "heldout", "chats, answers": "heldout_chat", "tasks, answers": "heldout_task"}
    for label, prefix in sets.items():
        lines = [record for record in measured if f"{prefix}_kl" in record]
        steps, values = [record["step"] for record in lines], [_compared(record, prefix) for record in lines]
        start = f"{START}_{prefix}"
        merged = _compared(first, start) if f"{start}_kl" in first else [None] * len(axes)
        for axis, untrained, *trained in zip(axes, merged, *values, strict=True) if lines else ():
            (curve,) = axis.plot(steps, trained, marker="o", markersize=3, label=label)
            if untrained is not None:
                axis.axhline(untrained, color=curve.get_color(), linestyle="--", linewidth=1)
    for axis in axes:
        if any(name.startswith(START) for name in first):
            axis.plot([], [], color="grey", linestyle="--", linewidth=1, label="merged, before training")
        axis.set(xlabel="step")
        axis.legend()
    divergence.set_ylim(bottom=0)


def _compared(record: dict, prefix: str) -> tuple[float, float, float]:
    """KL, next-token loss above the teacher's and agreement on a held-out set, of a line of metrics.jsonl."""
    kl, loss, teacher_loss, agreement = (record[f"{prefix}_{name}"] for name in
                                         ("kl", "loss", "teacher_loss", "agreement"))
    return kl, loss - teacher_loss, agreement
