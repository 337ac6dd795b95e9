"""What checkpoints are compared on: what is read and refused, and which predictions are compared."""

import contextlib
import json

import numpy
import pytest

from common.data.chat import load_chats, token_lines
from common.data.documents import EVALUATION
from common.data.tasks import example_from_row
from common.data.text import TOKEN
from common.evaluation import compared, measure
from common.evaluation.compared import Settings, Tokenized, prepare
from common.models.load import load_tokenizer
from common.run.errors import UserError
from common.training.lines import CHATS, TEXT
from models import byte_tokenizer, chatml_tokenizer, save_tiny
from runs import messages, save_chats


def test_a_question_beyond_the_positions_is_refused_before_any_scoring(inputs):
    """Counted with the longest choice and end-of-sequence, whichever choice is right."""
    rest = len("p\nQuestion: ?\nChoices: ['true', 'false']\nAnswer:false") + 1
    for length, fits in ((257, False), (256, True)):
        row = {"question": "q" * (length - rest), "passage": "p", "label": True}
        questions = {"boolq": {1: example_from_row("boolq", row)}}
        message = "boolq.validation row 1: expected at most 256 tokens"
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match=message):
            prepare(inputs["model"], Settings(length=2), questions, None)


def test_tokens_and_prompts_that_the_model_cannot_take_are_refused(inputs, tmp_path):
    """260 tokens in its vocabulary, 256 positions, of which an answer takes 64."""
    for token, prompt in ((259, "x" * 192), (260, ""), (259, "x" * 193)):
        numpy.save(f"{tmp_path}/tokens.npy", numpy.array([[1, token]], TOKEN))
        message = f"expected tokens below 260, the vocabulary of {inputs['model']}, found 260"
        if token < 260:
            message = "--prompts: expected at most 192 tokens, for an answer of 64 .*, found 193"
        settings = Settings(text=f"{tmp_path}/tokens.npy", length=2, prompts=(prompt,))
        with contextlib.nullcontext() if len(prompt) == 192 else pytest.raises(UserError, match=message):
            prepare(inputs["model"], settings, {}, None)


def test_chats_are_read_from_messages_as_from_their_tokens(tmp_path):
    """What a training leaves has chats as tokens, which suit one tokenizer alone."""
    path, tokens = save_tiny(tmp_path / "model", vocab_size=300), tmp_path / "tokens.jsonl"
    chatml_tokenizer().save_pretrained(path)
    chats = save_chats(tmp_path / "chats.jsonl", *[
        messages(("user", f"What {number}?"), ("assistant", "It is a colour."), ("user", "And?"),
                 ("assistant", "No.")) for number in range(3)])
    samples, _ = load_chats(chats, load_tokenizer(path), 256, EVALUATION)
    tokens.write_text(token_lines(samples))
    for source in (chats, str(tokens)):
        read, _ = prepare(path, Settings(chat=source), {}, None).sets[CHATS]
        assert [[*map(list, sample.segments)] for sample in read] == [
            [*map(list, sample.segments)] for sample in samples]


def tokenized(tokenizer, texts: list[str]) -> Tokenized:
    return Tokenized(tokenizer, 2, {TEXT: (texts, "a text")}, {}, {}, [])


def test_only_tokens_of_one_tokenizer_are_compared(tmp_path):
    """Tokens may be the same by chance; tokens of a file mean the same to one tokenizer only."""
    other = byte_tokenizer()
    other.add_tokens("another")
    tokenizers = {"a": byte_tokenizer(), "b": byte_tokenizer(), "c": other}
    each = {name: tokenized(tokenizer, []) for name, tokenizer in tokenizers.items()}
    paths = {name: f"models/{name}" for name in each}
    assert compared.same_tokenizers(paths, each, Settings(text="text.txt")) == {"a", "b"}
    with pytest.raises(UserError, match="rows.npy: expected .* one tokenizer, .* of models/a and models/c"):
        compared.same_tokenizers(paths, each, Settings(text="rows.npy"))
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"segments": [[1], [2]]}))
    with pytest.raises(UserError, match="chats.jsonl: expected checkpoints with one tokenizer"):
        compared.same_tokenizers(paths, each, Settings(chat=str(chats)))


def test_the_reference_is_the_first_checkpoint_where_tokens_are_the_same(monkeypatch):
    """Not of another tokenizer, nor of other tokens, as where texts are cut."""
    names, against = ("first", "same", "other tokenizer", "other tokens"), []
    texts = {name: tokenized(None, ["other" if name == names[3] else "tokens"]) for name in names}

    def measured(name, checkpoint, tokenized, reference, settings):
        against.append(reference)
        return {"path": name}, [f"answer of {name}"], {TEXT: f"predictions of {name}"}

    monkeypatch.setattr(measure, "measure", measured)
    comparable = {*names} - {names[2]}
    results, outcomes = measure.measure_all(dict.fromkeys(names), texts, comparable, Settings(), "run")
    assert against == [None, {TEXT: "predictions of first"}, {}, {}]
    assert [*results] == [*names] and outcomes == [f"answer of {name}" for name in names]
