"""Check that the tests notice faults: break the code, one small change at a time.

    python tests/mutants.py --rows "Eq. 29" --sample 50  # of such rows or files; all takes days
    python tests/mutants.py --rows "the rest" --sample 300

A row of AUDIT.md, docs/mathematics.md or a README of related/ names definitions and tests; the rest are all
other definitions of common/ and the stages.
A mutant is a definition with one change (tests/operators.py), in a scratch copy of the repository. It is
caught if a test fails, or takes too long, of any row that names its file, or for the rest also a quick one of
the folder of tests/ that mirrors its own; the cheapest tests come first. Survivors are printed as
{old => new}. The command fails if tests/equivalents.txt does not say why no test can notice one, or if tests
fail without a change. Every run of tests is a fork of this process, which has imported tests/packages.txt,
and none of the project's modules.
"""

import argparse
import ast
import collections
import contextlib
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from operators import edits, names_of

ROOT = Path(__file__).resolve().parent.parent
SLOW = {"pytest.mark.slow", "pytest.mark.release"}
AUDITS = "AUDIT.md", "docs/mathematics.md", "related/*/README.md"  # the documents with rows
REST = "the rest"  # the row of what no row of theirs names
LIMIT, SLOWER = 30, 10  # seconds tests may always take; how many times slower than without a change


@dataclass
class Trial:
    """One run of tests: with a change of a file, or without."""

    tests: tuple[str, ...]  # file::test
    rows: tuple[str, ...] = ()
    name: str = ""  # of the definition
    file: str = ""
    source: bytes = b""
    start: int = 0  # source[start:stop] becomes new
    stop: int = 0
    new: str = ""
    limit: float = 20 * LIMIT
    verdict: str = ""
    seconds: float = 0.0
    costs: dict = field(default_factory=dict)  # seconds of each of its tests, without a change
    output: str = ""  # its end

    def change(self) -> str:
        """The line with {old => new} in it."""
        before, old = self.source[: self.start].split(b"\n")[-1], self.source[self.start : self.stop]
        after = self.source[self.stop :].split(b"\n")[0]
        return " ".join(f"{before.decode()}{{{old.decode()} => {self.new}}}{after.decode()}".split())


def audits() -> list[Path]:
    return [path for pattern in AUDITS for path in sorted(ROOT.glob(pattern))]


def rows() -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """All documents' rows: the claim, what it names as (file, definition), its tests as file::test."""
    return [row for path in audits() for row in rows_of(path.read_text())]


def rows_of(text: str) -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    """The rows of one document."""
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


