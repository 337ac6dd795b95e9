"""Prompts to the character, both schemas, and one clear line for each bad file."""

import json
import os

import datasets
import pytest

from common.cli import UserError
from common.data import tasks
from common.data.tasks import TASKS, example_from_row, load_task, tokenize
from conftest import END, ROOT, byte_tokenizer, save_tasks, task_rows

LISTED = {"question": "What is 1 + 1?", "choices": {"text": ["two", "it's one"], "label": ["A", "B"]}, "answerKey": "A"}
SHIRT = {"stem": "Which color shirt will reflect the most light on a hot, sunny day?",
         "choices": [{"text": t, "label": n} for t, n in zip(["black", "blue", "red", "white"], "ABCD", strict=True)]}
ATHLETE = {"ctx": "A male athlete puts powder on his hands. he", "label": "2",
         "endings": ["bends and inspects his hands for damage.", "shakes them shakingly before putting them in his mouth.",
                     "mounts a high beam in the gym.", "then jumps up and does a high jump."]}
CORONER = {"passage": "The Coroner – The BBC announced on 2 March 2017 that there would be no further series.",
           "question": "will there be a second series of the coroner"}
TABLE_5 = [  # task, row, prompt, answer: the paper's own examples, in the wording and line breaks of the authors' data
    ("arc_easy", LISTED, "Question: What is 1 + 1?\nChoices: ['two', \"it's one\"]\nAnswer:", "two"),
    ("arc_challenge", {"question": SHIRT, "answerKey": "D"},
     "Question: Which color shirt will reflect the most light on a hot, sunny day?\nChoices: ['black', 'blue', 'red', 'white']\nAnswer:", "white"),
    ("openbookqa", {"question_stem": "The sun is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "B"},
     "Question: The sun is\nChoices: ['hot', 'cold']\nAnswer:", "cold"),
    ("hellaswag", ATHLETE,
     "Please choose the most appropriate text to complete the passage below:\nPassage: A male athlete puts powder on his hands. he\n"
     "Choices: ['bends and inspects his hands for damage.', 'shakes them shakingly before putting them in his mouth.', "
     "'mounts a high beam in the gym.', 'then jumps up and does a high jump.']\nAnswer:", "mounts a high beam in the gym."),
    *(("boolq", CORONER | label,
       "The Coroner – The BBC announced on 2 March 2017 that there would be no further series.\n"
       "Question: will there be a second series of the coroner?\nChoices: ['true', 'false']\nAnswer:", "false")
      for label in ({"label": False}, {"label": 0}, {"answer": False})),
    ("winogrande", {"sentence": "Natalie was less religious than Patricia, therefore _ attended church services more often on Sundays.",
                    "option1": "Natalie", "option2": "Patricia", "answer": "2"},
     'Choose the most sensible text to replace the "_" in the following sentence: Natalie was less religious than Patricia, therefore _ '
     "attended church services more often on Sundays.\nChoices: ['Natalie', 'Patricia']\nAnswer:", "Patricia"),
    ("piqa", {"goal": "how do you flood a room?", "sol1": "fill it with objects.", "sol2": "fill it with water.", "label": 1},
     "Goal: how do you flood a room?\nChoose the most sensible solution to achieve the goal. "
     "Choices: ['fill it with objects.', 'fill it with water.']\nAnswer:", "fill it with water."),
    ("siqa", {"context": "Sasha took him to vegas for a vacation.", "question": "How would Sasha feel afterwards?",
              "answerA": "sad", "answerB": "depressed", "answerC": "fulfilled", "label": "3"},
     "Sasha took him to vegas for a vacation.\nQuestion: How would Sasha feel afterwards??\n"
     "Choices: ['sad', 'depressed', 'fulfilled']\nAnswer:", "fulfilled"),
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


def on_the_hub(task: str, row: dict) -> dict:
    """A row of an original release in the columns and types of the hub."""
    if task == "boolq":
        return {"question": row["question"], "passage": row["passage"], "answer": row["label"]}
    if task.startswith("arc"):
        stem, choices = row["question"]["stem"], row["question"]["choices"]
        return {"id": "1", "question": stem, "choices": {key: [c[key] for c in choices] for key in ("text", "label")}, "answerKey": row["answerKey"]}
    return row | {"source_id": "1"}


def test_hub_files_give_the_examples_of_the_original_release(tmp_path, monkeypatch):
    """Directories laid out as the hub's repositories are, in its current schemas."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for task, rows in task_rows(6, 0).items():
        repository, configuration = tasks.HUB[task]
        home = tmp_path / repository
        files = home / (configuration or "data")
        files.mkdir(parents=True)
        for split in ("train", "validation"):
            datasets.Dataset.from_list([on_the_hub(task, row) for row in rows]).to_parquet(files / f"{split}-00000-of-00001.parquet")
        with open(home / "README.md", "a") as card:  # ai2_arc holds two configurations
            card.write("" if card.tell() else "---\nconfigs:\n")
            card.write(f"- config_name: {configuration or 'default'}\n  data_files:\n")
            card.writelines(f"  - split: {split}\n    path: {files.name}/{split}-*\n" for split in ("train", "validation"))
    monkeypatch.setattr(tasks, "HUB", {task: (str(tmp_path / name), configuration) for task, (name, configuration) in tasks.HUB.items()})
    for name in {name for name, _ in tasks.HUB.values()}:
        with open(f"{name}/README.md", "a") as card:
            card.write("---\n")
    for task, rows in task_rows(6, 0).items():
        for split in ("train", "validation"):
            examples, read = load_task(task, split, "hub")
            assert examples == [example_from_row(task, row) for row in rows] and read == f"hub:{tasks.HUB[task][0]}"


def test_parquet_as_the_hub_stores_it(tmp_path):
    rows = task_rows(6, 0)["boolq"]
    datasets.Dataset.from_list([on_the_hub("boolq", row) for row in rows]).to_parquet(tmp_path / "boolq.validation.parquet")
    examples, read = load_task("boolq", "validation", str(tmp_path))
    assert examples == [example_from_row("boolq", row) for row in rows] and read.endswith("boolq.validation.parquet")
    datasets.Dataset.from_list([*rows, rows[0] | {"passage": None}]).to_parquet(tmp_path / "boolq.validation.parquet")
    with pytest.raises(UserError, match=r"boolq.validation.parquet row 6: column 'passage' is missing"):
        load_task("boolq", "validation", str(tmp_path))


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
    (GOOD + "\n\n" + '{"goal": "g", "sol1": null, "sol2": "b", "label": 0}\n', r"line 4: column 'sol1' is missing; found .*'label', 'sol2'\]"),
    (GOOD + '{"goal": "g", "sol1": 5, "sol2": "b", "label": 0}\n', r"line 2: .*expected choices of text, found \[5, 'b'\]"),
    (GOOD * 20_000 + '{"goal": "g"}\n', r"line 20001: column 'sol1' is missing"),  # more than is parsed at a time
    (GOOD + '{"goal": "\udcff"}\n', r"line 2: not UTF-8: .* at byte 11"),
    (f"[{GOOD.strip()},{{}}]", r"row 1: column 'goal' is missing"),
    ('{"goal": "g", "goal": "g"}\n', r"cannot be read as json: .*specified twice"),
    ("", "at least one row"),
    ("\n\n", "at least one row"),
])
def test_bad_files_name_file_and_line(tmp_path, content, message):
    (tmp_path / "piqa.train.jsonl").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=message) as raised:
        load_task("piqa", "train", str(tmp_path))
    assert "piqa.train.jsonl" in str(raised.value)


def test_picked_questions():
    assert tasks.picked(5, None, None) == tasks.picked(5, 9, 3) == [0, 1, 2, 3, 4]
    assert tasks.picked(5, 2, None) == [0, 1]
    drawn = [tasks.picked(100, 10, seed) for seed in range(200)]
    assert drawn[0] == tasks.picked(100, 10, 0) != drawn[1]
    assert all(numbers == sorted(set(numbers)) and len(numbers) == 10 for numbers in drawn)
    assert set().union(*drawn) == set(range(100))  # any question can be drawn


REAL = ROOT.parent / "shared" / "data" / "tasks"
ROWS = {"boolq": 3270, "arc_easy": 570, "arc_challenge": 299, "openbookqa": 500, "piqa": 1838, "siqa": 1954, "winogrande": 1267}


@pytest.mark.skipif(not REAL.exists(), reason="the published files are not here")
@pytest.mark.parametrize("task", ROWS)
def test_published_files(task):
    examples, _ = load_task(task, "validation", os.fspath(REAL))
    assert len(examples) == ROWS[task]  # the paper's Table 4
    assert all(example.prompt.endswith("\nAnswer:") for example in examples)
