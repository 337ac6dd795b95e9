"""related/dha: records of its artifacts, and the report."""

import argparse
import contextlib
import json
import os
from types import SimpleNamespace

import pytest

from common.cli import UserError
from dha_models import example_records, save_record
from related.dha import pretrain, records, report


@pytest.mark.parametrize("stage, place, value", [
    (records.SEARCH, "groups", ...),
    (records.SEARCH, "groups.key", []),
    (records.SEARCH, "groups.key.1", [[0, 3], [1, 1]]),
    (records.SEARCH, "groups.key.1", [[0, 1, 3], [2]]),
    (records.SEARCH, "groups.value.0", [[0, 1], [2, 3]]),
    (records.SEARCH, "groups.value.1.0.1", "1"),
    (records.SEARCH, "summary.key.heads", [1]),
    (records.SEARCH, "summary.key.source_heads", [4, 2]),
    (records.SEARCH, "summary.data.length", 0),
    (records.FUSE, "summary.steps_so_far", 7.5),
    (records.FUSE, "files", {"../model": "0" * 64}),
    (records.START, "summary.steps_so_far", ...),
    (records.PRETRAIN, "summary.heldout", []),
    (records.PRETRAIN, "summary.heldout", [[0, 5.0], [288]]),
    (records.PRETRAIN, "summary.heldout", [[288, 4.0], [0, 5.0]]),
])  # fmt: skip
def test_damaged_records_are_refused_in_one_line(stage, place, value, tmp_path):
    record = example_records()[stage]
    assert records.read(save_record(tmp_path, record), stage) == record
    *outer, last = (int(name) if name.isdigit() else name for name in place.split("."))
    parent = record
    for name in outer:
        parent = parent[name]
    parent[last] = value
    if value is ...:
        del parent[last]
    with pytest.raises(UserError, match=r"expected .*, found .*; run related/dha/\w+.py again") as refusal:
        records.read(save_record(tmp_path, record), stage)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name, accepted", [
    ("mean-pool", True), ("a[1]", True), ("../x", False), ("/tmp/x", False), ("", False), ("..", False),
    ("fused", False), ("calibration", False),
])  # fmt: skip
def test_names_of_rows_are_directory_names_that_lead_onto_no_other_result(name, accepted):
    with contextlib.nullcontext() if accepted else pytest.raises(argparse.ArgumentTypeError):
        assert records.row_name(name) == name


def test_steps_behind_a_checkpoint_are_those_of_search_and_fusion(tmp_path):
    examples = example_records()
    data = examples[records.SEARCH]["summary"]["data"]
    assert records.read_start(str(tmp_path)) is None and records.steps_before(None, data) == 0
    for stage, steps in ((records.FUSE, 7), (records.START, 3), (records.PRETRAIN, 0)):
        path = save_record(tmp_path, examples[stage])
        assert records.steps_before(records.read_start(path), data) == steps
    with pytest.raises(UserError, match="batch: expected 2, as in the search before, found 4"):
        records.steps_before(examples[records.FUSE], data | {"batch": 4})
    for record in ([1], {"stage": None}, {"stage": records.FUSE}):
        with pytest.raises(UserError, match="stage.json: "):
            records.read_start(save_record(tmp_path, record))


@pytest.mark.parametrize("batch, steps", [(None, 12), (2, 12), (8, 3), (1, 24)])
def test_a_larger_batch_takes_fewer_steps_for_the_same_tokens(batch, steps):
    data = example_records()[records.SEARCH]["summary"]["data"]
    args = SimpleNamespace(steps=19, batch=batch, warmup=0.1, print_every=1, heldout_every=1)
    schedule = pretrain.make_schedule(args, data, 7)
    assert (schedule.steps, schedule.batch) == (steps, batch or 2) and schedule.steps * schedule.batch == 24
    args.batch = 5
    with pytest.raises(UserError, match="--batch: expected a divisor of the 24 sequences left, found 5"):
        pretrain.make_schedule(args, data, 7)


def test_tokens_of_search_and_fusion_count_before_those_of_training(tmp_path):
    for phase, losses in (("search", (5.0, 4.8, 4.6)), ("fusion", (4.6, 4.5))):
        (tmp_path / phase).mkdir()
        lines = []
        for step, loss in enumerate(losses, 1):
            lines.append(json.dumps({"step": step} | ({"heldout": loss} if step % 2 else {})) + "\n")
        (tmp_path / phase / "metrics.jsonl").write_text("".join(lines))
    fused = {"data": {"batch": 2, "length": 16}, "steps": 4, "loss_ended": 4.4}
    points = report.uncompressed_curve(str(tmp_path), {"steps": 3}, fused)
    assert points == [[0, 5.0], [2 * 32, 4.6], [3 * 32, 4.6], [7 * 32, 4.4]]


def comparable_rows() -> dict[str, dict]:
    row = example_records()[records.PRETRAIN]["summary"]
    row["heldout"] = [[0, 5.0], [70, 4.5], [150, 4.2], [288, 4.0]]
    late = row | {"heldout": [[140, 4.6], [216, 4.3], [288, 4.1]]}
    return {"source": row | {"cache_bytes_per_token": 256.0}, "pool": row, "dha": late}


def test_the_table_shows_losses_near_the_quarters_of_all_tokens():
    table = report.comparison_table(comparable_rows()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert cells[0][3:] == ["after tokens", "0.00 M", "0.00 M", "0.00 M", "0.00 M"]
    assert cells[2] == ["source", "256", "5.000", "0.00 M", "4.500", "4.200", "", "4.000"]
    assert cells[4] == ["dha", "64", "4.600", "0.00 M", "", "4.600", "4.300", "4.100"]


@pytest.mark.parametrize(
    "field, value", [("tokens", 320), ("data", {"length": 3}), ("batch", 8), ("cache_bytes_per_token", 65.0)]
)
def test_rows_that_cannot_be_compared_are_refused(field, value, tmp_path, monkeypatch):
    rows = comparable_rows()
    monkeypatch.setattr(report, "read", lambda path, stage: {"summary": rows[os.path.basename(path)]})
    assert report.read_rows(str(tmp_path), list(rows)) == rows
    rows["pool"][field] = value
    with pytest.raises(UserError, match=f"pool: expected the {field} of dha"):
        report.read_rows(str(tmp_path), list(rows))


def test_the_picture_shows_every_row_and_the_uncompressed_part_of_dha():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    rows = {name: row["heldout"] for name, row in comparable_rows().items()}
    figure = report.curves.__wrapped__(pyplot, rows, [[0, 5.0], [140, 4.6]], "title")
    drawn = figure.axes[0].lines
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in drawn}
    pyplot.close(figure)
    assert list(lines) == ["source", "pool", "dha", "dha, search and fusion (full cache)"]
    assert lines["dha"] == (pytest.approx([140e-6, 216e-6, 288e-6]), [4.6, 4.3, 4.1])
    assert lines["dha, search and fusion (full cache)"] == (pytest.approx([0, 140e-6]), [5.0, 4.6])
