"""The mutation runner reports what survives, and a list that is no longer true."""

import subprocess
import sys

import pytest

from conftest import ROOT
from mutants import Mutant, choose

SOURCE = "def add(a, b):\n    c = a + b\n    return c\n"
TESTS = """
import module

def test_sum():
    assert module.add(1, 2) == 3

def test_zero():
    assert module.add(0, 0) == 0

def test_wrong():
    assert module.add(1, 1) == 3
"""
SUM = ("sum", "module.py", "a + b", "a - b", "test_module::test_sum")
ZERO = ("zero", "module.py", "a + b", "a - b", "test_module::test_zero")


def run_list(home, *entries) -> subprocess.CompletedProcess:
    (home / "tests" / "mutations").mkdir(parents=True)
    (home / "module.py").write_text(SOURCE)
    (home / "tests" / "test_module.py").write_text(TESTS)
    (home / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    for number, entry in enumerate(entries):
        (home / "tests" / "mutations" / f"{number}.py").write_text(f"MUTANTS = [{entry!r}]")
    (home / "tests" / "mutations" / "packages.txt").write_text("")
    subprocess.run(["git", "init", "-q", home], check=True)
    command = [sys.executable, ROOT / "tests" / "mutants.py", "--tree", home]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (home / "module.py").read_text() == SOURCE
    return done


@pytest.mark.slow
def test_a_caught_mutation_is_not_reported(tmp_path):
    done = run_list(tmp_path, SUM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 caught, 0 timed out, 0 SURVIVED" in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.slow
def test_a_survivor_is_reported_with_file_and_line_unless_it_is_equivalent(tmp_path):
    done = run_list(tmp_path, SUM, ZERO, (*ZERO, "zero is its own negative"))
    first, second, counts = done.stdout.splitlines()
    assert done.returncode == 1 and first.startswith("SURVIVED    module.py:2  'a + b' -> 'a - b'"), first
    assert second.startswith("equivalent  module.py:2") and second.endswith("its own negative")
    assert "1 caught, 0 timed out, 1 SURVIVED, 1 equivalent" in counts


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "test", "message"), [
    ("a * b", "a - b", "test_sum", "expected exactly one 'a * b', found 0"),
    ("c", "d", "test_sum", "expected exactly one 'c', found 2"),
    ("a + b", "a +", "test_sum", "invalid syntax"),
    ("a + b", "a - b", "test_missing", "test_module::test_missing, without a mutation"),
    ("a + b", "a - b", "test_wrong", "test_module::test_wrong, without a mutation"),
])
def test_a_list_that_is_no_longer_true_fails(tmp_path, old, new, test, message):
    done = run_list(tmp_path, SUM, ("row", "module.py", old, new, f"test_module::{test}"))
    assert done.returncode == 1 and message in done.stdout, done.stdout + done.stderr
    assert "1 caught" in done.stdout and "1 invalid" in done.stdout


def test_rows_and_samples_are_chosen_by_name_and_random_seed():
    mutants = [Mutant(f"Eq. {number}", "", "", "", "") for number in range(30)]
    assert [mutant.row for mutant in choose(mutants, "eq. 29", None, 0)] == ["Eq. 29"]
    draws = [choose(mutants, "", 5, seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len({mutant.row for mutant in draws[0]}) == 5
