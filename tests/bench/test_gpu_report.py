"""make gpu without a GPU: the script's rows, its exit codes, and the report from logs."""

import importlib
import json
import shlex
import sys

import pytest
import torch

from bench import gpu
from bench.gpu import Row
from runs import recipe

pytestmark = pytest.mark.slow
LOG = """tests/stages/test_gpu.py::test_a[x] PASSED    [ 25%]
FAILED tests/stages/test_gpu.py::test_b[--merge closed-form] - assert 1 == 2
============ 1 failed, 1 passed, 1 skipped in 83.24s (0:01:23) ============""".splitlines()
STEP = {"mfu": 0.4512, "step_over_floor": 1.04, "gqa_step_over_floor": 0.98, "packed_over_single": 6.0,
        "tokens_per_s": 31234, "memory_gib": 20.0, "reserved_gib": 23.5, "step_seconds": 0.5, "layers": 24,
        "rows": 1, "planned": {"memory_gib": 22.0, "step_seconds": 0.45}}


@pytest.fixture
def machine(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(gpu, "describe", lambda: {"GPU": "8 x NVIDIA A100-SXM4-80GB, 79 GiB"})


@pytest.fixture
def pretended(tmp_path):
    """pretended(PART, SETTINGS): the script's rows with an interpreter that fails in the decode row alone."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\ncase "$*" in *bench.decode*) echo no; exit 3;; *report*) exit 1;; esac\n'
                      'echo "$*"\n')
    python.chmod(0o755)
    out = tmp_path / "an out [1]"

    def run(*part, **settings) -> tuple[int, list[Row]]:
        settings |= {"PYTHON": python, "OUT": out, "WORK": tmp_path / "work"}
        return recipe("gpu.sh", *part, **settings).returncode, gpu.read_rows(str(out))

    return run


def test_a_failure_does_not_stop_the_rows_after_it(pretended):
    """But the end of the time for all does: SECONDS is bash's own clock."""
    code, rows = pretended()
    assert code == 1
    assert [row.name for row in rows] == [
        "tests", "generating", "short-rows", "by-layer", "step-1.3b", "step-7b", "long-rows", "decode",
        "loss", "compiled", "short-compiled", "transform"]
    assert [row.code for row in rows] == [0] * 7 + [3] + [0] * 4
    assert rows[7].log == ["no"] and rows[7].verdict == "failed, exit code 3"
    assert all(row.log == [row.command] for row in rows if row.name != "decode")
    code, rows = pretended(SECONDS="9999", LIMIT="9000")
    assert code == 1 and {row.verdict for row in rows} == {"left out"}


@pytest.mark.parametrize("part", [
    "tests", "record", "refit", "7b", "7b-layerwise", "7b-refit", "7b-train"])
def test_every_row_has_flags_that_its_benchmark_or_stage_takes(pretended, monkeypatch, part):
    settings = {"MODEL": "demo", "KV_HEADS": 2} if part in ("record", "refit") else {}
    _, rows = pretended(part, **settings)
    assert len(rows) > 3
    for row in rows:
        words = shlex.split(row.command.removeprefix("-m "))
        if words[0] == "pytest":
            continue
        module = importlib.import_module(words[0].removesuffix(".py"))
        monkeypatch.setattr(sys, "argv", words)
        assert getattr(module.parse(), "device", "cuda") in ("cuda", "auto")


def test_the_report_is_named_for_the_gpus_names_failures_and_compares_the_plan(
    tmp_path, machine, monkeypatch
):
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    monkeypatch.setattr(sys, "argv", ["gpu", "report", str(tmp_path)])
    logs = {"tests": LOG, "step-1.3b": ["reads", json.dumps(STEP)], "compiled": [], "loss": ["\xff"]}
    for name, lines in logs.items():  # the last one is cut by a time limit
        (tmp_path / f"{name}.log").write_text("\n".join(lines), encoding="latin-1")
    codes = {"tests": 1, "step-1.3b": 0, "compiled": "left-out", "loss": 124}
    (tmp_path / "rows.tsv").write_text("".join(
        f"{name}\t{code}\t7\t1536\t-m bench.{name}\n" for name, code in codes.items()))
    assert gpu.main() == 1
    text = (tmp_path / "RESULTS-8xA100-SXM4-80GB.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert lines[0] == ["# Measured on 8 x NVIDIA A100-SXM4-80GB, 79 GiB"]
    assert ["tests", "failed, exit code 1: 1 failed, 1 passed, 1 skipped in 83.24s", "7", "1.5"] in lines
    assert f"    {LOG[1]}\n" in text  # the end of its log
    assert ["step-1.3b", "GiB", "22", "20", "+10.0%"] in lines
    assert ["step-1.3b", "seconds per step", "0.45", "0.5", "-10.0%"] in lines
    assert "No time was left for compiled." in text and "### loss: out of time" in text
