"""related/dha: the commands and the shell script, from search to comparison."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from common.cli import run_stage
from common.training.engine import STOPPED
from conftest import ROOT, byte_tokenizer, expect_error, run
from dha_models import EIGHT, SMALL
from related.dha import fuse, fusion, pool, pretrain, search
from students import merge_model


@pytest.mark.slow
def test_the_scripts_from_search_to_comparison(inputs, tmp_path):
    home = tmp_path / "it's run [1]"
    heldout = tmp_path / "heldout.txt"
    heldout.write_text(Path(json.__file__).read_text())
    source = ["--model", inputs["model"], "--text", inputs["text"], "--heldout", heldout]
    run("related/dha/search.py", "--run-dir", home, *source, *SMALL, processes=2)
    searched = json.loads((home / "search.json").read_text())
    for kind in ("key", "value"):
        counts = searched["summary"][kind]["heads"]
        assert [len(layer_groups) for layer_groups in searched["groups"][kind]] == counts and sum(
            counts
        ) == 2 * 3
        assert all(sorted(sum(layer_groups, [])) == EIGHT for layer_groups in searched["groups"][kind])
    assert searched["summary"]["unchanged_at_start"] <= 1e-5
    printed = run("related/dha/records.py", "--run", home, "--print", "text").stdout
    assert printed == inputs["text"] + "\n"

    fast = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]
    run("related/dha/fuse.py", "--run-dir", home, *fast, processes=2)
    fused = json.loads((home / "fused" / "stage.json").read_text())["summary"]
    assert fused["fusion_loss"] < 1e-3 and fused["steps"] % 10 == 0
    assert fused["unchanged_at_start"] <= 1e-5 and fused["averaged_to_fused"] <= 1e-5
    assert fused["cache_heads"] == {kind: searched["summary"][kind]["heads"] for kind in ("key", "value")}

    for phase in ("search", "fusion"):  # lambda starts at 0: the text alone moves operators in the first step
        lines = (home / phase / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["fusion_loss"] for line in lines[:2]]
        assert losses[0] != losses[1]

    total = fused["steps_so_far"] + 4
    expect_error("search and fusion", "related/dha/pretrain.py", "--run", home, "--steps", 4)
    expect_error("expected a directory name", "related/dha/pretrain.py", "--run", home, "--name", "../x")
    run("related/dha/pretrain.py", "--run", home, "--steps", total, "--heldout-every", 2)
    pooled = tmp_path / "pooled"
    merge_model(AutoModelForCausalLM.from_pretrained(inputs["model"]), 2).save_pretrained(pooled)
    byte_tokenizer().save_pretrained(pooled)
    baseline = ["--name", "mean-pool", "--checkpoint", pooled, "--heldout-every", 50]
    run("related/dha/pretrain.py", "--run", home, "--steps", total, *baseline)
    for weights, name in pool.NAMES.items():
        run("related/dha/pool.py", "--run", home, "--weights", weights)
        start = ["--name", name, "--checkpoint", home / f"start-{name}", "--heldout-every", 50]
        run("related/dha/pretrain.py", "--run", home, "--steps", total, *start)
    names = ["mean-pool", "cold", "unfused", "dha"]
    done = run("related/dha/compare.py", "--run", home, "--names", *names)
    assert "lowest held-out loss" in done.stdout
    rows = json.loads((home / "compare.json").read_text())["summary"]["rows"]
    assert (
        rows["dha"]["cache_bytes_per_token"]
        == rows["mean-pool"]["cache_bytes_per_token"]
        == 2 * 3 * 2 * 8 * 4
    )
    assert rows["dha"]["heldout"][0][0] == fused["steps_so_far"] * 4 * 32
    assert rows["mean-pool"]["heldout"][0][0] == 0
    assert rows["cold"]["heldout"][0] != rows["unfused"]["heldout"][0]
    assert rows["cold"]["heldout"][0][0] == rows["unfused"]["heldout"][0][0] == 4 * 4 * 32
    assert (home / "cka-fused.png").exists()
    assert rows["dha"]["heldout"][-1][0] == rows["mean-pool"]["heldout"][-1][0] == total * 4 * 32

    record = home / "mean-pool" / "stage.json"
    record.write_text(record.read_text().replace(f'"tokens": {total * 4 * 32}', '"tokens": 64'))
    names = ["--names", "mean-pool", "dha", "--force"]
    expect_error("expected the tokens of dha", "related/dha/compare.py", "--run", home, *names)
    weights = home / "searched" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    expect_error("its content does not match", "related/dha/fuse.py", "--run", home, "--force")
    (home / "searched" / "stage.json").write_text("{}")
    expect_error("searched: expected the artifact", "related/dha/fuse.py", "--run", home, "--force")


@pytest.mark.slow
def test_two_halvings_each_search_and_fuse_and_all_their_steps_count(inputs, tmp_path):
    half, quarter = tmp_path / "half", tmp_path / "quarter"
    (tmp_path / "heldout.txt").write_text(Path(json.__file__).read_text())
    texts = ["--text", inputs["text"], "--heldout", tmp_path / "heldout.txt", *SMALL]
    fast = ["--steps", 150, "--margin-steps", 10, "--operator-lr", 0.05, "--lambda-lr", 20]
    summaries, steps = [], 0
    for home, source, kv_heads in ((half, inputs["model"], 4), (quarter, half / "fused", 2)):
        arguments = ["--model", source, "--kv-heads", kv_heads, *texts]
        run("related/dha/search.py", "--run", home, *arguments)
        run("related/dha/fuse.py", "--run", home, *fast)
        searched = json.loads((home / "search.json").read_text())["summary"]
        fused = json.loads((home / "fused" / "stage.json").read_text())["summary"]
        assert searched["steps_so_far"] == steps + 4
        steps += 4 + fused["steps"]
        assert fused["steps_so_far"] == steps
        assert searched["unchanged_at_start"] <= 1e-5 and fused["averaged_to_fused"] <= 1e-5
        summaries.append(searched)
    for kind in fusion.PROJECTIONS:
        before, after = (summary[kind]["heads"] for summary in summaries)
        assert sum(before) == 4 * 3 and sum(after) == 2 * 3
        assert summaries[1][kind]["source_heads"] == before
    run("related/dha/pool.py", "--run", quarter)
    pooled = json.loads((quarter / "start-cold" / "stage.json").read_text())["summary"]
    assert pooled["steps_so_far"] == summaries[1]["steps_so_far"]
    staged = ["--name", "staged", "--checkpoint", quarter / "fused", "--steps", steps + 2]
    run("related/dha/pretrain.py", "--run", half, *staged)
    row = json.loads((half / "staged" / "stage.json").read_text())["summary"]
    assert row["steps"] == 2 and row["heldout"][0][0] == steps * 4 * 32
    assert row["cache_bytes_per_token"] == 2 * 3 * 2 * 8 * 4

    again = ["--run", tmp_path / "again", "--model", half / "fused", "--kv-heads", 2, *texts]
    expect_error("batch: expected 4", "related/dha/search.py", *again, "--batch", 2)
    weights = half / "fused" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    expect_error("its content does not match", "related/dha/search.py", *again)


@pytest.mark.parametrize("name", ["search", "fuse", "pretrain"])
def test_a_command_that_a_signal_stopped_says_so_by_its_exit_code(name, tmp_path, monkeypatch):
    module = {"search": search, "fuse": fuse, "pretrain": pretrain}[name]
    monkeypatch.setattr(sys, "argv", [name, "--run", str(tmp_path)])
    monkeypatch.setattr(module, "joined_ranks", contextlib.nullcontext)
    for finished, code in ((True, 0), (False, STOPPED)):
        monkeypatch.setattr(module, name, lambda *_, result=finished: result)
        with pytest.raises(SystemExit) as ended:
            run_stage(module.main)
        assert ended.value.code == code


INTERPRETER = """#!/bin/bash
# in place of Python: logs its arguments, one per line, and prints a value for --print
{ printf '%s\\n' "$@"; echo; } >> "$LOG"
run='' name='' script=${1##*/}
[ "$1" = -m ] && script=$2
for argument in "$@"; do
  case $argument in
    --run=*) run=${argument#--run=} ;;
    --print) name=print ;;
    kv-heads) echo 2; name='' ;;
    *) [ "$name" = print ] && echo "$argument of it's [1] \\$(touch $PWNED)"; name='' ;;
  esac
