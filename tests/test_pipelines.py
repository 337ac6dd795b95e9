"""The recipes as a user runs them: bad settings at once; on the embedded model, end to end, in the slow tests."""

import json
import os
import subprocess
import sys

import pytest

from common.data.tasks import TASKS
from conftest import ROOT

ROWS = ["baseline", "default-cos", "default-dist", "key-cos", "key-dist", "value-cos", "value-dist"]


def recipe(name: str, **settings) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", f"pipelines/{name}"], cwd=ROOT, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHON": sys.executable} | {key: str(value) for key, value in settings.items()})


@pytest.mark.parametrize("name", ["llama2_7b.sh", "sheared_llama_1.3b.sh", "table1.sh"])
def test_budget_that_was_not_published(name):
    done = recipe(name, KV=5)
    assert done.returncode == 2 and done.stderr.startswith("error: KV: expected ") and done.stderr.endswith("found 5\n")


@pytest.mark.slow
def test_table1_end_to_end(tmp_path):
    small = {"SMALL": 1, "SMALL_STEPS": 20, "SMALL_TEACHER_STEPS": 10, "LIMIT": 20, "RUN": tmp_path / "run"}
    planned = recipe("table1.sh", PLAN="8xA100-80GB", **small)
    assert planned.returncode == 0 and planned.stdout.count("  fits\n") == 2 and not (tmp_path / "run" / "teacher").exists()
    done = recipe("table1.sh", **small)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "run" / "eval.json").read_text())["results"]
    assert list(results) == ["teacher", *ROWS]
    records = {row: json.loads((tmp_path / "run" / row / "train" / "stage.json").read_text()) for row in ROWS}
    groups = {row: json.loads((tmp_path / "run" / row / "groups.json").read_text()) for row in ROWS}
    for row in ROWS:
        assert results[row]["kv_heads"] == 2 and set(results[row]["tasks"]) == set(TASKS)
        assert records[row]["inputs"].keys() == records["baseline"]["inputs"].keys()
        assert records[row]["summary"]["teacher"] == records["baseline"]["summary"]["teacher"]  # one teacher, one calibration
        assert groups[row]["inputs"] == groups["baseline"]["inputs"]
        aligned = json.loads((tmp_path / "run" / row / "aligned" / "stage.json").read_text())["arguments"]
        by, _, criterion = row.partition("-")
        assert (groups[row]["summary"]["by"], aligned["rotate"]) == ({"baseline": "none", "default": "none"}.get(by, by), criterion or "none")
    assert groups["default-cos"]["groups"] == groups["default-dist"]["groups"] == groups["baseline"]["groups"] != groups["key-cos"]["groups"]
    before = (tmp_path / "run" / "eval.json").read_bytes()
    again = recipe("table1.sh", **small)  # all of it stands: the table is shown again, nothing is made
    assert again.returncode == 0 and "| baseline" in again.stdout and (tmp_path / "run" / "eval.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv_heads"), [("llama2_7b.sh", 2), ("sheared_llama_1.3b.sh", 2)])
def test_recipe_end_to_end(name, kv_heads, tmp_path):
    done = recipe(name, SMALL=1, SMALL_STEPS=10, SMALL_TEACHER_STEPS=5, LIMIT=5, RUN=tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "run" / "eval.json").read_text())["results"]
    assert list(results) == ["teacher", "merged", "gqa"] and results["gqa"]["kv_heads"] == kv_heads
