"""Calibration text: whole documents first, packed where there are too few, refused where there is too little."""

import gzip
import json

import pytest

from common.cli import UserError
from common.data import text
from common.data.text import load_tokens
from conftest import END, byte_tokenizer

DOCUMENTS = ["a" * 20, "b" * 50, "c" * 10, "d" * 30]


@pytest.fixture(params=["jsonl", "json.gz"])
def documents(request, tmp_path):
    path = tmp_path / f"text.{request.param}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    path.write_bytes(gzip.compress(lines.encode())) if request.param == "json.gz" else path.write_text(lines)
    return str(path)


def test_first_documents_that_are_long_enough(documents):
    tokens, said = load_tokens(documents, byte_tokenizer(), sequences=2, length=25)
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 25, "d" * 25] and "first 2 documents" in said


def test_packed_where_too_few_are_long_enough(documents):
    tokens, said = load_tokens(documents, byte_tokenizer(), sequences=2, length=40)
    flat = tokens.flatten().tolist()
    assert byte_tokenizer().decode(flat) == "a" * 20 + "<eos>" + "b" * 50 + "<eos>" + "c" * 8
    assert flat[20] == END and "packed (1 of 4 documents" in said


def test_too_little_text_says_found_and_needed(documents):
    with pytest.raises(UserError, match="expected 4 x 40 = 160 tokens, found 114"):
        load_tokens(documents, byte_tokenizer(), sequences=4, length=40)


def test_bad_lines_and_names(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(UserError, match="line 2: column 'text' is missing"):
        load_tokens(str(path), byte_tokenizer(), 1, 40)
    for name in ("nowhere.txt", str(tmp_path)):
        with pytest.raises(UserError, match="expected c4, demo, or"):
            load_tokens(name, byte_tokenizer(), 1, 4)


def test_c4_is_streamed_from_its_file_on_the_hub(tmp_path, monkeypatch):
    """A directory laid out as the hub's repository is; only the named file is read, and another for what is held out."""
    (tmp_path / "en").mkdir()
    for name, texts in ((text.C4_FILES["train"], DOCUMENTS), ("en/c4-train.00001-of-01024.json.gz", ["e" * 60]), (text.C4_FILES["heldout"], ["f" * 60])):
        lines = "".join(json.dumps({"text": t, "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b"}) + "\n" for t in texts)
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setattr(text, "C4", str(tmp_path))
    tokens, said = load_tokens("c4", byte_tokenizer(), sequences=2, length=25)
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 25, "d" * 25] and said == "c4: first 2 documents of at least 25 tokens"
    heldout, _ = load_tokens("c4", byte_tokenizer(), sequences=1, length=25, split="heldout")
    assert byte_tokenizer().batch_decode(heldout) == ["f" * 25]
    monkeypatch.setattr(text, "C4", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="cannot stream .*nowhere from the hub"):
        load_tokens("c4", byte_tokenizer(), sequences=2, length=25)
