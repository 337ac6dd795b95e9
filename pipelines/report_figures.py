"""Formatting the figures of records as tables and charts for report.html. Accepts any JSON value."""

import math
import re
from typing import NamedTuple

from common.reporting.scores import AVERAGES

# record fields that are not figures
PROVENANCE = ("stage", "flags", "arguments", "model", "inputs", "packages", "commit", "seconds", "date",
              "summary", "files", "results", "prompts")
DIGEST = re.compile("[0-9a-f]{40,64}")  # shortened to its first digits
WORDS = {"kl": "KL", "bild": "BiLD", "l0": "L0", "lr": "learning rate", "gib": "GiB", "grad": "gradient",
         "mfu": "MFU", "dist": "squared distance", "cos": "cosine", "heldout": "held-out"}  # in names
PERCENT = ("exact_match", "likelihood", "chance")  # name endings of shares, shown in percent


class Table(NamedTuple):
    header: tuple  # empty for tables of (name, value)
    rows: list[tuple]
    caption: str = ""


def is_number(value) -> bool:
    """Whether a value is a finite number that can be plotted, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def label(name: str) -> str:
    """A figure's name in words: "heldout_task_kl" -> "held-out task KL"."""
    return " ".join(WORDS.get(word, word) for word in re.split("[._]", name))


def cell(value) -> str:
    """A record's value as short text."""
    if value is None or isinstance(value, bool):
        return {None: "–", True: "yes", False: "no"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    if isinstance(value, list):
        nested = any(isinstance(item, list) for item in value)
        return (" | " if nested else "\u00a0").join(map(cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {cell(item)}" for name, item in value.items())
    return value[:12] if DIGEST.fullmatch(value) else value


def rate(figures: dict, name: str) -> str:
    """A score with its standard error, if it has one; shares in percent."""
    values = [figures.get(name), figures.get(f"{name}_stderr")]
    numbers = [value for value in values if is_number(value)]
    if not numbers:
        return cell(values[0])
    if not name.endswith(PERCENT):
        return "\u00a0±\u00a0".join(map(cell, numbers))
    return "\u00a0±\u00a0".join(f"{100 * number:.1f}" for number in numbers) + "%"


def flatten(values: dict, prefix: str = "") -> dict:
    """Flatten nested objects; names are joined by dots."""
    flat = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def record_figures(record: dict) -> dict:
    """A record's summary and its stage-specific fields, flattened."""
    return flatten(record["summary"] | {name: record[name] for name in record if name not in PROVENANCE})


def figure_tables(figures: dict, layers: int) -> list[Table]:
    """One table of scalars, one for all lists of a given length (as columns), and one per list of objects."""
    lists = {name: values for name, values in figures.items() if isinstance(values, list) and values}
    columns: dict[tuple[str, int], dict[str, list]] = {}  # (caption, number of rows) -> column -> values
    for name, values in lists.items():
        if all(isinstance(value, dict) for value in values):
            columns[name, len(values)] = {key: [value.get(key) for value in values] for key in values[0]}
        else:
            columns.setdefault(("", len(values)), {})[name] = values
    tables = [Table((), [(label(name), value) for name, value in figures.items() if name not in lists])]
    for (caption, count), named in columns.items():
        first = "layer" if count == layers else ""
        rows = list(zip(range(count), *named.values(), strict=True))
        tables.append(Table((first, *map(label, named)), rows, label(caption)))
    return tables


def score_tables(results: dict[str, dict], prompts) -> list[Table]:
    """One table per kind of score, tasks by checkpoints, then one of all other figures, and the answers.

    results: checkpoint -> figures. prompts: the list that the checkpoints answered; any other has no table.
    """
    by_model = {}  # checkpoint -> task -> scores
    for name, figures in results.items():
        by_model[name] = {task: flatten(scores) for task, scores in figures.get("tasks", {}).items()}
    names = next((list(scores) for tasks in by_model.values() for scores in tasks.values()), [])
    kinds = [name for name in names if name not in ("questions", "chance") and not name.endswith("_stderr")]
    tables = [_score_table(kind, results, by_model) for kind in kinds]

    averages = {f"{average}_{name}" for average in AVERAGES for name in (*kinds, "chance")}
    shown = {"tasks", "answers"} | averages | {f"{name}_stderr" for name in averages}
    others = []
    for figures in results.values():
        others.append(flatten({name: value for name, value in figures.items() if name not in shown}))
    names = dict.fromkeys(name for figures in others for name in figures)
    rows = [(label(name), *(figures.get(name) for figures in others)) for name in names]
    tables.append(Table(("", *results), rows))
    columns = [prompts, *(figures.get("answers") for figures in results.values())]
    if all(isinstance(column, list) for column in columns):
        tables.append(Table(("prompt", *results), list(zip(*columns, strict=False)), "greedy answers"))
    return tables


def _score_table(kind: str, results: dict[str, dict], by_model: dict[str, dict]) -> Table:
    """One kind of score: a row per task and average, a column per checkpoint."""
    first, tasks = next(iter(results.values())), next(iter(by_model.values()))
    rows = []
    for task, scores in tasks.items():
        rates = [rate(model.get(task, {}), kind) for model in by_model.values()]
        rows.append((task, scores.get("questions"), rate(scores, "chance"), *rates))
    for average, title in AVERAGES.items():
        rates = [rate(figures, f"{average}_{kind}") for figures in results.values()]
        rows.append((title, "", rate(first, f"{average}_chance"), *rates))
    errors = any(f"{kind}_stderr" in scores for scores in tasks.values())
    caption = f"{label(kind)}, ± standard error" if errors else label(kind)
    return Table(("", "questions", "chance", *results), rows, caption)


def steps_table(metrics: list[dict]) -> Table:
    """A table of the first training step, the last with masks, and the last."""
    masked = [line for line in metrics if "mask_mean" in line]
    chosen = {line["step"]: line for line in (*metrics[:1], *masked[-1:], *metrics[-1:])}
    names = [name for name, value in metrics[0].items() if name != "step" and not isinstance(value, list)]
    rows = [(label(name), *(line.get(name) for line in chosen.values())) for name in names]
    return Table(("", *(f"step {step}" for step in chosen)), rows, "training steps")


def chart(metrics: list[dict], names: tuple[str, ...], scale=float) -> dict | None:
    """Curves of figures in metrics.jsonl, as points in a 570 x 150 box; None with fewer than two steps.

    scale: float, or math.log for a logarithmic axis, which skips values that are not positive.
    """
    every = max(1, len(metrics) // 400)  # at most as many points as the box is wide
    curves: dict[str, list] = {name: [] for name in names}
    for line in metrics[::-every][::-1]:  # from the end, to include the last step
        for name in names:
            if is_number(line.get(name)) and (scale is float or line[name] > 0):
                curves[name].append((line["step"], line[name]))
    points = [point for curve in curves.values() for point in curve]
    if len({step for step, _ in points}) < 2:
        return None
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    height = (scale(high) - scale(low)) or 1.0

    def place(step: int, value: float) -> str:
        right, down = (step - first) / (last - first), (scale(high) - scale(value)) / height
        return f"{570 * right:.1f},{150 * down:.1f}"

    lines = {label(name): " ".join(place(*point) for point in curve) for name, curve in curves.items()}
    lines = {name: line for name, line in lines.items() if line}
    return {"lines": lines, "steps": (first, last), "range": (f"{low:.2g}", f"{high:.2g}")}
