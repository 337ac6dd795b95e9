"""The report of pipelines/gpu.sh: what ran on this machine's GPUs, what failed, and what was measured.

    python -m bench.gpu check              # the GPU in one line; without one, an error and exit code 2
    python -m bench.gpu report runs/gpu    # bench/RESULTS-<GPU>.md and runs/gpu/results.json from the logs
    PART=7b python -m bench.gpu report runs/gpu-7b          # of another part: bench/RESULTS-<GPU>-7b.md
    GPU_TESTS_ON=cpu python -m bench.gpu report runs/gpu    # of the same on a CPU: runs/gpu/report.md

Exits with 1 if a row failed. The report has ratios measured side by side in one run, model FLOPs utilization
(MFU), the memory and time that pipelines/plan.py expects against what was measured, and of stages and
pipelines what they print last.
"""

import json
import os
import platform
import re
import sys
from dataclasses import dataclass

import torch
import transformers

from bench.machine import machine as processor
from common.reporting.tables import markdown_table
from common.run.artifact import source_commit
from common.run.errors import UserError, run_stage
from common.run.files import write_json, write_text

TIMED_OUT = (124, 137)  # exit codes of timeout(1)
LEFT_OUT = -1  # of a row that had no time to begin
ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
LAST_LINES = 80  # of a log in the report
TESTS = "tests"  # the part of gpu.sh that make gpu runs, and its row of the GPU tests
PART = os.environ.get("PART", TESTS)
STEPS = {  # measured by bench/train_step.py -> its name in the report
    "tokens_per_s": "tokens/s", "mfu": "MFU", "step_over_floor": "step over floor",
    "gqa_step_over_floor": "after the switch to GQA", "packed_over_single": "packed over single",
    "reserved_gib": "GiB reserved", "layers": "layers", "rows": "packed rows",
}
PLANNED = {"memory_gib": "GiB", "step_seconds": "seconds per step"}


@dataclass(frozen=True)
class Row:
    """A command that was run."""

    name: str
    code: int
    seconds: int
    mib: int  # of the first GPU's memory, at most; 0 if that is unknown
    command: str
    log: list[str]  # lines

    @property
    def verdict(self) -> str:
        if self.code in (0, LEFT_OUT):
            return "left out" if self.code else "passed"
        return "out of time" if self.code in TIMED_OUT else f"failed, exit code {self.code}"

    @property
    def measured(self) -> dict:
        """The JSON that a benchmark's log ends with; empty if it failed, and for the tests."""
        try:
            values = json.loads(self.log[-1])
        except (IndexError, ValueError):
            return {}
        return values if isinstance(values, dict) and self.code == 0 else {}

    @property
    def scalars(self) -> dict:
        """What was measured in one number each."""
        return {name: value for name, value in self.measured.items() if isinstance(value, int | float)}

    @property
    def summary(self) -> str:
        """The verdict, with pytest's counts."""
        counted = self.name == TESTS and self.log and re.search(r"\d+ \w+.* in [\d.]+s", self.log[-1])
        return f"{self.verdict}: {counted[0]}" if counted else self.verdict

    @property
    def ending(self) -> str:
        """The verdict and the last lines of the log, as Markdown: pytest's name what failed or ran last."""
        lines = [f"    {line[:200]}".rstrip() for line in self.log[-LAST_LINES:]]
        return "\n\n".join([f"### {self.name}: {self.verdict}", "\n".join(lines)]).rstrip()


def read_rows(directory: str) -> list[Row]:
    """The rows of OUT/rows.tsv with their logs, in the order in which they ran."""
    rows = []
    with open(os.path.join(directory, "rows.tsv"), encoding="utf-8") as file:
        for line in file:
            name, code, seconds, mib, command = line.rstrip("\n").split("\t")
            with open(os.path.join(directory, f"{name}.log"), encoding="utf-8", errors="replace") as log:
                code = LEFT_OUT if code == "left-out" else int(code)
                rows.append(Row(name, code, int(seconds), int(mib), command, log.read().splitlines()))
    return rows


def describe() -> dict[str, str]:
    """This machine's GPUs and software. Raises UserError without a GPU that torch can use."""
    if ON_CPU:
        devices = {"GPU": f"no GPU but {processor('cpu')}"}
    elif torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        count, memory = torch.cuda.device_count(), gpu.total_memory / 2**30
        devices = {"GPU": f"{count} x {gpu.name}, {memory:.0f} GiB"}
    else:
        raise UserError(f"expected a GPU for torch {torch.__version__}, found none")
    return devices | {"torch": f"{torch.__version__} (CUDA {torch.version.cuda})",
                      "transformers": transformers.__version__, "Python": platform.python_version(),
                      "commit": os.environ.get("COMMIT") or source_commit() or "unknown"}


