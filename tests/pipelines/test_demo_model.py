"""How the demo model, its text and its tasks were made."""

import gzip
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.data.demo import SHIPPED
from common.data.tasks import TASKS, example_from_row
from conftest import expect_error, run
from pipelines import demo_data, demo_model


def contents(directory: Path) -> dict[str, bytes]:
    """Name -> content of the files in a directory, uncompressed."""
    return {path.name.removesuffix(".gz"): (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
            for path in directory.iterdir() if path.is_file()}


@pytest.mark.release
def test_training_gives_the_same_bytes_each_time(tmp_path):
    for name in ("a", "b"):
        run("pipelines/demo_model.py", "--out", tmp_path / name, "--steps", 2, fresh=True)
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert first.keys() | {"README.md"} == contents(SHIPPED).keys()
    expect_error("a already exists", "pipelines/demo_model.py", "--out", tmp_path / "a")


def test_the_shipped_tasks_are_those_of_every_python(tmp_path):
    """The text is that of one Python."""
    run("pipelines/demo_data.py", "--out", tmp_path / "made")
    assert contents(tmp_path / "made" / "tasks") == contents(SHIPPED / "tasks")
    assert contents(tmp_path / "made" / "text").keys() | {"LICENSE.txt"} == contents(SHIPPED / "text").keys()
    expect_error("made already exists", "pipelines/demo_data.py", "--out", tmp_path / "made")


@pytest.fixture(scope="module")
def rows() -> dict:
    """(task, split) -> rows."""
    return demo_data.task_rows()


@pytest.fixture(scope="module")
def examples(rows) -> dict:
    """(task, split) -> examples."""
    return {(task, split): [example_from_row(task, row) for row in rows[task, split]] for task, split in rows}


@pytest.mark.parametrize("task", TASKS)
def test_tasks_are_fair(examples, task):
    """No validation prompt is trained on, the right answer is in the prompt, and no position is favoured."""
    train, validation = examples[task, "train"], examples[task, "validation"]
    assert (len(train), len(validation)) == (demo_data.TRAIN_ROWS, demo_data.VALIDATION_ROWS)
    assert not {example.prompt for example in train} & {example.prompt for example in validation}
    assert all(repr(example.answer) in example.prompt for example in train)
    choices = len(train[0].choices)
    for place in range(choices):  # 2000 draws: 5 sigma are 0.056 at most
        share = sum(example.label == place for example in train) / len(train)
        assert share == pytest.approx(1 / choices, abs=0.056)


def test_text_is_split_by_file():
    train, heldout = demo_data.read_corpus()
    assert len(train) >= demo_data.TRAIN_CHARS and len(heldout) >= demo_data.HELDOUT_CHARS
    sources = [path.read_text() for path in Path(os.__file__).parent.glob("*.py")]
    long = [source for source in sources if len(source) > 10_000]
    assert sum(source in heldout for source in long) >= 1
    assert not any(source in train and source in heldout for source in long)


class Tokens(SimpleNamespace):
    """The tokenizer of a model that is never given text."""

    eos_token_id, pad_token_id = 0, 1

    def __len__(self):
        return 100


def test_the_first_layer_starts_as_a_circuit_that_looks_back():
    """Head h attends to the token h + 1 places before, but for the noise of the other coordinates."""
    model = demo_model._new_model(Tokens())
    tokens = torch.randint(2, 100, (1, 220), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attentions = model(input_ids=tokens, output_attentions=True).attentions[0][0]  # [heads, 220, 220]
    for head, attention in enumerate(attentions):
        offsets = torch.arange(20, 220) - attention[20:].argmax(-1)
        assert offsets.mode().values == head + 1


def test_losses_count_the_tokens_of_weight_one():
    model = demo_model._new_model(Tokens())
    tokens, weights = demo_model._pad([([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 10, 11], [0, 1, 0])], 1)
    assert tokens.tolist() == [[5, 6, 7, 8], [9, 10, 11, 1]]
    assert weights.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    with torch.no_grad():
        losses = demo_model._losses(model, tokens, weights)
        log_probs = model(input_ids=tokens).logits.log_softmax(-1)
    expected = [-log_probs[0, 1, 7], -log_probs[0, 2, 8], -log_probs[1, 0, 10]]
    assert torch.allclose(losses, torch.stack(expected), atol=1e-5)
