"""Text: whole documents first, packed where they are too few, refused where too short; training tokens."""

import codecs
import gzip
import hashlib
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from tokenizers import processors

from common.data import text
from common.data.documents import C4_FILES, EVALUATION, HELDOUT, TRAIN, blocks, parse_source
from common.data.text import TextSamples, load_tokens, write_text_tokens
from common.run.errors import UserError
from models import END, byte_tokenizer
from runs import save_lines

DOCUMENTS = ["a" * 20, "b" * 50, "c" * 10, "d" * 30]


@pytest.fixture(params=["jsonl", "json.gz", "parquet"])
def documents(request, tmp_path):
    path = tmp_path / f"text.{request.param}"
    if request.param == "parquet":
        datasets.Dataset.from_dict({"text": DOCUMENTS, "url": DOCUMENTS}).to_parquet(path)
        return str(path)
    lines = Path(save_lines(path, DOCUMENTS)).read_bytes()
    path.write_bytes(gzip.compress(lines) if request.param.endswith("gz") else lines)
    return str(path)


def read(source, sequences: int, length: int, tokenizer=None, **part) -> list[str]:
    """What load_tokens takes from a source, as text."""
    tokenizer = tokenizer or byte_tokenizer()
    return tokenizer.batch_decode(load_tokens(str(source), tokenizer, sequences, length, **part)[0])


def test_first_documents_that_are_long_enough(documents):
    assert read(documents, 2, 30) == ["b" * 30, "d" * 30]  # "d" has exactly 30
    tokens, description = load_tokens(documents, byte_tokenizer(), sequences=2, length=25)
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 25, "d" * 25]
    assert description == f"{documents}: first 2 documents of at least 25 tokens"


