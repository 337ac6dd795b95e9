"""Stage 5 on tasks, chats and texts: the pool, the source as teacher."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from common.data.chat import has_tokens, load_chats, load_tokenized
from common.data.data_sets import COMMITS
from common.data.documents import HELDOUT, TRAIN, parse_source
from common.data.pool import Pool, Sources, load_pool, samples_digest
from common.data.rows import Sample, as_samples
from common.data.sources import DataContext, generated
from common.data.tasks import TASKS, load_task
from common.data.text import packed_rows
from common.run.artifact import read_record
from common.training.conversion import TrainingRun
from common.training.heldout import heldout_texts, load_heldout
from common.training.lines import CHAT_SET, TEXT_SET, read_metrics
from common.training.settings import read_samples
from hub import save_data_set, serving
from runs import (
    GROUPING,
    STAGE,
    assert_same_bits,
    assert_same_training,
    copy_run,
    expect_error,
    messages,
    metrics,
    run,
    save_chats,
    stop,
)

CHATML = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
          "{% if add_generation_prompt %}<assistant>{% endif %}")
TEXT_FLAGS = ["--tasks", "none", "--text-length", "40", "--steps", "5", "--batch", "4", "--lr", "1e-3",
              "--mask-lr", "2", "--warmup", "1", "--save-steps", "2"]


def text_arguments(home, inputs, *arguments) -> list:
    return ["--run-dir", home, "--text", inputs["text"], *TEXT_FLAGS, *arguments]


def context_of(run, model: str, ranks, **changes) -> DataContext:
    return DataContext(model, str(run), ranks.device, ranks, **changes)


def pool_of(run, model: str, ranks, bos: bool | None = None, **sources) -> Pool:
    """What these sources have to train on."""
    return load_pool(Sources(**{"text_length": 16} | sources), context_of(run, model, ranks, bos=bos))


@pytest.fixture
def chats(inputs, tmp_path) -> tuple[str, str]:
    """A model whose tokenizer has a chat template and an odd begin-of-sequence token, and a file of chats."""
    model = tmp_path / "model"
    shutil.copytree(inputs["model"], model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.bos_token = CHATML, "\x1b[2J"
    tokenizer.save_pretrained(model)
    return str(model), save_chats(tmp_path / "chats.jsonl", chat_of("yes") + chat_of("yes"))


def chat_of(answer: str) -> list[dict]:
    return messages(("user", "hi"), ("assistant", answer))


def test_tasks_chats_and_texts_are_one_pool(inputs, chats, tmp_path, group_of_one):
    (model, path), tokenizer = chats, AutoTokenizer.from_pretrained(chats[0])
    pool = pool_of(tmp_path / "run", model, group_of_one, tasks=inputs["tasks"], text=[inputs["text"]],
                   chat=[path])
    questions = sum(len(load_task(task, "train", inputs["tasks"])[0]) for task in TASKS)
    assert len(pool.answered) == questions + 1
    segments = [tokenizer.decode(segment) for segment in pool[questions].segments]
    assert segments == ["<user>hi\n<assistant>", "yes\n", "<user>hi\n<assistant>", "yes\n"]
    start = tokenizer("".join(parse_source(inputs["text"]).contents(TRAIN)))["input_ids"][:32]
    assert [*pool[questions + 1].prompt, *pool[questions + 2].prompt] == start
    assert all(len(sample) == 16 and not sample.answer_tokens for sample in pool.texts)


def test_held_out_parts_are_apart_from_the_pool(inputs, chats, tmp_path, group_of_one):
    """Of each source as many texts and chats, in its order; every second one is measured, the others are
    kept for stage 7.
    """
    (model, path), tokenizer = chats, AutoTokenizer.from_pretrained(chats[0])
    save_chats(Path(path), *(chat_of(f"chat {number}") for number in range(60)))
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(99)))
    sources = Sources(text=[inputs["text"], str(table), inputs["text"]], chat=[path], heldout_text="split",
                      heldout_sequences=3, text_length=16)
    origin = context_of(tmp_path, model, group_of_one)
    texts = heldout_texts(sources, origin)
    expected = [row for source in sources.text[:2] for row in packed_rows(source, tokenizer, 3, 16, HELDOUT)]
    assert [sample.prompt for sample in texts] == expected and len(texts) == 6
    heldout = load_heldout(sources, origin, texts, every=5)
    held_out = load_chats(path, tokenizer, 256, HELDOUT)[0][:6]
    assert heldout.sets == {TEXT_SET: texts[::2], CHAT_SET: held_out[::2]} and len(held_out) == 6
    assert np.load(Path(heldout.left, "tokens.npy")).tolist() == [text.prompt for text in texts[1::2]]
    assert load_heldout(sources, origin, texts, every=5).left == heldout.left  # of a training that goes on
    left = str(Path(heldout.left, "chats.jsonl"))
    assert has_tokens(left) and not has_tokens(path)
    assert list(map(tokens_of, load_tokenized(left, 1000, 9)[0])) == list(map(tokens_of, held_out[1::2]))
    pool = load_pool(sources, origin)
    assert pool.answered == load_chats(path, tokenizer, 256, TRAIN)[0]
    together = [token for source in sources.text for row in packed_rows(source, tokenizer, 10**6, 1, TRAIN)
                for token in row]
    trained = [token for sample in pool.texts for token in sample.prompt]
    assert trained == together[: len(together) // 16 * 16]


def tokens_of(sample: Sample) -> list[list[int]]:
    return [list(segment) for segment in sample.segments]


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    chats = [chat_of(f"chat {number}") for number in range(60)]
    home = save_data_set(tmp_path / "data", [f"document {number}" for number in range(99)], chats)
    with serving(tmp_path, monkeypatch, datasets={"acme/data": home}) as server:
        yield server


HUB_TEXT, HUB_CHATS = "hf:acme/data:text", "hf:acme/data:chats"


@pytest.mark.slow
def test_of_chats_of_the_hub_as_many_are_read_as_have_the_tokens(chats, data_set, tmp_path, group_of_one):
    """As far as it has them; of a file all."""
    path = save_chats(tmp_path / "same.jsonl", *(chat_of(f"chat {number}") for number in range(60)))

    def answered(source, tokens):
        samples = pool_of(tmp_path, chats[0], group_of_one, chat=[source], text_tokens=tokens).answered
        return [[list(segment) for segment in sample.segments] for sample in samples]

    every, some = answered(path, 99), answered(HUB_CHATS, 99)
    counts = [sum(map(len, sample)) for sample in some]
    assert sum(counts) >= 99 > sum(counts[:-1]) and some == every[: len(some)]
    assert answered(HUB_CHATS, 10**6) == every and len(every) > 40


def test_ranks_agree_on_the_commit_of_heldout_text_and_keep_it(data_set, inputs, tmp_path, group_of_one,
                                                               monkeypatch):
    agreed, on_all_ranks = [], "common.training.checkpoints.of_first_rank"
    monkeypatch.setattr(on_all_ranks, lambda value: agreed.append(value) or value)
    sources = Sources(text=[inputs["text"]], text_length=8, heldout_text=HUB_TEXT, heldout_sequences=1)
    read_samples(sources, context_of(tmp_path, inputs["model"], group_of_one), 1, {})
    assert agreed == [{HUB_TEXT: "a" * 40}]
    started = SimpleNamespace(args=SimpleNamespace(text=[], chat=[], heldout_text=HUB_TEXT))
    run = TrainingRun("", "", None, None, None, group_of_one, "float32", started)
    assert run.computation["hub_commits"] == {HUB_TEXT: "a" * 40}


@pytest.mark.slow
def test_two_ranks_train_on_a_data_set_of_the_hub_like_one(chats, data_set, tmp_path):
    one, sources = tmp_path / "one", ["--text", HUB_TEXT, "--chat", HUB_CHATS]
    run("01_calibrate.py", "--run", one, "--model", chats[0], *sources, "--sequences", 4, "--length", 32)
    record = read_record(str(one / "calibration"), "01_calibrate.py")
    assert record["inputs"][HUB_TEXT] == record["inputs"][HUB_CHATS] == data_set.commit
    run("02_similarity.py", "--run", one)
    run("03_group.py", "--run", one, *GROUPING)
    run("04_align.py", "--run", one)
    two = copy_run(one, tmp_path / "two")
    words = [*sources, "--text-tokens", "300", "--masks", "off", "--train", "attention", *TEXT_FLAGS]
    run(STAGE, "--run", one, *words)
    run(STAGE, "--run-dir", two, *words, processes=2)
    assert_same_training(one, two)
    assert len(metrics(one)) == 5 and "heldout_chat_kl" in metrics(one)[-1]
    # a training keeps the commits that it began with; another one takes the last
    data_set.commit = "b" * 40
    COMMITS.clear()  # another process
    assert "complete, by this command" in run(STAGE, "--run", one, *words).stdout
    assert data_set.revisions == {"a" * 40}
    COMMITS.clear()
    run(STAGE, "--run", one, *words, "--name", "later")
    for name, commit in (("train", "a" * 40), ("train-later", "b" * 40)):
        settings = json.loads((one / name / "settings.json").read_text())
        assert settings["hub_commits"] == {HUB_TEXT: commit, HUB_CHATS: commit}


@pytest.mark.slow
def test_of_generated_text_a_tenth_is_held_out(chats, tmp_path, group_of_one):
    """But two samples, of another seed; documents to continue are held out, too, and may be too few."""
    (tmp_path / "text.txt").write_text("word " * 100)
    origin = context_of(tmp_path, chats[0], group_of_one)
    sources = Sources(text=["generated", f"generated:{tmp_path / 'text.txt'}"], chat=["generated"],
                      heldout_text="split", heldout_sequences=5, text_length=100, text_tokens=3000)
    for changes, count in (({}, 3), ({"text_tokens": 500}, 2), ({"heldout_sequences": 1}, 1)):
        changed = replace(sources, **changes)
        texts = heldout_texts(changed, origin)
        assert [list(text.prompt) for text in texts] == generated(
            "generated", origin, count, 100, HELDOUT).tolist()
        pool = load_pool(replace(changed, text=["generated"], chat=()), origin)
        assert [sample.prompt for sample in pool.texts] == generated(
            "generated", origin, changed.text_tokens // 100, 100).tolist()
    found = load_heldout(sources, origin, [], every=5).sets.get(CHAT_SET, [])
    assert found == as_samples(generated("generated", origin, 3, 100, HELDOUT, chats=True))[::2]
    longer = replace(sources, text=(), text_length=250, text_tokens=60 * 250)  # long enough for an answer
    assert list(load_pool(longer, origin)) == as_samples(generated("generated", origin, 60, 250, chats=True))


def test_the_description_of_a_pool_sees_its_texts(chats, inputs, tmp_path, group_of_one):
    described = []
    for length, tokens, bos in ((16, 320, None), (16, 336, None), (20, 320, None), (16, 320, True)):
        pool = pool_of(tmp_path, chats[0], group_of_one, text=[inputs["text"]], text_length=length,
                       text_tokens=tokens, bos=bos)
        described.append(pool.description())
    assert [figures["texts"] for figures in described] == [20, 21, 16, 21]
    assert len({figures["samples_sha256"] for figures in described}) == 4


def test_the_digest_of_samples_sees_every_token_and_boundary():
    samples = [Sample((1, 2), (3,)), Sample((4,), (5, 6))]
    token, boundary = Sample((1, 2), (4,)), Sample((1,), (2, 3))
    others = [[token, samples[1]], [boundary, samples[1]], samples[::-1], samples[:1]]
    assert len({samples_digest(other) for other in [samples, *others]}) == 5
    assert samples_digest(list(samples)) == samples_digest(samples)


def test_tokens_are_written_once_and_again_when_the_text_changes(inputs, tmp_path, group_of_one):
    text, model = tmp_path / "text.txt", str(tmp_path / "model")
    shutil.copy(inputs["text"], text)
    shutil.copytree(inputs["model"], model)

    def written(*sources) -> tuple:
        """What the pool has, and the file of its tokens."""
        pool = pool_of(tmp_path / "run", model, group_of_one, text=list(map(str, sources)))
        path = Path(pool.texts.path)
        return pool.description()["samples_sha256"], path.parent.name, path.stat().st_mtime_ns

    each = [written(text)]
    assert written(text) == each[0]
    text.write_text("x" + text.read_text())
    each += [written(text), written(text, text)]
    tokenizer = json.loads(Path(model, "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 259, "content": "the"})
    Path(model, "tokenizer.json").write_text(json.dumps(tokenizer))
    each.append(written(text, text))
    assert [len(set(values)) for values in zip(*each, strict=True)] == [4, 4, 4]


def test_tokens_of_other_commands_stay_and_what_was_cut_is_written_again(inputs, tmp_path, group_of_one):
    """A training that goes on needs its own."""
    other = tmp_path / "other.txt"
    other.write_text("Other text. " * 50)
    first, second = (pool_of(tmp_path, inputs["model"], group_of_one, text=[str(text)])
                     for text in (inputs["text"], other))
    expected, content = first.description(), Path(first.texts.path).read_bytes()
    assert Path(second.texts.path).exists()
    Path(first.texts.path).write_bytes(content[:-4])
    again = pool_of(tmp_path, inputs["model"], group_of_one, text=[inputs["text"]])
    assert again.description() == expected and Path(again.texts.path).read_bytes() == content


@pytest.mark.slow
def test_training_on_text_with_the_source_as_teacher(aligned_run, inputs, tmp_path):
    """While masks are open the student is its teacher; stopped and resumed, it ends bit-identical."""
    home, other = (copy_run(aligned_run, tmp_path / name) for name in ("whole", "stopped"))
    done = run(STAGE, *text_arguments(home, inputs))
    assert not (home / "teacher").exists()
    lines = metrics(home)
    assert lines[0]["kl"] < 1e-3 < lines[-1]["kl"] and all(line["bild"] == 0 for line in lines)
    left = re.search(r"switch  after step \d+: masks, (\S+) on average, set to 0; rebuilt", done.stdout)[1]
    drawn = [line["mask_mean"] for line in lines if "mask_mean" in line]  # from the copy, which runs ahead
    assert float(left) == pytest.approx(drawn[-1], abs=0.25)
    assert (float(left) > 0) == ("masks had not closed" in done.stdout)
    record = json.loads((home / "train" / "stage.json").read_text())
    (tokens,) = {f"RUN/tokens/{path.name}" for path in (home / "tokens").iterdir()} - {record["heldout"]}
    assert record["inputs"].keys() == {"RUN/aligned", "RUN/merged", tokens}
    stop(2, *text_arguments(other, inputs))
    run(STAGE, *text_arguments(other, inputs))
    assert_same_bits(home, other)


@pytest.mark.slow
def test_data_that_cannot_be_trained_on_is_refused(aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    before = sorted(os.listdir(home))
    base, steps = ["--run", home, "--tasks", "none"], ["--steps", "4"]
    expect_error("--tasks none: expected --text or --chat with it, found neither", STAGE, *base)
    expect_error("hf:a/b:c: expected --text-tokens", STAGE, *base, "--chat", "hf:a/b:c", *steps)
    expect_error("nothing.txt: not found", STAGE, *base, "--text", "generated", "nothing.txt",
                 "--text-tokens", "400", *steps)  # before generating
    assert sorted(os.listdir(home)) == before


@pytest.mark.slow
def test_a_student_trains_on_under_another_name(aligned_run, inputs, tmp_path):
    """merged/ exported, trained from there as train-more/, and exported beside it."""
    home = copy_run(aligned_run, tmp_path / "run")
    run("06_export.py", "--run", home, "--untrained")
    words = text_arguments(home, inputs, "--name", "more", "--student", home / "gqa", "--masks", "off")
    run(STAGE, *words)
    start = read_metrics(str(home / "train-more" / "metrics.jsonl"))[0]
    run("06_export.py", "--run", home, "--name", "more")
    assert not (home / "train").exists() and (home / "gqa-more" / "config.json").exists()
    further = ["--name", "again", "--student", home / "gqa-more", "--masks", "off"]
    run(STAGE, *text_arguments(home, inputs, *further))
    again = read_metrics(str(home / "train-again" / "metrics.jsonl"))[0]
    assert again["start_heldout_kl"] < start["start_heldout_kl"]  # from where the other ended
    expect_error("--student: expected --masks off with it, found l0", STAGE, *words[:-1], "l0")

