"""The standard harness as a witness: lm_eval must choose what 07_eval.py chose, in every question."""

import json
import os
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.cli import UserError
from common.data.tasks import example_from_row
from common.reporting import harness
from conftest import ROOT, byte_tokenizer, save_tiny, task_rows

QUESTIONS = {task: {i: example_from_row(task, row) for i, row in enumerate(rows)} for task, rows in task_rows(5, 5).items()}
TEXTS = [text for questions in QUESTIONS.values() for e in questions.values() for text in (e.prompt, *e.choices)]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_delimiter_of_a_tokenizer_that_puts_a_space_before_every_text():
    """As SentencePiece does: a choice on its own starts with the space piece, which in the middle of a text takes a space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"]))
    assert harness.differing(wrapped(tokenizer), QUESTIONS, " ") == 0
    assert harness.differing(wrapped(tokenizer), QUESTIONS, "") == 8 * 5


def test_questions_whose_prompt_and_choice_melt_together_are_counted():
    characters = sorted(set("".join(TEXTS)))
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*characters, "</s>", ":r"])}, merges=[(":", "r")]))
    melting = sum(any(c.startswith("r") for c in e.choices) for questions in QUESTIONS.values() for e in questions.values())
    assert harness.differing(wrapped(tokenizer), QUESTIONS, "") == melting > 0
    assert harness.differing(byte_tokenizer(), QUESTIONS, "") == 0


def test_the_harness_makes_the_same_choices(inputs, tmp_path):
    """pipelines/harness.sh on a random GQA model; then with one answer of ours exchanged, and with one question missing."""
    pytest.importorskip("lm_eval")
    done = subprocess.run(["bash", str(ROOT / "pipelines" / "harness.sh"), save_tiny(tmp_path / "model", num_key_value_heads=2), inputs["tasks"]],
                          capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHON": sys.executable, "RUN": str(tmp_path / "run"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prompt and choice joined by '': 0 of 40 questions get other tokens" in done.stdout
    assert "harness: lm_eval made the same choice in all 40 questions; macro average model " in done.stdout.splitlines()[-1]

    outcomes = (tmp_path / "run" / "eval.jsonl").read_text().splitlines()
    assert 1 < len({json.loads(line)["likelihood_choice"] for line in outcomes})  # a random model, not one that always takes the first
    other = json.loads(outcomes[7])
    other["likelihood_scores"] = [-score for score in other["likelihood_scores"]]
    for changed, message in (([*outcomes[:7], json.dumps(other), *outcomes[8:]], "model, piqa: 1 of 5 choices differ; question 2: "),
                             (outcomes[1:], "model, boolq: expected lm_eval to answer the 4 questions")):
        (tmp_path / "run" / "eval.jsonl").write_text("\n".join(changed))
        with pytest.raises(UserError, match=message):
            harness.compare(str(tmp_path / "run"), str(tmp_path / "run" / "tasks"))