done
mkdir -p "$run"
"""


@pytest.mark.slow
@pytest.mark.parametrize("staged", ["", "1"])
def test_the_shell_script_passes_every_value_as_it_is(staged, tmp_path):
    interpreter, log, pwned = tmp_path / "python", tmp_path / "log", tmp_path / "pwned"
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    home = f"{tmp_path}/it's a run [1] $(touch {pwned})'); import os; os.system('touch {pwned}') #"
    environment = os.environ | {"RUN": home, "PYTHON": str(interpreter), "LOG": str(log), "PWNED": str(pwned)}
    environment |= {"FUSE": "--steps 9 --lambda-lr 2", "STEPS": "12", "STAGED": staged}
    command = ["bash", str(ROOT / "related" / "dha" / "run.sh"), "--model", "my model", "--text", "a b.txt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [call.splitlines() for call in log.read_text().split("\n\n") if call]
    assert not pwned.exists()
    assert calls[0] == [
        "-m",
        "related.dha.search",
        f"--run={home}",
        "--model",
        "my model",
        "--text",
        "a b.txt",
    ]
    assert calls[1][2:] == [f"--run={home}", "--steps", "9", "--lambda-lr", "2"]
    calibrate = next(call for call in calls if call[0] == "01_calibrate.py")
    assert f"--text=text of it's [1] $(touch {pwned})" in calibrate and f"--run={home}" in calibrate
    rows = ("mean-pool", "aligned", "closed-form")
    aligned = [call for call in calls if call[0] == "04_align.py"]
    assert [call[1] for call in aligned] == [f"--run={home}/start-{name}" for name in rows]
    assert all(call[2] == f"--calibration={home}/calibration" for call in aligned)
    names = [call[call.index("--name") + 1] for call in calls if "--name" in call]
    compared = ["source", *rows, "cold", "unfused", "staged", "dha"]
    if staged:
        assert names.pop(2) == "staged"
        assert calls[-1] == ["-m", "related.dha.compare", f"--run={home}", "--names", *compared]
    else:
        assert calls[-1] == ["-m", "related.dha.compare", f"--run={home}"]
    assert names == ["cold", "unfused", *rows, "source"]
    halvings = [call for call in calls if f"--run={home}/half" in call or f"--run={home}/quarter" in call]
    assert [call[1].split(".")[-1] for call in halvings] == (["search", "fuse"] * 2 if staged else [])
    if staged:
        assert halvings[0][-3:] == ["--kv-heads", "4", f"--run={home}/half"]
        second = ["--model", f"{home}/half/fused", "--kv-heads", "2", f"--run={home}/quarter"]
        assert halvings[2][-5:] == second
    pools = [call for call in calls if call[1] == "related.dha.pool"]
    assert [call[2:] for call in pools] == [[f"--run={home}", "--weights", weights] for weights in pool.NAMES]
