"""Stage 7: measure checkpoints side by side: the eight tasks, perplexity, cache bytes, speed.

Reads   any checkpoints (default: those that RUN holds), the eight tasks' evaluation sets, a text
Writes  RUN/eval.json and RUN/eval.md: one table, a column per checkpoint

    python 07_eval.py --run runs/llama2-7b --device cuda
    python 07_eval.py --model teacher=runs/a/teacher gqa=runs/a/gqa baseline=runs/b/gqa --limit 200
    python 07_eval.py                            # under a minute on two cores for the embedded model

Accuracy as published: greedy generation, stripped, equal to the text of the right answer. Beside it, likelihood: the
right choice has the largest log-probability, summed over its tokens. Averages: macro over tasks, micro over questions.
"""

import math
import os

import torch
from tqdm import tqdm

from common.artifacts import read_record, record, refuse_overwrite, write_json
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.evaluate import cache_bytes_per_token, choice_likelihoods, generate_answers, perplexity, speed
from common.models import DEMO, DEMO_HOME, describe, load_model, load_tokenizer, pick_device
from common.tasks import TASKS, Sample, load_task, tokenize
from common.text import load_tokens

OF_A_RUN = ("teacher", "merged", "gqa")  # what a run directory is asked for, where it has them


def parse():
    parser = stage_parser(__doc__)
    # what is measured
    parser.add_argument("--model", nargs="+", default=None, metavar="[NAME=]DIR", help="checkpoints, the first is the reference (default: RUN's teacher, merged, gqa)")
    parser.add_argument("--tasks", default=None, metavar="DIR", help="TASK.validation.jsonl files, or hub (default: hub; the embedded tasks for demo)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--limit", type=positive, default=None, help="questions per task, the first N (default: all)")
    # perplexity and speed
    parser.add_argument("--text", default=None, help="c4, demo (its held-out part), or a .txt, .jsonl, .json.gz file (default: c4; demo for demo)")
    parser.add_argument("--sequences", type=positive, default=32, help="sequences of text for the perplexity")
    parser.add_argument("--length", type=positive, default=512, help="tokens per sequence")
    # how it runs
    parser.add_argument("--batch", type=positive, default=64, help="prompts per generation batch")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of the forward passes")
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


def on_tasks(model, tokenizer, tasks: dict[str, list], batch: int, name: str) -> dict:
    """Per task: exact-match and likelihood accuracy with standard errors; and the averages."""
    bar = tqdm(total=sum(map(len, tasks.values())), desc=f"{name}: tasks", unit="question")
    results = {}
    for task, examples in tasks.items():
        answers = generate_answers(model, tokenizer, [tokenize(e, tokenizer) for e in examples], batch, bar)
        exact = [answer == e.answer.strip() for answer, e in zip(answers, examples, strict=True)]
        scores = choice_likelihoods(model, [choice_samples(e, tokenizer) for e in examples], batch)
        likely = [max(range(len(s)), key=s.__getitem__) == e.label for s, e in zip(scores, examples, strict=True)]
        results[task] = {"questions": len(examples), "chance": sum(1 / len(e.choices) for e in examples) / len(examples)}
        for kind, right in (("exact_match", exact), ("likelihood", likely)):
            rate = sum(right) / len(right)
            results[task] |= {kind: rate, f"{kind}_stderr": math.sqrt(rate * (1 - rate) / len(right))}
    bar.close()
    questions = sum(r["questions"] for r in results.values())
    averages = {}
    for kind in ("exact_match", "likelihood", "chance"):
        averages[f"macro_{kind}"] = sum(r[kind] for r in results.values()) / len(results)
        averages[f"micro_{kind}"] = sum(r[kind] * r["questions"] for r in results.values()) / questions
    return {"tasks": results} | averages


def choice_samples(example, tokenizer) -> list[Sample]:
    """The prompt with each choice in turn as its answer."""
    prompt = tokenize(example, tokenizer).prompt
    end = tokenizer.eos_token_id
    return [Sample(prompt, (*tokenizer(choice, add_special_tokens=False)["input_ids"], end)) for choice in example.choices]