def device_slug() -> str:
    """Number and name of the GPUs as part of a file name: H200, 8xA100-SXM4-80GB."""
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    name = re.sub(r"[^A-Za-z0-9]+", "-", name.removeprefix("NVIDIA ")).strip("-")
    return f"{count}x{name}" if count > 1 else name


def number(value) -> str:
    """A number in a table: four digits are enough."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def step_tables(rows: list[Row]) -> str:
    """bench/train_step.py: its ratios, and the plan against the measurement."""
    steps = {row.name: row.measured for row in rows if "step_over_floor" in row.measured}
    if not steps:
        return ""
    ratios = [[name, *(number(values.get(key)) for key in STEPS)] for name, values in steps.items()]
    planned = []
    for name, values in steps.items():
        for key, unit in PLANNED.items():
            expected, measured = values["planned"].get(key), values.get(key)
            if expected and measured:
                error = f"{expected / measured - 1:+.1%}"
                planned.append([name, unit, number(expected), number(measured), error])
    comparison = [
        "What the plan expects for the same work (its error: expected over measured, minus one):",
        markdown_table(("", "", "expected", "measured", "error"), planned)] if planned else []
    title = "## A pruning step: `python -m bench.train_step`"
    return "\n\n".join([title, markdown_table(("", *STEPS.values()), ratios), *comparison])


def table(row: Row) -> str:
    """Another benchmark: its scalars, one a line, and the cells of bench/decode.py."""
    module = " ".join(row.command.split()[:2])
    scalars = [(name, number(value)) for name, value in row.scalars.items()]
    parts = [f"## {row.name}: `python {module}`", markdown_table(("", ""), scalars)]
    cells = [(cell["context"], cell["batch"], number(cell["prefill_speedup"]), number(cell["decode_speedup"]))
             for cell in row.measured.get("cells", [])]
    if cells:
        parts.append(markdown_table(("context", "batch", "speed-up of prefill", "of decoding"), cells))
    return "\n\n".join(parts)


def untested(rows: list[Row]) -> str:
    """What this machine or its time left out."""
    gpus, names = torch.cuda.device_count(), [row.name for row in rows if row.code == LEFT_OUT]
    notes = [f"No time was left for {', '.join(names)}."] if names else []
    if ON_CPU:
        notes.append("No GPU: no kernel of one was tested.")
    elif gpus < 2:
        notes.append("One GPU: no communication between GPUs was tested.")
    return " ".join(notes)


def write_report(directory: str, machine: dict[str, str], rows: list[Row]) -> str:
    """The report as Markdown. Also writes results.json to the directory of the logs."""
    results = {row.name: {"code": row.code, "seconds": row.seconds, "mib": row.mib, "command": row.command,
                          "result": row.summary, "measured": row.measured} for row in rows}
    write_json(os.path.join(directory, "results.json"), {"machine": machine, "rows": results})
    software = "; ".join(f"{name} {value}" for name, value in machine.items() if name != "GPU")
    failures = [row.ending for row in rows if row.code not in (0, LEFT_OUT)]
    printed = [row.ending for row in rows if row.code == 0 and not row.scalars and row.name != TESTS]
    parts = [f"# Measured on {machine['GPU']}", f"Written by `pipelines/gpu.sh {PART}`. {software}.",
             markdown_table(("row", "result", "seconds", "GiB of the GPU"),
                            [(r.name, r.summary, r.seconds, number(r.mib / 1024 or None)) for r in rows]),
             untested(rows), "## Failures", *(failures or ["None."]), step_tables(rows),
             *(table(row) for row in rows if row.scalars and "step_over_floor" not in row.scalars),
             *(["## What was printed last", *printed] if printed else []),
             "## Commands", "\n".join(f"    python {row.command}" for row in rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def main() -> int:
    if sys.argv[1:] == ["check"]:
        print("; ".join(f"{name} {value}" for name, value in describe().items()))
        return 0
    if len(sys.argv) != 3 or sys.argv[1] != "report":
        raise UserError(f"expected check or report DIRECTORY, found {' '.join(sys.argv[1:])}")
    directory, machine = sys.argv[2], describe()
    rows, path = read_rows(directory), os.path.join(directory, "report.md")
    if not ON_CPU:
        name = device_slug() + f"-{PART}" * (PART != TESTS)
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"RESULTS-{name}.md")
    write_text(path, write_report(directory, machine, rows))
    for row in rows:
        print(f"{row.name:10s} {row.seconds:4d} s  {row.summary}")
    print(untested(rows) or "nothing was left out")
    print(f"wrote   {os.path.relpath(path)}, {os.path.join(directory, 'results.json')}")
    return 1 if any(row.code for row in rows) else 0


if __name__ == "__main__":
    run_stage(main)
