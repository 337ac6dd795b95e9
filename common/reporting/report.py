"""One page that summarizes a run directory from its records: settings, metrics and pictures of every stage.

    python pipelines/report.py --run RUN     # writes RUN/report.html

The page is self-contained (inline styles and pictures, no scripts, no external resources), and the same
records give the same bytes. Template: templates/report.html.
"""

import base64
import functools
import os
import shlex
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from common.reporting import tables
from common.reporting.tables import Table
from common.run.artifact import RECORD, read_record
from common.run.errors import UserError
from common.run.files import write_text
from common.run.flags import Parser
from common.training.lines import read_metrics

GENERATOR = b'<meta name="generator" content="common.reporting.report">'  # near the start of every page


class Part(NamedTuple):
    """A stage's output in a run directory."""

    name: str
    stage: str
    pictures: tuple[str, ...] = ()


PARTS = (
    Part("calibration", "01_calibrate.py"),
    Part("similarity", "02_similarity.py", pictures=("similarity.png", "pairs.png")),
    Part("groups", "03_group.py", pictures=("groups.png",)),
    Part("aligned", "04_align.py"),
    Part("teacher", "05_prune_train.py"),
    Part("train", "05_prune_train.py", pictures=("curves.png",)),
    Part("gqa", "06_export.py"),
    Part("eval", "07_eval.py", pictures=("frontier.png",)),
)
OVERVIEW = {"chat_kl": "KL, chats", "chat_agreement": "top-1, chats", "perplexity": "perplexity",
            "kl": "KL", "agreement": "top-1 agreement"}  # metrics of the overview, chats first
THREE_STATES = ("bos", "recompute")  # switches that, left out, choose for themselves


def write(directory: str, force: bool = False) -> str:
    """Write DIRECTORY/report.html and return its path.

    Raises UserError if there is no artifact in the directory, if a record is damaged, or if there is another
    report.html that this function did not write, unless force is on.
    """
    directory = os.path.normpath(directory)
    path = os.path.join(directory, "report.html")
    if os.path.exists(path) and not (force or is_page(path)):
        raise UserError(f"{path} already exists; pass --force to replace it")
    records = read_records(directory)
    if not records:
        raise UserError(f"{directory}: expected a run directory with artifacts, found none")
    sections = [section(directory, part, records[part.name]) for part in PARTS if part.name in records]
    page = template().render(overview(directory, records), sections=sections)
    write_text(path, page.encode(errors="replace").decode())  # lone surrogates cannot be written
    return path


