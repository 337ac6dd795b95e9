"""AUDIT.md, docs/METHOD.md and the READMEs of related/ name functions and tests that exist.

A row is | what | function | test |, | paper | what | function | test | or | paper | what | as printed |
function | test |: the last two cells are read. The function cell links files and names definitions in them,
[`common/method/merge.py`] `fuse_layer`; the links' targets are listed at the end. The test cell names
`test_file::test_name`, where `::test_name` is in the file named before it.
"""

import ast
import functools
import re

import pytest

from torchrun import ROOT

AUDITS = [ROOT / "AUDIT.md", ROOT / "docs/METHOD.md", *sorted(ROOT.glob("related/*/README.md"))]


def rows_of(text: str) -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """The rows of a document: the claim, what it names as (file, definition), its tests as file::test."""
    found = []
    for line in text.splitlines():
        cells, file, stem = [cell.strip() for cell in line.strip("| ").split(" | ")], "", ""
        if not line.startswith("|") or "::test_" not in cells[-1]:
            continue
        definitions, tests = [], []
        for link, name in re.findall(r"\[`([^`]+)`\]|`([^`]+)`", cells[-2]):
            file = link or file
            definitions += [(file, name)] if name else []
        for named, test in re.findall(r"`(\w*)::(test_\w+)`", cells[-1]):
            stem = named or stem
            tests.append(f"{stem}::{test}")
        found.append((": ".join(cells[:-2][:2]), definitions, tests))
    return found


ROWS = [row for path in AUDITS for row in rows_of(path.read_text())]
DOCUMENTS = pytest.mark.parametrize("path", AUDITS, ids=lambda path: str(path.relative_to(ROOT)))


@functools.cache
def defined(path: str) -> set[str]:
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


@DOCUMENTS
def test_tables_are_read_whole(path):
    text = path.read_text()
    lines, found = [line for line in text.splitlines() if re.search(r"test_\w+`", line)], rows_of(text)
    assert len(found) == sum(line.startswith("|") for line in lines) > 10
    assert all(definitions and tests for _, definitions, tests in found)
    assert sum(len(tests) for _, _, tests in found) == text.count("::test_")


def test_named_functions_and_tests_exist():
    """All that are missing are listed."""
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    missing = []
    for _, definitions, tests in ROWS:
        missing += [name for file, name in definitions if name.split(".")[-1] not in defined(file)]
        for test in tests:
            stem, name = test.split("::")
            missing += [] if f"def {name}(" in sources.get(stem, "") else [test]
    assert not missing


@DOCUMENTS
def test_links_lead_to_the_files_they_name(path):
    targets = re.findall(r"^\[`([^`]+)`\]: (\S+)$", path.read_text(), re.MULTILINE)
    assert all((path.parent / target).resolve() == ROOT / name for name, target in targets)
    assert all((ROOT / name).is_file() for name, _ in targets)
    named = {file for _, definitions, _ in rows_of(path.read_text()) for file, _ in definitions}
    assert sorted(name for name, _ in targets) == sorted(named)


def test_links_into_pages_lead_to_their_headings():
    folders = ".", "docs", "bench", "related/*"
    pages = {path: path.read_text() for folder in folders for path in ROOT.glob(f"{folder}/*.md")}
    for path, text in pages.items():
        for target, heading in re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", text):
            lines = pages[(path.parent / target).resolve() if target else path].splitlines()
            anchors = {re.sub(r"[^\w -]", "", line.lower()).strip().replace(" ", "-") for line in lines
                       if line.startswith("#")}
            assert heading in anchors, f"{path}: {target}#{heading}"


def test_every_equation_as_printed_is_named_and_exists():
    lines = (ROOT / "AUDIT.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if "::test_" in line]
    printed = [row[2].strip() for row in cells if len(row) == 5]
    named = {name for cell in printed for name in re.findall(r"`(\w+)`", cell)}
    assert len(printed) > 50 and all("`" in cell or cell == "-" for cell in printed)
    assert named <= defined("paper.py")
    assert named >= {f"eq_{number}" for number in range(1, 32)} | {"algorithm_1", "algorithm_2"}
