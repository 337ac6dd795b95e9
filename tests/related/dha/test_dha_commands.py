"""related/dha: the commands, from search to the report, and the records that they leave."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.models.equivalence import max_difference
from common.models.layers import Layers
from common.models.load import load_model
from common.run.errors import UserError
from common.run.files import write_json
from dha_models import DATA, SMALL, example_record, fused_tiny, tokens
from models import byte_tokenizer, tiny_model
from reference import merge_model
from related.dha import fusion, pretrain, records, report, search, start
from related.dha.training import all_logits
from runs import run

pytestmark = pytest.mark.slow
FAST = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]


def dha(command: str, *arguments, **options):
    return run(f"related/dha/{command}.py", *arguments, **options)


def record_of(path: Path) -> dict:
    return json.loads((path / "stage.json").read_text())


def summary_of(path: Path) -> dict:
    return record_of(path)["summary"]


@pytest.fixture(scope="module")
def halved(inputs, tmp_path_factory):
    """A directory with the runs half/ and quarter/ of search and fusion."""
    home = tmp_path_factory.mktemp("halved")
    (home / "heldout.txt").write_text(Path(json.__file__).read_text())
    flags = ["--text", inputs["text"], "--heldout", home / "heldout.txt", *SMALL]
    for name, source, kv_heads, processes in (("half", inputs["model"], 4, 2),
                                              ("quarter", home / "half" / "fused", 2, 0)):
        dha("search", "--run-dir", home / name, "--model", source, "--kv-heads", kv_heads, *flags,
            processes=processes)
        dha("fuse", "--run-dir", home / name, *FAST, processes=processes)
    return home


def test_two_halvings_each_search_and_fuse_and_all_their_steps_count(halved):
    steps, heads_before = 0, {kind: [8] * 3 for kind in fusion.PROJECTIONS}
    for name, kv_heads in (("half", 4), ("quarter", 2)):
        search, fused = record_of(halved / name / "searched"), summary_of(halved / name / "fused")
        searched = search["summary"]
        heads = {kind: searched[kind]["heads"] for kind in fusion.PROJECTIONS}
        for kind, groups in search["groups"].items():
            assert [len(layer_groups) for layer_groups in groups] == heads[kind]
            assert sum(heads[kind]) == kv_heads * 3 and searched[kind]["source_heads"] == heads_before[kind]
        assert searched["steps_so_far"] == steps + 4 and fused["steps_so_far"] == steps + 4 + fused["steps"]
        assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0 and fused["cache_heads"] == heads
        steps, heads_before = fused["steps_so_far"], heads


def test_rows_of_the_same_cache_and_tokens_are_reported(inputs, halved, tmp_path):
    home = halved / "quarter"
    steps = summary_of(home / "fused")["steps_so_far"]
    total, searched = steps + 4, summary_of(home / "searched")["steps_so_far"]
    merge_model(Layers(inputs["model"], torch.float32, "cpu").model, 2).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    checkpoints = {"mean-pool": tmp_path, "dha": home / "fused"}
    for weights, name in start.NAMES.items():
        dha("start", "--run", home, "--weights", weights)
        checkpoints[name] = home / f"start-{name}"
    for name, checkpoint in checkpoints.items():
        dha("pretrain", "--run", home, "--steps", total, "--name", name, "--checkpoint", checkpoint)
    dha("report", "--run", home, "--names", *checkpoints)
    assert (home / "cka-fused.png").exists()
    rows = summary_of(home / "compare")["rows"]
    assert {row["cache_bytes_per_token"] for row in rows.values()} == {2 * 3 * 2 * 8 * 4}
    first = {name: row["heldout"][0][0] // (4 * 32) for name, row in rows.items()}
    assert first == {"mean-pool": 0, "dha": steps, "cold": searched, "unfused": searched}
    assert rows["cold"]["heldout"][0] != rows["unfused"]["heldout"][0]
    assert {row["heldout"][-1][0] for row in rows.values()} == {total * 4 * 32}


def test_closed_forms_and_aligned_heads_as_commands(inputs, halved):
    """From one search: what its groups cost in steps, refits, and heads that are aligned for fusion."""
    home, rotated = halved / "half", halved / "half" / "rotated"
    for place, model in ((home, inputs["model"]), (rotated, home / "searched")):
        run("01_calibrate.py", "--run", place, "--model", model, "--text", inputs["text"], "--length", 32,
            "--sequences", 8)
    kl, size = {}, ["--sequences", 8, "--refit-sequences", 8]
    for name, steps, flags in (
        ("uniform", 0, ["--counts", "uniform"]), ("measured", 0, []),
        ("output", 0, ["--counts", "uniform", "--refit", "output", "--name", "output"]),
        ("search", 4, ["--counts", "search", "--groups", "search"]),
    ):
        dha("start", "--run", home, "--merge", "closed-form", *flags, *size)
        summary = summary_of(home / f"start-{name}")
        assert summary["steps_so_far"] == steps
        kl[name] = summary["kl"]
    assert kl["output"] < kl["uniform"] > kl["measured"]

    dha("start", "--run", home, "--merge", "none")
    before, after = record_of(home / "searched"), record_of(rotated / "searched")
    assert before["groups"] == after["groups"] and before["summary"].items() <= after["summary"].items()
    logits = [all_logits(load_model(str(path / "searched")), tokens()) for path in (home, rotated)]
    assert max_difference(*logits) < 1e-4
    dha("start", "--run", rotated, "--weights", "searched")
    dha("report", "--run", home, "--models", f"measured={home / 'start-measured'}",
        f"pooled={rotated / 'start-unfused'}")
    rows = summary_of(home / "starts")["rows"]
    assert rows["source"]["kl"] == 0 < rows["measured"]["kl"] < rows["pooled"]["kl"]


def save_record(directory: Path, record: dict, **metrics) -> str:
    """metrics: others of the record's summary."""
    write_json(str(directory / "stage.json"), record | {"summary": record["summary"] | metrics})
    return str(directory)


