"""Tables: Markdown, of which this is the one writer; the scores of 07_eval.py; and the metrics of any record,
for report.html.
"""

import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.models.quantized_cache import LAYOUTS
from common.run.errors import printable
from common.training.lines import CHATS, OPEN_MASKS, TEXT

ESCAPES = str.maketrans({"\\": r"\\", "|": r"\|", "<": "&lt;"})  # without <, no tag or comment can start
AVERAGES = {"micro": "micro average, as published", "macro": "macro average"}  # -> title, here and in reports
COMPARED_ROWS = {  # metric -> title, digits
    "kl": ("KL from the first, nats", 4),
    "agreement": ("top-1 agreement", 4),
    "loss_above": ("loss above the first's, nats", 4),
    "perplexity": ("perplexity", 3),
}
SPEEDS = {"prefill_tokens_per_s": "prefill tokens/s", "decode_tokens_per_s": "decode tokens/s"}
FEW = 4096  # tokens below which a caption warns: two texts give other differences
MOST_COLUMNS = 6  # checkpoints side by side; with more, lines are too long to read and each gets a row
# record fields that are not metrics
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


def markdown_text(value) -> str:
    """`value` on one line, without what would end a cell, start HTML or make a terminal act."""
    return printable(" ".join(str(value).split())).translate(ESCAPES)


