"""Stage 7: measure checkpoints side by side: the eight tasks, perplexity, cache bytes, speed.

Reads   any checkpoints (default: those that RUN holds), the eight tasks' evaluation sets, a text
Writes  RUN/eval.json and RUN/eval.md: one table, a column per checkpoint; RUN/eval.jsonl: what each checkpoint answered to each
        question; the scores in the README.md of a checkpoint that has a place for them

    python 07_eval.py --run runs/llama2-7b --device cuda
    python 07_eval.py --model teacher=runs/a/teacher gqa=runs/a/gqa baseline=runs/b/gqa --limit 200 --seed 0
    python 07_eval.py --harness runs/harness     # and the same questions as tasks of the standard harness, lm_eval
    python 07_eval.py --report                   # measures nothing: RUN/report.html from what the stages left
    python 07_eval.py                            # under a minute on two cores for the embedded model

Exact match as published: greedy generation, stripped, equal to the text of the right answer. Likelihood: the right
choice has the largest log-probability, summed over its tokens. Averages: macro over tasks, micro over questions; what
follows a ± is a standard error. Prompts, answers and text are tokenized without a begin-of-sequence token, as in training.
"""

import importlib
import json
import os

import torch
from tqdm import tqdm

from common.artifacts import claim, read_record, record, write_json, write_text
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.tasks import TASKS, Example, choice_samples, load_task, select_questions, tokenize
from common.data.text import load_tokens
from common.evaluate import (
    averages,
    cache_bytes_per_token,
    choice_likelihoods,
    generate_answers,
    perplexity,
    rate,
    speed,
    write_scores,
)
from common.models import DEMO, DEMO_HOME, describe, load_model, load_tokenizer, pick_device
from common.reporting import harness

OF_A_RUN = ("teacher", "merged", "gqa")  # what a run directory is asked for, where it has them


def parse():
    parser = stage_parser(__doc__)
    parser.section("what is measured")
    parser.add_argument("--model", nargs="+", default=None, metavar="[NAME=]DIR", help="checkpoints, the first is the reference (default: RUN's teacher, merged, gqa)")
    parser.add_argument("--tasks", default=None, metavar="DIR", help="TASK.validation.jsonl or .parquet files, or hub (default: hub; the embedded tasks for demo)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--limit", type=positive, default=None, metavar="N", help="questions per task, the first N (default: all)")
    parser.add_argument("--seed", type=int, default=None, help="with --limit: N questions drawn with this seed instead of the first N")
    parser.section("perplexity and speed")
    parser.add_argument("--text", default=None, help="c4, demo (its held-out part), a .txt, .jsonl, .json.gz file, or none for no perplexity (default: c4; demo for demo)")
    parser.add_argument("--sequences", type=positive, default=32, help="sequences of text for the perplexity")
    parser.add_argument("--length", type=positive, default=512, help="tokens per sequence")
    parser.section("how it runs")
    parser.add_argument("--batch", type=positive, default=64, help="prompts per generation batch")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the forward passes")
    parser.add_argument("--register", nargs="+", default=(), metavar="MODULE", help="modules that register further model types, e.g. related.dha.modeling")
    parser.section("other readers")
    parser.add_argument("--harness", default=None, metavar="DIR", help="also write the questions there as tasks of lm_eval, and lm_eval.sh, which runs it on them")
    parser.add_argument("--report", action="store_true", help="measure nothing: write RUN/report.html from what RUN holds")
    return parser.parse_args()


def chosen(args) -> dict[str, str]:
    """Column name -> checkpoint directory."""
    if args.model is None:
        found = {name: os.path.join(args.run, name) for name in OF_A_RUN if os.path.isdir(os.path.join(args.run, name))}
        if not found:
            raise UserError(f"{args.run}: expected one of {', '.join(OF_A_RUN)}, found none; run the stages first or give --model")
        return found
    named = {}
    for text in args.model:
        name, _, path = text.rpartition("=")
        name = name or os.path.basename(os.path.normpath(path))
        if name in named:
            raise UserError(f"--model: two checkpoints are called {name}; name them NAME=DIR")
        named[name] = path
    return named


def read_tasks(args, source: str) -> dict[str, dict[int, Example]]:
    """Per task the chosen questions, by their index in the file."""
    tasks = {}
    for task in args.only:
        examples, read = load_task(task, "validation", source)
        tasks[task] = {index: examples[index] for index in select_questions(len(examples), args.limit, args.seed)}
        print(f"reads   {read}: {len(tasks[task])} of {len(examples)} questions")
    return tasks


def on_tasks(model, tokenizer, tasks: dict[str, dict[int, Example]], batch: int, name: str) -> tuple[dict, list[dict]]:
    """Rates with standard errors, per task and averaged; and what became of each question."""
    bar = tqdm(total=sum(1 + len(e.choices) for questions in tasks.values() for e in questions.values()), desc=f"{name}: tasks", unit="seq")
    figures, outcomes = {}, []
    for task, questions in tasks.items():
        examples = list(questions.values())
        answers = generate_answers(model, tokenizer, [tokenize(e, tokenizer) for e in examples], batch, bar)
        scores = choice_likelihoods(model, [choice_samples(e, tokenizer) for e in examples], batch, bar)
        of_task = [{"model": name, "task": task, "question": index, "label": example.label, "likelihood_scores": score,
                    "likelihood_choice": score.index(max(score)), "generated": answer, "exact": answer == example.answer.strip()}
                   for (index, example), answer, score in zip(questions.items(), answers, scores, strict=True)]
        figures[task] = {"questions": len(examples), "chance": sum(1 / len(e.choices) for e in examples) / len(examples)}
        for kind, right in (("exact_match", [o["exact"] for o in of_task]),
                            ("likelihood", [o["likelihood_choice"] == o["label"] for o in of_task])):
            figures[task][kind], figures[task][f"{kind}_stderr"] = rate(right)
        outcomes += of_task
    bar.close()
    return {"tasks": figures} | averages(figures), outcomes


