"""AUDIT.md names functions and tests that exist, and every row's test is tried by a mutation.

A row is | what | function | test | or | paper | what | function | test |: the last two cells are read. The
function cell names files and definitions in them, `common/method/fuse.py` `fuse_layer`; the test cell
`test_file::test_name`, where `::test_name` is in the file named before it.
"""

import ast
import re

import pytest

from conftest import ROOT
from mutants import MUTATIONS, listed

EXEMPT: dict[str, str] = {}  # claim of a row that no mutation tries -> the reason


def rows() -> list[list[str]]:
    """The cells of every row that names a test."""
    lines = [line for line in (ROOT / "AUDIT.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [row for row in cells if "::test_" in row[-1]]


def named_tests(row: list[str]) -> list[str]:
    """file::test of every test that a row names."""
    file, names = None, []
    for stem, test in re.findall(r"`(?:tests/)?(\w*)(?:\.py)?::(test_\w+)`", row[-1]):
        file = stem or file
        names.append(f"{file}::{test}")
    return names


def definitions(path: str) -> set[str]:
    """Names that a file defines at its top level or in a class: functions, classes, constants."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_the_table_is_read_whole():
    lines = [line for line in (ROOT / "AUDIT.md").read_text().splitlines() if re.search(r"test_\w+`", line)]
    assert len(rows()) == sum(line.startswith("|") for line in lines) > 25
    assert all(len(row) in (3, 4, 5) and named_tests(row) for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_named_tests_exist(row):
    for name in named_tests(row):
        file, test = name.split("::")
        assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(), name


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_named_functions_exist(row):
    known, names = set(), re.findall(r"`([^`]+)`", row[-2])
    files = [name for name in names if name.endswith(".py")]
    for file in files:
        known |= definitions(file)
    assert files and not {name.split(".")[-1] for name in names if name not in files} - known


def test_every_equation_as_printed_is_named_and_exists():
    printed = [row[2] for row in rows() if len(row) == 5]
    named = {name for cell in printed for name in re.findall(r"`(\w+)`", cell)}
    assert len(printed) > 50 and all("`" in cell or cell == "-" for cell in printed)
    assert named <= definitions("paper.py")
    assert named >= {f"eq_{number}" for number in range(1, 32)} | {"algorithm_1", "algorithm_2"}


def test_a_mutation_tries_every_row():
    tried = {test for mutant in listed(ROOT / MUTATIONS) for test in mutant.test.split()}
    untried = {row[-3 if len(row) < 5 else 1] for row in rows() if not tried.intersection(named_tests(row))}
    assert untried == EXEMPT.keys()