def markdown_table(
    header: Sequence,
    rows: Iterable[Sequence],
    align: str = "",  # one of "<" (left) and ">" (right) per column; the default is left for all
) -> str:
    """A Markdown table with padded columns and no final newline.

    Cells are converted by str(). Raises ValueError if a row has more or fewer cells than the header.
    """
    align = align or "<" * len(header)
    cells = [[markdown_text(value) for value in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(1, *map(len, column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        return f"| {' | '.join(padded)} |"

    ends = {"<": "-", ">": ":"}
    rules = ["-" * (width + 1) + ends[side] for side, width in zip(align, widths, strict=True)]
    return "\n".join([line(cells[0]), f"|{'|'.join(rules)}|", *map(line, cells[1:])])


def results_table(results: dict[str, dict]) -> str:
    """A Markdown table with a column per checkpoint; with many of them, tables with a row per checkpoint."""
    names, sections = ("chance", *results), table_sections(list(results.values()))
    if len(results) <= MOST_COLUMNS:
        rows = []
        for title, section in sections.items():
            rows += [(f"**{title}**", *[""] * len(names)), *section]
        table = [("", *names), *rows]
        if not any(metrics["tasks"] for metrics in results.values()):
            table = [(title, *cells) for title, _, *cells in table]  # nothing to guess
        return markdown_table(table[0], table[1:])
    tables = []
    for title, section in sections.items():
        titles, *rows = zip(*section, strict=True)
        named = [(name, *row) for name, row in zip(names, rows, strict=True) if any(row)]
        tables.append(markdown_table((title, *titles), named))
    return "\n\n".join(tables)


def table_sections(columns: list[dict]) -> dict[str, list[tuple[str, ...]]]:
    """Title -> rows (title, chance or "", a cell per checkpoint). columns: each checkpoint's metrics."""
    sections, kinds = {}, {"exact_match": "exact match, %", "likelihood": "likelihood, %"}
    sections["answers of chats"] = compared_rows(columns, CHATS)
    for kind, title in kinds.items() if any(column["tasks"] for column in columns) else ():
        rows = [rate_row(task, [column["tasks"][task] for column in columns], kind, "chance")
                for task in columns[0]["tasks"]]
        rows += [rate_row(f"*{name}*", columns, f"{average}_{kind}", f"{average}_chance")
                 for average, name in AVERAGES.items()]
        sections[title] = rows
    sections["text"] = compared_rows(columns, TEXT)
    costs = [("kv heads", "", *(f"{column['kv_heads']} of {column['heads']}" for column in columns))]
    if any(column.get(OPEN_MASKS) for column in columns):
        costs.append(("masks open at removal", "", *(number(column, OPEN_MASKS, 0) for column in columns)))
    for key, title in {"cache_bytes_per_token": "KV bytes per token", **SPEEDS}.items():
        if any(key in column for column in columns):
            costs.append((title, "", *(number(column, key, 0) for column in columns)))
    return {title: rows for title, rows in (sections | {"cost": costs}).items() if rows}


def compared_rows(columns: list[dict], prefix: str) -> list[tuple[str, ...]]:
    """A row of each metric in COMPARED_ROWS that was measured, with standard errors."""
    return [(title, "", *(number(column, prefix + key, digits) for column in columns))
            for key, (title, digits) in COMPARED_ROWS.items()
            if any(prefix + key in column for column in columns)]


def number(column: dict, key: str, digits: int) -> str:
    """A metric with its standard error, if it has one, or "-" if it was not measured."""
    numbers = [column[name] for name in (key, f"{key}_stderr") if name in column]
    return " ± ".join(f"{each:.{digits}f}" for each in numbers) or "-"


def without_speeds(metrics: dict) -> dict:
    """A checkpoint's metrics for its card: speeds are those of one machine, busy or not."""
    return {key: value for key, value in metrics.items() if key not in SPEEDS}


def rate_row(title: str, columns: list[dict], key: str, chance: str) -> tuple[str, ...]:
    """A table row of rates in percent with their standard errors."""
    cells = [f"{100 * column[key]:.1f} ± {100 * column[f'{key}_stderr']:.1f}" for column in columns]
    return title, f"{100 * columns[0][chance]:.1f}", *cells


class CacheRow(NamedTuple):
    """A checkpoint with a cache of some format."""

    name: str
    format: str
    bytes_per_token: float
    kls: tuple[float, ...]  # from the first checkpoint, in each layout
    cells: tuple[str, ...]  # these with their errors; perplexity and agreement in the last layout

    def is_dominated(self, rows: list["CacheRow"]) -> bool:
        """Whether one of them has no more bytes and a lower KL in every layout."""
        smaller = [row for row in rows if row.bytes_per_token <= self.bytes_per_token]
        return any(all(map(float.__lt__, row.kls, self.kls)) for row in smaller)


def cache_rows(results: dict[str, dict]) -> list[CacheRow]:
    """Every checkpoint with every cache that it was compared in."""
    rows = []
    for name, checkpoint in results.items():
        for cache, metrics in checkpoint.get("caches", {}).items():
            last = metrics["rotated"]
            if "kl" in last:
                kls = tuple(metrics[layout]["kl"] for layout in LAYOUTS)
                cells = [number(metrics[layout], "kl", 4) for layout in LAYOUTS]
                cells += [number(last, "perplexity", 3), number(last, "agreement", 4)]
                rows.append(CacheRow(name, cache, metrics["bytes_per_token"], kls, tuple(cells)))
    return rows


def caches_table(results: dict[str, dict]) -> Table:
    """A row per checkpoint and cache; those that are dominated are marked by >."""
    rows = cache_rows(results)
    cells = [(f"{row.name} >" if row.is_dominated(rows) else row.name, row.format,
              f"{row.bytes_per_token:.0f}", *row.cells) for row in rows]
    header = ("quantized caches", "format", "bytes per token", *(f"KL, {layout}" for layout in LAYOUTS),
              "perplexity, rotated", "top-1, rotated")
    return Table(header, cells, "KL from the first, nats; >: another has no more bytes and a lower KL in "
                                "every layout.")


def caches_section(results: dict[str, dict]) -> str:
    """caches_table in Markdown; "" without caches."""
    header, rows, note = caches_table(results)
    return f"\n\n{markdown_table(header, rows, '<<>>>>>>')}\n\n{note}" if rows else ""


def answers_section(prompts: list[str], results: dict[str, dict]) -> str:
    """Each prompt with the answers of all checkpoints, in Markdown; "" without prompts."""
    parts = []
    for number, prompt in enumerate(prompts):
        answers = [(name, metrics["answers"][number]) for name, metrics in results.items()]
        parts.append(markdown_table((prompt, "greedy answer"), answers))
    return "".join(f"\n\n{part}" for part in parts)


def caption(reference: dict, source: str, limit: int | None, seed: int | None, hardware: str,
            bos: bool) -> str:
    """One line that says what the metrics are and how they were measured.

    reference: the first checkpoint's metrics. source: where the questions come from. limit, seed: how they
    were selected. hardware: device and dtype. bos: whether prompts and text had a begin-of-sequence token.
    """
    sentences = []
    if reference["tasks"]:
        questions = sum(task["questions"] for task in reference["tasks"].values())
        selection = "" if limit is None else f", the first {limit} per task"
        if seed is not None:
            selection = f", {limit} per task drawn with seed {seed}"
        sentences.append(
            "Exact match of greedy generation, and how often the likeliest choice is the right one, ± "
            f"standard error: {questions} validation questions ({file_name(source)}{selection}), averaged "
            "over questions (micro, the paper's Avg.) and over tasks (macro).")
    for prefix, title in ((CHATS, "Answers"), (TEXT, "Text")):
        if f"{prefix}perplexity" in reference:
            tokens, read = (reference[f"{prefix}perplexity_{name}"] for name in ("tokens", "text"))
            few = ", too few to tell close models apart" if tokens < FEW else ""
            sentences.append(f"{title}: {tokens} tokens{few}, ± standard error over sequences; "
                             f"{file_name(read)}.")
    timed = SPEEDS.keys() <= reference.keys()
    speeds = "Speeds: one sequence, median of five runs," if timed else "Measured"
    beginning = f"{'with a' if bos else 'no'} begin-of-sequence token"
    return markdown_text(" ".join([*sentences, f"{speeds} on {hardware}, {beginning}."]))


def file_name(source: str) -> str:
    """A description, "PATH" or "PATH: ...", without directories: who reads a model card has others."""
    path, *rest = source.split(": ", 1)
    return ": ".join((os.path.basename(os.path.normpath(path)), *rest)) if os.path.exists(path) else source


def summary_line(results: dict[str, dict]) -> str:
    """One line: KL on chats, micro averages, or else perplexities, and the last KV cache relative to the
    first.
    """
    scores = [f"{name} KL on answers {number(metrics, 'chat_kl', 4)}" for name, metrics in results.items()
              if "chat_kl" in metrics]
    for name, metrics in results.items():
        if metrics["tasks"]:
            rate, error = metrics["micro_exact_match"], metrics["micro_exact_match_stderr"]
            scores.append(f"{name} micro average {rate:.1%} ± {error:.1%}")
        elif "perplexity" in metrics:
            scores.append(f"{name} perplexity {number(metrics, 'perplexity', 3)}")
    sizes = [metrics["cache_bytes_per_token"] for metrics in results.values()]
    return "; ".join([*scores, f"KV cache of the last {sizes[-1] / sizes[0]:.3f} of the first's"])


def is_number(value) -> bool:
    """Whether a value is a finite number that can be plotted, and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def label(name: str) -> str:
    """A metric's name in words: "heldout_task_kl" -> "held-out task KL"."""
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


def rate(metrics: dict, name: str) -> str:
    """A score with its standard error, if it has one; shares in percent."""
    values = [metrics.get(name), metrics.get(f"{name}_stderr")]
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


def record_metrics(record: dict) -> dict:
    """A record's summary and its stage-specific fields, flattened."""
    return flatten(record["summary"] | {name: record[name] for name in record if name not in PROVENANCE})


def metric_tables(metrics: dict, layers: int) -> list[Table]:
    """One table of scalars, one for all lists of a given length (as columns), and one per list of objects."""
    lists = {name: values for name, values in metrics.items() if isinstance(values, list) and values}
    columns: dict[tuple[str, int], dict[str, list]] = {}  # (caption, number of rows) -> column -> values
    for name, values in lists.items():
        if all(isinstance(value, dict) for value in values):
            columns[name, len(values)] = {key: [value.get(key) for value in values] for key in values[0]}
        else:
            columns.setdefault(("", len(values)), {})[name] = values
    tables = [Table((), [(label(name), value) for name, value in metrics.items() if name not in lists])]
    for (caption, count), named in columns.items():
        first = "layer" if count == layers else ""
        rows = list(zip(range(count), *named.values(), strict=True))
        tables.append(Table((first, *map(label, named)), rows, label(caption)))
    return tables


def score_tables(results: dict[str, dict], prompts) -> list[Table]:
    """One table per kind of score, tasks by checkpoints, then one of all other metrics, and the answers.

    results: checkpoint -> metrics. prompts: the list that the checkpoints answered; any other has no table.
    """
    models = list(results.values())
    names = next((list(scores) for model in models for scores in model.get("tasks", {}).values()), [])
    kinds = [name for name in names if name not in ("questions", "chance") and not name.endswith("_stderr")]
    tables = [_score_table(kind, results) for kind in kinds]

    averages = {f"{average}_{name}" for average in AVERAGES for name in (*kinds, "chance")}
    shown = {"tasks", "answers", "caches"} | averages | {f"{name}_stderr" for name in averages}
    others = [flatten({name: value for name, value in model.items() if name not in shown})
              for model in models]
    names = dict.fromkeys(name for metrics in others for name in metrics if not name.endswith("_stderr"))
    rows = [(label(name), *(rate(metrics, name) if f"{name}_stderr" in metrics else metrics.get(name)
                            for metrics in others)) for name in names]
    tables.append(Table(("", *results), rows))
    caches = caches_table(results)
    tables += [caches] if caches.rows else []
    columns = [prompts, *(model.get("answers") for model in models)]
    if all(isinstance(column, list) for column in columns):
        tables.append(Table(("prompt", *results), list(zip(*columns, strict=False)), "greedy answers"))
    return tables


def _score_table(kind: str, results: dict[str, dict]) -> Table:
    """One kind of score: a row per task and average, a column per checkpoint."""
    models, rows = list(results.values()), []
    tasks = [model.get("tasks", {}) for model in models]
    for task, scores in tasks[0].items():
        rates = [rate(by_task.get(task, {}), kind) for by_task in tasks]
        rows.append((task, scores.get("questions"), rate(scores, "chance"), *rates))
    for average, title in AVERAGES.items():
        rates = [rate(model, f"{average}_{kind}") for model in models]
        rows.append((title, "", rate(models[0], f"{average}_chance"), *rates))
    errors = any(f"{kind}_stderr" in scores for scores in tasks[0].values())
    caption = f"{label(kind)}, ± standard error" if errors else label(kind)
    return Table(("", "questions", "chance", *results), rows, caption)


def steps_table(metrics: list[dict]) -> Table:
    """A table of the first training step, the last with masks, and the last."""
    masked = [line for line in metrics if "mask_mean" in line]
    chosen = {line["step"]: line for line in (*metrics[:1], *masked[-1:], *metrics[-1:])}
    names = [name for name, value in metrics[0].items() if name != "step" and not isinstance(value, list)]
    rows = [(label(name), *(line.get(name) for line in chosen.values())) for name in names]
    return Table(("", *(f"step {step}" for step in chosen)), rows, "training steps")
