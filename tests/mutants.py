"""Check that the tests notice faults: apply one-line mutations one by one, and run the test that should fail.

    python tests/mutants.py                        # all of tests/mutations/; also: make mutants
    python tests/mutants.py --rows "Eq. 29"        # rows of AUDIT.md whose name contains this text
    python tests/mutants.py --sample 20 --seed 1   # a quick look
    python tests/mutants.py --list tests/mutations/method.py  # one part

A mutation is (row of AUDIT.md, or what it is about where there is no row; file, old text, new text, test
[, reason why no test can notice it]). It is applied in a scratch copy of the repository. The command fails if
a mutation survives that is not marked as equivalent, if the old text is not in its file exactly once, or if a
test fails without any mutation. Every test run is a fork of this process, which has imported the packages of
tests/mutations/packages.txt; none of the project's modules may be among them.
"""

import argparse
import collections
import contextlib
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = Path("tests", "mutations")
LIMIT, SLOWER = 60, 10  # seconds a test may always take; how many times slower than without a mutation
PASSED, CAUGHT, TIMED_OUT = "passed", "caught", "timed out"
SURVIVED, EQUIVALENT, INVALID = "SURVIVED", "equivalent", "INVALID"


@dataclass(frozen=True)
class Mutant:
    row: str  # of AUDIT.md, or a name of its own
    file: str
    old: str
    new: str
    test: str  # "test_file::test_name", several separated by blanks
    equivalent: str = ""  # why no test can tell the difference

    def place(self, tree: Path) -> str:
        """file:line of the old text. Raises ValueError unless it occurs once and the result is Python."""
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.file}: expected exactly one {self.old!r}, found {text.count(self.old)}")
        try:
            if self.file.endswith(".py"):
                compile(text.replace(self.old, self.new), self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.file}: {self.new!r}: {error}") from error
        return f"{self.file}:{text[: text.index(self.old)].count(chr(10)) + 1}"

    @contextlib.contextmanager
    def applied(self, tree: Path):
        """The tree with this mutation, for the length of a block."""
        self.place(tree)
        path = tree / self.file
        text = path.read_text()
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


@dataclass
class Job:
    """One test run: of a mutant, or of the unchanged tree."""

    test: str
    mutant: Mutant | None = None
    place: str = ""
    limit: float = LIMIT
    verdict: str = ""
    detail: str = ""  # end of pytest's output
    seconds: float = 0.0


class Tally:
    """Counts the tests that really ran and passed."""

    passed = 0

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed


class TimeUp(BaseException):
    """The time limit of a test; no `except Exception` of the tested code swallows it."""


def copy_tree(source: Path, target: Path) -> None:
    """The files git knows of or would add."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    known = subprocess.run(command, cwd=source, capture_output=True, check=True)
    for name in filter(None, known.stdout.decode().split("\0")):
        if (source / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name)


def start(job: Job, slot: Path) -> int:
    """Fork a process that runs the test in slot/tree and writes slot/result.json. Returns its process id."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    try:
        os.setsid()
        output = os.open(slot / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(slot / "tree")
        (slot / "result.json").write_text(json.dumps(run_tests(job, slot)))
    finally:
        os._exit(0)


def run_tests(job: Job, slot: Path) -> tuple[int, int]:
    """pytest's exit code and how many tests passed."""
    import pytest

    def time_up(number, frame):
        raise TimeUp

    signal.signal(signal.SIGALRM, time_up)
    signal.setitimer(signal.ITIMER_REAL, job.limit)
    tally = Tally()
    tests = [f"{file_of(name)}::{name.split('::', 1)[1]}" for name in job.test.split()]
    options = ["-x", "--no-header", "--tb=line", "-m", "", f"--basetemp={slot / 'temporary'}"]
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, *plugins, *tests], plugins=[tally])), tally.passed


def file_of(test: str, tree: Path = Path()) -> Path:
    """The file of `file::test`, by its name alone: somewhere below tree/tests."""
    name = f"{test.split('::')[0]}.py"
    return next((tree / "tests").rglob(name), tree / "tests" / name)


def judge(job: Job, slot: Path) -> None:
    """Fill in the verdict of a job whose process has ended."""
    job.detail = "\n".join((slot / "output.txt").read_text(errors="replace").splitlines()[-12:])
    result = slot / "result.json"
    code, passed = 1, 0  # if it died in the test
    if result.exists():
        code, passed = json.loads(result.read_text())
    job.verdict = INVALID  # no such test, all skipped, a module that cannot be imported, a failing baseline
    if code == 0 and passed and job.mutant is None:
        job.verdict = PASSED
    elif code == 0 and passed:
        job.verdict = EQUIVALENT if job.mutant.equivalent else SURVIVED
    elif code == 1 and job.mutant is not None:
        job.verdict = TIMED_OUT if job.seconds > job.limit else CAUGHT


