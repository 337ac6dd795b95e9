"""The eight multiple-choice tasks: reading rows, formatting prompts (Table 5), tokenizing.

Rows may use the hub's current schema or that of the original release. Prompts match the authors' released
data to the character: the template adds a question mark to BoolQ questions, which have none, and to SIQA
questions, which already have one (hence "??").
"""

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from common.data.data_sets import rows_of
from common.data.rows import Sample, abbreviated, checked, column, nested, numbered, parse_rows, read_rows
from common.models.load import bos_prefix
from common.run.errors import UserError


@dataclass(frozen=True)
class Example:
    """One question: the prompt, the choices in prompt order, and the index of the right one."""

    task: str
    prompt: str
    choices: tuple[str, ...]
    label: int

    @property
    def answer(self) -> str:
        return self.choices[self.label]


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
PUBLISHED_SIZES = {  # Table 4: task -> rows of its train and validation split
    "boolq": (9427, 3270), "piqa": (16113, 1838), "hellaswag": (39905, 10042), "winogrande": (40398, 1267),
    "arc_challenge": (1119, 299), "arc_easy": (2251, 570), "openbookqa": (4957, 500), "siqa": (33410, 1954),
}  # fmt: skip


def _label(row: dict, name: str, first: int, count: int) -> int:
    """Index of the right one of `count` choices, numbered from `first` by an integer or by digits."""
    value = column(row, name, object)
    if not str(value).isdecimal() or not 0 <= int(value) - first < count:
        raise ValueError(f"column {name!r}: expected a whole number from {first} to {first + count - 1}, "
                         f"found {abbreviated(value)}")
    return int(value) - first


def _lettered(row: dict, question: str, choices: dict) -> tuple[str, list[str], int]:
    """ARC and OpenBookQA: choices are labelled with letters, and column answerKey has the right letter."""
    texts = column(choices, "choices.text", list)
    letters, answer = column(choices, "choices.label", list)[: len(texts)], column(row, "answerKey")
    if answer not in letters:
        raise ValueError(f"column 'answerKey': expected one of {letters}, found {abbreviated(answer)}")
    return f"Question: {question}\n", texts, letters.index(answer)


def _arc(row):
    if not isinstance(row.get("question"), dict):
        return _lettered(row, column(row, "question"), nested(column(row, "choices", dict), "choices"))
    question = nested(row["question"], "question")  # original release: choices in it, one object each
    choices = [checked(choice, "question.choices", dict)
               for choice in column(question, "question.choices", list)]
    columns = {f"choices.{name}": [choice.get(name) for choice in choices] for name in ("text", "label")}
    return _lettered(row, column(question, "question.stem"), columns)


def _openbookqa(row):
    choices = nested(column(row, "choices", dict), "choices")
    return _lettered(row, column(row, "question_stem"), choices)


def _boolq(row):
    name = "answer" if row.get("label") is None else "label"  # a table may have both, and null in one
    value = column(row, name, object)
    if value not in (0, 1):  # True and False are; the text "false" would count as true
        raise ValueError(f"column {name!r}: expected true, false, 1 or 0, found {abbreviated(value)}")
    question = f"{column(row, 'passage')}\nQuestion: {column(row, 'question')}?\n"
    return question, ["true", "false"], 0 if value else 1


def _hellaswag(row):
    endings = column(row, "endings", list)
    question = ("Please choose the most appropriate text to complete the passage below:\n"
                f"Passage: {column(row, 'ctx')}\n")
    return question, endings, _label(row, "label", 0, len(endings))


# task whose choices have columns of their own -> its question, the columns in it, those of the choices, and
# the one of the label with the label of the first choice
BY_COLUMNS = {
    "piqa": ("Goal: {goal}\nChoose the most sensible solution to achieve the goal. ",
             ("goal",), ("sol1", "sol2"), "label", 0),
    "winogrande": ('Choose the most sensible text to replace the "_" in the following sentence: {sentence}\n',
                   ("sentence",), ("option1", "option2"), "answer", 1),
    "siqa": ("{context}\nQuestion: {question}?\n",
             ("context", "question"), ("answerA", "answerB", "answerC"), "label", 1),
}  # fmt: skip


def _by_columns(task: str, row: dict) -> tuple[str, list[str], int]:
    question, columns, columns_of_choices, label, first = BY_COLUMNS[task]
    choices = [column(row, name) for name in columns_of_choices]
    question = question.format(**{name: column(row, name) for name in columns})
    return question, choices, _label(row, label, first, len(choices))


READERS = {"boolq": _boolq, "hellaswag": _hellaswag, "arc_challenge": _arc, "arc_easy": _arc,
           "openbookqa": _openbookqa} | {task: partial(_by_columns, task) for task in BY_COLUMNS}


