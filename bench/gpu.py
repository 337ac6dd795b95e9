"""The report of pipelines/gpu.sh: what ran on this machine's GPUs, what failed, and all figures.

    python -m bench.gpu check              # the GPU in one line; without one, an error and exit code 2
    python -m bench.gpu report runs/gpu    # bench/RESULTS-<GPU>.md and runs/gpu/results.json from the logs
    GPU_TESTS_ON=cpu python -m bench.gpu report runs/gpu    # of the same on a CPU: runs/gpu/report.md

Exits with 1 if a row failed. Figures are ratios measured side by side in one run, model FLOPs utilization
(MFU), and the memory and time that 05_prune_train.py --plan expects against what was measured.
"""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass

import torch
import transformers

from bench.machine import machine as processor
from common.artifacts import source_commit
from common.cli import UserError, run_stage
from common.files import write_json, write_text
from common.reporting.tables import markdown_table

TIMED_OUT = (124, 137)  # exit codes of timeout(1)
LEFT_OUT = -1  # of a row that had no time to begin
ON_CPU = os.environ.get("GPU_TESTS_ON") == "cpu"
LAST_LINES = 15  # of a failed row's log
TESTS = "tests"  # the row of the GPU tests
STEPS = {  # figure of bench/train_step.py -> its name in the report
    "mfu": "MFU", "step_over_floor": "step over floor", "gqa_step_over_floor": "after the switch to GQA",
    "packed_over_single": "packed over single", "tokens_per_s": "tokens/s", "tflops_per_s": "TFLOP/s",
}
PLANNED = {"memory_gib": "GiB", "step_seconds": "seconds per step"}


@dataclass(frozen=True)
class Row:
    """A command that was run."""

    name: str
    code: int
    seconds: int
    command: str
    log: list[str]  # lines

    @property
    def verdict(self) -> str:
        if self.code in (0, LEFT_OUT):
            return "left out" if self.code else "passed"
        return "out of time" if self.code in TIMED_OUT else f"failed, exit code {self.code}"

    @property
    def figures(self) -> dict:
        """The JSON that a benchmark's log ends with; empty if it failed, and for the tests."""
        try:
            figures = json.loads(self.log[-1])
        except (IndexError, ValueError):
            return {}
        return figures if isinstance(figures, dict) and self.code == 0 else {}


def read_rows(directory: str) -> list[Row]:
    """The rows of OUT/rows.tsv with their logs, in the order in which they ran."""
    rows = []
    with open(os.path.join(directory, "rows.tsv"), encoding="utf-8") as file:
        for line in file:
            name, code, seconds, command = line.rstrip("\n").split("\t")
            with open(os.path.join(directory, f"{name}.log"), encoding="utf-8", errors="replace") as log:
                code = LEFT_OUT if code == "left-out" else int(code)
                rows.append(Row(name, code, int(seconds), command, log.read().splitlines()))
    return rows


def driver() -> str:
    """The NVIDIA driver's version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        words = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        words = []
    return words[0] if words else "unknown"


def describe() -> dict[str, str]:
    """This machine's GPUs and software. Raises UserError without a GPU that torch can use."""
    if ON_CPU:
        devices = {"GPU": f"no GPU but {processor('cpu')}"}
    elif torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        count, memory = torch.cuda.device_count(), gpu.total_memory / 2**30
        devices = {"GPU": f"{count} x {gpu.name}, {memory:.0f} GiB", "driver": driver()}
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


def tests_by_outcome(log: list[str]) -> dict[str, list[str]]:
    """Names of the tests that pytest -v printed: PASSED, FAILED, ERROR, SKIPPED, or RUNNING when it ended."""
    outcomes: dict[str, list[str]] = {}
    for line in log:
        match = re.match(r"\S+\.py::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", line)
        if match:
            outcomes.setdefault(match[2], []).append(match[1])
    begun = re.match(r"\S+\.py::(\S.*)$", log[-1]) if log else None
    if begun and not re.search(r" (PASSED|FAILED|ERROR|SKIPPED)\b", log[-1]):
        outcomes["RUNNING"] = [begun[1].strip()]
    return outcomes


def summary(row: Row) -> str:
    """A row's verdict, with the number of tests of each outcome."""
    if row.name != TESTS:
        return row.verdict
    counts = [f"{len(names)} {name.lower()}" for name, names in tests_by_outcome(row.log).items()]
    return f"{row.verdict}: {', '.join(counts) or 'none ran'}"


def failures(rows: list[Row]) -> str:
    """Each failed row and test by name, with the last lines of the log."""
    parts = []
    for row in rows:
        if row.code in (0, LEFT_OUT):
            continue
        parts.append(f"### {row.name}: {row.verdict}")
        outcomes = tests_by_outcome(row.log) if row.name == TESTS else {}
        names = [f"- {name}: {outcome.lower()}" for outcome in ("FAILED", "ERROR", "RUNNING")
                 for name in outcomes.get(outcome, [])]
        lines = [f"    {line[:200]}".rstrip() for line in row.log[-LAST_LINES:]]
        parts += ["\n".join(block) for block in (names, lines) if block]
    return "\n\n".join(parts) or "None."


