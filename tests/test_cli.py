"""The command line that stages share: --help as a manual, and a mistake as one line that names what was perhaps meant."""

import runpy
import sys

import pytest

from common import cli
from common.data.tasks import TASKS
from conftest import ROOT

MANUAL = """Stage 0: count things.

    python 00_count.py   --kv-heads 2     # spaces   as they are
"""


def parser() -> cli.StageParser:
    made = cli.stage_parser(MANUAL)
    made.add_argument("--input", metavar="FILE", help="what is read")
    made.section("what is counted")
    made.add_argument("--kv-heads", type=cli.positive, default=2, help="groups")
    made.add_argument("--by", choices=("none", "value"), default="value", help="whose")
    made.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help="tasks")
    made.section("how it runs")
    made.add_argument("--lr", type=float, help="rate")
    made.add_argument("--seed", type=int, default=0, help="of noise")
    return made


def ends(main, capsys) -> tuple[int, str]:
    """Exit code and standard error of a stage whose main is this."""
    with pytest.raises(SystemExit) as end:
        cli.run_stage(main)
    return end.value.code, capsys.readouterr().err


def test_values_and_defaults():
    found = parser().parse_args("--run-dir there --kv-heads 4 --only piqa siqa --lr 1e-5 --force".split())
    assert vars(found) == {"run": "there", "force": True, "input": None, "kv_heads": 4, "by": "value", "only": ["piqa", "siqa"], "lr": 1e-5, "seed": 0}


def test_help_is_a_page_of_a_manual(monkeypatch):
    for width in (60, 100, 300):
        monkeypatch.setenv("COLUMNS", str(width))
        page = parser().format_help()
        usage, _, rest = page.partition("\n")
        assert usage.startswith("usage: ") and usage.endswith(" [flags]") and MANUAL.strip() in rest
        flags = page.split(MANUAL.strip())[1]
        assert max(map(len, flags.splitlines())) <= min(width, 120)
        sections = dict(section.split(":\n", 1) for section in flags.strip().split("\n\n"))
        assert {title: [line.split()[0].strip(",") for line in body.splitlines() if line.startswith("  -")] for title, body in sections.items()} == {
            "every stage": ["--run", "--force", "-h"], "this stage": ["--input"],
            "what is counted": ["--kv-heads", "--by", "--only"], "how it runs": ["--lr", "--seed"]}
        assert "(default: runs/demo)" in " ".join(flags.split()) and "(default: 0)" in flags and "(default: all)" in flags
        assert "--kv-heads N" in flags and "--lr X" in flags and "None" not in flags and "False" not in flags


@pytest.mark.parametrize(("command", "said"), [
    ("--kv-head 4", "unknown flag --kv-head; did you mean --kv-heads? (--help lists all)"),
    ("--kv_heads=4", "unknown flag --kv_heads; did you mean --kv-heads? (--help lists all)"),
    ("--inptu a.txt --sed 1 --zzz", "unknown flag --inptu; did you mean --input? and unknown flag --sed; did you mean --seed? and unknown flag --zzz (--help lists all)"),
    ("-run there", "unknown flag -run; did you mean --run? (--help lists all)"),
    ("here there", "expected flags, found here there (--help lists all)"),
    ("--by vlaue", "--by: expected one of none, value, found vlaue; did you mean value?"),
    ("--by 7", "--by: expected one of none, value, found 7"),
    ("--only piqa BoolQ", f"--only: expected one of {', '.join(TASKS)}, found BoolQ; did you mean boolq?"),
    ("--kv-heads two", "--kv-heads: expected a whole number of at least 1, found two"),
    ("--kv-heads 0", "--kv-heads: expected a whole number of at least 1, found 0"),
    ("--seed 1.5", "--seed: expected a whole number, found 1.5"),
    ("--lr fast", "--lr: expected a number, found fast"),
    ("--lr nan", "--lr: expected a number, found nan"),
    ("--seed", "--seed: expected one argument"),
])
def test_a_mistake_is_one_line_and_exit_code_2(command, said, capsys):
    assert ends(lambda: parser().parse_args(command.split()), capsys) == (2, f"error: {said}\n")


def test_only_the_first_rank_speaks(monkeypatch, capsys):
    exits = []
    monkeypatch.setattr(cli.os, "_exit", lambda code: exits.append(code) or sys.exit(code))
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        code, error = ends(lambda: parser().parse_args(["--kv-head", "4"]), capsys)
        assert (code, error.count("\n")) == (2, lines)
    assert exits == [2, 2]


def test_suggest():
    known = ("runs/demo", "meta-llama/Llama-2-7b-hf", "--tokens-per-microbatch", "arc_easy")
    assert cli.suggest("meta-lama/llama2-7b-hf", known) == "; did you mean meta-llama/Llama-2-7b-hf?"
    assert cli.suggest("--tokens", known) == "; did you mean --tokens-per-microbatch?"
    assert cli.suggest("ARC_Esay", known) == "; did you mean arc_easy?"
    assert cli.suggest("gpt2", known) == cli.suggest("", known) == cli.suggest("x", ()) == ""


@pytest.mark.parametrize("stage", sorted(path.name for path in ROOT.glob("0*_*.py")))
def test_a_stage_has_its_manual_and_refuses_a_wrong_flag(stage, monkeypatch, capsys):
    parse = runpy.run_path(str(ROOT / stage))["parse"]
    monkeypatch.setattr(sys, "argv", [stage, "--help"])
    assert ends(parse, capsys) == (0, "")
    monkeypatch.setattr(sys, "argv", [stage, "--runs", "there"])
    assert ends(parse, capsys) == (2, "error: unknown flag --runs; did you mean --run? (--help lists all)\n")