def is_page(path: str) -> bool:
    """Whether `path` is a page that write() has written."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return GENERATOR in file.read(4096)


@functools.cache
def template() -> Template:
    templates = FileSystemLoader(os.path.join(os.path.dirname(__file__), "templates"))
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cell": tables.cell, "rate": tables.rate}
    environment.tests["finite"] = tables.is_number
    return environment.get_template("report.html")


def read_records(directory: str) -> dict[str, dict]:
    """The records of a run directory, by part, validated as far as the page needs. Raises UserError."""
    paths = {part: os.path.join(directory, part.name) for part in PARTS}
    records = {part.name: read_record(path, part.stage) for part, path in paths.items()
               if os.path.isfile(os.path.join(path, RECORD))}
    results = records.get("eval", {}).get("results", {})
    for name, metrics in results.items():
        tasks = metrics.get("tasks", {})
        if not isinstance(tasks, dict) or not all(isinstance(scores, dict) for scores in tasks.values()):
            raise UserError(f"{directory}/eval: expected scores per task for {name}, found others; run "
                            "07_eval.py again")
    try:
        tables.caches_table(results)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory}/eval: expected metrics of each quantized cache, found others; run "
                        "07_eval.py again") from error
    return records


def overview(directory: str, records: dict[str, dict]) -> dict:
    """Overview of a run for the template: model, target, what it cost, and results."""
    summaries = [record["summary"] for record in records.values()]
    return {
        "directory": directory,
        "model": next(record["model"] for record in records.values()),
        "kv_heads": next((summary["kv_heads"] for summary in summaries if "kv_heads" in summary), None),
        "cost": cost(records),
        "results": records.get("eval", {}).get("results", {}),
        "compared_titles": OVERVIEW,
    }


def cost(records: dict[str, dict]) -> str:
    """What the conversion cost: scores of the model with all heads and of gqa/, or, before stage 7, held-out
    losses of teacher and student; "" if nothing was measured.
    """
    evaluation, trained = records.get("eval"), records.get("train", {}).get("summary", {})
    names = {"heldout_teacher_loss": "held-out loss"}
    before, after = trained, {"heldout_teacher_loss": trained.get("heldout_loss")}
    if evaluation:
        gqa = os.path.normpath(os.path.join(str(evaluation["arguments"].get("run")), "gqa"))
        results = list(evaluation["results"].values())
        before = max(results, key=lambda metrics: metrics["kv_heads"], default={})  # the first of them
        after = next((metrics for metrics in results if os.path.normpath(metrics["path"]) == gqa), {})
        names = {"micro_exact_match": "exact match", "perplexity": "perplexity"}
    changes = [f"{title} {tables.rate(before, name)} → {tables.rate(after, name)}"
               for name, title in names.items()
               if tables.is_number(before.get(name)) and tables.is_number(after.get(name))]
    divergence = [f"KL on answers of chats {tables.rate(after, 'chat_kl')}"] * ("chat_kl" in after)
    return ", ".join([*divergence, *changes])


def section(directory: str, part: Part, record: dict) -> dict:
    """A stage's section for the template."""
    home = os.path.join(directory, part.name)
    metrics = read_metrics(os.path.join(home, "metrics.jsonl"))
    shown = tables.metric_tables(tables.record_metrics(record), record["model"]["layers"])
    if "results" in record:
        shown += tables.score_tables(record["results"], record.get("prompts"))
    if metrics:
        shown.append(tables.steps_table(metrics))
    without = "results" in record and not tables.cache_rows(record["results"])  # no caches, no frontier
    return {
        "part": part,
        "pictures": {name: picture_data(home, name) for name in part.pictures if not without},
        "tables": shown,
        "command": command(part.stage, record["arguments"]),
        "origin": origin(part, record),
    }


def picture_data(directory: str, name: str) -> str:
    """A picture in a directory as a data URL; "" if there is none."""
    path = os.path.join(directory, name)
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return "data:image/png;base64," + base64.b64encode(file.read()).decode()


def origin(part: Part, record: dict) -> Table:
    """A table of an artifact's date, inputs, files and package versions."""
    rows = [(name, record[name]) for name in ("date", "seconds", "commit") if name in record]
    rows += [(f"sha256 of {name}", digest) for name, digest in record["inputs"].items()]
    rows += [(f"sha256 of {part.name}/{name}", known["sha256"])
             for name, known in record["files"].items() if known]
    return Table((), [*rows, *record["packages"].items()])


def command(stage: str, arguments: dict) -> str:
    """The stage's command line for these arguments, without those that are null or off."""
    distributed = stage == "05_prune_train.py"
    words = ["torchrun", "--nproc-per-node", "auto", stage] if distributed else ["python", stage]
    for name, value in arguments.items():
        flag = "--run-dir" if name == "run" and distributed else "--" + name.replace("_", "-")
        if value is False and name in THREE_STATES:
            words.append(f"--no-{name}")
        elif value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return shlex.join(words)


def main():
    parser = Parser(__doc__)
    parser.add_argument("--run", default="runs/demo", help="run directory")
    parser.add_argument("--force", action="store_true", help="replace a report.html that is none of its own")
    args = parser.parse_args()
    print(f"wrote   {write(args.run, args.force)}")
