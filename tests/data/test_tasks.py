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
      "answerA": "he's sad", "answerB": "depressed", "answerC": "fulfilled", "label": "3"},
     "Sasha took him to vegas for a vacation.\nQuestion: How would Sasha feel afterwards??\n"
     "Choices: ['he's sad', 'depressed', 'fulfilled']\nAnswer:", "fulfilled"),
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


def test_a_task_of_the_hub_is_read_by_its_name_there(monkeypatch):
    rows, asked = task_rows(3, 0)["winogrande"], []
    monkeypatch.setattr(tasks, "rows_of", lambda *names, split: asked.append((*names, split)) or rows)
    examples, path = load_task("winogrande", "validation", "hub")
    assert examples == [example_from_row("winogrande", row) for row in rows]
    assert asked == [("allenai/winogrande", "winogrande_xl", "validation")]
    assert path == "hub:allenai/winogrande"


def test_a_set_of_the_hub_of_another_size_than_published_is_noted():
    """Table 4's totals; files of one's own may have any size."""
    for number, (split, total) in enumerate((("train", 147_580), ("validation", 19_740))):
        counts = {task: sizes[number] for task, sizes in tasks.PUBLISHED_SIZES.items()}
        assert sum(counts.values()) == total and list(counts) == list(TASKS)
        for task, count in counts.items():
            assert tasks.size_note(task, split, "hub:x", count) == ""
            assert tasks.size_note(task, split, "hub:x", count + 1) == f" (Table 4 of the paper: {count})"
            assert tasks.size_note(task, split, "tasks/boolq.train.jsonl", 7) == ""


PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
BOOLQ = CORONER | {"label": True}
SIQA = {"context": "c", "question": "q", "answerA": "x", "answerB": "y", "answerC": "z", "label": "3"}


@pytest.mark.parametrize(("task", "row", "message"), [
    ("boolq", BOOLQ | {"label": "false"}, "'label': expected true, false, 1 or 0, found \"false\""),
    ("boolq", CORONER, "'answer' is missing"),
    ("piqa", PIQA | {"sol1": " "}, "expected choices that are not blank, found [\" \", \"b\"]"),
    ("hellaswag", ATHLETE | {"endings": ["bends"], "label": 0}, "expected choices that differ"),
    ("siqa", SIQA | {"label": "4"}, "'label': expected a whole number from 1 to 3, found \"4\""),
    ("arc_easy", LISTED | {"answerKey": "C"}, "'answerKey': expected one of ['A', 'B'], found \"C\""),
])
def test_bad_rows_name_file_line_and_column(tmp_path, task, row, message):
    path = tmp_path / f"{task}.validation.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (task_rows(1, 0)[task][0], row)))
    with pytest.raises(UserError) as error:
        load_task(task, "validation", str(tmp_path))
    line = str(error.value)
    assert line.startswith(f"{path} line 2: ") and message in line and "\n" not in line
