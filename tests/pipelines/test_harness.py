"""The standard harness as a witness: lm_eval must choose what 07_eval.py chose, in every question."""

import json

import pytest
from tokenizers import processors

from common.data.tasks import example_from_row
from models import byte_tokenizer, llama2_tokenizer, save_tiny
from pipelines import harness_tasks as harness
from runs import expect_error, read, recipe, task_rows

WRITE, CHECK = "pipelines/harness_tasks.py", "pipelines/harness_check.py"
QUESTIONS = {task: {index: example_from_row(task, row) for index, row in enumerate(rows)}
             for task, rows in task_rows(5, 5).items()}


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_questions_whose_prompt_and_choice_share_a_token_are_counted():
    examples = [example for questions in QUESTIONS.values() for example in questions.values()]
    merging = sum(any(choice.startswith("r") for choice in example.choices) for example in examples)
    assert harness.count_differing(byte_tokenizer([(":", "r")]), QUESTIONS, "") == merging > 0
    tokenizer = byte_tokenizer(bos_token="^")  # which begins prompts, here and in lm_eval
    begin = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begin
    assert harness.count_differing(tokenizer, QUESTIONS, "") == 0


@pytest.mark.parametrize(("tokenizer", "delimiter"), [(byte_tokenizer(), ""), (llama2_tokenizer(), " ")])
def test_tasks_hold_the_questions_and_the_delimiter(tmp_path, tokenizer, delimiter):
    """A space, where the tokenizer puts one before every text."""
    line = harness.write_tasks(str(tmp_path), QUESTIONS, tokenizer)
    assert f"joined by {delimiter!r}: 0 of 40 questions" in line
    for task, questions in QUESTIONS.items():
        assert read_rows(tmp_path / f"{task}.jsonl") == [
            {"question": index, "prompt": example.prompt, "choices": list(example.choices),
             "label": example.label} for index, example in questions.items()]
        assert f'target_delimiter: "{delimiter}"\n' in (tmp_path / f"{task}.yaml").read_text()


def change_choice(path) -> None:
    rows = read_rows(path)
    rows[7]["likelihood_scores"] = [-score for score in rows[7]["likelihood_scores"]]
    path.write_text("\n".join(map(json.dumps, rows)))


def change_accuracy(path) -> None:
    results = read(path)
    results["results"]["table5_siqa"]["acc,none"] += 1e-6
    path.write_text(json.dumps(results))


@pytest.mark.slow
def test_the_harness_makes_the_same_choices(inputs, tmp_path):
    """pipelines/harness.sh, with lm_eval itself, on a random GQA model and on the questions that 07_eval.py
    drew; other answers are one line.
    """
    pytest.importorskip("lm_eval")
    model, home = save_tiny(tmp_path / "model", num_key_value_heads=2), tmp_path / "run of one"
    done = recipe("harness.sh", model, inputs["tasks"], RUN=home, ONLY="boolq piqa siqa", LIMIT=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prompt and choice joined by '': 0 of 12 questions are tokenized differently" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert "harness: lm_eval made the same choice in all 12 questions; macro average model " in last
    outcomes = read_rows(home / "eval/eval.jsonl")
    assert len({row["likelihood_choice"] for row in outcomes}) > 1  # not a model that always takes the first
    (results,) = home.glob("tasks/samples/model/*/results_*.json")
    for path, change, message in ((results, change_accuracy, "model, table5_siqa: accuracy "),
                                  (home / "eval/eval.jsonl", change_choice,
                                   "model, piqa: 1 of 4 choices differ; question ")):
        change(path)
        expect_error(message, CHECK, home, home / "tasks")
    expect_error("already exists; pass --force", WRITE, "--run", home, "--output", home / "tasks")
