"""The eight multiple-choice tasks: where they come from, how a row becomes a prompt (Table 5), how it is tokenized.

A row may follow the hub's current schema or the original release's; both are read by the same function. Prompts are
those of the authors' released data to the character: BoolQ questions carry no question mark, SIQA's do, and the
template adds one to each (hence SIQA's "??").
"""

import glob
import json
import os
import random
from dataclasses import dataclass

from common.cli import UserError


@dataclass(frozen=True)
class Example:
    """One question: the prompt, the choices in their printed order, and which of them is right."""

    task: str
    prompt: str
    choices: tuple[str, ...]
    label: int

    @property
    def answer(self) -> str:
        return self.choices[self.label]


@dataclass(frozen=True)
class Sample:
    """A tokenized example: prompt ids, then answer ids with the end-of-sequence token. No begin-of-sequence token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


# task -> (hub dataset, configuration)
HUB = {
    "boolq": ("google/boolq", None),
    "piqa": ("baber/piqa", None),
    "hellaswag": ("Rowan/hellaswag", None),
    "winogrande": ("allenai/winogrande", "winogrande_xl"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
    "openbookqa": ("allenai/openbookqa", "main"),
    "siqa": ("lighteval/siqa", None),
}
TASKS = tuple(HUB)


def _listed(stem: str, texts: list[str], labels: list[str], answer: str):
    return f"Question: {stem}\nChoices: {texts}\nAnswer:", texts, labels.index(answer)


def _arc(row):
    if isinstance(row["question"], dict):  # original release: choices inside the question, one object each
        stem, choices = row["question"]["stem"], row["question"]["choices"]
        return _listed(stem, [c["text"] for c in choices], [c["label"] for c in choices], row["answerKey"])
    return _listed(row["question"], row["choices"]["text"], row["choices"]["label"], row["answerKey"])


def _openbookqa(row):
    return _listed(row["question_stem"], row["choices"]["text"], row["choices"]["label"], row["answerKey"])


def _boolq(row):
    value = row["label"] if "label" in row else row["answer"]
    prompt = f"{row['passage']}\nQuestion: {row['question']}?\nChoices: ['true', 'false']\nAnswer:"
    return prompt, ["true", "false"], 0 if value else 1


def _piqa(row):
    prompt = (f"Goal: {row['goal']}\nChoose the most sensible solution to achieve the goal. "
              f"Choices: ['{row['sol1']}', '{row['sol2']}']\nAnswer:")
    return prompt, [row["sol1"], row["sol2"]], int(row["label"])


def _hellaswag(row):
    prompt = ("Please choose the most appropriate text to complete the passage below:\n"
              f"Passage: {row['ctx']}\nChoices: {row['endings']}\nAnswer:")
    return prompt, row["endings"], int(row["label"])


def _winogrande(row):
    prompt = ('Choose the most sensible text to replace the "_" in the following sentence: '
              f"{row['sentence']}\nChoices: ['{row['option1']}', '{row['option2']}']\nAnswer:")
    return prompt, [row["option1"], row["option2"]], int(row["answer"]) - 1


def _siqa(row):
    choices = [row["answerA"], row["answerB"], row["answerC"]]
    listed = ", ".join(f"'{choice}'" for choice in choices)
    prompt = f"{row['context']}\nQuestion: {row['question']}?\nChoices: [{listed}]\nAnswer:"
    return prompt, choices, int(row["label"]) - 1


READERS = {
    "boolq": _boolq, "piqa": _piqa, "hellaswag": _hellaswag, "winogrande": _winogrande,
    "arc_challenge": _arc, "arc_easy": _arc, "openbookqa": _openbookqa, "siqa": _siqa,
}  # fmt: skip


def example_from_row(task: str, row: dict) -> Example:
    """The prompt and choices of one row.

    Raises KeyError naming a column that is missing, ValueError for a label that names no choice and for choices that
    are not text.
    """
    prompt, choices, label = READERS[task](row)
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError(f"expected choices of text, found {choices}")
    if not 0 <= label < len(choices):
        raise ValueError(f"label {label} names none of {len(choices)} choices")
    return Example(task, prompt, tuple(choices), label)


def load_task(task: str, split: str, source: str) -> tuple[list[Example], str]:
    """All examples of one split, and the name of what was read.

    source: "hub", or a directory that holds TASK.SPLIT.jsonl or, as the hub stores it, TASK.SPLIT.parquet (and
    TASK.SPLIT.labels where the release keeps labels apart). split: "train" or "validation". Raises UserError naming
    file, line and column of the first bad row.
    """
    if source == "hub":
        read, labels = f"hub:{HUB[task][0]}", None
        rows = _hub_rows(task, split)
    else:
        stem = os.path.join(source, f"{task}.{split}")
        read = next((stem + kind for kind in (".jsonl", ".parquet") if os.path.exists(stem + kind)), None)
        if read is None:
            raise UserError(f"task file not found: expected {stem}.jsonl or .parquet for task {task}, split {split}")
        rows, labels = _file_rows(read), _labels(stem + ".labels")
    if not rows:
        raise UserError(f"{read}: expected at least one row, found none")
    if labels is not None and len(labels) != len(rows):
        raise UserError(f"{read}: expected one label a row, found {len(rows)} rows and {len(labels)} labels")
    examples = []
    for index, row in enumerate(rows):
        row = {column: value for column, value in row.items() if value is not None}  # what a row lacks is null in a table
        if labels is not None:
            row["label"] = labels[index]
        try:
            examples.append(example_from_row(task, row))
        except KeyError as error:
            raise UserError(f"{_place(read, index, len(rows))}: column {error} is missing; found columns {sorted(row)}") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{_place(read, index, len(rows))}: not a {task} row: {error}") from error
    return examples, read


def _file_rows(path: str) -> list[dict]:
    import datasets  # slow to import: only where rows are read

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would log is in the error raised here
    kind = "parquet" if path.endswith(".parquet") else "json"
    try:  # streamed: straight from the file, no second copy in a cache
        return list(datasets.load_dataset(kind, data_files=glob.escape(path), split="train", streaming=True))
    except Exception as error:  # arrow's classes differ with what is wrong, and none names the line
        raise UserError((kind == "json" and _fault(path)) or f"{path}: cannot be read as {kind}: {error}") from error


def _hub_rows(task: str, split: str):
    import datasets

    name, configuration = HUB[task]
    try:
        return datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # the hub client raises a different class for each way of not being reached
        raise UserError(f"task {task}: cannot load {name} from the hub ({type(error).__name__}); "
                        "give a directory of local files with --tasks") from error


def _labels(path: str) -> list[str] | None:
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().split()


def _lines(path: str) -> list[tuple[int, bytes]]:
    """Line number and content of each line that is not blank: one per row."""
    with open(path, "rb") as file:
        return [(number, line) for number, line in enumerate(file, 1) if line.strip()]


def _place(read: str, index: int, rows: int) -> str:
    lines = _lines(read) if read.endswith(".jsonl") else []
    return f"{read} line {lines[index][0]}" if len(lines) == rows else f"{read} row {index}"


def _fault(path: str) -> str | None:
    """What keeps a file from being rows of JSON objects, where it can be told."""
    lines = _lines(path)
    if not lines:
        return f"{path}: expected at least one row, found none"
    for number, line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return f"{path} line {number}: not JSON: {error.msg} at column {error.colno}"
        except UnicodeDecodeError as error:
            return f"{path} line {number}: not UTF-8: {error.reason} at byte {error.start + 1}"
        if not isinstance(row, dict):
            return f"{path} line {number}: expected a JSON object, found {type(row).__name__}"


def picked(count: int, limit: int | None, seed: int | None) -> list[int]:
    """Which of `count` questions are evaluated, ascending: all, the first `limit`, or `limit` drawn with a seed."""
    if limit is None or limit >= count:
        return list(range(count))
    return list(range(limit)) if seed is None else sorted(random.Random(seed).sample(range(count), limit))


def tokenize(example: Example, tokenizer) -> Sample:
    """Prompt and answer tokenized each on its own, the answer closed by end-of-sequence; no begin-of-sequence."""
    prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
    return Sample(tuple(prompt), (*answer, tokenizer.eos_token_id))


def choice_samples(example: Example, tokenizer) -> list[Sample]:
    """The prompt with each choice in turn as its answer."""
    prompt = tokenize(example, tokenizer).prompt
    return [Sample(prompt, (*tokenizer(choice, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)) for choice in example.choices]
