"""Data sets of the hub as text and chats: rows arrive as they are read; a refusal says what is missing."""

import itertools

import pytest

from common.data import data_sets
from common.data.chat import load_chats
from common.data.rows import read_rows
from common.data.sources import check_sources, hub_commits
from common.data.text import EVALUATION, HELDOUT, TRAIN, digests_of, read_documents
from common.run.errors import UserError
from hub import LOGIN, RESTRICTED, save_data_set, serving
from models import chatml_tokenizer
from runs import expect_error, messages, run, save_chats, save_lines

DOCUMENTS = [f"document {number}" for number in range(60)]
CHATS = [messages(("user", f"{number}?"), ("assistant", str(number))) for number in range(60)]


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    home = save_data_set(tmp_path / "data", DOCUMENTS, CHATS)
    with serving(tmp_path, monkeypatch, datasets={"acme/data": home}) as server:
        yield server


def test_a_data_set_of_the_hub_is_read_as_a_file_with_its_rows(data_set, tmp_path):
    """Both have the same parts. A user who names the data set to evaluate on gets its held-out part."""
    lines = save_lines(tmp_path / "t.jsonl", DOCUMENTS)
    for split in (TRAIN, HELDOUT):
        documents = [*read_documents("hf:acme/data:text", split)]
        assert documents == [*read_documents(lines, split)] and len(documents) > 2
    assert [*read_documents("hf:acme/data:text", EVALUATION)] == documents
    path, tokenizer = save_chats(tmp_path / "chats.jsonl", *CHATS), chatml_tokenizer()
    for split in (TRAIN, HELDOUT):
        samples, description = load_chats("hf:acme/data:chats", tokenizer, 100, split)
        expected, said = load_chats(path, tokenizer, 100, split)
        assert samples == expected and description == said.replace(path, "hf:acme/data:chats")
    assert load_chats("hf:acme/data:chats", tokenizer, 100, EVALUATION)[0] == samples


@pytest.mark.slow
def test_rows_of_a_data_set_arrive_as_they_are_read(data_set):
    rows = read_rows("hf:acme/data:text")
    assert [*itertools.islice(rows, 2)] == [(f"row {i}", {"text": DOCUMENTS[i]}) for i in range(2)]
    assert set(data_set.downloaded) == {"README.md", "text/0.parquet"}
    assert next(itertools.islice(rows, 28, None))[1] == {"text": DOCUMENTS[30]}  # in the second file


def test_a_data_set_is_known_by_its_commit(data_set):
    """A run reads one commit; the next one may find another."""
    sources, second = ["hf:acme/data:text", "generated:hf:acme/data:chats", "generated", None], "b" * 40
    read = digests_of(sources, "")
    assert read == dict.fromkeys(("hf:acme/data:text", "hf:acme/data:chats"), "a" * 40)
    assert hub_commits(sources[:3]) == read
    data_set.commit = second
    assert digests_of(sources, "") == read and next(read_rows("hf:acme/data:text"))
    assert data_set.revisions == {"a" * 40}
    data_sets.COMMITS.clear()
    assert {*digests_of(sources, "").values()} == {second}


@pytest.mark.slow
def test_a_stage_that_is_complete_stays_so_at_a_later_commit(data_set, inputs, tmp_path):
    command = ["01_calibrate.py", "--run", tmp_path / "run", "--model", inputs["model"], "--sequences", 2,
               "--length", 8, "--text"]
    run(*command, "hf:acme/data:text")
    data_set.commit = "b" * 40
    data_sets.COMMITS.clear()
    assert ": complete, by this command" in run(*command, "hf:acme/data:text").stdout
    expect_error("already exists, made with --text 'hf:acme/data:text', not ", *command, inputs["text"])


UNREADABLE = "cannot read the data set {} from the hub ("


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), [
    ("hf:acme/data:", "expected a data set of the hub as hf:NAME[:CONFIG], found hf:acme/data:"),
    ("hf:acme/none", UNREADABLE.format("acme/none") + "404 Client Error. Repository Not Found for url: "),
    ("hf:acme/data", UNREADABLE.format("acme/data") + "Config name is missing. Please pick one among the "
     "available configs: ['text', 'chats']"),
    ("hf:acme/data:chats", "hf:acme/data:chats row 0: column 'text' is missing; found columns ['messages']"),
])
def test_a_data_set_that_is_no_text_is_refused_in_one_line(data_set, text, message):
    with pytest.raises(UserError) as refused:
        check_sources(["generated", text], ["none"])
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_data_set_that_cannot_be_read_is_refused_by_a_stage_before_it_writes(data_set, inputs, tmp_path):
    home = tmp_path / "run"
    data_set.refusal, data_set.refuses_all = (403, "GatedRepo", RESTRICTED), False
    expect_error(LOGIN, "01_calibrate.py", "--run", home, "--model", inputs["model"], "--text",
                 "hf:acme/data:text")
    assert not home.exists() or not any(home.iterdir())
