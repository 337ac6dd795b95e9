"""Prompts to the character, both schemas, and one clear line for each bad file."""

import json
import os

import pytest

from common.cli import UserError
from common.tasks import TASKS, example_from_row, load_task, tokenize
from conftest import END, ROOT, byte_tokenizer, save_tasks, task_rows

LISTED = {"question": "What is 1 + 1?", "choices": {"text": ["two", "it's one"], "label": ["A", "B"]}, "answerKey": "A"}
TABLE_5 = [  # task, row, prompt, answer
    ("arc_easy", LISTED, "Question: What is 1 + 1?\nChoices: ['two', \"it's one\"]\nAnswer:", "two"),
    ("arc_challenge", {"question": {"stem": "Which?", "choices": [{"text": "x", "label": "1"}, {"text": "y", "label": "2"}]}, "answerKey": "2"},
     "Question: Which?\nChoices: ['x', 'y']\nAnswer:", "y"),
    ("openbookqa", {"question_stem": "The sun is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "B"},
     "Question: The sun is\nChoices: ['hot', 'cold']\nAnswer:", "cold"),
    ("hellaswag", {"ctx": "A man sits. he", "endings": ["stands", "flies"], "label": "0"},
     "Please choose the most appropriate text to complete the passage below:\nPassage: A man sits. he\nChoices: ['stands', 'flies']\nAnswer:", "stands"),
    ("boolq", {"passage": "It rains.", "question": "is it wet", "label": False},
     "It rains.\nQuestion: is it wet?\nChoices: ['true', 'false']\nAnswer:", "false"),
    ("boolq", {"passage": "It rains.", "question": "is it wet", "answer": True},
     "It rains.\nQuestion: is it wet?\nChoices: ['true', 'false']\nAnswer:", "true"),
    ("winogrande", {"sentence": "Ann thanked Bo, so _ was kind.", "option1": "Ann", "option2": "Bo", "answer": "2"},
     "Choose the most sensible text to replace the \"_\" in the following sentence: Ann thanked Bo, so _ was kind.\nChoices: ['Ann', 'Bo']\nAnswer:", "Bo"),
    ("piqa", {"goal": "dry a cup", "sol1": "use a towel", "sol2": "use a hose", "label": 0},
     "Goal: dry a cup\nChoose the most sensible solution to achieve the goal. Choices: ['use a towel', 'use a hose']\nAnswer:", "use a towel"),
    ("siqa", {"context": "Jo fell.", "question": "How does Jo feel?", "answerA": "sore", "answerB": "glad", "answerC": "rich", "label": "1"},
     "Jo fell.\nQuestion: How does Jo feel??\nChoices: ['sore', 'glad', 'rich']\nAnswer:", "sore"),
]


@pytest.mark.parametrize(("task", "row", "prompt", "answer"), TABLE_5)
def test_prompts_of_table_5(task, row, prompt, answer):
    example = example_from_row(task, row)
    assert (example.prompt, example.answer) == (prompt, answer)


def test_tokens_are_prompt_then_answer_then_end_without_a_beginning():
    sample = tokenize(example_from_row("arc_easy", LISTED), byte_tokenizer())
    decoded = byte_tokenizer().decode(sample.prompt + sample.answer)
    assert decoded.endswith("Answer:two<eos>") and decoded.startswith("Question") and sample.answer[-1] == END
    assert len(sample) == len(sample.prompt) + 4


def test_local_files(tmp_path):
    source = save_tasks(tmp_path / "tasks")
    for task in TASKS:
        examples, read = load_task(task, "train", source)
        assert len(examples) == 12 and read.endswith(f"{task}.train.jsonl")
        assert all(example.answer in example.prompt for example in examples)


def test_labels_in_a_file_of_their_own(tmp_path):
    rows = task_rows(4, 0)["piqa"]
    labels = [row.pop("label") for row in rows]
    (tmp_path / "piqa.validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "piqa.validation.labels").write_text("".join(f"{label}\n" for label in labels))
    examples, _ = load_task("piqa", "validation", str(tmp_path))
    assert [example.label for example in examples] == labels
    (tmp_path / "piqa.validation.labels").write_text("0\n")
    with pytest.raises(UserError, match="4 rows and 1 labels"):
        load_task("piqa", "validation", str(tmp_path))


GOOD = json.dumps({"goal": "g", "sol1": "a", "sol2": "b", "label": 1}) + "\n"


@pytest.mark.parametrize(("content", "message"), [
    (GOOD + "{not json}\n", r"line 2: not JSON: .* at column 2"),
    (GOOD + GOOD + '{"goal": "g", "sol1": "a", "label": 0}\n', r"line 3: column 'sol2' is missing"),
    (GOOD + '{"goal": "g", "sol1": "a", "sol2": "b", "label": 7}\n', r"line 2: .*label 7"),
    (GOOD + "[1]\n", r"line 2: expected a JSON object"),
    ("", "at least one row"),
])
def test_bad_files_name_file_and_line(tmp_path, content, message):
    (tmp_path / "piqa.train.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as raised:
        load_task("piqa", "train", str(tmp_path))
    assert "piqa.train.jsonl" in str(raised.value)


REAL = ROOT.parent / "shared" / "data" / "tasks"
ROWS = {"boolq": 3270, "arc_easy": 570, "arc_challenge": 299, "openbookqa": 500, "piqa": 1838, "siqa": 1954, "winogrande": 1267}


@pytest.mark.skipif(not REAL.exists(), reason="the published files are not here")
@pytest.mark.parametrize("task", ROWS)
def test_published_files(task):
    examples, _ = load_task(task, "validation", os.fspath(REAL))
    assert len(examples) == ROWS[task]  # the paper's Table 4
    assert all(example.prompt.endswith("\nAnswer:") for example in examples)
