"""related/dha: the commands and the shell script, from search to the report."""

import json
from pathlib import Path

import pytest
import torch

from common.models.layers import Layers
from dha_models import SMALL
from models import byte_tokenizer
from reference import merge_model
from related.dha import fusion, start
from runs import run

pytestmark = pytest.mark.slow
FAST = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]


def dha(command: str, *arguments, **options):
    return run(f"related/dha/{command}.py", *arguments, **options)


def summary_of(path: Path) -> dict:
    return json.loads((path / "stage.json").read_text())["summary"]


@pytest.fixture(scope="module")
def halved(inputs, tmp_path_factory):
    """A directory with the runs half/ and quarter/ of search and fusion."""
    home = tmp_path_factory.mktemp("it's run [1]")
    (home / "heldout.txt").write_text(Path(json.__file__).read_text())
    flags = ["--text", inputs["text"], "--heldout", home / "heldout.txt", *SMALL]
    for name, source, kv_heads in (("half", inputs["model"], 4), ("quarter", home / "half" / "fused", 2)):
        processes = 2 if name == "half" else 0
        dha("search", "--run-dir", home / name, "--model", source, "--kv-heads", kv_heads, *flags,
            processes=processes)
        dha("fuse", "--run-dir", home / name, *FAST, processes=processes)
    return home


def test_two_halvings_each_search_and_fuse_and_all_their_steps_count(halved):
    home, steps, heads_before = halved, 0, {kind: [8] * 3 for kind in fusion.PROJECTIONS}
    for name, kv_heads in (("half", 4), ("quarter", 2)):
        search = json.loads((home / name / "searched" / "stage.json").read_text())
        searched, fused = search["summary"], summary_of(home / name / "fused")
        heads = {kind: searched[kind]["heads"] for kind in fusion.PROJECTIONS}
        for kind, groups in search["groups"].items():
            assert [len(layer_groups) for layer_groups in groups] == heads[kind]
            assert sum(heads[kind]) == kv_heads * 3 and searched[kind]["source_heads"] == heads_before[kind]
        assert searched["steps_so_far"] == steps + 4 and fused["steps_so_far"] == steps + 4 + fused["steps"]
        assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0 and fused["cache_heads"] == heads
        checks = searched["unchanged_at_start"], fused["unchanged_at_start"], fused["averaged_to_fused"]
        assert max(checks) <= 1e-5
        for phase in ("search", "fusion"):  # lambda starts at 0: the text alone moves operators at first
            lines = (home / name / phase / "metrics.jsonl").read_text().splitlines()
            losses = [json.loads(line)["fusion_loss"] for line in lines[:2]]
            assert losses[0] != losses[1]
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
    done = dha("report", "--run", home, "--names", *checkpoints)
    assert "lowest held-out loss" in done.stdout and (home / "cka-fused.png").exists()
    rows = json.loads((home / "compare" / "stage.json").read_text())["summary"]["rows"]
    assert {row["cache_bytes_per_token"] for row in rows.values()} == {2 * 3 * 2 * 8 * 4}
    first = {name: row["heldout"][0][0] // (4 * 32) for name, row in rows.items()}
    assert first == {"mean-pool": 0, "dha": steps, "cold": searched, "unfused": searched}
    assert rows["cold"]["heldout"][0] != rows["unfused"]["heldout"][0]
    assert {row["heldout"][-1][0] for row in rows.values()} == {total * 4 * 32}
