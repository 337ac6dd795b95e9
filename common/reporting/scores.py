"""The scores of 07_eval.py in Markdown, as eval.md, the model card of an export and report.html show them.

Each argument `results` is that of eval/stage.json: the metrics of each checkpoint by its name.
"""

import os

from common.evaluation.compared import Settings
from common.models.quantized_cache import LAYOUTS
from common.reporting.tables import markdown_table, markdown_text
from common.training.lines import CHATS, OPEN_MASKS, TEXT

PREDICTION_ROWS = {  # metric -> title, digits
    "kl": ("KL from the first, nats", 4),
    "agreement": ("top-1 agreement", 4),
    "loss_above": ("loss above the first's, nats", 4),
    "perplexity": ("perplexity", 3),
}
SPEED_ROWS = {  # of one sequence, the median of five runs
    "prefill_tokens_per_s": ("prefill tokens/s", 0),
    "decode_tokens_per_s": ("decode tokens/s", 0),
}
COST_ROWS = {OPEN_MASKS: ("masks open at removal", 0), "cache_bytes_per_token": ("KV bytes per token", 0),
             **SPEED_ROWS}
TASK_ROWS = {"exact_match": "exact match, %", "likelihood": "likelihood, %"}  # metric -> title of its section
AVERAGES = {"micro": "*micro average, as published*", "macro": "*macro average*"}
FEW = 4096  # tokens below which a caption warns: two texts give other differences


def scores(results: dict[str, dict], prompts: list[str], caption: str) -> str:
    """The caption, all metrics, those of quantized caches, and the answers to prompts."""
    parts = [caption, results_table(results), caches_table(results)]
    for index, prompt in enumerate(prompts):
        answers = [(name, metrics["answers"][index]) for name, metrics in results.items()]
        parts.append(markdown_table((prompt, "greedy answer"), answers))
    return "\n\n".join(filter(None, parts))


def results_table(results: dict[str, dict]) -> str:
    """A table with a column per checkpoint, and one for chance if there is something to guess."""
    names, columns, table = ("chance", *results), list(results.values()), []

    def add(title: str, rows: list[tuple[str, ...]]) -> None:
        table.extend([(f"**{title}**", *[""] * len(names)), *rows] if rows else [])

    def measured(titles: dict[str, tuple[str, int]], prefix: str = "") -> list[tuple[str, ...]]:
        return [(title, "", *(number(column, prefix + metric, digits) for column in columns))
                for metric, (title, digits) in titles.items()
                if any(prefix + metric in column for column in columns)]

    add("answers of chats", measured(PREDICTION_ROWS, CHATS))
    for metric, title in TASK_ROWS.items() if columns[0]["tasks"] else ():
        tasks = {task: [column["tasks"][task] for column in columns] for task in columns[0]["tasks"]}
        rows = [rate_row(task, rates, metric, "chance") for task, rates in tasks.items()]
        add(title, rows + [rate_row(name, columns, f"{average}_{metric}", f"{average}_chance")
                           for average, name in AVERAGES.items()])
    add("text", measured(PREDICTION_ROWS, TEXT))
    heads = ("kv heads", "", *(f"{column['kv_heads']} of {column['heads']}" for column in columns))
    add("cost", [heads, *measured(COST_ROWS)])
    table = [("", *names), *table]
    if not columns[0]["tasks"]:
        table = [(title, *cells) for title, _, *cells in table]
    return markdown_table(table[0], table[1:], "<" + ">" * (len(table[0]) - 1))


def number(metrics: dict, name: str, digits: int, factor: float = 1) -> str:
    """A metric, times a factor, with its standard error, if it has one, or "-" if it was not measured."""
    numbers = [metrics[key] for key in (name, f"{name}_stderr") if key in metrics]
    return " ± ".join(f"{factor * each:.{digits}f}" for each in numbers) or "-"