def run_jobs(jobs: list[Job], slots: list[Path]) -> None:
    """Run all jobs, one at a time in each slot."""
    waiting, free, running = list(reversed(jobs)), list(slots), {}
    while waiting or running:
        while waiting and free:
            job, slot, applied = waiting.pop(), free.pop(), contextlib.ExitStack()
            (slot / "result.json").unlink(missing_ok=True)
            if job.mutant:
                applied.enter_context(job.mutant.applied(slot / "tree"))
            running[start(job, slot)] = (job, slot, applied, time.monotonic())
        time.sleep(0.02)
        for process, (job, slot, applied, began) in list(running.items()):
            job.seconds = time.monotonic() - began
            ended, _ = os.waitpid(process, os.WNOHANG)
            if not ended and job.seconds < job.limit + 15:  # its own alarm comes first
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # and what it started
            if not ended:
                os.waitpid(process, 0)
            applied.close()
            judge(job, slot)
            free.append(slot)
            del running[process]
            report(job)


def run_mutants(tree: Path, mutants: list[Mutant], workers: int) -> list[Job]:
    """Every test without a mutation, then every mutant whose test passed."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as home:
        slots = [Path(home) / str(number) for number in range(workers)]
        for slot in slots:
            copy_tree(tree, slot / "tree")
        baselines = {mutant.test: Job(mutant.test, limit=10 * LIMIT) for mutant in mutants}
        run_jobs(list(baselines.values()), slots)
        jobs = []
        for mutant in mutants:
            baseline = baselines[mutant.test]
            if baseline.verdict == PASSED:
                limit = max(LIMIT, SLOWER * baseline.seconds)
                jobs.append(Job(mutant.test, mutant, mutant.place(tree), limit))
        run_jobs(jobs, slots)
    return [*baselines.values(), *jobs]


def listed(path: Path) -> list[Mutant]:
    """The mutations of a file, or of all files of a directory."""
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return [Mutant(*entry) for file in files for entry in runpy.run_path(str(file))["MUTANTS"]]


def choose(mutants: list[Mutant], rows: str, sample: int | None, seed: int) -> list[Mutant]:
    chosen = [mutant for mutant in mutants if rows.lower() in mutant.row.lower()]
    if sample is None or sample >= len(chosen):
        return chosen
    return random.Random(seed).sample(chosen, sample)


def parse(arguments: list[str] | None):
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains this text")
    parser.add_argument("--sample", type=int, metavar="N", help="only N mutations, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="random seed of --sample")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="test runs at a time")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="the repository")
    parser.add_argument("--list", type=Path, metavar="PATH",
                        help="a file with MUTANTS, or a directory of them (default: tests/mutations/)")
    return parser.parse_args(arguments)


def checked(mutants: list[Mutant], tree: Path) -> tuple[list[Mutant], int]:
    """Those that can be applied, and how many cannot."""
    valid = []
    for mutant in mutants:
        try:
            mutant.place(tree)
            valid.append(mutant)
        except (OSError, ValueError) as error:
            print(f"{INVALID:10s}  {mutant.row}: {error}")
    return valid, len(mutants) - len(valid)


def report(job: Job) -> None:
    """Print what is to be looked at, and nothing else."""
    mutant = job.mutant
    change = f"{mutant.old!r} -> {mutant.new!r}" if mutant else "without a mutation"
    if job.verdict in (SURVIVED, EQUIVALENT):
        reason = f"  {mutant.equivalent}" if mutant.equivalent else ""
        print(f"{job.verdict:10s}  {job.place}  {change}  {job.test}{reason}", flush=True)
    elif job.verdict == INVALID:
        print(f"{job.verdict:10s}  {job.test}, {change}  {job.place}\n{job.detail}", flush=True)


def prepare(packages: list[str]) -> None:
    """Import the packages, and let every fork find the project's modules in its own scratch copy only."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True  # a mutated file may have the size and the time of the one before it
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests")]
    for package in packages:
        importlib.import_module(package)


def main(arguments: list[str] | None = None) -> int:
    args, began = parse(arguments), time.monotonic()
    chosen = choose(listed(args.list or args.tree / MUTATIONS), args.rows, args.sample, args.seed)
    mutants, invalid = checked(chosen, args.tree)
    prepare((args.tree / MUTATIONS / "packages.txt").read_text().split())
    jobs = run_mutants(args.tree, mutants, args.workers)
    verdicts = collections.Counter(job.verdict for job in jobs if job.mutant)
    invalid += sum(job.verdict == INVALID for job in jobs)
    counts = [f"{verdicts[verdict]} {verdict}" for verdict in (CAUGHT, TIMED_OUT, SURVIVED, EQUIVALENT)]
    print(f"mutants: {', '.join(counts)}, {invalid} invalid; {time.monotonic() - began:.0f} s")
    return 1 if invalid or verdicts[SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
