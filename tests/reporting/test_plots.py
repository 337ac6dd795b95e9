"""Pictures, checked for what they show: titles, axes, series and the numbers they are drawn from."""

import sys

import numpy as np
import pytest

from common.reporting import plots

pyplot = pytest.importorskip("matplotlib.pyplot")
pyplot.switch_backend("Agg")
pytestmark = pytest.mark.usefixtures("pictures")


def training_records(layers: int = 2, measured=()) -> list[dict]:
    """Five steps, the last without masks; every figure differs from every other.

    measured: kinds of held-out samples, on which the first and the last step were measured.
    """
    records = []
    for step in range(1, 6):
        record = {"step": step, "loss": 5.0 / step, "kl": 3.0 / step, "bild": 2.0 / step}
        if step < 5:
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


def test_the_frontier_joins_what_nothing_smaller_and_closer_beats():
    rows = [("source", "f16", {"bytes_per_token": 64.0, "halves": {"kl": 0.0}, "rotated": {"kl": 0.0}}),
            ("source", "q4_0", {"bytes_per_token": 18.0, "halves": {"kl": 0.5}, "rotated": {"kl": 0.2}}),
            ("gqa", "f16", {"bytes_per_token": 32.0, "halves": {"kl": 0.3}, "rotated": {"kl": 0.3}})]
    figure = figure_of(plots.frontier, rows, ["halves", "rotated"], "KL from x")
    joined = [[18, 32, 64], [0.5, 0.3, 0.0]], [[18, 64], [0.2, 0.0]]  # on the right gqa is worse and larger
    for axis, layout, best in zip(figure.axes, ("halves", "rotated"), joined, strict=True):
        assert axis.get_title() == layout
        assert series(axis) == {"source": ([64, 18], [0, rows[1][2][layout]["kl"]]), "gqa": ([32], [0.3])}
        assert axis.lines[-1].get_xydata().T.tolist() == best


def test_curves_show_losses_masks_and_a_line_per_layer():
    records = training_records(layers=2)
    losses, masks, by_layer = (figure := figure_of(plots.curves, records, "8 -> 2 kv heads")).axes
    for axis, names in (
        (losses, {"loss": "loss", "kl": "kl", "bild": "bild"}),
        (masks, {"target T": "mask_target", "expected mask (Eq. 29)": "mask_expected",
                 "mean of the sampled masks": "mask_mean"}),
    ):
        assert list(series(axis)) == list(names)
        for label, name in names.items():
            measured = [record for record in records if name in record]
            assert series(axis)[label] == ([record["step"] for record in measured],
                                           [record[name] for record in measured])
    assert list(series(by_layer)) == ["layer 0", "layer 1"] and "without masks" in figure.get_suptitle()
    for layer, points in enumerate(series(by_layer).values()):
        assert points == ([1, 2, 3, 4], [record["mask_mean_per_layer"][layer] for record in records[:4]])


def test_curves_show_held_out_metrics_on_panels_of_their_own():
    """Dashed, at what the first line says of the student before its step, are those of merged/."""
    labels = {"heldout": "text", "heldout_task": "tasks, answers"}
    records = training_records(measured=labels)
    records[0] |= {"start_heldout_kl": 1.5, "start_heldout_loss": 4.0, "start_heldout_teacher_loss": 3.0,
                   "start_heldout_agreement": 0.25}
    axes, ends = figure_of(plots.curves, records, "title").axes, [records[0], records[-1]]
    for axis, name, merged in zip(axes[-3:], ("kl", "loss", "agreement"), (1.5, 1, 0.25), strict=True):
        for prefix, label in labels.items():
            values = [record[f"{prefix}_{name}"] for record in ends]
            if name == "loss":
                values = [value - ends[0][f"{prefix}_teacher_loss"] for value in values]
            assert series(axis)[label] == ([record["step"] for record in ends], values)
        (dashed,) = [line for line in axis.lines if line.get_linestyle() == "--" and len(line.get_xdata())]
        assert list(dashed.get_ydata()) == [merged, merged]


def test_scores_of_a_layer_have_a_scale_of_their_own():
    """Only cosines can be compared between layers; a head's score with itself means nothing. Heads stand in
    the order of their groups, which are framed."""
    layers = [-np.array([[0.0, 1, 2, 3], [1, 0, 5, 4], [2, 5, 0, 2], [3, 4, 2, 0]]),
              -np.array([[0.0, 70, 80, 75], [70, 0, 90, 71], [80, 90, 0, 72], [75, 71, 72, 0]])]
    apart, groups = ~np.eye(4, dtype=bool), [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    figure = figure_of(plots.heatmaps, {"by": layers}, [0, 5], "Groups", groups, "dist")
    drawn = [axis for axis in figure.axes if axis.images]
    for axis, matrix, heads, scale in zip(drawn, layers, groups, ((-5, -1), (-90, -70)), strict=True):
        order, image = heads[0] + heads[1], axis.images[0]
        shown = np.ma.filled(image.get_array(), np.nan)
        assert image.get_clim() == scale and np.isnan(np.diag(shown)).all()
        assert np.array_equal(shown[apart], matrix[np.ix_(order, order)][apart])
        frames = [(*frame.get_xy(), frame.get_width(), frame.get_height()) for frame in axis.patches]
        assert frames == [(-0.5, -0.5, 2, 2), (1.5, 1.5, 2, 2)]


def test_heatmaps_show_each_matrix_in_its_place():
    draw = np.random.default_rng(0)
    matrices = {label: [draw.random((4, 4)) for _ in range(3)] for label in ("keys before", "keys after")}
    for least in (0, -0.25):  # negative similarities have colours of their own
        matrices["keys before"][1][0, 2] = least
        figure = figure_of(plots.heatmaps, matrices, [0, 5, 7], "Similarity of heads")
        *axes, _ = figure.axes  # the last is the colour bar
        for axis, matrix in zip(axes, [*matrices["keys before"], *matrices["keys after"]], strict=True):
            assert np.array_equal(axis.images[0].get_array(), matrix)
            assert axis.images[0].get_clim() == (least, 1)  # one scale, or colours could not be compared


def test_pairs_show_median_and_range_of_the_absolute_cosines_of_every_layer():
    cosines = {"keys": {"before": [[0.5, -0.25, 0.0], [0.125, 0.0, 0.0]],
                        "after": [[0.9, 0.8, 0.5], [1, 1, 1]]},
               "values": {"before": [[-1.0], [0.75]]}}
    keys, values = figure_of(plots.pairs, cosines, "Pairs").axes
    assert series(keys) == {"before": ([0, 1], [0.25, 0.0]), "after": ([0, 1], [0.8, 1])}
    assert series(values) == {"before": ([0, 1], [1.0, 0.75])}
    ranges = [path.vertices for band in keys.collections for path in band.get_paths()]
    for corners, expected in zip(ranges, ([(0, 0), (0, 0.5), (1, 0), (1, 0.125)],
                                          [(0, 0.5), (0, 0.9), (1, 1)]), strict=True):
        assert {tuple(corner) for corner in corners.tolist()} == set(expected)


def test_a_picture_that_cannot_be_drawn_is_skipped_in_one_line(tmp_path, capsys, monkeypatch):
    for reason in ("cannot be drawn (", "matplotlib cannot be imported ("):
        plots.curves(str(tmp_path), [], "title")  # a directory
        assert capsys.readouterr().out.startswith(f"skipped {tmp_path}: {reason}")
        monkeypatch.setitem(sys.modules, "matplotlib", None)
