"""Calibration text: whole documents first, packed where they are too few, refused where too short."""

import gzip
import json

import pytest

from common.cli import UserError
from common.data import text
from common.data.text import load_tokens, sequence_length
from conftest import END, byte_tokenizer

DOCUMENTS = ["a" * 20, "b" * 50, "c" * 10, "d" * 30]


@pytest.fixture(params=["jsonl", "json", "jsonl.gz", "json.gz"])
def documents(request, tmp_path):
    path = tmp_path / f"text.{request.param}"
    lines = "".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS).encode()
    path.write_bytes(gzip.compress(lines) if request.param.endswith("gz") else lines)
    return str(path)


def test_first_documents_that_are_long_enough(documents):
    tokens, description = load_tokens(documents, byte_tokenizer(), sequences=2, length=25)
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 25, "d" * 25]
    assert description == f"{documents}: first 2 documents of at least 25 tokens"
    tokens, _ = load_tokens(documents, byte_tokenizer(), sequences=2, length=30)  # "d" has exactly 30
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 30, "d" * 30]


def test_packed_where_too_few_are_long_enough(documents):
    tokens, description = load_tokens(documents, byte_tokenizer(), sequences=2, length=40)
    assert tokens.shape == (2, 40)
    flat = tokens.flatten().tolist()
    assert byte_tokenizer().decode(flat) == "a" * 20 + "<eos>" + "b" * 50 + "<eos>" + "c" * 8
    assert flat[20] == END
    assert description == f"{documents}: packed (1 of 4 documents have 40 tokens, 2 needed)"


def test_too_little_text_says_found_and_needed(documents):
    with pytest.raises(UserError, match="expected 4 x 40 = 160 tokens, found 114"):
        load_tokens(documents, byte_tokenizer(), sequences=4, length=40)
    with pytest.raises(UserError, match="expected 3 x 40 = 120 tokens, found 114"):
        load_tokens(documents, byte_tokenizer(), sequences=3, length=40)


def test_no_special_tokens_are_added(tmp_path):
    class Beginning:
        eos_token_id = 2

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return {"input_ids": [1, *map(ord, text)] if add_special_tokens else [*map(ord, text)]}

    (tmp_path / "text.txt").write_text("abc")
    assert load_tokens(str(tmp_path / "text.txt"), Beginning(), 1, 3)[0].tolist() == [[97, 98, 99]]
    assert load_tokens(str(tmp_path / "text.txt"), Beginning(), 1, 2)[0].tolist() == [[97, 98]]
    assert load_tokens(str(tmp_path / "text.txt"), Beginning(), 2, 2)[0].tolist() == [[97, 98], [99, 2]]


def test_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('\n{"text": "xy"}\n\n \t\r\n{"text": ""}\n{"text": "zw"}\n\n')
    tokens, _ = load_tokens(str(path), byte_tokenizer(), sequences=1, length=6)
    assert byte_tokenizer().decode(tokens[0]) == "xy<eos><eos>zw"


