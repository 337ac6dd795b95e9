"""Easy questions: which answers count as right, and how models are compared."""

import math
import statistics

import pytest

from bench import answers
from helpers import run, save_tiny
from test_benches import last_line


@pytest.mark.parametrize("answer, words, expected", [
    ("The capital of Italy is Rome.", ["Rome"], True),
    ("ROME", ["Rome"], True),
    ("Romeo and Juliet", ["Rome"], False),
    ("There are 7 days", ["seven", "7"], True),
    ("There are 17 days", ["seven", "7"], False),
    ("It is in South\nAmerica", ["South America"], False),
    ("", ["Rome"], False),
])  # fmt: skip
def test_an_answer_is_right_if_a_word_stands_in_it(answer, words, expected):
    assert answers.is_right(answer, words) == expected


def test_no_question_gives_its_answer_away():
    questions = answers.read_questions()
    assert len(questions) == 100
    for question, words in questions.items():
        assert question.endswith("?") and words
        assert all(word and word == word.strip() and "/" not in word for word in words)
        assert not answers.is_right(question, words), question


def test_models_are_compared_question_by_question():
    right = {"source": [True, True, False, True], "merged": [True, False, True, False]}
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in answers.table(right).splitlines()]
    spread = statistics.stdev([0, -1, 1, -1]) / math.sqrt(4)
    assert rows[2][0] == "source" and rows[2][1].startswith("75 ±") and not rows[2][2]
    assert rows[3][0] == "merged" and rows[3][2] == f"-25 ± {100 * spread:.1f}"


@pytest.mark.slow
def test_answers_bench(tmp_path):
    model, out = save_tiny(tmp_path / "model"), tmp_path / "out"
    figures = last_line(run("bench/answers.py", "--models", f"a={model}", f"b={model}", "--tokens", 3,
                            "--out", out))
    assert figures["right"]["a"] == figures["right"]["b"]
    text = (out / "answers.md").read_text()
    assert all(f"**{question}**" in text for question in answers.read_questions())
    assert text.count("- b: ") == 100