def test_steps_behind_a_checkpoint_are_those_of_search_and_fusion(tmp_path):
    assert records.read_start(str(tmp_path)) is None and records.steps_before(None, DATA) == 0
    for stage, steps in ((records.FUSE, 7), (records.START, 3), (records.PRETRAIN, 0)):
        path = save_record(tmp_path, example_record(stage))
        assert records.steps_before(records.read_start(path), DATA) == steps
    with pytest.raises(UserError, match="batch: expected 2, as in the search before, found 4"):
        records.steps_before(example_record(records.FUSE), DATA | {"batch": 4})


def test_fused_checkpoints_are_sources_and_other_shared_heads_are_not(tmp_path):
    assert search.source_record("model", tiny_model().config) is None
    with pytest.raises(UserError, match="model_type llama"):
        search.source_record("model", tiny_model(model_type="mistral").config)
    config = fused_tiny()[1].config
    path = save_record(tmp_path, example_record(records.FUSE))
    assert search.source_record(path, config) == example_record(records.FUSE)
    save_record(tmp_path, example_record(records.START))
    with pytest.raises(UserError, match="or heads that related/dha/fuse.py fused, found 2 for 8"):
        search.source_record(path, config)


def test_a_larger_batch_takes_fewer_steps_for_the_same_tokens():
    args = SimpleNamespace(steps=19, batch=8, warmup=0.1, print_every=1, heldout_every=1)
    schedule = pretrain.make_schedule(args, DATA, 7)
    assert (schedule.steps, schedule.batch) == (3, 8)  # 12 steps of 2 are left
    args.batch = 5
    with pytest.raises(UserError, match="--batch: expected a divisor of the 24 sequences left, found 5"):
        pretrain.make_schedule(args, DATA, 7)


@pytest.mark.parametrize("field, value", [("tokens", 320), ("data", {}), ("cache_bytes_per_token", 65.0)])
def test_rows_that_cannot_be_compared_are_refused(field, value, tmp_path):
    record = example_record(records.PRETRAIN)
    for name in ("pool", "dha"):
        save_record(tmp_path / name, record)
    save_record(tmp_path / "source", record, cache_bytes_per_token=256.0)
    names = ["source", "pool", "dha"]
    assert list(report.read_rows(str(tmp_path), names)) == names
    save_record(tmp_path / "pool", record, **{field: value})
    with pytest.raises(UserError, match=f"pool: expected the {field} of dha"):
        report.read_rows(str(tmp_path), names)
