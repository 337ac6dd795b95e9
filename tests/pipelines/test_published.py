"""pipelines/published.py: docs/PAPER.md is what it writes, commands make their rows, ours come from runs."""

import importlib
import re

import pytest

from common.data.tasks import TASKS
from common.run.files import write_json
from pipelines import published
from runs import valid_record
from torchrun import ROOT

PAGE = (ROOT / "docs/PAPER.md").read_text()


def test_the_page_is_what_the_script_writes(monkeypatch, tmp_path):
    """But for rows, which come from runs that are not here."""
    monkeypatch.setattr(published, "PAGE", str(tmp_path / "PAPER.md"))
    (tmp_path / "PAPER.md").write_text(PAGE.partition(published.BEGIN)[0] + published.BEGIN + "older")
    monkeypatch.setattr("sys.argv", ["published"])
    published.main()
    written = (tmp_path / "PAPER.md").read_text().splitlines()
    assert [*filter(None, written)] == [line for line in PAGE.splitlines() if line and line[0] != "|"]


@pytest.mark.slow
def test_the_stages_accept_the_commands_of_the_scripts(monkeypatch):
    given = [line.split() for script in published.MODELS
             for lines in published.commands(script).values() for line in lines]
    assert len(given) == 2 * 3 + 35 * 4
    for command in given:
        at, stage = next((at, word) for at, word in enumerate(command) if re.match("0[1-7]_", word))
        monkeypatch.setattr("sys.argv", command[at:])
        importlib.import_module(stage.removesuffix(".py")).parse()


def save(home, *names: str) -> str:
    """RUN/eval/ of Sheared-LLaMA, where each of these checkpoints has the same scores of every task."""
    record = valid_record("07_eval.py")
    record["model"] |= {"layers": 24, "heads": 16, "kv_heads": 16, "hidden": 2048}
    scores = {"questions": 25, "exact_match": 0.56, "exact_match_stderr": 0.0993}
    result = {"path": "x", "heads": 16, "kv_heads": 8, "tasks": dict.fromkeys(TASKS, scores),
              "micro_exact_match": 0.6, "micro_exact_match_stderr": 0.0125}
    write_json(str(home / "eval/stage.json"), record | {"results": dict.fromkeys(names, result)})
    return str(home)


def test_ours_are_those_of_the_runs(tmp_path):
    home = save(tmp_path / "table2", "teacher", "gqa4-key-cos")
    other = save(tmp_path / "other", "gqa4-key-cos")
    one, two = published.tables([f"{home}/", other]).split("## Table 2")
    lines = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in two.splitlines() if "|" in line]
    cells = [*["56.00 ± 9.93"] * 8, "60.00 ± 1.25", "200 questions"]
    assert lines[-2:] == [["ours, table2", *cells], ["ours, other", *cells]]
    assert [line[0] for line in lines[-5:-2]] == ["teacher", "ours, table2", "gqa4-key-cos"]
    assert "ours" not in one