def example_from_row(task: str, row: dict) -> Example:
    """The prompt and choices of one row. Raises ValueError naming what was expected.

    Duplicate choices are accepted unless all are equal: SIQA and OpenBookQA have such rows.
    """
    question, choices, label = READERS[task](row)
    if not all(checked(choice, "choices").strip() for choice in choices):
        raise ValueError(f"expected choices that are not blank, found {abbreviated(choices)}")
    if len(set(choices)) < 2:
        raise ValueError(f"expected choices that differ, found {abbreviated(choices)}")
    quoted = ", ".join(f"'{choice}'" for choice in choices)
    shown = f"[{quoted}]" if task in BY_COLUMNS else choices
    return Example(task, f"{question}Choices: {shown}\nAnswer:", tuple(choices), label)


def task_file(task: str, split: str, source: str) -> str | None:
    """The file of a split of a task in a directory: TASK.SPLIT.jsonl or .parquet; None if there is none."""
    paths = (os.path.join(source, f"{task}.{split}{suffix}") for suffix in (".jsonl", ".parquet"))
    return next(filter(os.path.exists, paths), None)


def load_task(task: str, split: str, source: str) -> tuple[list[Example], str]:
    """All examples of one split, and the name of their source.

    source: "hub", or a directory with the split's task_file. split: "train" or "validation". Raises UserError
    naming file, line and column of the first bad row, and if there is no row.
    """
    if source == "hub":
        name, configuration = HUB[task]
        path, rows = f"hub:{name}", numbered(rows_of(name, configuration, split=split))
    else:
        require_split([task], split, source)
        path = task_file(task, split, source)
        rows = read_rows(path)
    examples = [example for _, example in parse_rows(path, rows, partial(example_from_row, task))]
    if not examples:
        raise UserError(f"{path}: expected at least one row, found none")
    return examples, path


def size_note(task: str, split: str, path: str, count: int) -> str:
    """What to add to the line about a set of the hub, by its path from load_task, whose size is not that of
    Table 4; otherwise "".
    """
    published = PUBLISHED_SIZES[task][split == "validation"]
    differs = path.startswith("hub:") and count != published
    return f" (Table 4 of the paper: {published})" if differs else ""


def has_split(task: str, split: str, source: str) -> bool:
    """Whether a source, as for load_task, has this split of a task; the hub has all."""
    return source == "hub" or task_file(task, split, source) is not None


def require_split(tasks: Sequence[str], split: str, source: str) -> None:
    """Raise UserError naming all tasks that have no such split, and the flag that does without them."""
    present = [task for task in tasks if has_split(task, split, source)]
    missing = [task for task in tasks if task not in present]
    if missing:
        advice = " ".join(["--only", *present]) if present else "--tasks none"
        raise UserError(f"task file not found: expected TASK.{split}.jsonl or .parquet in {source} of "
                        f"{', '.join(missing)}; pass {advice} to do without")


def select_questions(count: int, limit: int | None, seed: int | None) -> list[int]:
    """Indices of the questions to evaluate, ascending: all, the first `limit`, or `limit` random ones."""
    if limit is None or limit >= count:
        return list(range(count))
    return list(range(limit)) if seed is None else sorted(random.Random(seed).sample(range(count), limit))


def _ids(text: str, tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _prompt(example: Example, tokenizer) -> tuple[int, ...]:
    return (*bos_prefix(tokenizer), *_ids(example.prompt, tokenizer))


def tokenize(example: Example, tokenizer) -> Sample:
    """Prompt and answer, tokenized separately; the prompt begins with bos_prefix, the answer ends with
    end-of-sequence.
    """
    answer = (*_ids(example.answer, tokenizer), tokenizer.eos_token_id)
    return Sample(_prompt(example, tokenizer), answer)


def choice_samples(example: Example, tokenizer) -> list[Sample]:
    """One sample per choice, as tokenize gives it: the prompt with the choice as its answer."""
    prompt, end = _prompt(example, tokenizer), tokenizer.eos_token_id
    return [Sample(prompt, (*_ids(choice, tokenizer), end)) for choice in example.choices]


def check_lengths(samples: Iterable[tuple[int, Sample]], positions: int, source: str) -> None:
    """Raise UserError for a sample, of (row number, sample) pairs, that exceeds the model's positions.

    source: name of the data in error messages.
    """
    for index, sample in samples:
        if len(sample) > positions:
            raise UserError(f"{source} row {index}: expected at most {positions} tokens (the model's "
                            f"max_position_embeddings), found {len(sample)}")