def number(value) -> str:
    """A figure in a table: four digits are enough."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def step_tables(rows: list[Row]) -> str:
    """bench/train_step.py: its ratios, the plan against the measurement, and where the time goes."""
    steps = {row.name: row.figures for row in rows if "step_over_floor" in row.figures}
    if not steps:
        return ""
    ratios = [[name, *(number(figures.get(key)) for key in STEPS)] for name, figures in steps.items()]
    planned = []
    for name, figures in steps.items():
        for key, unit in PLANNED.items():
            expected, measured = figures.get("planned", {}).get(key), figures.get(key)
            if expected and measured:
                error = f"{expected / measured - 1:+.1%}"
                planned.append([name, unit, number(expected), number(measured), error])
    categories = list(next(iter(steps.values())).get("profile", {}))
    shares = [[category, *(f"{figures['profile'][category]:.1%}" for figures in steps.values())]
              for category in categories]
    return "\n\n".join([
        "## A pruning step: `python -m bench.train_step`", markdown_table(("", *STEPS.values()), ratios),
        "What `--plan` expects for the same work (its error: expected over measured, minus one):",
        markdown_table(("", "", "expected", "measured", "error"), planned),
        "Where the time of a masked step goes:", markdown_table(("", *steps), shares),
    ])


def scalar_table(row: Row) -> str:
    """The scalar figures of a benchmark, one a line."""
    scalars = {name: value for name, value in row.figures.items() if isinstance(value, int | float)}
    return markdown_table(("figure", ""), [(name, number(value)) for name, value in scalars.items()])


def decode_table(row: Row) -> str:
    cells = [(cell["context"], cell["batch"], number(cell["prefill_speedup"]), number(cell["decode_speedup"]))
             for cell in row.figures["cells"]]
    table = markdown_table(("context", "batch", "speed-up of prefill", "of decoding"), cells)
    ratio = number(row.figures["kv_bytes_ratio"])
    return ("## A GQA checkpoint beside its source: `python -m bench.decode`\n\n"
            f"KV bytes of the source over those of the GQA model: {ratio}.\n\n{table}\n\n{scalar_table(row)}")


def variant_table(row: Row) -> str:
    """bench/step_variants.py: a step in several ways, and the checkpoint."""
    columns = {"tokens_per_s": "tokens/s", "mfu": "MFU", "memory_gib": "GiB", "reserved_gib": "GiB reserved",
               "planned_gib": "GiB in `--plan`"}
    cells = [[name, *(number(figures.get(key)) for key in columns)]
             for name, figures in row.figures["variants"].items()]
    title = "A step in several ways, and its checkpoint: `python -m bench.step_variants`"
    return f"## {title}\n\n" + "\n\n".join([
        markdown_table(("", *columns.values()), cells), scalar_table(row)])


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
    results = {}
    for row in rows:
        results[row.name] = {"code": row.code, "seconds": row.seconds, "command": row.command}
        if row.name == TESTS:
            results[row.name]["tests"] = tests_by_outcome(row.log)
        else:
            results[row.name]["figures"] = row.figures
    write_json(os.path.join(directory, "results.json"), {"machine": machine, "rows": results})
    named = {row.name: row for row in rows if row.figures}
    parts = [f"# Measured on {machine['GPU']}", "Written by `make gpu`. " + "; ".join(
             f"{name} {value}" for name, value in machine.items() if name != "GPU") + ".",
             markdown_table(("row", "result", "seconds"), [(r.name, summary(r), r.seconds) for r in rows]),
             untested(rows), "## Failures", failures(rows), step_tables(rows)]
    if "variants" in named:
        parts.append(variant_table(named["variants"]))
    if "transform" in named:
        parts.append("## Stages 1 to 4: `python -m bench.transform`\n\n" + scalar_table(named["transform"]))
    if "decode" in named:
        parts.append(decode_table(named["decode"]))
    if "loss" in named:
        parts.append("## The distillation loss: `python -m bench.loss`\n\n" + scalar_table(named["loss"]))
    parts += ["## Commands", "\n".join(f"    python {row.command}" for row in rows)]
    return "\n\n".join(filter(None, parts)) + "\n"


def main() -> int:
    if sys.argv[1:] == ["check"]:
        print("; ".join(f"{name} {value}" for name, value in describe().items()))
        return 0
    if len(sys.argv) != 3 or sys.argv[1] != "report":
        raise UserError(f"expected check or report DIRECTORY, found {' '.join(sys.argv[1:])}")
    directory, machine = sys.argv[2], describe()
    rows = read_rows(directory)
    path = os.path.join(directory, "report.md")
    if not ON_CPU:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"RESULTS-{device_slug()}.md")
    write_text(path, write_report(directory, machine, rows))
    for row in rows:
        print(f"{row.name:10s} {row.seconds:4d} s  {summary(row)}")
    print(untested(rows) or "nothing was left out")
    print(f"wrote   {os.path.relpath(path)}, {os.path.join(directory, 'results.json')}")
    return 1 if any(row.code for row in rows) else 0


if __name__ == "__main__":
    run_stage(main)
