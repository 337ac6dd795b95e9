"""related/dha: records of its artifacts, and the report."""

import json
from types import SimpleNamespace

import pytest

from common.run.errors import UserError
from dha_models import DATA, example_record, fused_tiny, tokens
from models import save_tiny, tiny_model
from related.dha import pretrain, records, report, search
from related.dha.training import all_logits
from runs import changed_record, save_record

pytestmark = pytest.mark.slow


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


def test_the_kl_of_an_initial_model_is_from_its_source(tmp_path):
    source, path = tiny_model(seed=1), save_tiny(tmp_path / "model")
    kl = report.measure(path, tokens(), all_logits(source, tokens()))["kl"]
    log_p, log_q = (model(tokens()).logits[:, :-1].detach().double().log_softmax(-1)
                    for model in (source, tiny_model()))
    assert kl == pytest.approx(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()), rel=1e-4)


def test_a_larger_batch_takes_fewer_steps_for_the_same_tokens():
    args = SimpleNamespace(steps=19, batch=8, warmup=0.1, print_every=1, heldout_every=1)
    schedule = pretrain.make_schedule(args, DATA, 7)
    assert (schedule.steps, schedule.batch) == (3, 8)  # 12 steps of 2 are left
    args.batch = 5
    with pytest.raises(UserError, match="--batch: expected a divisor of the 24 sequences left, found 5"):
        pretrain.make_schedule(args, DATA, 7)


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


@pytest.mark.parametrize("place, value", [
    (("tokens",), 320), (("data", "length"), 3), (("batch",), 8), (("cache_bytes_per_token",), 65.0)])
def test_rows_that_cannot_be_compared_are_refused(place, value, tmp_path):
    record, names = example_record(records.PRETRAIN), ["source", "pool", "dha"]
    for name in names:
        cache = 256.0 if name == "source" else 64.0
        save_record(tmp_path / name, changed_record(record, ("summary", "cache_bytes_per_token"), cache))
    assert list(report.read_rows(str(tmp_path), names)) == names
    save_record(tmp_path / "pool", changed_record(record, ("summary", *place), value))
    with pytest.raises(UserError, match=f"pool: expected the {place[0]} of dha"):
        report.read_rows(str(tmp_path), names)