def code() -> list[str]:
    """The files of which every definition is mutated."""
    paths = [*ROOT.glob("common/**/*.py"), *ROOT.glob("0*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


@functools.cache
def quick_tests(folder: str) -> list[str]:
    """The tests of a folder of tests/, as file::test, without those that are not quick."""
    found = []
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
        for node in ast.parse(path.read_bytes()).body:
            marks = {ast.unparse(mark) for mark in getattr(node, "decorator_list", ())}
            if getattr(node, "name", "").startswith("test_") and not marks & SLOW:
                found.append(f"{path.stem}::{node.name}")
    return found


def mutants() -> list[Trial]:
    """Every change of every definition that a row names, with all rows that name it; then of the rest.

    The tests are first those of these rows, then those of all rows that name the file, and for the rest those
    of the folder that mirrors the file's: tests/method of common/method, tests/stages of the stages.
    """
    found, of_file = {}, collections.defaultdict(list)
    for row, definitions, tests in rows():
        for file in {file for file, _ in definitions}:
            of_file[file] += tests
        for file, name in definitions:
            source = (ROOT / file).read_bytes()
            for edit in edits(source, name.split(".")[-1]) if file.endswith(".py") else ():
                mutant = found.setdefault((file, *edit), Trial((), (), name, file, source, *edit))
                mutant.rows = (*dict.fromkeys((*mutant.rows, row)),)
                mutant.tests = (*dict.fromkeys((*mutant.tests, *tests)),)
    for mutant in found.values():
        mutant.tests = (*dict.fromkeys((*mutant.tests, *of_file[mutant.file])),)
    for file in code():
        source = (ROOT / file).read_bytes()
        tests = (*dict.fromkeys((*of_file[file], *quick_tests(Path(file).parent.name or "stages"))),)
        for name in dict.fromkeys(name for node in ast.parse(source).body for name in names_of(node) if name):
            for edit in edits(source, name):
                found.setdefault((file, *edit), Trial(tests, (REST,), name, file, source, *edit))
    return list(found.values())


def equivalents() -> dict[tuple[str, str], str]:
    """(definition, change) -> why no test can notice it: lines `definition: why`, indented changes below."""
    found, name, reason = {}, "", ""
    for line in (ROOT / "tests" / "equivalents.txt").read_text().splitlines():
        if line.startswith(" "):
            found[name, line.strip()] = reason
        elif line:
            name, reason = line.split(": ", 1)
    return found


class Tally:
    """A plugin of pytest: what each test costs."""

    def __init__(self):
        self.called, self.prepared, self.needs = collections.Counter(), {}, {}

    def pytest_runtest_logreport(self, report):
        self.called[named(report.nodeid)] += report.duration * (report.when == "call")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.prepared[fixturedef.argname] = time.monotonic() - began

    def pytest_collection_finish(self, session):
        self.needs = {named(item.nodeid): item.fixturenames for item in session.items}

    def costs(self) -> dict[str, float]:
        """file::test -> seconds of its calls and of every fixture it needs, whoever needed it first."""
        return {test: seconds + sum(self.prepared.get(fixture, 0) for fixture in self.needs[test])
                for test, seconds in self.called.items()}


def named(nodeid: str) -> str:
    """pytest's tests/stages/test_plan.py::test_x[1] as rows have it: test_plan::test_x."""
    file, test = nodeid.split("[")[0].split("::")
    return f"{Path(file).stem}::{test}"


def file_of(test: str) -> str:
    return test.split("::")[0]


def run_tests(tests: tuple[str, ...], tree: Path) -> None:
    """In a forked process: exit with 0 if they pass."""
    os.setsid()
    os.chdir(tree)
    for number in (1, 2):
        os.dup2(os.open(f"{tree}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    files, tally = {path.stem: path for path in Path("tests").rglob("test_*.py")}, Tally()
    names = [f"{files.get(stem, stem)}::{name}" for stem, name in (test.split("::") for test in tests)]
    options = ["-x", "-m", "", f"--basetemp={tree}.temporary", "-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main([*options, *names], plugins=[tally])
    Path(f"{tree}.json").write_text(json.dumps(tally.costs()))
    os._exit(code)


def run_trial(trial: Trial, trees: queue.Queue) -> Trial:
    """Run its tests in one of the trees, and fill in the verdict."""
    tree, source, began = trees.get(), trial.source, time.monotonic()
    if source:
        (tree / trial.file).write_bytes(source[: trial.start] + trial.new.encode() + source[trial.stop :])
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(trial.tests, tree))
    process.start()
    process.join(trial.limit)
    verdicts = {None: "timed out", 0: "survived", -signal.SIGTERM: "killed from outside"}
    trial.verdict = verdicts.get(process.exitcode, "caught")
    trial.seconds = time.monotonic() - began
    trial.output = Path(f"{tree}.txt").read_text(errors="replace")[-2000:]
    if trial.verdict == "survived":
        trial.costs = json.loads(Path(f"{tree}.json").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and what it started
    process.join()
    if source:
        (tree / trial.file).write_bytes(source)
    trees.put(tree)
    return trial


def run_all(chosen: list[Trial], jobs: int) -> Iterator[Trial]:
    """Yield each file's tests without a change, then the changes of which no file's failed, as they end."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a changed file may have the size and time of the one before
    sys.dont_write_bytecode = True
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests")]
    for package in (ROOT / "tests" / "packages.txt").read_text().split():
        importlib.import_module(package)
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(jobs) as pool:
        trees = queue.Queue()
        for slot in (Path(home, str(number)) for number in range(jobs)):
            slot.mkdir()
            copy = f"git ls-files -coz --exclude-standard | tar -c --null -T - | tar -x -C {slot}"
            subprocess.run(copy, shell=True, cwd=ROOT, check=True)
            trees.put(slot)
        needed = sorted({test for trial in chosen for test in trial.tests})
        plain = [Trial((*tests,)) for _, tests in itertools.groupby(needed, file_of)]
        yield from pool.map(lambda trial: run_trial(trial, trees), plain)
        failing = {test for trial in plain if trial.verdict != "survived" for test in trial.tests}
        costs = collections.ChainMap(*(trial.costs for trial in plain))
        started = {file_of(trial.tests[0]): trial.seconds - sum(trial.costs.values()) for trial in plain}
        able = [trial for trial in chosen if failing.isdisjoint(trial.tests)]
        for trial in able:
            seconds = sum(costs.get(test, 0.0) for test in trial.tests)
            seconds += sum(started[file] for file in {*map(file_of, trial.tests)})
            trial.limit = max(LIMIT, SLOWER * seconds)
            trial.tests = tuple(sorted(trial.tests, key=lambda test: costs.get(test, 0.0)))
        yield from pool.map(lambda trial: run_trial(trial, trees), able)


def report(chosen: list[Trial], explained: dict, jobs: int, verbose: bool = False) -> int:
    """Run them, print what survived and the counts. Returns the exit code."""
    counts, by_row, began = collections.Counter(), collections.defaultdict(list), time.monotonic()
    for trial in run_all(chosen, jobs):
        if not trial.file:
            if trial.verdict != "survived":
                counts["failing without a change"] += 1
                print(f"failing without a change: {' '.join(trial.tests)}\n{trial.output}", flush=True)
            continue
        if trial.verdict == "survived" and (trial.name, trial.change()) in explained:
            trial.verdict = "equivalent"
        elif trial.verdict == "survived":
            line = trial.source.count(b"\n", 0, trial.start) + 1
            print(f"{trial.file}:{line} {trial.name}: {trial.change()}  [{trial.rows[0]}]", flush=True)
        counts[trial.verdict] += 1
        for row in trial.rows:
            by_row[row].append(trial.verdict in ("caught", "timed out"))
    for row, caught in by_row.items() if verbose else ():
        print(f"{sum(caught):4d} of {len(caught):4d}  {row}")
    print(*(f"{count} {verdict}," for verdict, count in counts.items()), f"{time.monotonic() - began:.0f} s")
    return 0 if counts.keys() <= {"caught", "timed out", "equivalent"} else 1


def choose(found: list[Trial], text: str, sample: int | None, seed: int) -> list[Trial]:
    found = [trial for trial in found if any(text.lower() in at.lower() for at in (trial.file, *trial.rows))]
    return found if sample is None or sample >= len(found) else random.Random(seed).sample(found, sample)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows or files with this text")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --sample")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="test runs at a time")
    parser.add_argument("--verbose", action="store_true", help="print how many are caught of each row's")
    args = parser.parse_args()
    chosen = choose(mutants(), args.rows, args.sample, args.seed)
    sys.exit(report(chosen, equivalents(), args.jobs, args.verbose))
