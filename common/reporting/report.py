"""RUN/report.html: a run directory explained on one page. Every stage's settings, figures and pictures, from its records alone.

The page stands by itself (styles inline, pictures as data, no scripts, nothing fetched) and the same records give the same bytes.
"""

import base64
import datetime
import html
import math
import os
import re
import shlex
from typing import NamedTuple
from urllib.parse import quote

from common.artifacts import read_record
from common.cli import UserError
from common.training.engine import read_metrics


class Part(NamedTuple):
    """What one stage leaves in a run directory. `name` is also the flag by which a later stage takes it from elsewhere."""

    name: str
    stage: str
    record: str
    about: str
    result: str = ""  # {figure} is filled in from the record
    picture: str | None = None


PARTS = (
    Part("calibration", "01_calibrate.py", "calibration/stage.json", "How the key and value vectors of all heads move together on text: Gram matrices, never the caches.",
         "{tokens} tokens in {sequences} sequences of {length}"),
    Part("similarity", "02_similarity.py", "similarity.json", "How alike any two heads of a layer are, and how alike a rotation can make them.",
         "mean cosine of two heads: keys {key.cos.before} → {key.cos.after}, values {value.cos.before} → {value.cos.after}", "similarity.png"),
    Part("groups", "03_group.py", "groups.json", "Which heads of each layer share one key/value head.", "{kv_heads} groups per layer, by {by}"),
    Part("aligned", "04_align.py", "aligned/stage.json", "The same function with heads rotated onto each other (aligned/), and each group merged without training (merged/).",
         "largest logit difference {max_logit_difference}; perplexity: source {perplexity_source}, aligned {perplexity_aligned}, merged {perplexity_merged}"),
    Part("teacher", "05_prune_train.py", "teacher/stage.json", "The untouched model, fine-tuned on the tasks: what the student is kept close to.",
         "{steps} steps of {batch} samples, {tokens} tokens; last loss on answers {loss}"),
    Part("train", "05_prune_train.py", "train/stage.json", "The student, trained from the merged heads while it is kept close to the teacher.",
         "{steps} steps of {batch} samples, {tokens} tokens; last distillation loss {loss}", "train/curves.png"),
    Part("gqa", "06_export.py", "gqa/stage.json", "The student as a stock checkpoint with fewer key/value heads.",
         "{class} with {kv_heads} kv heads in {dtype}; largest logit difference from the student {max_logit_difference}"),
    Part("eval", "07_eval.py", "eval.json", "The checkpoints measured side by side.", "measured on {device}"),
)
FIELDS = ("stage", "arguments", "model", "inputs", "packages", "commit", "seconds", "date", "summary", "sha256", "results")  # the rest are figures
DIGEST = re.compile("[0-9a-f]{40,64}")  # shown by their beginning
RATES = ("exact_match", "likelihood", "chance")  # shown in percent
COLOURS = ("#2a78d6", "#eb6834", "#1baf7a", "#a371c7")  # of curves, on light and on dark
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; --line: color-mix(in srgb, CanvasText 18%, Canvas); --quiet: color-mix(in srgb, CanvasText 62%, Canvas); }
body { max-width: 68rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
.quiet, caption, summary { color: var(--quiet); } .result { font-weight: 600; }
.scroll { overflow: auto; margin: 1rem 0; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; } th, td { padding: .2rem .75rem .2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th, .number { white-space: nowrap; } tbody th { font-weight: normal; position: sticky; left: 0; background: Canvas; } .numbers :is(th, td):not(:first-child) { text-align: right; padding-left: .75rem; }
pre { white-space: pre-wrap; padding: .75rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: white; border-radius: 6px; } svg { width: 100%; max-width: 40rem; height: auto; }
details { margin: .75rem 0; } summary { cursor: pointer; } nav ul { columns: 16rem; padding-left: 1.2rem; }
@media screen and (max-width: 40rem) { figure { overflow: auto; } img { max-width: 48rem; } svg { min-width: 32rem; } }
@media screen { .scroll { max-height: 42rem; } }
@media print { .scroll { overflow: visible; } table { font-size: .7rem; } details::details-content { content-visibility: visible; block-size: auto; } section, figure, tr { break-inside: avoid-page; } section { break-inside: auto; } }
"""


class Html(str):
    """Markup; all other text is escaped."""


def write(run: str) -> str:
    """Make RUN/report.html and return its path. Raises UserError where neither RUN nor a directory in it holds a stage's artifact."""
    run = os.path.normpath(run)
    found = {home: records for home in sorted(home for home, _, _ in os.walk(run)) if (records := _records(home))}
    if not found:
        raise UserError(f"{run}: expected a run directory with at least one stage's artifact, found none")
    own, inner = found.pop(run, {}), {os.path.relpath(home, run): records for home, records in found.items()}
    title = _title(own) if own else run
    links = [(part.name, part.name, "" if part.name in own else " (not here)") for part in PARTS]
    links += [(f"{name}/", f"{name}/", "") for name in inner]
    body = [f"<header><h1>{_text(title)}</h1>", _overview(run, own), "</header>", "<nav><h2>Contents</h2><ul>",
            *(f'<li><a href="#{quote(to)}">{_text(label)}</a><span class="quiet">{more}</span></li>' for to, label, more in links), "</ul></nav>", "<main>",
            *(_section(run, part, own, [name for name, records in inner.items() if part.name in records]) for part in PARTS)]
    for name, records in inner.items():
        home = os.path.join(run, name)
        body += [f'<section id="{quote(name)}/"><h2>{_text(name)}/</h2><p class="quiet">A run inside this one.</p>', _overview(home, records), "</section>",
                 *(_section(home, part, records, [], f"{name}/") for part in PARTS if part.name in records)]
    path = os.path.join(run, "report.html")
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">\n'
                   f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n")
    os.rename(file.name, path)
    return path


def _records(run: str) -> dict[str, dict]:
    """Part name -> record, of the parts that stand in this directory."""
    paths = {part: os.path.join(run, part.record) for part in PARTS}
    return {part.name: read_record(path, part.stage) for part, path in paths.items() if os.path.exists(path)}


def _flat(values: dict, prefix: str = "") -> dict:
    """Nested names joined by a dot."""
    flat = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _figures(record: dict) -> dict:
    """The summary, and what else a stage put beside it."""
    return _flat(record["summary"] | {name: value for name, value in record.items() if name not in FIELDS})


def _kv_heads(records: dict) -> int | None:
    """What a run's heads were merged to, where that is decided."""
    return next((figures["kv_heads"] for record in records.values() if "kv_heads" in (figures := _figures(record))), None)


def _title(records: dict) -> str:
    model, kv_heads = next(iter(records.values()))["model"], _kv_heads(records)
    return f"{model['name']}: {model['kv_heads']}{f' → {kv_heads}' if kv_heads else ''} key/value heads"


def _overview(run: str, records: dict) -> str:
    """What was converted to what, how long it took, and a row per evaluated checkpoint."""
    if not records:
        return ""
    model, kv_heads = next(iter(records.values()))["model"], _kv_heads(records)
    ended = {name: datetime.datetime.fromisoformat(record["date"]).timestamp() for name, record in records.items()}
    seconds = sum(record["seconds"] for record in records.values())
    if {"teacher", "train"} <= records.keys() and ended["teacher"] > ended["train"] - records["train"]["seconds"]:
        seconds -= records["teacher"]["seconds"]  # one command made both: the student's seconds hold the teacher's
    facts = {"run": run, "model": f"{model['path']} ({_cell(model['fingerprint'])})",
             "shape": f"{model['layers']} layers, {model['heads']} heads of {model['head_dim']}, {model['kv_heads']} key/value heads"}
    if kv_heads:
        facts["KV cache"] = f"{kv_heads / model['kv_heads']:.1%} of the bytes: {kv_heads} key/value heads instead of {model['kv_heads']}"
    scores = [(name, _rate(figures, "macro_exact_match"), Html(f'<meter max="1" value="{figures.get("macro_exact_match", 0):.4f}"></meter>'),
               figures.get("perplexity"), figures.get("kv_heads"), figures.get("cache_bytes_per_token")) for name, figures in records.get("eval", {}).get("results", {}).items()]
    return (_table((), (facts | {"time": f"{seconds:,.0f} s in all stages that stand here"}).items())
            + _table(("checkpoint", "exact match", "", "perplexity", "kv heads", "KV bytes per token"), scores))


def _section(run: str, part: Part, records: dict, elsewhere: list[str], prefix: str = "") -> str:
    """One stage: what it left here, or how to run it. elsewhere: the inner runs that hold this part."""
    record, lines = records.get(part.name), read_metrics(os.path.join(run, os.path.dirname(part.record), "metrics.jsonl"))
    body = [f'<section id="{quote(prefix + part.name)}"><h2>{_text(prefix + part.name)}</h2><p class="quiet">{part.stage}: {_text(part.about)}</p>']
    if record:
        figures = _figures(record)
        body.append(f'<p class="result">{_text(re.sub(r"{([^}]+)}", lambda name: _cell(figures.get(name[1])), part.result))}</p>')
    elif lines:
        body.append(f"<p>Begun, not finished: step {lines[-1]['step']}. To go on, the same command again.</p>")
    elif taken := next((found["arguments"][part.name] for found in records.values() if found["arguments"].get(part.name)), None):
        body.append(f"<p>Taken from {_text(taken)}.</p>")
    elif elsewhere:
        body.append(f"<p>In inner runs: {_text(', '.join(elsewhere))}.</p>")
    else:
        body.append(f"<p>Not run yet:</p><pre>{_text(_command(part.stage, {'run': run}))}</pre>")
    body.append(_picture(run, part, lines, bool(record)))
    if record:
        body += [_tables(figures, record["model"]["layers"]), _evaluation(record.get("results", {})), _steps(lines), _origin(part, record)]
    return "\n".join([*filter(None, body), "</section>"])


def _picture(run: str, part: Part, lines: list[dict], finished: bool) -> str:
    """The picture that the stage drew, or else curves from its metrics."""
    path = os.path.join(run, part.picture or "")
    if part.picture and os.path.exists(path):
        with open(path, "rb") as file:
            return f'<figure><img alt="{_text(part.picture)}" src="data:image/png;base64,{base64.b64encode(file.read()).decode()}"></figure>'
    if lines:
        return _curves(lines, ("loss", "kl", "bild", "l0"), log=True) + _curves(lines, ("mask_target", "mask_expected"))
    return f'<p class="quiet">{_text(part.picture)} is not there: matplotlib draws it.</p>' if part.picture and finished else ""


def _curves(lines: list[dict], names: tuple[str, ...], log: bool = False) -> str:
    """Figures of metrics.jsonl over the steps, as SVG."""
    lines = lines[:: max(1, len(lines) // 400)] + lines[-1:]
    curves = {name: [(line["step"], line[name]) for line in lines if name in line and (line[name] > 0 or not log)] for name in names}
    points = [point for curve in curves.values() for point in curve]
    if len({step for step, _ in points}) < 2:
        return ""
    scale = math.log if log else float
    (left, *_, right), (low, *_, high) = sorted(step for step, _ in points), sorted(value for _, value in points)
    tall = scale(high) - scale(low) or 1.0
    drawn = []
    for at, (name, curve) in enumerate((name, curve) for name, curve in curves.items() if curve):
        path = " ".join(f"{60 + 570 * (step - left) / (right - left):.1f},{180 - 150 * (scale(value) - scale(low)) / tall:.1f}" for step, value in curve)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[at]}" stroke-width="1.5"/><text x="{60 + 110 * at}" y="16" fill="{COLOURS[at]}">{name}</text>')
    axes = [(54, 185, "end", f"{low:.2g}"), (54, 36, "end", f"{high:.2g}"), (60, 202, "start", f"step {left}"), (630, 202, "end", f"step {right}")]
    drawn += [f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{label}</text>' for x, y, anchor, label in axes]
    return (f'<figure><svg viewBox="0 0 640 210" role="img" aria-label="{", ".join(names)} over the steps" font-size="12">'
            f'<path d="M60 30V180H630" fill="none" stroke="currentColor" opacity=".4"/>{"".join(drawn)}</svg></figure>')


def _tables(figures: dict, layers: int) -> str:
    """Single figures in one table; lists of figures, and of records, in tables with a row per entry."""
    lists = {name: values for name, values in figures.items() if isinstance(values, list) and values}
    columns: dict[tuple, dict[str, list]] = {}  # (caption, rows) -> column -> values
    for name, values in lists.items():
        of_records = isinstance(values[0], dict)
        columns.setdefault((name if of_records else "", len(values)), {}).update(
            {key: [value.get(key) for value in values] for key in values[0]} if of_records else {name: values})
    return _table((), [item for item in figures.items() if item[0] not in lists]) + "".join(
        _table(("layer" if count == layers else "", *named), zip(range(count), *named.values(), strict=True), caption) for (caption, count), named in columns.items())


def _evaluation(results: dict[str, dict]) -> str:
    """A table per kind of score, tasks by checkpoints; then every other figure."""
    scores = {name: {task: _flat(figures) for task, figures in r.get("tasks", {}).items()} for name, r in results.items()}  # name -> task -> figures
    first, tasks = next(iter(results.values()), {}), next(iter(scores.values()), {})
    shown, tables = {"tasks"}, []
    kinds = [kind for kind in next(iter(tasks.values()), {}) if kind not in ("questions", "chance") and not kind.endswith("_stderr")]
    for kind in kinds:
        rows = [(task, figures.get("questions"), _rate(figures, "chance"), *(_rate(of.get(task, {}), kind) for of in scores.values())) for task, figures in tasks.items()]
        for average in ("macro", "micro"):
            rows.append((f"{average} average", "", _rate(first, f"{average}_chance"), *(_rate(r, f"{average}_{kind}") for r in results.values())))
            shown |= {f"{average}_{name}{end}" for name in (kind, "chance") for end in ("", "_stderr")}
        tables.append(_table(("", "questions", "chance", *results), rows, kind + (", ± standard error" if any(f"{kind}_stderr" in figures for figures in tasks.values()) else "")))
    rest = {name: _flat({key: value for key, value in figures.items() if key not in shown}) for name, figures in results.items()}
    names = dict.fromkeys(key for figures in rest.values() for key in figures)
    return "".join([*tables, _table(("", *results), [(key, *(figures.get(key) for figures in rest.values())) for key in names])])


def _steps(lines: list[dict]) -> str:
    """The first step, the last with masks, the last."""
    masked = [line for line in lines if "mask_mean" in line]
    chosen = {line["step"]: line for line in (*lines[:1], *masked[-1:], *lines[-1:])}
    names = [name for name, value in (lines or [{}])[0].items() if name != "step" and not isinstance(value, list)]
    return _table(("", *(f"step {step}" for step in chosen)), [(name, *(line.get(name) for line in chosen.values())) for name in names], "training steps")


def _origin(part: Part, record: dict) -> str:
    """The command that repeats it, and what it was made from and with; folded."""
    facts = {name: record[name] for name in ("date", "seconds", "commit", "sha256") if name in record} | {f"sha256 of {name}": digest for name, digest in record["inputs"].items()} | record["packages"]
    return f"<details><summary>Command and origin</summary><pre>{_text(_command(part.stage, record['arguments']))}</pre>{_table((), facts.items())}</details>"


def _command(stage: str, arguments: dict) -> str:
    """The stage's command line with these arguments; those that are None or off are its defaults."""
    words = ["torchrun", "--nproc-per-node", "auto", stage] if stage == "05_prune_train.py" else ["python", stage]
    for name, value in arguments.items():
        flag = "--run-dir" if name == "run" and words[0] == "torchrun" else "--" + name.replace("_", "-")
        if value is False and name == "recompute":  # the one switch that has a third state
            words.append("--no-recompute")
        elif value is not None and value is not False:
            words += [flag] if value is True else [flag, *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _rate(figures: dict, name: str) -> str:
    """A score with its standard error where there is one."""
    percent = name.endswith(RATES)
    shown = [f"{100 * value:.1f}" if percent else _cell(value) for value in (figures.get(name), figures.get(f"{name}_stderr")) if value is not None]
    return "\u00a0±\u00a0".join(shown) + "%" * percent if shown else _cell(None)


def _table(head: tuple, rows, caption: str = "") -> str:
    """Scrolls where it is wider than the page. Without a head: names and what they stand for."""
    top = f"<thead><tr>{''.join(f'<th scope=col>{_text(name)}</th>' for name in head)}</tr></thead>" if head else ""
    cell = {True: "<td>{}</td>", False: "<td class=number>{}</td>"}  # numbers stay on one line
    body = "".join(f"<tr><th scope=row>{_text(first)}</th>{''.join(cell[isinstance(value, str)].format(_text(value)) for value in rest)}</tr>" for first, *rest in rows)
    caption = caption and f"<caption>{_text(caption)}</caption>"
    return body and f'<div class="scroll"><table{" class=numbers" if head else ""}>{caption}{top}<tbody>{body}</tbody></table></div>'


def _cell(value) -> str:
    if isinstance(value, str):
        return value[:12] if DIGEST.fullmatch(value) else value
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, list):
        return (" | " if value and isinstance(value[0], list) else "\u00a0").join(map(_cell, value))
    return {None: "–", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else f"{value:,}"


def _text(value) -> str:
    return value if isinstance(value, Html) else html.escape(_cell(value))