def rate_row(title: str, columns: list[dict], name: str, chance: str) -> tuple[str, ...]:
    """A table row of rates in percent."""
    return title, number(columns[0], chance, 1, 100), *(number(column, name, 1, 100) for column in columns)


def without_speeds(metrics: dict) -> dict:
    """A checkpoint's metrics for its card: speeds are those of one machine, busy or not."""
    return {name: value for name, value in metrics.items() if name not in SPEED_ROWS}


def cache_rows(results: dict[str, dict]) -> list[tuple[str, str, dict]]:
    """(checkpoint, format, metrics in each layout) of every cache that a checkpoint was compared in."""
    return [(name, form, metrics) for name, checkpoint in results.items()
            for form, metrics in checkpoint.get("caches", {}).items() if "kl" in metrics["rotated"]]


def caches_table(results: dict[str, dict]) -> str:
    """A row per checkpoint and cache; "" without any."""
    header = ("quantized caches", "format", "bytes per token", *(f"KL, {layout}" for layout in LAYOUTS),
              "perplexity, rotated", "top-1, rotated")
    rows = [(name, form, number(metrics, "bytes_per_token", 0),
             *(number(metrics[layout], "kl", 4) for layout in LAYOUTS),
             number(metrics["rotated"], "perplexity", 3), number(metrics["rotated"], "agreement", 4))
            for name, form, metrics in cache_rows(results)]
    return markdown_table(header, rows, "<<>>>>>>") if rows else ""


def caption(reference: dict, settings: Settings, bos: bool) -> str:
    """One line that says what the metrics are and how they were measured.

    reference: the first checkpoint's metrics. bos: whether its texts had a begin-of-sequence token.
    """
    sentences = []
    if reference["tasks"]:
        questions = sum(task["questions"] for task in reference["tasks"].values())
        selection = "" if settings.limit is None else f", the first {settings.limit} per task"
        if settings.seed is not None:
            selection = f", {settings.limit} per task drawn with seed {settings.seed}"
        sentences.append(
            "Exact match of greedy generation, and how often the likeliest choice is the right one, ± "
            f"standard error: {questions} validation questions ({file_name(settings.tasks)}{selection}), "
            "averaged over questions (micro, the paper's Avg.) and over tasks (macro).")
    for prefix, title in ((CHATS, "Answers"), (TEXT, "Text")):
        if f"{prefix}perplexity" in reference:
            tokens, source = (reference[f"{prefix}perplexity_{name}"] for name in ("tokens", "text"))
            few = ", too few to tell close models apart" if tokens < FEW else ""
            sentences.append(f"{title}: {tokens} tokens{few}, ± standard error over sequences; "
                             f"{file_name(source)}.")
    sentences.append(f"Measured on {settings.device}, {settings.dtype}, {'with a' if bos else 'no'} "
                     "begin-of-sequence token.")
    return markdown_text(" ".join(sentences))


def file_name(source: str) -> str:
    """A description, "PATH" or "PATH: ...", without directories: who reads a model card has others."""
    path, *rest = source.split(": ", 1)
    return ": ".join((os.path.basename(os.path.normpath(path)), *rest)) if os.path.exists(path) else source


def summary_line(results: dict[str, dict]) -> str:
    """One line: KL on chats, micro averages, or else perplexities, and the last KV cache relative to the
    first.
    """
    parts = [f"{name} KL on answers {number(metrics, 'chat_kl', 4)}" for name, metrics in results.items()
             if "chat_kl" in metrics]
    for name, metrics in results.items():
        if metrics["tasks"]:
            parts.append(f"{name} micro average {number(metrics, 'micro_exact_match', 1, 100)} %")
        elif "perplexity" in metrics:
            parts.append(f"{name} perplexity {number(metrics, 'perplexity', 3)}")
    sizes = [metrics["cache_bytes_per_token"] for metrics in results.values()]
    return "; ".join([*parts, f"KV cache of the last {sizes[-1] / sizes[0]:.3f} of the first's"])