def table(results: dict[str, dict]) -> str:
    """Markdown: a row per figure, a column per checkpoint."""
    first, *_ = columns = list(results.values())
    rows = [("", "chance", *results)]
    for kind, title in (("exact_match", "exact match"), ("likelihood", "likelihood")):
        rows.append((f"**{title}, %**", *[""] * (len(columns) + 1)))
        measured = [(task, kind, [r["tasks"][task] for r in columns], "chance") for task in first["tasks"]]
        measured += [(f"*{average} average*", f"{average}_{kind}", columns, f"{average}_chance") for average in ("macro", "micro")]
        rows += [(row, f"{100 * found[0][chance]:.1f}", *(f"{100 * f[key]:.1f} ± {100 * f[f'{key}_stderr']:.1f}" for f in found))
                 for row, key, found, chance in measured]
    rows.append(("**cost**", *[""] * (len(columns) + 1)))
    if "perplexity" in first:
        rows.append(("perplexity", "", *(f"{r['perplexity']:.3f}" for r in columns)))
    rows.append(("kv heads", "", *(f"{r['kv_heads']} of {r['heads']}" for r in columns)))
    rows.append(("KV bytes per token", "", *(f"{r['cache_bytes_per_token']:.0f}" for r in columns)))
    rows.append(("prefill tokens/s", "", *(f"{r['prefill_tokens_per_s']:.0f}" for r in columns)))
    rows.append(("decode tokens/s", "", *(f"{r['decode_tokens_per_s']:.0f}" for r in columns)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def caption(args, first: dict, source: str, device: str) -> str:
    """What the table's figures are, and of what."""
    how = "" if args.limit is None else f", the first {args.limit} a task" if args.seed is None else f", {args.limit} a task drawn with seed {args.seed}"
    of_text = f" Perplexity of {first['perplexity_text']}." if "perplexity" in first else ""
    return ("Exact match of greedy generation, and how often the likeliest choice is the right one, ± standard error: "
            f"{sum(t['questions'] for t in first['tasks'].values())} validation questions ({source}{how}), "
            f"no begin-of-sequence token.{of_text} Speeds: one sequence on {device}, {args.dtype}.")


def main():
    args, clock = parse(), Clock()
    if args.report:
        from common.reporting import report

        print(f"wrote   {report.write(args.run)}")
        return
    for module in args.register:
        importlib.import_module(module)
    output = os.path.join(args.run, "eval.json")
    claim("07_eval.py", args, output)
    models = chosen(args)
    described = {name: describe(path) for name, path in models.items()}
    calibration = os.path.join(args.run, "calibration")
    demo = os.path.exists(calibration) and read_record(calibration, "01_calibrate.py")["model"]["name"] == DEMO
    source = args.tasks or (os.path.join(DEMO_HOME, "tasks") if demo else "hub")
    tasks, text = read_tasks(args, source), args.text or (DEMO if demo else "c4")
    device = pick_device(args.device)
    if args.harness:
        print(harness.write(args.harness, tasks, models, load_tokenizer(next(iter(models.values()))), args.batch, device, args.dtype))

    results, outcomes = {}, []
    for name, path in models.items():
        model, tokenizer = load_model(path, getattr(torch, args.dtype), device), load_tokenizer(path)
        length = min(args.length, model.config.max_position_embeddings)
        print(f"reads   {path}")
        of_text = {}
        if text != "none":
            tokens, said = load_tokens(text, tokenizer, args.sequences, length, split="heldout")
            print(f"reads   {said}")
            of_text = {"perplexity": perplexity(model, tokens), "perplexity_text": said, "perplexity_tokens": tokens.numel()}
        figures, answered = on_tasks(model, tokenizer, tasks, args.batch, name)
        outcomes += answered
        row = torch.arange(length) % model.config.vocab_size  # cache and speed depend on how many tokens, not on which
        results[name] = {"path": path, "heads": described[name]["heads"], "kv_heads": described[name]["kv_heads"]} | figures | of_text
        results[name] |= {"cache_bytes_per_token": cache_bytes_per_token(model, row)} | speed(model, row)

    shown, reference = table(results), next(iter(results))
    note = caption(args, results[reference], source, device)
    write_text(os.path.join(args.run, "eval.jsonl"), "".join(json.dumps(outcome) + "\n" for outcome in outcomes))
    write_text(os.path.join(args.run, "eval.md"), f"{note}\n\n{shown}\n")
    written = record("07_eval.py", args, described[reference], [], {}, clock())
    write_json(output, written | {"device": device, "begin_of_sequence": False, "results": results})
    print(f"\n{shown}\n\nwrote   {output}, eval.jsonl, eval.md")
    for name, path in models.items():
        if write_scores(path, f"{table({key: results[key] for key in (reference, name)})}\n\n{note}"):
            print(f"wrote   {os.path.join(path, 'README.md')}: the scores")
    first, last = results[reference], list(results.values())[-1]
    macro = ", ".join(f"{name} {r['macro_exact_match']:.1%} ± {r['macro_exact_match_stderr']:.1%}" for name, r in results.items())
    print(f"07_eval: macro average {macro}; the last caches {last['cache_bytes_per_token'] / first['cache_bytes_per_token']:.3f} "
          f"of the first's bytes; in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
