"""Mutants are made of the documents' rows and of the rest of the code; unnoticed ones are reported."""

import subprocess
import sys

import pytest

from helpers import ROOT
from mutants import REST, code, equivalents, mutants, quick_tests, rows
from operators import edits

AUDIT = "| claim | function | test |\n| add | [`module.py`] `add` | `test_module::{}` |\n"
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


REST_SOURCE = "def add(a, b):\n    return a + b\n"
REST_TESTS = """
from common.rest import add

def test_rest():
    assert add(1, 2) == 3
"""


@pytest.mark.parametrize(("source", "expected"), [
    ("a + b * c", ["a - b * c", "a + b / c"]),
    ("a @ b", ["b @ a"]),
    ("x[-1]", ["x[1]", "x[-0]", "x[-2]"]),
    ("a <= b", ["a < b", "a >= b"]),
    ("a and not b", ["a or not b", "a and b"]),
    ("f(a, b, dim=1)", ["f(b, a, dim=1)", "f(a, b)", "f(a, b, dim=0)", "f(a, b, dim=2)"]),
    ("x.mT * y.conj()", ["x.mT / y.conj()", "x * y.conj()", "x.mT * y"]),
    ("max(x.double(), .5)", ["min(x.double(), .5)", "max(x, .5)", "max(x.double(), 1.0)"]),
    ("x[:-n]", ["x[:]", "x[:n]"]),
    ("torch.einsum('ij->ij', x)", ["torch.einsum(x, 'ij->ij')", "torch.einsum('ij->ji', x)"]),
    ("torch.float64 if a else 1e-12", ["torch.float32 if a else 1e-12", "torch.float64 if not a else 1e-12",
                                       "torch.float64 if a else 1e-06"]),
    ("f'{a + b}'", []),
])
def test_standard_operators(source, expected):
    text = f"def f():\n    'x + y'\n    return {source}".encode()
    found = [(text[:start] + new.encode() + text[stop:]).decode() for start, stop, new in edits(text, "f")]
    assert sorted(line.split("return ")[1] for line in found) == sorted(expected)


def test_statements_are_dropped():
    text = b"def f(x):\n    y = 0\n    x = x * y\n    x += y\n    g(x)\n    x.y = y\n    return x\n"
    dropped = {text[start:stop].decode() for start, stop, new in edits(text, "f") if new == "pass"}
    assert dropped == {"x = x * y", "x += y", "g(x)", "x.y = y"}


def test_methods_and_constants_are_mutated_and_nothing_else():
    text = "SIZE: int = 2\nOTHER = 2\nclass A:\n    'é'\n    def f(self) -> 2:\n        return 2\n".encode()
    assert [text[:start].count(b"\n") for start, _, _ in edits(text, "SIZE")] == [0, 0]
    assert [text[:start].count(b"\n") for start, _, _ in edits(text, "A")] == [5, 5]


@pytest.fixture(scope="module")
def made():
    return mutants()


def test_every_row_has_mutants_and_what_is_equivalent_still_is_one(made):
    assert {REST} | {row for row, _, _ in rows()} == {row for mutant in made for row in mutant.rows}
    assert equivalents().keys() <= {(mutant.name, mutant.change()) for mutant in made}
    assert all(equivalents().values())


def test_all_code_is_mutated_and_tried_on_the_tests_of_its_folder(made):
    rest = [mutant for mutant in made if mutant.rows == (REST,)]
    empty = {file for file in code() if not (ROOT / file).read_text()}
    empty |= {"common/openmp.py", "common/errors.py"}
    assert {mutant.file for mutant in made} >= {*code()} - empty
    for file, test in (("06_export.py", "test_export::test_merged_is_exported_as_it_is"),
                       ("common/files.py", "test_writing::"), ("common/data/text.py", "test_text::")):
        tests = next(mutant.tests for mutant in rest if mutant.file == file)
        assert any(name.startswith(test) for name in tests)
    for folder, slow in (("repository", "test_what_no_test_notices_is_reported"),
                         ("stages", "test_memory_is_that_of_a_layer")):  # slow, release
        assert not any(name.endswith(f"::{slow}") for name in quick_tests(folder))


def run_mutants(home, tests: str, explained: str = "") -> subprocess.CompletedProcess:
    files = {
        "AUDIT.md": AUDIT.format(tests), "module.py": SOURCE, "tests/test_module.py": TESTS,
        "common/rest.py": REST_SOURCE, "tests/common/test_rest.py": REST_TESTS,
        "tests/packages.txt": "", "tests/equivalents.txt": explained,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
        **{f"tests/{name}": (ROOT / "tests" / name).read_text() for name in ("mutants.py", "operators.py")},
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    subprocess.run(["git", "init", "-q", home], check=True)
    command = [sys.executable, home / "tests" / "mutants.py", "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (home / "module.py").read_text() == SOURCE
    return done


@pytest.mark.slow
@pytest.mark.parametrize(("tests", "explained", "code", "first", "last"), [
    ("test_zero`, `::test_sum", "", 0, "   1 of    1  add", "2 caught"),
    ("test_zero", "", 1, "module.py:2 add: c = {a + b => a - b}  [add]", "1 survived"),
    ("test_zero", "add: -0 is 0\n    c = {a + b => a - b}\n", 0, "   0 of    1  add", "1 equivalent"),
    ("test_wrong", "", 1, "failing without a change: test_module::test_wrong", "1 failing"),
])
def test_what_no_test_notices_is_reported(tmp_path, tests, explained, code, first, last):
    done = run_mutants(tmp_path, tests, explained)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (code, first), done.stdout + done.stderr
    assert lines[-1].startswith(last)