def test_a_beginning_is_one_of_the_tokens_of_every_sequence(documents):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "^"
    begun = ["^" + "b" * 30, "^" + "d" * 30]  # "d" has 30 characters
    packed = ["^" + "a" * 20 + "<eos>" + "b" * 18, "^" + "b" * 32 + "<eos>" + "c" * 6]
    for tokenizer.bos in (None, False):  # the tokenizer does not add it itself
        assert read(documents, 2, 30, tokenizer) == ["b" * 30, "d" * 30]
    tokenizer.bos = True
    assert read(documents, 2, 31, tokenizer) == begun
    assert read(documents, 2, 40, tokenizer) == packed
    tokenizer.bos = None
    begins = processors.TemplateProcessing(single="^ $A", special_tokens=[("^", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begins
    assert read(documents, 2, 31, tokenizer) == begun


ROW = b'{"text": "x"}\n'
GZIPPED = gzip.compress(ROW * 500, mtime=0)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("t.txt", codecs.BOM_UTF8 + b"\r\n" * 9000 + b"\xff.", r"t.txt: not UTF-8: .* at byte 18004"),
    ("t.jsonl", ROW + b'{"txt": "y"}\n', r"line 2: column 'text' is missing; found columns \['txt'\]"),
    ("t.jsonl", ROW + b'{"text": "\\ud83d"}\n', "t.jsonl line 2: .*surrogates not allowed"),
    ("t.jsonl", ROW + b"{", r"t.jsonl line 2: not JSON"),
    ("t.json.gz", GZIPPED[: len(GZIPPED) // 2], r"t.json.gz after line \d+: .*: .*ended before"),
    ("t.parquet", ROW, r"t.parquet: cannot be read as parquet: .*[Pp]arquet"),
    ("t.npy", ROW, "expected a .npy file of tokens"),
])
def test_damaged_text_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read(path, 1, 4000, split=EVALUATION)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_demo_keeps_its_held_out_text_apart(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name, content in (("train", "train"), ("heldout", "apart")):
        (tmp_path / "text" / f"{name}.txt").write_text(content)
    monkeypatch.setattr("common.data.demo.DEMO_HOME", str(tmp_path))
    for split, expected in ((TRAIN, "train"), (HELDOUT, "apart"), (EVALUATION, "apart")):
        assert read("demo", 1, 5, split=split) == [expected]


def save_c4(home, monkeypatch):
    """A directory laid out as the hub's repository, in place of it, with two files to train on."""
    (home / "en").mkdir()
    rest = {"timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b"}
    for name, documents in (("train.00000-of-01024", DOCUMENTS), ("train.00001-of-01024", ["e" * 60]),
                            ("validation.00000-of-00008", ["f" * 60])):
        lines = "".join(json.dumps({"text": document} | rest) + "\n" for document in documents)
        (home / "en" / f"c4-{name}.json.gz").write_bytes(gzip.compress(lines.encode()))
    monkeypatch.setattr("common.data.documents.C4", str(home))
    monkeypatch.setitem(C4_FILES, "train", (C4_FILES["train"][0], 2))


def test_c4_is_streamed_from_its_files_on_the_hub(tmp_path, monkeypatch):
    save_c4(tmp_path, monkeypatch)
    tokens, description = load_tokens("c4", byte_tokenizer(), sequences=3, length=25)
    assert byte_tokenizer().batch_decode(tokens) == ["b" * 25, "d" * 25, "e" * 25]
    assert description == "c4: first 3 documents of at least 25 tokens"
    for split in (HELDOUT, EVALUATION):
        assert read("c4", 1, 25, split=split) == ["f" * 25]


def expected_tokens(*documents: str) -> list[int]:
    """Documents one by one, each with its end-of-sequence."""
    tokenizer, tokens = byte_tokenizer(), []
    for document in documents:
        tokens += [*tokenizer(document, add_special_tokens=False)["input_ids"], END]
    return tokens


def flat(samples: TextSamples) -> list[int]:
    return [token for sample in samples for token in sample.segments[0]]


def test_all_tokens_come_back_in_order(documents, tmp_path, monkeypatch):
    """Without the tokens that the tokenizer begins texts with: samples get them where they are read."""
    monkeypatch.setattr(text, "BATCH", 60)  # two batches
    plain, path = tmp_path / "plain.txt", str(tmp_path / "tokens.npy")
    tokenizer = byte_tokenizer()
    begins = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", END)])
    tokenizer.backend_tokenizer.post_processor = begins
    plain.write_text("one document\nof two lines\nxx")
    lines = write_text_tokens([documents, str(plain)], tokenizer, 16, None, path)
    expected = expected_tokens(*DOCUMENTS, "one document\nof two lines\nxx")
    samples = TextSamples(path, 16)
    assert flat(samples) == expected[:128] and len(expected) == 143
    assert len(samples) == 8 and {len(sample) for sample in samples} == {16}
    assert lines == [f"{documents}: 114 tokens", f"{plain}: 29 tokens"]
    np.save(tmp_path / "plain.npy", np.array(expected[:128], dtype=np.int32))
    assert Path(path).read_bytes() == (tmp_path / "plain.npy").read_bytes()
    write_text_tokens([documents, str(plain)], tokenizer, 25, 25, path)  # so many of each
    assert flat(TextSamples(path, 25)) == expected[:25] + expected[114:139]


def parts_of(source) -> dict[str, str]:
    """The text of each part of a .txt file."""
    splits = (TRAIN, HELDOUT, EVALUATION)
    return {split: "".join(next(parse_source(str(source)).documents(split))) for split in splits}


def numbered(numbers) -> str:
    return "".join(f"line {number} of {7 * number}\n" for number in numbers)


def test_blocks_of_a_text_file_are_held_out_by_their_content(tmp_path, monkeypatch):
    """Together they are the file; what is repeated elsewhere, or in another file, is in the same part but for
    the blocks at its ends."""
    monkeypatch.setattr("common.data.documents.BLOCK", 50)
    path, passage = tmp_path / "t.txt", numbered(range(1000, 2000))
    path.write_bytes((codecs.BOM_UTF8.decode() + numbered(range(1500)) + passage).encode())
    found = [*blocks(str(path))]
    assert "".join(found) == numbered(range(1500)) + passage and all(block[-1] == "\n" for block in found)
    assert 0.7 < sum(map(len, found)) / len(found) / 50 < 1.5
    parts = parts_of(path)
    assert parts[EVALUATION] == "".join(found)
    for split, chosen in ((HELDOUT, True), (TRAIN, False)):
        expected = [block for block in found
                    if (int(hashlib.sha256(block.encode()).hexdigest(), 16) < 2**256 // 10) == chosen]
        assert parts[split] == "".join(expected)
    assert 0.05 < len(parts[HELDOUT]) / len(parts[EVALUATION]) < 0.15
    (tmp_path / "other.txt").write_text("another beginning\n" * 9 + passage)
    assert len({*found} & {*blocks(str(tmp_path / "other.txt"))}) > 0.9 * len(passage) / 50 * 0.7


def test_a_line_without_end_is_cut_where_a_character_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("common.data.documents.LONGEST_BLOCK", 3000)
    (tmp_path / "t.txt").write_text("é" * 7000 + "\r\nx", encoding="utf-8", newline="")
    assert [*blocks(str(tmp_path / "t.txt"))] == ["é" * 3000, "é" * 3000, "é" * 1000 + "\nx"]
    (tmp_path / "t.txt").write_text("")
    assert parts_of(tmp_path / "t.txt") == dict.fromkeys((TRAIN, HELDOUT, EVALUATION), "")


def test_one_document_in_ten_is_held_out_by_its_content(tmp_path):
    """Copies of a document are on the same side; of generated:FILE, too."""
    documents = [f"document {number:04d}" for number in range(1000)] * 2
    held_out = [document for document in documents
                if int(hashlib.sha256(document.encode()).hexdigest(), 16) / 2**256 < 0.1]
    others = [document for document in documents if document not in held_out]
    path = save_lines(tmp_path / "t.jsonl", documents)
    assert 70 < len(held_out) / 2 < 130
    for split, expected in ((TRAIN, others), (HELDOUT, held_out), (EVALUATION, documents)):
        assert list(parse_source(path).texts(split)) == expected
        assert read(path, len(expected), 13, split=split) == expected
    write_text_tokens([path], byte_tokenizer(), 14, None, str(tmp_path / "tokens.npy"))
    assert flat(TextSamples(str(tmp_path / "tokens.npy"), 14)) == expected_tokens(*others)
    rows = text.packed_rows(path, byte_tokenizer(), 9, 14, HELDOUT)
    assert sum(rows, []) == expected_tokens(*held_out[:9])


def test_one_row_of_tokens_in_ten_is_held_out_by_its_content(tmp_path):
    path, rows = str(tmp_path / "t.npy"), np.arange(200, dtype="<i4").reshape(100, 2)
    np.save(path, rows)
    heldout = [row for row in rows.tolist() if int.from_bytes(
        hashlib.sha256(np.array(row, "<i4").tobytes()).digest()) < 2**256 // 10]
    others = [row for row in rows.tolist() if row not in heldout]
    assert 2 < len(heldout) < 25
    for split, expected in ((TRAIN, others), (HELDOUT, heldout), (EVALUATION, rows.tolist())):
        assert load_tokens(path, byte_tokenizer(), 100, 2, split)[0].tolist() == expected


def test_no_more_is_read_than_asked(tmp_path, monkeypatch):
    """What is damaged after them is not seen."""
    monkeypatch.setattr(text, "BATCH", 10)
    monkeypatch.setattr(text, "PIECE", 4096)
    monkeypatch.setattr("common.data.documents.LONGEST_BLOCK", 4096)
    (tmp_path / "t.jsonl").write_bytes(ROW * 100 + b"damaged")
    (tmp_path / "t.txt").write_bytes(b"a line\r\n" * 4000 + b"\xff")
    for name in ("t.jsonl", "t.txt"):
        write_text_tokens([str(tmp_path / name)], byte_tokenizer(), 10, 150, str(tmp_path / "tokens.npy"))
        assert len(TextSamples(str(tmp_path / "tokens.npy"), 10)) == 15
    assert read(tmp_path / "t.txt", 2, 7) == ["a line\n"] * 2


@pytest.mark.parametrize(("sources", "tokens", "message"), [
    (["t.jsonl", "t.jsonl"], 115,
     r"--text .*t.jsonl: expected 115 tokens in its training part \(--text-tokens\), found 114"),
    (["t.jsonl"], None, "--text .*t.jsonl: expected at least one sequence of 120 tokens, found 114"),
])
def test_training_text_that_does_not_suffice_is_one_line(tmp_path, monkeypatch, sources, tokens, message):
    monkeypatch.chdir(tmp_path)
    save_lines(tmp_path / "t.jsonl", DOCUMENTS)
    with pytest.raises(UserError, match=message) as error:
        write_text_tokens(sources, byte_tokenizer(), 120, tokens, "tokens.npy")
    assert "\n" not in str(error.value)


def test_tokens_are_read_as_they_were_written(tmp_path):
    """As many as there are, at most as many as asked for; those that all begin so as they are."""
    path, tokenizer = str(tmp_path / "heldout.npy"), byte_tokenizer()
    rows = np.arange(12, dtype="<i4").reshape(3, 4)
    np.save(path, rows)
    for asked, expected in (((9, 9), rows), ((2, 3), rows[:2, :3])):
        tokens, _ = load_tokens(path, tokenizer, *asked, EVALUATION)
        assert tokens.dtype is torch.int64 and tokens.tolist() == expected.tolist()
    tokenizer.bos_token = "^"
    begin, tokenizer.bos = tokenizer.bos_token_id, True
    tokens, _ = load_tokens(path, tokenizer, 2, 4, EVALUATION)
    assert tokens.tolist() == [[begin, 0, 1, 2], [begin, 4, 5, 6]]
    np.save(path, np.array([[begin, 1, 2], [begin, 3, 4]], "<i4"))
    assert load_tokens(path, tokenizer, 9, 3, EVALUATION)[0].tolist() == [[begin, 1, 2], [begin, 3, 4]]


def test_a_document_of_a_text_file_is_a_line_of_it(tmp_path):
    """Whatever else str.splitlines would split at."""
    path, line = str(tmp_path / "lines.txt"), "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg"
    Path(path).write_text(f"{line}\n\n{line}\r\nlast", encoding="utf-8")
    assert [*parse_source(path).texts(EVALUATION)] == [line, "", line, "last"]