ROW = b'{"text": "x"}\n'
GZIPPED = gzip.compress(ROW * 500, mtime=0)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("t.txt", b"\x80\xff\x00\x01", r"t.txt: not UTF-8: invalid start byte at byte 1"),
    ("t.txt", "naïve".encode("latin-1"), r"t.txt: not UTF-8: .* at byte 3"),
    ("t.jsonl", b"\x00\xff\x93\n\x88", r"t.jsonl line 1: not UTF-8: .* at byte 2"),
    ("t.jsonl", ROW + b'{"text": "\xff"}\n', r"t.jsonl line 2: not UTF-8: .* at byte 11"),
    ("t.jsonl", ROW + b"{text}\n", r"t.jsonl line 2: not JSON: .* at column 2"),
    ("t.jsonl", ROW + b'{"txt": "y"}\n', r"line 2: column 'text' is missing; found columns \['txt'\]"),
    ("t.jsonl", ROW + b'\n{"text": null}\n', r"t.jsonl line 3: column 'text' is missing; found columns \[\]"),
    ("t.jsonl", ROW + b'{"text": 5}\n', r"t.jsonl line 2: column 'text': expected text, found 5"),
    ("t.jsonl", ROW + b'{"text": ["x"]}\n', r"t.jsonl line 2: column 'text': expected text, found \[\"x\"\]"),
    ("t.jsonl", ROW + b'"x"\n', r"t.jsonl line 2: expected a JSON object, found \"x\""),
    ("t.jsonl", ROW + b"null\n", r"t.jsonl line 2: expected a JSON object, found null"),
    ("t.jsonl", ROW + rb'{"text": "ab\udc80"}', r"line 2: column 'text': .* a lone surrogate at character 3"),
    ("t.jsonl", b"\n\n", r"t.jsonl: expected 1 x 4000 = 4000 tokens, found 0"),
    ("t.json.gz", ROW, r"t.json.gz after line 0: expected gzip data, found a damaged file"),
    ("t.json.gz", GZIPPED[: len(GZIPPED) // 2], r"t.json.gz after line \d+: .*: .*ended before"),
    ("t.json.gz", GZIPPED[:30] + b"\xff" * 12 + GZIPPED[42:], r"t.json.gz after line \d+: .* a damaged file"),
    ("t.json.gz", GZIPPED[:-8] + b"\x00" * 8, r"t.json.gz after line 500: .* CRC check failed"),
    ("t.json.gz", gzip.compress(b"\x80", mtime=0), r"t.json.gz line 1: not UTF-8"),
    ("t.bin", ROW, r"text .*t.bin: expected c4, demo, or a .txt"),
])
def test_damaged_text_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_tokens(str(tmp_path / name), byte_tokenizer(), 1, 4000)
    assert "\n" not in str(error.value)


def test_unknown_sources_are_named(tmp_path):
    for name in ("nowhere.txt", str(tmp_path)):
        with pytest.raises(UserError, match="expected c4, demo, or"):
            load_tokens(name, byte_tokenizer(), 1, 4)


def test_sequence_length():
    assert sequence_length(None, 512, 256) == sequence_length(256, 512, 256) == 256
    assert sequence_length(None, 512, 4096) == 512
    assert sequence_length(1, 512, 256) == 1
    for requested, least in ((257, 1), (1, 2), (0, 1)):
        message = rf"--length: expected {least} to 256 tokens \(the model's .*\), found {requested}"
        with pytest.raises(UserError, match=message):
            sequence_length(requested, 512, 256, least)


def test_demo_keeps_its_held_out_text_apart(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.txt").write_text("train")
    (tmp_path / "text" / "heldout.txt").write_text("apart")
    monkeypatch.setattr(text, "DEMO_HOME", str(tmp_path))
    for split, expected in (("train", "train"), ("heldout", "apart")):
        tokens, description = load_tokens("demo", byte_tokenizer(), 1, 5, split)
        assert byte_tokenizer().decode(tokens[0]) == expected and f"{split}.txt" in description


def test_c4_is_streamed_from_its_file_on_the_hub(tmp_path, monkeypatch):
    """A directory laid out as the hub's repository: one file is read, and another for what is held out."""
    (tmp_path / "en").mkdir()
    rest = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b"}
    for name, documents in ((text.C4_FILES["train"], DOCUMENTS),
                            ("en/c4-train.00001-of-01024.json.gz", ["e" * 60]),
                            (text.C4_FILES["heldout"], ["f" * 60])):
        lines = "".join(json.dumps({"text": document} | rest) + "\n" for document in documents)
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setattr(text, "C4", str(tmp_path))
    tokens, description = load_tokens("c4", byte_tokenizer(), sequences=2, length=25)
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 25, "d" * 25]
    assert description == "c4: first 2 documents of at least 25 tokens"
    heldout, _ = load_tokens("c4", byte_tokenizer(), sequences=1, length=25, split="heldout")
    assert byte_tokenizer().batch_decode(heldout) == ["f" * 25]
    monkeypatch.setattr(text, "C4", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="cannot stream .*nowhere from the hub"):
        load_tokens("c4", byte_tokenizer(), sequences=2, length=25)
