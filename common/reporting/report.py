"""One page that summarizes a run directory from its records: settings, metrics and pictures of every stage.

    python pipelines/report.py --run RUN     # writes RUN/report.html

The page is self-contained (inline styles and pictures, no scripts, no external resources), and the same
records give the same bytes.
"""

import base64
import html
import os
import re
import shlex

from common.reporting.scores import summary_line
from common.reporting.tables import as_html, markdown_table
from common.run.artifact import RECORD, read_record
from common.run.errors import UserError
from common.run.files import read_text, write_text
from common.run.flags import Parser

STYLE = os.path.join(os.path.dirname(__file__), "templates", "report.css")
# directory in RUN -> its stage and pictures
PARTS = {
    "calibration": ("01_calibrate.py",),
    "similarity": ("02_similarity.py", "similarity.png", "pairs.png"),
    "groups": ("03_group.py", "groups.png"),
    "aligned": ("04_align.py",),
    "teacher": ("05_prune_train.py",),
    "train": ("05_prune_train.py", "curves.png"),
    "gqa": ("06_export.py",),
    "eval": ("07_eval.py", "frontier.png"),
}
DIGEST = re.compile("[0-9a-f]{40,64}")  # shortened to its first digits
THREE_STATES = ("bos", "recompute")  # switches that, left out, choose for themselves


def write(directory: str) -> str:
    """Write DIRECTORY/report.html and return its path.

    Raises UserError if there is no artifact in the directory, or if a record is damaged.
    """
    directory = os.path.normpath(directory)
    homes = {os.path.join(directory, name): stage for name, (stage, *_) in PARTS.items()}
    records = {home: read_record(home, stage) for home, stage in homes.items()
               if os.path.isfile(os.path.join(home, RECORD))}
    if not records:
        raise UserError(f"{directory}: expected a run directory with artifacts, found none")
    path = os.path.join(directory, "report.html")
    write_text(path, page(directory, records))
    return path


def page(directory: str, records: dict[str, dict]) -> str:
    """The page of a run. records: those of its stages, by their directories; the first has the model."""
    model, summaries = next(iter(records.values()))["model"], [each["summary"] for each in records.values()]
    kv_heads = next((summary["kv_heads"] for summary in summaries if "kv_heads" in summary), None)
    title = f"{model['name']}: {model['kv_heads']}{f' → {kv_heads}' if kv_heads else ''} key/value heads"
    lead = [summary_line(record["results"]) for record in records.values() if "results" in record]
    values = {"run": directory, "model": f"{model['path']} ({cell(model['fingerprint'])})",
              "layers": model["layers"], "heads": f"{model['heads']} of {model['head_dim']}"}
    values |= {"KV cache": f"{kv_heads / model['kv_heads']:.1%} of the bytes"} if kv_heads else {}
    header = as_html("\n\n".join([*lead, values_table(values)]))
    return "\n".join((
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title>\n<style>\n{read_text(STYLE)}</style></head>\n<body>",
        f"<h1>{html.escape(title)}</h1>\n{header}",
        *(section(home, record) for home, record in records.items()), "</body>\n</html>\n"))


def section(home: str, record: dict) -> str:
    """The HTML of a stage's section. home: its output."""
    name = os.path.basename(home)
    stage, *pictures = PARTS[name]
    parts, table = metric_tables(record), os.path.join(home, "eval.md")
    parts += [read_text(table)] if os.path.exists(table) else []
    origin = {key: record[key] for key in ("date", "seconds", "commit")} | record["packages"]
    origin |= {f"sha256 of {path}": digest for path, digest in record["inputs"].items()}
    return "\n".join((
        f"<h2>{name}</h2>", *(picture(home, each) for each in pictures), as_html("\n\n".join(parts)),
        "<details><summary>Command and origin</summary>",
        f"<pre>{html.escape(command(stage, record['arguments']))}</pre>", as_html(values_table(origin)),
        "</details>"))


def picture(home: str, name: str) -> str:
    """The HTML of a picture in a directory; "" if there is none."""
    path = os.path.join(home, name)
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        content = base64.b64encode(file.read()).decode()
    return f'<figure><img alt="{name}" src="data:image/png;base64,{content}"></figure>'


def metric_tables(record: dict) -> list[str]:
    """Tables of a record's metrics: of single values, and of what each layer has, as columns."""
    metrics = flatten(record["summary"])
    metrics |= {"groups": record["groups"]} if "groups" in record else {}
    layers = {name: values for name, values in metrics.items()
              if isinstance(values, list) and len(values) == record["model"]["layers"]}
    tables = [values_table({name: value for name, value in metrics.items() if name not in layers})]
    if layers:
        rows = [(index, *map(cell, row)) for index, row in enumerate(zip(*layers.values(), strict=True))]
        tables.append(markdown_table(("layer", *map(label, layers)), rows, "<" + ">" * len(layers)))
    return tables


def values_table(values: dict) -> str:
    """A table of names and values."""
    return markdown_table(("", ""), [(label(name), cell(value)) for name, value in values.items()])


def label(name: str) -> str:
    """A metric's name in words: "heldout_task_kl" -> "heldout task kl"."""
    return re.sub("[._]", " ", name)


def cell(value) -> str:
    """A record's value as short text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        nested = any(isinstance(item, list) for item in value)
        return (" | " if nested else " ").join(map(cell, value))
    return value[:12] if isinstance(value, str) and DIGEST.fullmatch(value) else str(value)


def flatten(values: dict, prefix: str = "") -> dict:
    """Flatten nested objects, and lists of them to lists of their values; names are joined by dots."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {key: [each[key] for each in value] for key in value[0]}
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


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
    print(f"wrote   {write(parser.parse_args().run)}")
