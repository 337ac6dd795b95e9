"""What a chat model still answers: four hundred easy questions, to a source and to what was merged from it.

    python -m bench.answers --models source=DIR merged=RUN/merged trained=RUN/gqa

Each question is asked by itself, through the chat template if there is one, and answered greedily. An answer
is right if it has the word, or one of the words, that bench/questions.txt gives for it, however much else it
says in --tokens tokens. Writes OUT/answers.md, the share of right answers, ± the standard error over
questions, and all answers side by side; the last line is JSON.
"""

import json
import os
import re
import statistics
from pathlib import Path

import torch

from bench.machine import machine, named_directories, standard_error
from common.evaluation.evaluate import complete, prompt_ids
from common.models.load import load_model, load_tokenizer, pick_device
from common.reporting.tables import markdown_table, markdown_text
from common.run.errors import run_stage
from common.run.files import write_text
from common.run.flags import Parser, positive

QUESTIONS = Path(__file__).with_name("questions.txt")  # QUESTION | WORD / WORD


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--models", nargs="+", required=True, metavar="NAME=DIR",
                       help="checkpoints; the others are compared with the first")
    flags.add_argument("--tokens", type=positive, default=40, help="of an answer, at most")
    flags.add_argument("--batch", type=positive, default=50, help="questions answered at a time")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--out", default="runs/answers")
    return flags.parse_args()


def read_questions() -> dict[str, list[str]]:
    """Question -> words, any of which makes an answer right."""
    lines = (line.split(" | ") for line in QUESTIONS.read_text(encoding="utf-8").splitlines())
    return {question: words.split(" / ") for question, words in lines}


def is_right(answer: str, words: list[str]) -> bool:
    """Whether one of the words occurs in the answer, by itself and in any case."""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE) for word in words)


def percent(values: list[float]) -> str:
    """The mean ± its standard error, in percent."""
    return f"{100 * statistics.mean(values):.0f} ± {100 * standard_error(values):.1f}"


def table(right: dict[str, list[bool]]) -> str:
    """Percent right, and the difference from the first model, question by question, as Markdown."""
    first = next(iter(right.values()))
    rows = []
    for name, ours in right.items():
        differences = [mine - theirs for mine, theirs in zip(ours, first, strict=True)]
        rows.append([name, percent(ours), percent(differences) if ours is not first else ""])
    return markdown_table(["answers", "% right", "minus the first's"], rows) + "\n"


def side_by_side(questions: dict[str, list[str]], answers: dict[str, list[str]]) -> str:
    """Every question and every model's answer, as Markdown."""
    sections = []
    for index, question in enumerate(questions):
        lines = [f"- {markdown_text(name)}: {markdown_text(texts[index])}" for name, texts in answers.items()]
        sections.append(f"**{question}**\n\n" + "\n".join(lines) + "\n")
    return "\n".join(sections)


def main():
    args = parse()
    directories, questions = named_directories(args.models), read_questions()
    answers, right, device = {}, {}, pick_device("auto")
    for name, path in directories.items():
        tokenizer, model = load_tokenizer(path), load_model(path, getattr(torch, args.dtype), device)
        prompts = prompt_ids(list(questions), tokenizer)
        answers[name] = complete(model, tokenizer, prompts, args.tokens, args.batch)
        right[name] = [is_right(*pair) for pair in zip(answers[name], questions.values(), strict=True)]
    text = table(right)
    write_text(os.path.join(args.out, "answers.md"), f"{text}\n{side_by_side(questions, answers)}")
    print(text)
    shares = {name: statistics.mean(ours) for name, ours in right.items()}
    print(json.dumps({"right": shares, "settings": vars(args), "machine": machine(device)}))


if __name__ == "__main__":
    run_stage(main)
