"""The tables of docs/PAPER.md: rows of the paper's Tables 1 and 2 that were run, as published and ours.

    python -m pipelines.published                                   # no rows: how to make them
    python -m pipelines.published --runs runs/table1 runs/table2    # those that each RUN/eval/ has

published.txt has the numbers of the EMNLP version, a row a line: script, name, the tasks' numbers, their
average, budget. The commands are those that the scripts give to Python.
"""

import os
import re
import subprocess
from typing import NamedTuple

from common.data.tasks import TASKS
from common.reporting.tables import markdown_table
from common.run.artifact import read_record
from common.run.errors import UserError, run_stage
from common.run.files import read_text, write_text
from common.run.flags import Parser

HERE = os.path.dirname(os.path.abspath(__file__))
PAGE, BEGIN = os.path.join(HERE, os.pardir, "docs", "PAPER.md"), "<!-- python -m pipelines.published -->\n"
MODELS = {"table1.sh": ("LLaMA2-7B", (32, 32, 4096)),  # layers, heads, hidden size
          "table2.sh": ("Sheared-LLaMA-1.3B", (24, 16, 2048))}


class Row(NamedTuple):
    cells: list[str]  # of TASKS, as printed
    average: str
    budget: str  # tokens and epochs, in the first row of a block


def published() -> dict[str, dict[str, Row]]:
    """Script -> name of a row -> the row."""
    tables, width = {}, len(TASKS)
    for line in read_text(os.path.join(HERE, "published.txt")).splitlines():
        script, name, *cells = line.split(maxsplit=width + 3)
        tables.setdefault(script, {})[name] = Row(cells[:width], cells[width], "".join(cells[width + 1 :]))
    return tables


def commands(script: str) -> dict[str, list[str]]:
    """Name of a row -> the command lines that the script gives to Python for it; "" -> those of all rows."""
    environment, made = {"PATH": os.environ["PATH"], "PYTHON": "echo"}, {}
    done = subprocess.run(["bash", os.path.join(HERE, script)], env=environment, check=True,
                          stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        name = re.search(r"--run(?:-dir)? runs/\w+/?(\S*)", line)[1]
        made.setdefault(name, []).append(f"python {line}")
    return made


def measured(run: str) -> tuple[str, dict[str, list[str]]]:
    """The script of a run's model, and name of a row -> cells of TASKS, the average, how many questions.

    Raises UserError unless the run has an evaluation of one of MODELS with all tasks.
    """
    path, rows = os.path.join(run, "eval"), {}
    record = read_record(path, "07_eval.py")
    shape = tuple(record["model"][name] for name in ("layers", "heads", "hidden"))
    script = next((script for script, (_, other) in MODELS.items() if other == shape), None)
    if script is None:
        raise UserError(f"{path}: expected an evaluation of {' or '.join(dict(MODELS.values()))}, "
                        f"found one of {shape[0]} layers, {shape[1]} heads and hidden size {shape[2]}")
    for name, metrics in record["results"].items():
        try:
            scores = [metrics["tasks"][task] for task in TASKS]
            rates = [*((score, "exact_match") for score in scores), (metrics, "micro_exact_match")]
            rows[name] = [f"{100 * of[key]:.2f} ± {100 * of[f'{key}_stderr']:.2f}" for of, key in rates]
            rows[name].append(f"{sum(score['questions'] for score in scores)} questions")
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: expected scores of all tasks for {name}, found none") from error
    return script, rows


def table(script: str, rows: dict[str, Row], ours: dict[str, dict]) -> str:
    """Commands of a table's first row, and the rows that were run. ours: run -> name of a row -> cells."""
    made, lines = commands(script), []
    first = next(filter(None, made))
    *before, evaluation = (re.sub(rf" gqa(?!{first[3:]}=)\S+", "", line) for line in made[""])
    for name, row in rows.items():
        found = [(f"ours, {os.path.basename(os.path.normpath(run))}", *cells[name])
                 for run, cells in ours.items() if name in cells]
        lines += [(f"`{name}`", *row.cells, row.average, row.budget), *found] if found else []
    block = "\n".join(f"    {line}" for line in (*before, *made[first], evaluation))
    return f"{block}\n\n{markdown_table(('row', *TASKS, 'Avg.', 'budget'), lines)}" if lines else block


def tables(runs: list[str]) -> str:
    """The page's part after BEGIN, with ours of these runs. Raises UserError as measured() does."""
    rows, ours = published(), {script: {} for script in MODELS}
    for run in runs:
        script, cells = measured(run)
        ours[script][run] = cells
    parts = [f"## Table {number}: {MODELS[script][0]}\n\n{table(script, rows[script], ours[script])}"
             for number, script in enumerate(rows, start=1)]
    return "\n\n".join(parts) + "\n"


def main():
    parser = Parser(__doc__)
    parser.add_argument("--runs", nargs="*", default=[], metavar="RUN", help="runs of the two scripts")
    found = tables(parser.parse_args().runs)
    write_text(PAGE, read_text(PAGE).partition(BEGIN)[0] + BEGIN + found)
    print(f"wrote   {os.path.normpath(PAGE)}")


if __name__ == "__main__":
    run_stage(main)
