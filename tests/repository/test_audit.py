"""AUDIT.md names functions and tests that exist, and every row's test is tried by a mutation.

A row is | what | function | test | or | paper | what | function | test |: the last two cells are read. The
function cell links files and names definitions in them, [`common/method/merge.py`] `fuse_layer`; the links'
targets are listed at the end. The test cell names `test_file::test_name`, where `::test_name` is in the file
named before it.
"""

import ast
import re

import pytest

from conftest import ROOT
from mutants import MUTATIONS, file_of, listed

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


def linked_files(row: list[str]) -> list[str]:
    """Files that a row's function cell links."""
    return re.findall(r"\[`([^`]+)`\]", row[-2])


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
        assert f"def {name.split('::')[1]}(" in file_of(name, ROOT).read_text(), name


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_named_functions_exist(row):
    known, files = set(), linked_files(row)
    for file in files:
        known |= definitions(file)
    names = set(re.findall(r"`([^`]+)`", row[-2])) - set(files)
    assert files and not {name.split(".")[-1] for name in names} - known


def test_links_lead_to_the_files_they_name():
    targets = re.findall(r"^\[`([^`]+)`\]: (\S+)$", (ROOT / "AUDIT.md").read_text(), re.MULTILINE)
    assert all(name == target and (ROOT / target).is_file() for name, target in targets)
    linked = {file for row in rows() for file in linked_files(row)}
    assert sorted(name for name, _ in targets) == sorted(linked)


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
