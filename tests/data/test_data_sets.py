"""Data sets of the hub as text and chats: rows arrive as they are read; a refusal says what is missing."""

from types import SimpleNamespace

import datasets
import pytest

from common.data import data_sets
from common.data.chat import load_chats
from common.data.documents import EVALUATION, HELDOUT, TRAIN, digests_of, parse_source
from common.data.rows import Sample
from common.data.sources import DataContext, check_sources, hub_commits
from common.run.errors import UserError
from hub import save_data_set, serving
from models import chatml_tokenizer
from runs import messages, save_chats, save_lines

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
        documents = [*parse_source("hf:acme/data:text").texts(split)]
        assert documents == [*parse_source(str(lines)).texts(split)] and len(documents) > 2
    assert [*parse_source("hf:acme/data:text").texts(EVALUATION)] == documents
    path, tokenizer = save_chats(tmp_path / "chats.jsonl", *CHATS), chatml_tokenizer()
    for split in (TRAIN, HELDOUT):
        samples, description = load_chats("hf:acme/data:chats", tokenizer, 100, split)
        expected, said = load_chats(path, tokenizer, 100, split)
        assert samples == expected and description == said.replace(path, "hf:acme/data:chats")
    assert load_chats("hf:acme/data:chats", tokenizer, 100, EVALUATION)[0] == samples


def test_a_data_set_is_known_by_its_commit(data_set):
    """A run reads one commit; the next one may find another."""
    sources, second = ["hf:acme/data:text", "generated:hf:acme/data:chats", "generated", None], "b" * 40
    read = digests_of(sources, "")
    assert read == dict.fromkeys(("hf:acme/data:text", "hf:acme/data:chats"), "a" * 40)
    assert hub_commits(sources[:3]) == read
    data_set.commit = second
    assert digests_of(sources, "") == read and next(parse_source("hf:acme/data:text").rows())
    assert data_set.revisions == {"a" * 40}
    data_sets.COMMITS.clear()
    assert {*digests_of(sources, "").values()} == {second}


def test_another_split_is_read_and_rows_with_a_null_are_skipped_and_counted(tmp_path, monkeypatch, capsys):
    """Of the columns that are read; another one, here of pictures, is not decoded."""
    rows = {"messages": [CHATS[0], None, CHATS[1]], "picture": [b"no picture"] * 3}
    features = datasets.Features({"messages": [{"role": datasets.Value("string"),
                                                "content": datasets.Value("string")}],
                                  "picture": datasets.Value("binary")})
    loaded = datasets.Dataset.from_dict(rows, features).cast_column("picture", datasets.Image())
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: (
        asked.append((*names, options["split"])) or loaded.to_iterable_dataset()))
    monkeypatch.setitem(data_sets.COMMITS, "hf:a/b:c:train_sft", "a" * 40)
    assert [row["messages"] for _, row in parse_source("hf:a/b:c:train_sft").rows()] == CHATS[:2]
    assert asked == [("a/b", "c", "train_sft")] and "1 rows with a null, skipped" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "answers"), [(429, 5), (503, 5), (404, 1)])
def test_a_busy_hub_is_asked_again_from_where_it_was(monkeypatch, status, answers):
    """Some times, and longer apart each time; one that says no is not."""
    waited, reads = [], []
    monkeypatch.setattr(data_sets.time, "sleep", waited.append)

    def read():
        reads.append(None)
        yield from range(len(reads))
        answer = OSError("busy")
        answer.response = SimpleNamespace(status_code=status)
        raise OSError("no answer") from answer

    rows = data_sets._patiently("a/b", read)
    found = []
    with pytest.raises(UserError, match="cannot read the data set a/b from the hub .no answer"):
        for row in rows:
            found.append(row)
    assert found == list(range(answers)) and waited == [2, 4, 8, 16][: answers - 1]


def test_samples_of_the_hub_are_read_by_the_first_rank_once(data_set, inputs, tmp_path):
    """A training that goes on asks the hub for nothing."""
    context = DataContext(inputs["model"], str(tmp_path / "run"), "cpu")
    reads = []

    def read():
        reads.append(None)
        return [Sample([1, 2], [3]), Sample([4])], "two samples"

    for again in (context, DataContext(inputs["model"], str(tmp_path / "run"), "cpu")):
        samples, description = again.kept("hf:acme/data:text", ["texts"], read)
        assert [list(map(list, sample.segments)) for sample in samples] == [[[1, 2], [3]], [[4]]]
        assert description == "two samples" and len(reads) == 1
    context.kept("hf:acme/data:text", ["chats"], read)
    context.kept("a.jsonl", ["texts"], read)
    assert len(reads) == 3


UNREADABLE = "cannot read the data set {} from the hub ("


@pytest.mark.slow
@pytest.mark.parametrize(("text", "message"), [
    ("hf:acme/data:", "expected a data set of the hub as hf:NAME[:CONFIG[:SPLIT]], found hf:acme/data:"),
    ("hf:acme/none", UNREADABLE.format("acme/none") + "404 Client Error. Repository Not Found for url: "),
    ("hf:acme/data", UNREADABLE.format("acme/data") + "Config name is missing. Please pick one among the "
     "available configs: ['text', 'chats']"),
])
def test_a_data_set_that_is_no_text_is_refused_in_one_line(data_set, text, message):
    with pytest.raises(UserError) as refused:
        check_sources(["generated", text], ["none"])
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
