"""related/dha: records of its artifacts, and the report."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from common.run.errors import UserError
from common.run.files import write_json
from dha_models import DATA, example_record, fused_tiny
from models import tiny_model
from related.dha import pretrain, records, report, search

pytestmark = pytest.mark.slow


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
