"""related/dha: the commands, from search to the report."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.models.equivalence import max_difference
from common.models.load import load_model
from common.run.errors import UserError
from dha_models import tokens
from models import save_tiny
from related.dha import fusion, pretrain, start
from related.dha.training import all_logits
from runs import expect_error, read, run

pytestmark = pytest.mark.slow
SMALL = "--sequences 24 --heldout-sequences 4 --length 32 --batch 4 --steps 4 --heldout-every 2".split()
FAST = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]


def dha(command: str, *arguments, **options):
    return run(f"related/dha/{command}.py", *arguments, **options)


def summary_of(path: Path) -> dict:
    return read(path / "stage.json")["summary"]


@pytest.fixture(scope="module")
def text_flags(inputs, tmp_path_factory) -> list:
    heldout = tmp_path_factory.mktemp("text") / "heldout.txt"
    heldout.write_text(Path(json.__file__).read_text())
    return ["--text", inputs["text"], "--heldout", heldout, *SMALL]


@pytest.fixture(scope="module")
def halved(inputs, text_flags, tmp_path_factory) -> Path:
    """A directory with the runs half/ and quarter/ of search and fusion."""
    home = tmp_path_factory.mktemp("halved")
    for name, source, kv_heads, processes in (("half", inputs["model"], 4, 2),
                                              ("quarter", home / "half" / "fused", 2, 0)):
        dha("search", "--run-dir", home / name, "--model", source, "--kv-heads", kv_heads, *text_flags,
            processes=processes)
        dha("fuse", "--run-dir", home / name, *FAST, processes=processes)
    return home


def test_two_halvings_each_search_and_fuse_and_all_their_steps_count(halved):
    steps, heads_before = 0, {kind: [8] * 3 for kind in fusion.PROJECTIONS}
    for name, kv_heads in (("half", 4), ("quarter", 2)):
        search, fused = read(halved / name / "searched" / "stage.json"), summary_of(halved / name / "fused")
        searched = search["summary"]
        heads = {kind: searched[kind]["heads"] for kind in fusion.PROJECTIONS}
        for kind, groups in search["groups"].items():
            assert [len(layer_groups) for layer_groups in groups] == heads[kind]
            assert sum(heads[kind]) == kv_heads * 3 and searched[kind]["source_heads"] == heads_before[kind]
        assert searched["steps_so_far"] == steps + 4 and fused["steps_so_far"] == steps + 4 + fused["steps"]
        assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0 and fused["cache_heads"] == heads
        steps, heads_before = fused["steps_so_far"], heads


def test_sources_are_whole_llamas_or_fused_with_the_same_batches(halved, text_flags, tmp_path):
    shared = save_tiny(tmp_path / "shared", num_key_value_heads=4)
    for message, source in (("or heads that related/dha/fuse.py fused, found 4 for 8", [shared]),
                            ("batch: expected 4, as in the search before, found 2",
                             [halved / "half" / "fused", "--batch", 2])):
        expect_error(message, "related/dha/search.py", "--run", tmp_path / "run", "--kv-heads", 2,
                     *text_flags, "--model", *source)


def test_rows_of_the_same_cache_and_tokens_are_reported_and_others_refused(inputs, halved):
    home = halved / "quarter"
    steps, searched = (summary_of(home / name)["steps_so_far"] for name in ("fused", "searched"))
    total, checkpoints = steps + 4, {"source": inputs["model"]}
    for weights, name in start.NAMES.items():
        dha("start", "--run", home, "--weights", weights)
        checkpoints[name] = home / f"start-{name}"
    checkpoints["dha"] = home / "fused"
    for name, checkpoint in checkpoints.items():
        dha("pretrain", "--run", home, "--steps", total, "--name", name, "--checkpoint", checkpoint)
    dha("pretrain", "--run", home, "--steps", total + 1, "--name", "longer")
    expect_error("longer: expected the tokens of dha", "related/dha/report.py", "--run", home,
                 "--names", "longer", "dha")
    dha("report", "--run", home, "--names", *checkpoints)
    assert (home / "cka-fused.png").exists()
    rows = summary_of(home / "compare")["rows"]
    cached = {name: row["cache_bytes_per_token"] for name, row in rows.items()}
    assert cached.pop("source") == 4 * 2 * 3 * 2 * 8 * 4 and {*cached.values()} == {2 * 3 * 2 * 8 * 4}
    first = {name: row["heldout"][0][0] // (4 * 32) for name, row in rows.items()}
    assert first == {"source": 0, "cold": searched, "unfused": searched, "dha": steps}
    assert rows["cold"]["heldout"][0] != rows["unfused"]["heldout"][0]
    assert {row["heldout"][-1][0] for row in rows.values()} == {total * 4 * 32}


def test_closed_forms_and_aligned_heads_as_commands(inputs, halved):
    """From one search: what its groups cost in steps, refits, and heads that are aligned for fusion."""
    home, rotated = halved / "half", halved / "half" / "rotated"
    for place, model in ((home, inputs["model"]), (rotated, home / "searched")):
        run("01_calibrate.py", "--run", place, "--model", model, "--text", inputs["text"], "--length", 32,
            "--sequences", 8)
    kl = {}
    for name, steps, flags in (
        ("uniform", 0, ["--counts", "uniform"]), ("measured", 0, []),
        ("output", 0, ["--counts", "uniform", "--refit", "output", "--name", "output"]),
        ("search", 4, ["--counts", "search", "--groups", "search"]),
    ):
        dha("start", "--run", home, "--merge", "closed-form", "--sequences", 8, *flags)
        summary = summary_of(home / f"start-{name}")
        assert summary["steps_so_far"] == steps
        kl[name] = summary["kl"]
    assert kl["output"] < kl["uniform"] > kl["measured"]

    dha("start", "--run", home, "--merge", "none")
    before, after = (read(place / "searched" / "stage.json") for place in (home, rotated))
    assert before["groups"] == after["groups"] and before["summary"].items() <= after["summary"].items()
    logits = [all_logits(load_model(str(place / "searched")), tokens()) for place in (home, rotated)]
    assert max_difference(*logits) < 1e-4
    dha("start", "--run", rotated, "--weights", "searched")
    dha("report", "--run", home, "--models", f"measured={home / 'start-measured'}",
        f"pooled={rotated / 'start-unfused'}")
    rows = summary_of(home / "starts")["rows"]
    assert rows["source"]["kl"] == 0 < rows["measured"]["kl"] < rows["pooled"]["kl"]


def test_a_larger_batch_takes_fewer_steps_for_the_same_tokens():
    args = SimpleNamespace(steps=19, batch=8, warmup=0.1, print_every=1, heldout_every=1)
    data = {"batch": 2, "seed": 0, "tokens_per_microbatch": 64}
    schedule = pretrain.make_schedule(args, data, 7)
    assert (schedule.steps, schedule.batch) == (3, 8)  # 12 steps of 2 are left
    args.batch = 5
    with pytest.raises(UserError, match="--batch: expected a divisor of the 24 sequences left, found 5"):
        pretrain.make_schedule(args, data, 7)
