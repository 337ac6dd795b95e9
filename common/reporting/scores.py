"""The results of 07_eval.py: table in Markdown, caption and last line; writing them to a model card."""

import os

from common.files import read_text, write_text
from common.reporting.tables import markdown_table

AVERAGES = {"micro": "micro average, as published", "macro": "macro average"}  # -> title, here and in reports
MOST_COLUMNS = 6  # checkpoints beside each other; with more, lines are too long to read and each gets a row
SCORES, END_OF_SCORES = "<!-- scores -->", "<!-- /scores -->"  # enclose the scores in README.md


def results_table(results: dict[str, dict]) -> str:
    """A Markdown table with a column per checkpoint; with many of them, tables with a row per checkpoint."""
    names, sections = ("chance", *results), table_sections(list(results.values()))
    if len(results) <= MOST_COLUMNS:
        rows = []
        for title, section in sections.items():
            rows += [(f"**{title}**", *[""] * len(names)), *section]
        table = [("", *names), *rows]
        if not any(figures["tasks"] for figures in results.values()):
            table = [(title, *cells) for title, _, *cells in table]  # nothing to guess
        return markdown_table(table[0], table[1:])
    tables = []
    for title, section in sections.items():
        titles, *rows = zip(*section, strict=True)
        named = [(name, *row) for name, row in zip(names, rows, strict=True) if any(row)]
        tables.append(markdown_table((title, *titles), named))
    return "\n\n".join(tables)


def table_sections(columns: list[dict]) -> dict[str, list[tuple[str, ...]]]:
    """Title -> rows (title, chance or "", a cell per checkpoint). columns: each checkpoint's figures."""
    sections, kinds = {}, {"exact_match": "exact match, %", "likelihood": "likelihood, %"}
    for kind, title in kinds.items() if any(column["tasks"] for column in columns) else ():
        rows = [rate_row(task, [column["tasks"][task] for column in columns], kind, "chance")
                for task in columns[0]["tasks"]]
        rows += [rate_row(f"*{name}*", columns, f"{average}_{kind}", f"{average}_chance")
                 for average, name in AVERAGES.items()]
        sections[title] = rows
    costs = []
    if "perplexity" in columns[0]:
        costs.append(("perplexity", "", *(number(column, "perplexity", 3) for column in columns)))
    if any("kl" in column for column in columns):
        for title, key in (("KL from the first, nats", "kl"), ("top-1 agreement", "agreement")):
            costs.append((title, "", "", *(number(column, key, 4) for column in columns[1:])))
    costs.append(("kv heads", "", *(f"{column['kv_heads']} of {column['heads']}" for column in columns)))
    for title, key in (("KV bytes per token", "cache_bytes_per_token"),
                       ("prefill tokens/s", "prefill_tokens_per_s"),
                       ("decode tokens/s", "decode_tokens_per_s")):
        if any(key in column for column in columns):
            costs.append((title, "", *(number(column, key, 0) for column in columns)))
    return sections | {"cost": costs}


def number(column: dict, key: str, digits: int) -> str:
    """A figure, or "-" if it was not measured."""
    return f"{column[key]:.{digits}f}" if key in column else "-"


def rate_row(title: str, columns: list[dict], key: str, chance: str) -> tuple[str, ...]:
    """A table row of rates in percent with their standard errors, "-" for those that were not measured."""
    if key not in columns[0]:
        return title, *["-"] * (len(columns) + 1)
    cells = [f"{100 * column[key]:.1f} ± {100 * column[f'{key}_stderr']:.1f}" for column in columns]
    return title, f"{100 * columns[0][chance]:.1f}", *cells


def answers_section(prompts: list[str], results: dict[str, dict]) -> str:
    """Each prompt with the answers of all checkpoints, in Markdown; "" without prompts."""
    parts = []
    for number, prompt in enumerate(prompts):
        answers = [(name, figures["answers"][number]) for name, figures in results.items()]
        parts.append(markdown_table((prompt, "greedy answer"), answers))
    return "".join(f"\n\n{part}" for part in parts)


def caption(reference: dict, source: str, limit: int | None, seed: int | None, hardware: str,
            bos: bool) -> str:
    """One line that says what the figures are and how they were measured.

    reference: the first checkpoint's figures. source: where the questions come from. limit, seed: how they
    were selected. hardware: device and dtype. bos: whether prompts and text had a begin-of-sequence token.
    """
    text = f" Perplexity of {file_name(reference['perplexity_text'])}." if "perplexity" in reference else ""
    beginning = f"{'with a' if bos else 'no'} begin-of-sequence token"
    if not reference["tasks"]:
        measured = "Speeds: one sequence" if "decode_tokens_per_s" in reference else "Layer by layer"
        return " ".join(f"{text} {measured} on {hardware}, {beginning}.".split())  # names may have newlines
    questions = sum(task["questions"] for task in reference["tasks"].values())
    selection = "" if limit is None else f", the first {limit} per task"
    if seed is not None:
        selection = f", {limit} per task drawn with seed {seed}"
    line = ("Exact match of greedy generation, and how often the likeliest choice is the right one, "
            f"± standard error: {questions} validation questions ({file_name(source)}{selection}), averaged "
            f"over questions (micro, the paper's Avg.) and over tasks (macro), {beginning}."
            f"{text} Speeds: one sequence on {hardware}.")
    return " ".join(line.split())


def file_name(source: str) -> str:
    """A description, "PATH" or "PATH: ...", without directories: who reads a model card has others."""
    path, *rest = source.split(": ", 1)
    return ": ".join((os.path.basename(os.path.normpath(path)), *rest)) if os.path.exists(path) else source


def summary_line(results: dict[str, dict]) -> str:
    """One line: micro averages, or else perplexities, and the last KV cache relative to the first."""
    scores = []
    for name, figures in results.items():
        if figures["tasks"]:
            rate, error = figures["micro_exact_match"], figures["micro_exact_match_stderr"]
            scores.append(f"{name} micro average {rate:.1%} ± {error:.1%}")
        elif "perplexity" in figures:
            scores.append(f"{name} perplexity {figures['perplexity']:.3f}")
    sizes = [figures["cache_bytes_per_token"] for figures in results.values()]
    return "; ".join([*scores, f"KV cache of the last {sizes[-1] / sizes[0]:.3f} of the first's"])


def write_scores(directory: str, scores: str) -> bool:
    """Put scores (Markdown) between <!-- scores --> and <!-- /scores --> in a checkpoint's README.md.

    Returns False, without a change, if it has no such markers. Comments in the scores are escaped, so that
    they cannot be taken for the closing marker. Raises UserError if the card is not UTF-8.
    """
    path = os.path.join(directory, "README.md")
    if not os.path.exists(path):
        return False
    before, opening, rest = read_text(path).partition(SCORES)
    _, closing, after = rest.partition(END_OF_SCORES)
    if closing:
        escaped = scores.replace("<!--", "&lt;!--")
        write_text(path, f"{before}{opening}\n{escaped}\n{closing}{after}")
    return bool(closing)