def table(results: dict[str, dict]) -> str:
    """Markdown: a row per figure, a column per checkpoint; task cells are exact match % (likelihood %)."""
    first = next(iter(results.values()))
    rows = [("", "chance", *results)]
    for task, figures in first["tasks"].items():
        rows.append((task, f"{figures['chance']:.1%}", *(f"{r['tasks'][task]['exact_match']:.1%} ({r['tasks'][task]['likelihood']:.1%})" for r in results.values())))
    for average in ("macro", "micro"):
        rows.append((f"**{average} average**", f"{first[f'{average}_chance']:.1%}", *(f"{r[f'{average}_exact_match']:.1%} ({r[f'{average}_likelihood']:.1%})" for r in results.values())))
    rows.append(("perplexity", "", *(f"{r['perplexity']:.3f}" for r in results.values())))
    rows.append(("kv heads", "", *(str(r["kv_heads"]) for r in results.values())))
    rows.append(("KV bytes per token", "", *(f"{r['cache_bytes_per_token']:.0f}" for r in results.values())))
    rows.append(("prefill tokens/s", "", *(f"{r['prefill_tokens_per_s']:.0f}" for r in results.values())))
    rows.append(("decode tokens/s", "", *(f"{r['decode_tokens_per_s']:.0f}" for r in results.values())))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main():
    args, clock = parse(), Clock()
    output = os.path.join(args.run, "eval.json")
    refuse_overwrite(output, args.force)
    models = chosen(args)
    described = {name: describe(path) for name, path in models.items()}
    calibration = os.path.join(args.run, "calibration.safetensors")
    demo = os.path.exists(calibration) and read_record(calibration, "01_calibrate.py")["model"]["name"] == DEMO
    source = args.tasks or (os.path.join(DEMO_HOME, "tasks") if demo else "hub")
    tasks = {}
    for task in args.only:
        examples, read = load_task(task, "validation", source)
        tasks[task] = examples[: args.limit]
        print(f"reads   {read}: {len(tasks[task])} of {len(examples)} questions")
    device = pick_device(args.device)

    results = {}
    for name, path in models.items():
        model, tokenizer = load_model(path, getattr(torch, args.dtype), device), load_tokenizer(path)
        length = min(args.length, model.config.max_position_embeddings)
        tokens, said = load_tokens(args.text or (DEMO if demo else "c4"), tokenizer, args.sequences, length, split="heldout")
        print(f"reads   {path}; {said}")
        results[name] = {"path": path, "kv_heads": described[name]["kv_heads"]} | on_tasks(model, tokenizer, tasks, args.batch, name)
        results[name] |= {"perplexity": perplexity(model, tokens), "perplexity_text": said, "perplexity_tokens": tokens.numel(),
                          "cache_bytes_per_token": cache_bytes_per_token(model, tokens[0])} | speed(model, tokens[0])

    shown = table(results)
    written = record("07_eval.py", args, next(iter(described.values())), [], {}, clock())
    write_json(output, written | {"device": device, "results": results})
    with open(output.removesuffix(".json") + ".md.tmp", "w", encoding="utf-8") as file:
        file.write(f"Task cells: exact match of greedy generation (choice of highest likelihood). Speeds: one sequence on {device}.\n\n{shown}\n")
    os.rename(file.name, file.name.removesuffix(".tmp"))
    print(f"\n{shown}\n\nwrote   {output}, {os.path.basename(file.name).removesuffix('.tmp')}")
    first, last = list(results.values())[0], list(results.values())[-1]
    averages = ", ".join(f"{name} {figures['macro_exact_match']:.1%}" for name, figures in results.items())
    print(f"07_eval: macro average {averages}; the last caches {last['cache_bytes_per_token'] / first['cache_bytes_per_token']:.3f} "
          f"of the first's bytes; in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
