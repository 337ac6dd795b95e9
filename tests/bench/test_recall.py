"""What models recall: easy questions, which answers count as right, and pass keys hidden in text."""

import random
import re

import pytest
import torch

from bench import retrieval
from models import byte_tokenizer, save_tiny, tiny_model
from runs import last_line, run

pytestmark = pytest.mark.slow
LINE = re.compile(r"\nThe (\w+) pass key is (\d{5})\.\n")


@pytest.mark.parametrize("keys", [1, 8])
@pytest.mark.parametrize("depth", retrieval.DEPTHS)
def test_keys_are_hidden_at_their_depths(keys, depth):
    tokenizer, filler = byte_tokenizer(), "".join(chr(97 + number % 26) for number in range(1000))
    ids = tokenizer(filler, add_special_tokens=False)["input_ids"]
    row, answer = retrieval.hide(ids, tokenizer, 900, depth, keys, random.Random(3))
    text = tokenizer.decode(row)
    assert len(row) == 900
    hidden = dict(LINE.findall(text))
    assert len(hidden) == len(set(hidden.values())) == keys and hidden.keys() <= set(retrieval.COLOURS)
    asked = re.search(r"\nThe (\w+) pass key is( \d{5})$", text)
    assert asked[2] == f" {hidden[asked[1]]}" == tokenizer.decode(row[-answer:])
    left = LINE.sub("", text[: asked.start()])
    assert left == filler[: len(left)]  # nothing of the text is lost or moved
    places = {match[1]: len(LINE.sub("", text[: match.start()])) / len(left) for match in LINE.finditer(text)}
    assert places[asked[1]] == pytest.approx(depth, abs=1 / len(left))
    assert len({round(place, 2) for place in places.values()}) == keys  # each at a depth of its own


def test_a_key_is_recalled_if_greedy_decoding_writes_it():
    model, prompt = tiny_model(), torch.arange(20) * 3
    written = model.generate(prompt[None], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    row = written[0].tolist()
    assert len(row) == 25 and retrieval.recalls(model, row, 5)
    for place in (-5, -3, -1):
        wrong = list(row)
        wrong[place] += 1
        assert not retrieval.recalls(model, wrong, 5)


def test_retrieval_bench(inputs, tmp_path):
    out, model = tmp_path / "out", save_tiny(tmp_path / "model", max_position_embeddings=600)
    figures = last_line(run("bench/retrieval.py", "--source", model, "--models", f"same={model}", "--text",
                            inputs["text"], "--samples", 2, "--out", out))
    recalled = figures["recalled"]
    assert list(recalled["source, 1"]) == ["512"]  # the lengths that the model has positions for
    assert recalled["source, 8"] == recalled["same, 8"]
