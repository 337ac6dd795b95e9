"""The eight multiple-choice tasks: where they come from, how a row becomes a prompt (Table 5), how it is tokenized.

A row may follow the hub's current schema or the original release's; both are read by the same function. Prompts are
those of the authors' released data to the character: BoolQ questions carry no question mark, SIQA's do, and the
template adds one to each (hence SIQA's "??").
"""

import json
import os
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


# task -> (hub dataset, configuration, name of its evaluation split)
HUB = {
    "boolq": ("google/boolq", None, "validation"),
    "piqa": ("baber/piqa", None, "validation"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "validation"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "validation"),
    "openbookqa": ("allenai/openbookqa", "main", "validation"),
    "siqa": ("lighteval/siqa", None, "validation"),
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

    Raises KeyError naming a column that is missing, ValueError for a label that names no choice.
    """
    prompt, choices, label = READERS[task](row)
    if not 0 <= label < len(choices):
        raise ValueError(f"label {label} names none of {len(choices)} choices")
    return Example(task, prompt, tuple(choices), label)


def load_task(task: str, split: str, source: str) -> tuple[list[Example], str]:
    """All examples of one split, and the name of what was read.

    source: a directory that holds TASK.SPLIT.jsonl (and TASK.SPLIT.labels where the release keeps labels apart),
    or "hub". split: "train" or "validation". Raises UserError naming file, line and column of the first bad line.
    """
    if source == "hub":
        return _from_hub(task, split)
    path = os.path.join(source, f"{task}.{split}.jsonl")
    if not os.path.exists(path):
        raise UserError(f"task file not found: expected {path} for task {task}, split {split}")
    rows, labels = _numbered_rows(path), _labels(path)
    if labels is not None and len(labels) != len(rows):
        raise UserError(f"{path}: expected one label a row, found {len(rows)} rows and {len(labels)} labels")
    examples = []
    for index, (number, row) in enumerate(rows):
        if labels is not None:
            row = row | {"label": labels[index]}
        examples.append(_checked(task, row, f"{path} line {number}"))
    if not examples:
        raise UserError(f"{path}: expected at least one row, found none")
    return examples, path


def _checked(task: str, row: dict, where: str) -> Example:
    try:
        return example_from_row(task, row)
    except KeyError as error:
        raise UserError(f"{where}: column {error} is missing; found columns {sorted(row)}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: not a {task} row: {error}") from error


def _numbered_rows(path: str) -> list[tuple[int, dict]]:
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path} line {number}: not JSON: {error.msg} at column {error.colno}") from error
            if not isinstance(row, dict):
                raise UserError(f"{path} line {number}: expected a JSON object, found {type(row).__name__}")
            rows.append((number, row))
    return rows


def _labels(path: str) -> list[str] | None:
    labels = path.removesuffix(".jsonl") + ".labels"
    if not os.path.exists(labels):
        return None
    with open(labels, encoding="utf-8") as file:
        return file.read().split()


def _from_hub(task: str, split: str) -> tuple[list[Example], str]:
    import datasets  # slow to import, and not needed with local files

    name, configuration, validation = HUB[task]
    try:
        rows = datasets.load_dataset(name, configuration, split=validation if split == "validation" else split)
    except Exception as error:  # the hub client raises a different class for each way of not being reached
        raise UserError(f"task {task}: cannot load {name} from the hub ({type(error).__name__}); "
                        "give a directory of local files with --tasks") from error
    return [_checked(task, row, f"hub {name} row {i}") for i, row in enumerate(rows)], f"hub:{name}"


def tokenize(example: Example, tokenizer) -> Sample:
    """Prompt and answer tokenized each on its own, the answer closed by end-of-sequence; no begin-of-sequence."""
    prompt = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
    return Sample(tuple(prompt), (*answer, tokenizer.eos_token_id))
