"""Prompts to the character, both schemas, and one clear line for each bad file."""

import json

import pytest
from tokenizers import processors

from common.data import tasks
from common.data.rows import Sample
from common.data.tasks import TASKS, choice_samples, example_from_row, load_task, tokenize
from common.run.errors import UserError
from models import END, byte_tokenizer
from runs import task_rows

LISTED = {
    "question": "What is 1 + 1?",
    "choices": {"text": ["two", "it's one"], "label": ["A", "B"]},
    "answerKey": "A",
}
SHIRT = {
    "stem": "Which color shirt will reflect the most light on a hot, sunny day?",
    "choices": [{"text": "black", "label": "A"}, {"text": "blue", "label": "B"},
                {"text": "red", "label": "C"}, {"text": "white", "label": "D"}],
}
ATHLETE = {
    "ctx": "A male athlete puts powder on his hands. he",
    "label": "2",
    "endings": ["bends and inspects his hands for damage.",
                "shakes them shakingly before putting them in his mouth.",
                "mounts a high beam in the gym.", "then jumps up and does a high jump."],
}
CORONER = {
    "passage": "The Coroner – The BBC announced on 2 March 2017 that there would be no further series.",
    "question": "will there be a second series of the coroner",
}
CORONER_PROMPT = (
    "The Coroner – The BBC announced on 2 March 2017 that there would be no further series.\n"
    "Question: will there be a second series of the coroner?\nChoices: ['true', 'false']\nAnswer:"
)
NATALIE = ("Natalie was less religious than Patricia, therefore _ attended church services more often "
           "on Sundays.")
# task, row, prompt, answer: the paper's own examples, in the wording and line breaks of the authors' data
TABLE_5 = [
    ("arc_easy", LISTED,
     "Question: What is 1 + 1?\nChoices: ['two', \"it's one\"]\nAnswer:", "two"),
    ("arc_challenge", {"question": SHIRT, "answerKey": "D"},
     "Question: Which color shirt will reflect the most light on a hot, sunny day?\n"
     "Choices: ['black', 'blue', 'red', 'white']\nAnswer:", "white"),
    ("openbookqa",
     {"question_stem": "The sun is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]},
      "answerKey": "B"},
     "Question: The sun is\nChoices: ['hot', 'cold']\nAnswer:", "cold"),
    ("hellaswag", ATHLETE,
     "Please choose the most appropriate text to complete the passage below:\n"
     "Passage: A male athlete puts powder on his hands. he\n"
     "Choices: ['bends and inspects his hands for damage.', "
     "'shakes them shakingly before putting them in his mouth.', "
     "'mounts a high beam in the gym.', 'then jumps up and does a high jump.']\nAnswer:",
     "mounts a high beam in the gym."),
    ("boolq", CORONER | {"label": False}, CORONER_PROMPT, "false"),
    ("boolq", CORONER | {"answer": True}, CORONER_PROMPT, "true"),
    ("winogrande", {"sentence": NATALIE, "option1": "Natalie", "option2": "Patricia", "answer": "2"},
     f'Choose the most sensible text to replace the "_" in the following sentence: {NATALIE}\n'
     "Choices: ['Natalie', 'Patricia']\nAnswer:", "Patricia"),
    ("piqa",
     {"goal": "how do you flood a room?", "sol1": "fill it with objects.", "sol2": "fill it with water.",
      "label": 1},
     "Goal: how do you flood a room?\nChoose the most sensible solution to achieve the goal. "
     "Choices: ['fill it with objects.', 'fill it with water.']\nAnswer:", "fill it with water."),
    ("siqa",
     {"context": "Sasha took him to vegas for a vacation.", "question": "How would Sasha feel afterwards?",
      "answerA": "sad", "answerB": "depressed", "answerC": "fulfilled", "label": "3"},
     "Sasha took him to vegas for a vacation.\nQuestion: How would Sasha feel afterwards??\n"
     "Choices: ['sad', 'depressed', 'fulfilled']\nAnswer:", "fulfilled"),
]


@pytest.mark.parametrize(("task", "row", "prompt", "answer"), TABLE_5)
def test_prompts_of_table_5(task, row, prompt, answer):
    example = example_from_row(task, row)
    assert (example.prompt, example.answer) == (prompt, answer)


