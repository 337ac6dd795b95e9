"""Pictures. Drawn when matplotlib is installed, skipped with a line when it is not."""

import functools
import os


def drawing(function):
    """Call function(plt, path, ...) with matplotlib's pyplot, write aside and rename; without matplotlib, say so."""

    @functools.wraps(function)
    def draw(path: str, *args, **kwargs) -> None:
        try:
            import matplotlib
        except ImportError:
            print(f"skipped {path}: matplotlib is not installed")
            return
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure = function(pyplot, *args, **kwargs)
        aside = path.removesuffix(".png") + ".tmp.png"
        figure.savefig(aside, dpi=110, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(figure)
        os.rename(aside, path)
        print(f"drew    {path}")

    return draw


@drawing
def heatmaps(plt, matrices: dict[str, dict[str, list]], layers: list[int], title: str):
    """Figure 2. matrices: row label ("keys before", ...) -> list of [H, H] arrays, one a column; layers: column numbers."""
    figure, axes = plt.subplots(len(matrices), len(layers), squeeze=False, layout="constrained",
                                figsize=(2.3 * len(layers) + 1.2, 2.3 * len(matrices) + 0.4))
    for row, (label, images) in zip(axes, matrices.items(), strict=True):
        for axis, image in zip(row, images, strict=True):
            shown = axis.imshow(image, vmin=0, vmax=1, cmap="viridis")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(label)
    for axis, layer in zip(axes[0], layers, strict=True):
        axis.set_title(f"layer {layer}")
    figure.colorbar(shown, ax=axes, shrink=0.6, label="mean cosine of the two heads")
    figure.suptitle(title)
    return figure


@drawing
def curves(plt, steps: list[dict], title: str):
    """Training, from the lines of metrics.jsonl: losses; target and actual mask mean; mask mean per layer (Figure 3)."""
    masked = [line for line in steps if "mask_mean" in line]
    figure, axes = plt.subplots(1, 3, figsize=(15.6, 3.8), layout="constrained")
    for name in ("loss", "kl", "bild", "l0"):
        points = [(line["step"], line[name]) for line in steps if line.get(name, 0) > 0]
        if points:
            axes[0].plot(*zip(*points, strict=True), label=name, linewidth=1.2 if name == "loss" else 0.9)
    axes[0].set(title="losses", xlabel="step", yscale="log")
    axes[0].legend()
    if masked:  # a run of one step has no masked phase
        numbers = [line["step"] for line in masked]
        axes[1].plot(numbers, [line["mask_target"] for line in masked], "k--", label="target T")
        axes[1].plot(numbers, [line["mask_expected"] for line in masked], label="expected mask (Eq. 29)")
        axes[1].plot(numbers, [line["mask_mean"] for line in masked], label="mean of the masks drawn", alpha=0.7)
        axes[1].set(title="masks", xlabel="step", ylim=(-0.03, 1.03))
        axes[1].legend()
        layers = len(masked[0]["mask_per_layer"])
        for layer in range(layers):
            axes[2].plot(numbers, [line["mask_per_layer"][layer] for line in masked],
                         color=plt.cm.viridis(layer / max(layers - 1, 1)), label=f"layer {layer}" if layers <= 8 else None)
        axes[2].set(title="expected mask per layer", xlabel="step", ylim=(-0.03, 1.03))
        if layers <= 8:
            axes[2].legend()
    figure.suptitle(title)
    return figure


@drawing
def starts(plt, rows: dict[str, dict[int, float]], source: float, title: str):
    """Held-out loss against distillation steps. rows: name -> steps -> loss, 0 steps being right after merging; names that
    differ in what follows the last comma share a colour, the second of them is dashed."""
    figure, axis = plt.subplots(figsize=(8.6, 4.4), layout="constrained")
    colours: dict[str, str] = {}
    for name, losses in rows.items():
        start = name.rpartition(",")[0]
        again = start in colours
        colour = colours.setdefault(start, f"C{len(colours)}")
        axis.plot(range(len(losses)), list(losses.values()), color=colour, linestyle="--" if again else "-", marker="o", markersize=3, label=name)
    budgets = list(next(iter(rows.values())))
    axis.plot([0, len(budgets) - 1], [source, source], color="black", linewidth=0.8, label="source")
    axis.set(title=title, xlabel="distillation steps", ylabel="held-out loss, nats", xticks=range(len(budgets)), xticklabels=budgets)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure
