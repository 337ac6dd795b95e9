"""Pictures, checked for what they show: titles, axes, series and the numbers they are drawn from."""

import math
import sys

import numpy as np
import pytest

from common.reporting import plots
from common.reporting.tables import CacheRow
from pipelines import smollm2

pyplot = pytest.importorskip("matplotlib.pyplot")
pyplot.switch_backend("Agg")
pytestmark = pytest.mark.usefixtures("pictures")


def training_records(layers: int = 2, masked: bool = True, measured=()) -> list[dict]:
    """Five steps, the last without masks; every figure differs from every other.

    measured: kinds of held-out samples, on which the first and the last step were measured.
    """
    records = []
    for step in range(1, 6):
        record = {"step": step, "loss": 5.0 / step, "kl": 3.0 / step, "bild": 2.0 / step}
        if masked and step < 5:
            record |= {"mask_target": 1 - step / 5, "mask_expected": 0.9 - step / 10,
                       "mask_mean": 0.8 - step / 20,
                       "mask_mean_per_layer": [(step + layer) / (10 * layers) for layer in range(layers)]}
        for prefix in measured if step in (1, 5) else ():
            record |= {"heldout_seconds": 1.0, f"{prefix}_teacher_loss": 2.0 + 0.5 * len(prefix)}
            for name, value in (("kl", 0.5), ("loss", 3.0), ("agreement", 0.8)):
                record[f"{prefix}_{name}"] = value - 0.1 * (step == 5) - 0.01 * len(prefix)
        records.append(record)
    return records


def figure_of(draw, *arguments):
    figure = draw.__wrapped__(pyplot, *arguments)
    pyplot.close(figure)
    return figure


def series(axis) -> dict[str, tuple[list, list]]:
    """Label -> (x, y) of each line that has a label."""
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines}
    return {label: points for label, points in drawn.items() if not label.startswith("_")}


def legend(axis) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_the_frontier_joins_what_nothing_smaller_and_closer_beats():
    rows = [CacheRow("source", "f16", 64.0, (0.0, 0.0), ()),
            CacheRow("source", "q4_0", 18.0, (0.5, 0.2), ()),
            CacheRow("gqa", "f16", 32.0, (0.3, 0.3), ())]
    figure = figure_of(plots.frontier, rows, ["halves", "rotated"], "KL from x")
    joined = [[18, 32, 64], [0.5, 0.3, 0.0]], [[18, 64], [0.2, 0.0]]  # on the right gqa is worse and larger
    for panel, (axis, title) in enumerate(zip(figure.axes, ("halves", "rotated"), strict=True)):
        assert (axis.get_title(), axis.get_xlabel(), axis.get_xscale(), axis.get_yscale()) == (
            title, "KV bytes per token", "log", "symlog")
        assert series(axis) == {"source": ([64, 18], [0, rows[1].kls[panel]]), "gqa": ([32], [0.3])}
        assert axis.lines[-1].get_xydata().T.tolist() == joined[panel]
        assert {(text.xy, text.get_text()) for text in axis.texts} == {
            ((row.bytes_per_token, row.kls[panel]), row.format) for row in rows}
        assert [text.get_text() for text in axis.get_xticklabels()] == ["18", "32", "64"]
        assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 0.5
    assert legend(figure.axes[0]) == ["source", "gqa"] and figure.get_suptitle() == "KL from x"
    assert figure.axes[0].get_ylabel() == "KL from the first, nats"


@pytest.mark.parametrize("layers", [2, 8, 9])
def test_curves_show_losses_masks_and_a_line_per_layer(layers):
    records = training_records(layers)
    figure = figure_of(plots.curves, records, "8 -> 2 kv heads")
    assert figure.get_suptitle() == "8 -> 2 kv heads (dotted: without masks from here on)"
    losses, masks, by_layer = figure.axes
    for axis, title, names in (
        (losses, "losses", {"loss": "loss", "kl": "kl", "bild": "bild"}),
        (masks, "masks", {"target T": "mask_target", "expected mask (Eq. 29)": "mask_expected",
                          "mean of the sampled masks": "mask_mean"}),
    ):
        assert (axis.get_title(), axis.get_xlabel(), legend(axis)) == (title, "step", list(names))
        for label, name in names.items():
            measured = [record for record in records if name in record]
            assert series(axis)[label] == ([record["step"] for record in measured],
                                           [record[name] for record in measured])
    assert losses.get_yscale() == "log"
    band, kl, _, _ = losses.lines  # the fourth is dotted
    assert band.get_linewidth() > 2 * kl.get_linewidth() and band.get_zorder() <= kl.get_zorder()
    assert (by_layer.get_title(), by_layer.get_xlabel()) == ("mean mask per layer", "step")
    assert list(series(by_layer)) == [f"layer {layer}" for layer in range(layers)]
    for layer, points in enumerate(series(by_layer).values()):
        assert points == ([1, 2, 3, 4], [record["mask_mean_per_layer"][layer] for record in records[:4]])
    assert (by_layer.get_legend() is not None) == (layers <= 8)
    assert len({line.get_color() for line in by_layer.lines[:layers]}) == layers
    whole = figure_of(plots.curves, records[:4], "all with masks")
    assert whole.get_suptitle() == "all with masks"
    assert not [line for axis in whole.axes for line in axis.lines if line.get_linestyle() == ":"]


def test_without_answers_the_loss_and_its_only_term_are_both_seen():
    records = [{"step": step, "loss": 2.0, "kl": 2.0, "bild": 0.0} for step in (1, 2)]
    (axis,) = figure_of(plots.curves, records, "text").axes
    assert list(series(axis)) == ["loss", "kl"]  # a logarithmic axis has no zero
    assert not figure_of(plots.curves, [], "text").axes[0].lines


def test_a_small_change_looks_small():
    """7 % off the losses, the agreement and the held-out figures: a tenth of the height, not all of it."""
    records = []
    for step, share in ((1, 1.0), (2, 0.93)):
        records.append({"step": step, "loss": 0.5 * share, "kl": 0.5 * share, "bild": 0.0,
                        "heldout_seconds": 1.0, "heldout_kl": 0.1 * share, "heldout_agreement": 0.8 * share,
                        "heldout_loss": 2 + 0.2 * share, "heldout_teacher_loss": 2.0})
    for axis in figure_of(plots.curves, records, "text").axes:
        _, (before, after) = next(iter(series(axis).values()))
        scale = np.log if axis.get_yscale() == "log" else float
        low, high = map(scale, axis.get_ylim())
        assert 0 < (scale(before) - scale(after)) / (high - low) < 0.1, axis.get_title()


@pytest.mark.parametrize("masked, prefixes", [
    (True, ["heldout", "heldout_task"]), (False, ["heldout", "heldout_task"]), (True, ["heldout_task"]),
    (False, ["heldout"]),
])  # fmt: skip
def test_curves_show_held_out_metrics_on_panels_of_their_own(masked, prefixes):
    records = training_records(masked=masked, measured=prefixes)
    axes = figure_of(plots.curves, records, "title").axes
    assert len({axis.get_xlim() for axis in axes}) == 1 and axes[0].get_xlim()[1] >= 5
    for axis in axes:  # dotted where the masks end
        dotted = [list(line.get_xdata()) for line in axis.lines if line.get_linestyle() == ":"]
        assert dotted == ([[4, 4]] if masked else [])
    first = ["losses", "masks", "mean mask per layer"] if masked else ["losses"]
    assert [axis.get_title() for axis in axes[:-3]] == first
    ends = [records[0], records[-1]]
    labels = {"heldout": "text", "heldout_chat": "chats, answers", "heldout_task": "tasks, answers"}
    panels = {"kl": ("held-out KL to the teacher", "nats"),
              "loss": ("held-out next-token loss above the teacher's", "nats"),
              "agreement": ("held-out top-1 agreement", "share of tokens")}
    for axis, (name, (title, unit)) in zip(axes[-3:], panels.items(), strict=True):
        assert (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()) == (title, "step", unit)
        assert legend(axis) == [labels[prefix] for prefix in prefixes]
        for prefix in prefixes:
            values = [record[f"{prefix}_{name}"] for record in ends]
            if name == "loss":
                values = [value - ends[0][f"{prefix}_teacher_loss"] for value in values]
            assert series(axis)[labels[prefix]] == ([record["step"] for record in ends], values)


def test_dashed_lines_are_those_of_merged():
    """In the colour of their set's curve, at what the first line says of the student before its step."""
    records = training_records(measured=["heldout", "heldout_task"])
    before = {"heldout": (1.5, 4.0, 3.0, 0.25), "heldout_task": (2.5, 5.0, 3.5, 0.125)}
    for prefix, values in before.items():
        names = ("kl", "loss", "teacher_loss", "agreement")
        records[0] |= {f"start_{prefix}_{name}": value for name, value in zip(names, values, strict=True)}
    axes = figure_of(plots.curves, records, "title").axes[-3:]
    for axis, expected in zip(axes, ([1.5, 2.5], [1.0, 1.5], [0.25, 0.125]), strict=True):
        assert legend(axis) == ["text", "tasks, answers", "merged, before training"]
        dashed = [line for line in axis.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
        assert [list(line.get_ydata()) for line in dashed] == [[value, value] for value in expected]
        curves = [line for line in axis.lines if line.get_marker() == "o"]
        assert [line.get_color() for line in dashed] == [line.get_color() for line in curves]


def test_scores_of_a_layer_have_a_scale_of_their_own():
    """Only cosines can be compared between layers; a head's score with itself means nothing."""
    layers = [-np.array([[0.0, 1, 2], [1, 0, 5], [2, 5, 0]]),
              -np.array([[0.0, 70, 80], [70, 0, 90], [80, 90, 0]])]
    apart = ~np.eye(3, dtype=bool)
    for kind in sorted(plots.SCORES.keys() - {"cos"}):
        figure = figure_of(plots.heatmaps, {"by": layers}, [0, 1], "Groups", [[[2, 0, 1]]] * 2, kind)
        assert figure.get_supxlabel() == f"colours: {plots.SCORES[kind].label}"
        drawn = [axis.images[0] for axis in figure.axes if axis.images]
        for image, matrix, scale in zip(drawn, layers, ((-5, -1), (-90, -70)), strict=True):
            shown, expected = np.ma.filled(image.get_array(), np.nan), matrix[[2, 0, 1]][:, [2, 0, 1]]
            assert image.get_clim() == scale and np.array_equal(shown[apart], expected[apart])
            assert np.isnan(np.diag(shown)).all()
        assert len(figure.axes) == 4  # two colour bars


def test_heatmaps_show_each_matrix_in_its_place():
    draw = np.random.default_rng(0)
    matrices = {label: [draw.random((4, 4)) for _ in range(3)] for label in ("keys before", "keys after")}
    for least in (0, -0.25):  # negative similarities have colours of their own
        matrices["keys before"][1][0, 2] = least
        figure = figure_of(plots.heatmaps, matrices, [0, 5, 7], "Similarity of heads")
        *axes, colour_bar = figure.axes
        assert figure.get_suptitle() == "Similarity of heads" and len(axes) == 6
        assert colour_bar.get_ylabel() == "mean cosine of the two heads"
        assert [axis.get_title() for axis in axes] == ["layer 0", "layer 5", "layer 7", "", "", ""]
        assert [axis.get_ylabel() for axis in axes] == ["keys before", "", "", "keys after", "", ""]
        for axis, matrix in zip(axes, [*matrices["keys before"], *matrices["keys after"]], strict=True):
            assert np.array_equal(axis.images[0].get_array(), matrix)
            assert axis.images[0].get_clim() == (least, 1)  # one scale, or colours could not be compared


def test_heads_are_numbered_and_groups_framed():
    draw = np.random.default_rng(0)
    images, groups = [draw.random((4, 4)) for _ in range(2)], [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    figure = figure_of(plots.heatmaps, {"keys after": images}, [0, 5], "Groups", groups)
    for axis, image, heads in zip(figure.axes, images, groups, strict=False):
        order = heads[0] + heads[1]
        for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
            assert [label.get_text() for label in labels] == [str(head) for head in order]
        shown = axis.images[0].get_array()
        assert all(shown[i, j] == image[order[i], order[j]] for i in range(4) for j in range(4))
        frames = [(*frame.get_xy(), frame.get_width(), frame.get_height()) for frame in axis.patches]
        assert frames == [(-0.5, -0.5, 2, 2), (1.5, 1.5, 2, 2)]
    (axis, _) = figure_of(plots.heatmaps, {"keys after": images[:1]}, [0], "Heads").axes
    assert [label.get_text() for label in axis.get_xticklabels()] == list("0123") and not axis.patches


def test_pairs_show_median_and_range_of_the_absolute_cosines_of_every_layer():
    cosines = {"keys": {"before": [[0.5, -0.25, 0.0], [0.125, 0.0, 0.0]],
                        "after": [[0.9, 0.8, 0.5], [1, 1, 1]]},
               "values": {"before": [[-1.0], [0.75]]}}
    keys, values = figure_of(plots.pairs, cosines, "Pairs").axes
    assert series(keys) == {"before": ([0, 1], [0.25, 0.0]), "after": ([0, 1], [0.8, 1])}
    assert series(values) == {"before": ([0, 1], [1.0, 0.75])} and values.get_title() == "values"
    ranges = [path.vertices for band in keys.collections for path in band.get_paths()]
    for corners, expected in zip(ranges, ([(0, 0), (0, 0.5), (1, 0), (1, 0.125)],
                                          [(0, 0.5), (0, 0.9), (1, 1)]), strict=True):
        assert {tuple(corner) for corner in corners.tolist()} == set(expected)
    assert legend(keys) == ["before", "after"] and keys.get_ylim() == (0, 1.03)
    assert all(tick == round(tick) for tick in keys.get_xticks())  # layers


def test_losses_before_training_are_those_above_the_sources():
    perplexities = {"source": 20.0, "mean": 35808.0, "closed form": 20 * math.e}
    axis, = figure_of(smollm2.losses_above_source, perplexities, "3 -> 1 kv heads").axes
    assert [label.get_text() for label in axis.get_yticklabels()] == ["mean", "closed form"]
    assert [bar.get_width() for bar in axis.patches] == pytest.approx([math.log(35808 / 20), 1])
    assert [text.get_text() for text in axis.texts] == ["perplexity 35,808", "perplexity 54.4"]
    assert axis.yaxis_inverted() and axis.get_title() == "3 -> 1 kv heads"
    assert axis.get_xlabel() == "loss above the source's (perplexity 20.0), nats per token"


def test_the_same_records_give_the_same_bytes(tmp_path, capsys):
    paths = [tmp_path / name for name in ("one.png", "two.png")]
    for path in paths:
        plots.curves(str(path), [{"step": 1, "loss": 2.0}], "title")
    first, second = (path.read_bytes() for path in paths)
    assert first == second and first.startswith(b"\x89PNG")
    assert capsys.readouterr().out == "".join(f"drew    {path.name}\n" for path in paths)
    assert sorted(tmp_path.iterdir()) == paths  # nothing written aside is left
    assert not pyplot.get_fignums()


def test_names_are_no_mathematics():
    row = CacheRow("$a_b_{/$c", "f16", 64.0, (0.5,), ())
    figure = plots.frontier.__wrapped__(pyplot, [row], ["halves"], "$x_{/$y")
    figure.canvas.draw()
    pyplot.close(figure)


def test_a_picture_that_cannot_be_drawn_is_skipped_in_one_line(tmp_path, capsys, monkeypatch):
    for reason in ("cannot be drawn (", "matplotlib cannot be imported ("):
        plots.curves(str(tmp_path), [], "title")  # a directory
        out = capsys.readouterr().out
        assert out.startswith(f"skipped {tmp_path}: {reason}") and out.count("\n") == 1
        assert not list(tmp_path.iterdir()) and not pyplot.get_fignums()
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.parametrize("count, layers", [(1, [0]), (3, [0, 1, 2]), (32, [0, 10, 21, 31])])
def test_drawn_layers_reach_from_the_first_to_the_last(count, layers):
    assert plots.spaced_layers(count) == layers