def test_tokens_are_prompt_then_answer_then_end():
    """Of a tokenizer that opens every text with a begin-of-sequence token unless it is told not to."""
    tokenizer, example = byte_tokenizer(), example_from_row("arc_easy", LISTED)
    tokenizer.bos_token = "^"
    begin = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    prompt, *choices = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
                        for text in (example.prompt, "two", "it's one"))
    for bos, begun in ((False, prompt), (None, (tokenizer.bos_token_id, *prompt))):
        tokenizer.bos = bos
        assert tokenize(example, tokenizer) == Sample(begun, (*choices[0], END))
        assert choice_samples(example, tokenizer) == [Sample(begun, (*ids, END)) for ids in choices]


def test_a_choice_without_tokens_is_one_line():
    samples = [Sample((5, 6), (7, END)), Sample((5, 6), (END,))]
    with pytest.raises(UserError, match="row 1: expected at least one token per choice"):
        tasks.check_lengths(enumerate(samples), 4, "tasks/piqa.train.jsonl")


def on_the_hub(task: str, row: dict) -> dict:
    """A row of an original release in the columns and types of the hub."""
    if task == "boolq":
        return {"question": row["question"], "passage": row["passage"], "answer": row["label"]}
    if task.startswith("arc"):
        question, objects = row["question"]["stem"], row["question"]["choices"]
        choices = {key: [choice[key] for choice in objects] for key in ("text", "label")}
        return {"id": "1", "question": question, "choices": choices, "answerKey": row["answerKey"]}
    return row | {"source_id": "1"}


def test_hub_files_give_the_examples_of_the_original_release(monkeypatch):
    rows, task_of = task_rows(6, 0), {place: task for task, place in tasks.HUB.items()}
    assert len(task_of) == len(TASKS)
    monkeypatch.setattr(tasks, "rows_of", lambda name, configuration, split: [
        on_the_hub(task_of[name, configuration], row) for row in rows[task_of[name, configuration]]])
    for task in TASKS:
        examples, path = load_task(task, "validation", "hub")
        assert examples == [example_from_row(task, row) for row in rows[task]]
        assert path == f"hub:{tasks.HUB[task][0]}"


def test_a_set_of_the_hub_of_another_size_than_published_is_noted():
    """Table 4's totals; files of one's own may have any size."""
    for number, (split, total) in enumerate((("train", 147_580), ("validation", 19_740))):
        counts = {task: sizes[number] for task, sizes in tasks.PUBLISHED_SIZES.items()}
        assert sum(counts.values()) == total and list(counts) == list(TASKS)
        for task, count in counts.items():
            assert tasks.size_note(task, split, "hub:x", count) == ""
            assert tasks.size_note(task, split, "hub:x", count + 1) == f" (Table 4 of the paper: {count})"
            assert tasks.size_note(task, split, "tasks/boolq.train.jsonl", 7) == ""


def save_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}


def test_bad_files_name_file_and_line(tmp_path):
    path = tmp_path / "piqa.train.jsonl"
    path.write_text(json.dumps(PIQA) + "\n{not json}\n")
    with pytest.raises(UserError, match=f"^{path} line 2: not JSON: .* at column 2"):
        load_task("piqa", "train", str(tmp_path))


ARC = {"question": SHIRT, "answerKey": "D"}
BOOLQ = CORONER | {"label": True}
SIQA = {"context": "c", "question": "q", "answerA": "x", "answerB": "y", "answerC": "z", "label": "3"}


@pytest.mark.parametrize(("task", "row", "message"), [
    ("boolq", BOOLQ | {"label": "false"}, "'label': expected true, false, 1 or 0, found \"false\""),
    ("boolq", CORONER, "'answer' is missing"),
    ("piqa", PIQA | {"sol1": "b"}, "expected choices that differ, found [\"b\", \"b\"]"),
    ("hellaswag", ATHLETE | {"endings": ["bends"]}, "'endings': expected two or more choices"),
    ("siqa", SIQA | {"label": "4"}, "'label': expected a whole number from 1 to 3, found \"4\""),
    ("arc_easy", ARC | {"answerKey": "E"}, "'answerKey': expected one of ['A', 'B', 'C', 'D'], found \"E\""),
])
def test_bad_rows_name_file_line_and_column(tmp_path, task, row, message):
    path = tmp_path / f"{task}.validation.jsonl"
    save_rows(path, [task_rows(1, 0)[task][0], row])
    with pytest.raises(UserError) as error:
        load_task(task, "validation", str(tmp_path))
    line = str(error.value)
    assert line.startswith(f"{path} line 2: not a row of {task}: ") and message in line and "\n" not in line


def test_selected_questions():
    assert tasks.select_questions(5, None, None) == tasks.select_questions(5, 9, 3) == [0, 1, 2, 3, 4]
    drawn = [tasks.select_questions(100, 10, seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0] == sorted(set(drawn[0])) and len(drawn[0]) == 10
