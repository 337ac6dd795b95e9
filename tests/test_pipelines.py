"""The recipes as a user runs them: bad settings and odd paths at once; end to end on the demo model, slow."""

import json
import os
import subprocess
import sys

import pytest

from common.data.tasks import TASKS
from conftest import ROOT
from pipelines.smollm2 import STARTS

ROWS = ["baseline", "default-cos", "default-dist", "key-cos", "key-dist", "value-cos", "value-dist"]
RECIPES = ["llama2_7b.sh", "sheared_llama_1.3b.sh", "table1.sh"]


def recipe(name: str, **settings) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable}
    environment |= {key: str(value) for key, value in settings.items()}
    command = ["bash", f"pipelines/{name}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def recorded(tmp_path):
    """recorded(SCRIPT, settings): the command lines that a script would run, in order."""
    recorder, log = tmp_path / "a python", tmp_path / "log"
    recorder.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >> "$LOG"; echo >> "$LOG"\n')
    recorder.chmod(0o755)

    def record(name: str, **settings) -> list[list[str]]:
        done = recipe(name, PYTHON=recorder, LOG=log, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split("\0")[:-1] for line in log.read_text().splitlines()]

    return record


def after(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("name", RECIPES)
def test_an_unpublished_budget_is_refused(name):
    done = recipe(name, KV=5)
    assert done.returncode == 2 and done.stderr.startswith("error: KV: expected ")
    assert done.stderr.endswith("found 5\n")


def test_an_unknown_row_is_refused():
    done = recipe("table1.sh", ROWS="key-cos keys-cos", PYTHON="false")
    assert done.returncode == 2
    assert done.stderr == f"error: ROWS: expected some of {' '.join(ROWS)}, found keys-cos\n"


@pytest.mark.parametrize("small", ["", "1"])
@pytest.mark.parametrize("name", ["demo.sh", *RECIPES])
def test_paths_with_blanks_quotes_and_brackets_stay_whole(name, small, recorded, tmp_path):
    run = f"{tmp_path}/it's a [1] \"run\" $x *"
    commands = recorded(name, RUN=run, SMALL=small, TASKS="my [2] tasks", LIMIT=7)
    assert len(commands) > 5
    for words in commands:
        target = after("--run-dir" if "05_prune_train.py" in words else "--run", words)
        assert target == run or target.startswith(run + "/")
        assert all(run in word for word in words if "it's" in word or "\"run\"" in word)
        assert "--tasks" not in words or after("--tasks", words) == "my [2] tasks"


def test_table1_evaluates_the_teacher_and_every_row(recorded, tmp_path):
    run = str(tmp_path / "a run")
    *_, evaluation = recorded("table1.sh", RUN=run)
    assert evaluation[0] == "07_eval.py"
    models = evaluation[evaluation.index("--model") + 1:]
    assert models == [f"teacher={run}/teacher", *(f"{row}={run}/{row}/gqa" for row in ROWS)]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_pass_the_published_budgets(name, recorded, tmp_path):
    """Epochs of 147,580 samples (Appendix A): 10 at a batch of 64 for 8 of 32 heads, 12 for 4 of 16."""
    epochs, teacher_epochs = (12, 3) if "1.3b" in name else (10, 2)
    training = [words for words in recorded(name, RUN=tmp_path) if "05_prune_train.py" in words]
    assert training
    for words in training:
        assert abs(int(after("--steps", words)) - epochs * 147580 / 64) < epochs
        assert abs(int(after("--teacher-steps", words)) - teacher_epochs * 147580 / 128) < teacher_epochs


def test_small_recipes_scale_the_kv_heads_to_the_demo_model(recorded, tmp_path):
    commands = recorded("llama2_7b.sh", RUN=tmp_path, SMALL=1, KV=16)
    grouping = next(words for words in commands if "03_group.py" in words)
    assert after("--kv-heads", grouping) == "4"  # half of 8 heads, as 16 are of 32


def test_smollm2_makes_every_start_from_one_calibration(recorded, tmp_path):
    run = f"{tmp_path}/it's a [1] run *"
    commands = recorded("smollm2.sh", RUN=run, MODEL="a model", TEXT="my text.txt", KV_HEADS=2, SEQUENCES=6)
    text, calibration, similarity, *stages, table = commands
    assert after("--text", text) == "my text.txt" and after("--model", calibration) == "a model"
    assert after("--text", calibration) == f"{run}/text/calibration.txt"
    assert after("--sequences", calibration) == "6" and after("--sequences", table) == "2"
    assert all(after("--run", words) == run for words in (text, calibration, similarity, table))
    groupings, merges = stages[::2], stages[1::2]
    for grouping, merge, name in zip(groupings, merges, STARTS, strict=True):
        assert after("--run", grouping) == after("--run", merge) == f"{run}/{name}"
        assert after("--similarity", grouping) == f"{run}/similarity.safetensors"
        assert after("--calibration", merge) == f"{run}/calibration"
        assert after("--kv-heads", grouping) == "2"
    assert [after("--by", words) for words in groupings] == ["none", "value", "energy", "energy", "energy"]
    closed = ["--merge", "closed-form"]
    assert [words[words.index("--calibration") + 2:] for words in merges] == [
        ["--rotate", "none"], ["--rotate", "dist"], closed, [*closed, "--refit", "output"],
        [*closed, "--refit", "attention"]]


@pytest.mark.release
def test_table1_end_to_end(tmp_path):
    run = tmp_path / "a [1] run"
    small = {"SMALL": 1, "SMALL_STEPS": 20, "SMALL_TEACHER_STEPS": 10, "LIMIT": 20, "RUN": run}
    planned = recipe("table1.sh", PLAN="8xA100-80GB", **small)
    assert planned.returncode == 0 and planned.stdout.count("  fits\n") == 2
    assert not (run / "teacher").exists()
    done = recipe("table1.sh", **small)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((run / "eval.json").read_text())["results"]
    assert list(results) == ["teacher", *ROWS]
    records = {row: json.loads((run / row / "train" / "stage.json").read_text()) for row in ROWS}
    groups = {row: json.loads((run / row / "groups.json").read_text()) for row in ROWS}
    for row in ROWS:
        assert results[row]["kv_heads"] == 2 and set(results[row]["tasks"]) == set(TASKS)
        assert records[row]["inputs"].keys() == records["baseline"]["inputs"].keys()
        # one teacher, one calibration
        assert records[row]["summary"]["teacher"] == records["baseline"]["summary"]["teacher"]
        assert groups[row]["inputs"] == groups["baseline"]["inputs"]
        aligned = json.loads((run / row / "aligned" / "stage.json").read_text())["arguments"]
        kind, _, criterion = row.partition("-")
        assert groups[row]["summary"]["by"] == ("none" if kind in ("baseline", "default") else kind)
        assert aligned["rotate"] == (criterion or "none")
    assert groups["default-cos"]["groups"] == groups["default-dist"]["groups"] == groups["baseline"]["groups"]
    assert groups["baseline"]["groups"] != groups["key-cos"]["groups"]
    before = (run / "eval.json").read_bytes()
    again = recipe("table1.sh", **small)  # everything exists: the table is shown again, nothing is made
    assert again.returncode == 0 and "| baseline" in again.stdout
    assert (run / "eval.json").read_bytes() == before


@pytest.mark.release
@pytest.mark.parametrize(("name", "kv_heads"), [("llama2_7b.sh", 2), ("sheared_llama_1.3b.sh", 2)])
def test_recipe_end_to_end(name, kv_heads, tmp_path):
    run = tmp_path / "it's a run"
    done = recipe(name, SMALL=1, SMALL_STEPS=10, SMALL_TEACHER_STEPS=5, LIMIT=5, RUN=run)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((run / "eval.json").read_text())["results"]
    assert list(results) == ["teacher", "merged", "gqa"] and results["gqa"]["kv_heads"] == kv_heads
