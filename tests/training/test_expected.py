"""The plan of a model that is not there yet: as that of a run of its shape, as the manual's, and refusals."""

import re

import pytest
from transformers import LlamaConfig

from bench.families import small_config
from common.data.pool import Sources
from common.data.tasks import TASKS, load_task, tokenize
from common.models.load import load_config, load_tokenizer
from common.models.proof import require_convertible
from common.run.errors import UserError
from common.training import expected
from runs import STAGE, copy_run, expect_error, run
from torchrun import ROOT

PLAN = ["--plan", "8xA100-80GB"]
# hidden size, width of MLPs, layers, heads and kv heads
LLAMA2 = {"7B": (4096, 11008, 32, 32, 32), "13B": (5120, 13824, 40, 40, 40), "70B": (8192, 28672, 80, 64, 8)}


def costs(*words) -> list[str]:
    """What a plan prints of disk, training and measurement."""
    printed = run(STAGE, *PLAN, *words).stdout
    return printed[printed.index("GB on disk") :].splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["file", "generated"])
def test_a_config_alone_gives_the_plan_of_a_run_with_texts(aligned_run, inputs, text, tmp_path):
    source = inputs["text"] if text == "file" else text
    words = ["--tasks", "none", "--text", source, "--text-tokens", 20000, "--text-length", 64,
             "--heldout-sequences", 8, "--masks", "off"]  # as after this run's mean they would not be
    of_run = costs("--run", copy_run(aligned_run, tmp_path / "run"), *words)  # which gets tokens
    assert len(of_run) == 7 and costs("--model", inputs["model"], "--kv-heads", 2, *words) == of_run
    alone = tmp_path / "home" / "settings.json"
    alone.parent.mkdir()
    alone.write_bytes(open(f"{inputs['model']}/config.json", "rb").read())
    assert costs("--model", alone, "--kv-heads", 2, *words) == of_run and [*alone.parent.iterdir()] == [alone]


@pytest.mark.slow
def test_a_config_alone_gives_the_plan_of_a_run_with_tasks(aligned_run, inputs, monkeypatch):
    """Where the published sets are as large as this run's, with samples of the same lengths."""
    tokenizer = load_tokenizer(inputs["model"])
    samples = {split: [tokenize(example, tokenizer) for task in TASKS
                       for example in load_task(task, split, inputs["tasks"])[0]]
               for split in ("train", "validation")}
    by_count = {len(each): each for each in samples.values()}
    monkeypatch.setattr(expected, "PUBLISHED_SIZES", dict.fromkeys(TASKS, (12, 5)))
    monkeypatch.setattr(expected, "questions", by_count.get)
    of_run = costs("--run", aligned_run, "--tasks", inputs["tasks"])
    assert sum("teacher" in line for line in of_run) > 2
    assert costs("--model", inputs["model"], "--kv-heads", 2) == of_run


@pytest.mark.slow
def test_expected_samples_are_as_long_as_published():
    """18.6 million tokens in 147,580 samples, 126 each; few of them are spread alike."""
    pool = expected.expected_pool(Sources("hub"), 0)
    tokens = sum(map(len, pool))
    assert len(pool) == 147_580 and tokens == pytest.approx(18.6e6, rel=0.003)
    few = expected.questions(128)
    assert sum(map(len, few)) / 128 == pytest.approx(126, abs=1) and len({*map(len, few)}) > 60
    assert len(expected.expected_pool(Sources("hub", ["piqa"]), 0)) == 16113


def test_expected_texts_and_chats():
    """Of 9900 tokens from each of two sources; a token more begins each text, and chats are rows of 100."""
    sources = Sources(text=("c4", "generated"), chat=["generated"], text_length=100, text_tokens=9900,
                      heldout_text="split", heldout_sequences=32, heldout_chats=32)
    pool = expected.expected_pool(sources, 1)
    assert [len(pool.texts), len(pool.answered)] == [200, 99]
    assert {len(sample) for sample in pool} == {100} and pool.answered[0].answer_tokens == 50
    heldout = expected.expected_heldout(sources, 50, 1)
    assert {name: len(samples) for name, samples in heldout.sets.items()} == {
        "heldout": (32 + 10) / 2, "heldout_chat": (9 + 1) / 2}


@pytest.mark.parametrize("words, message", [
    ("--model MODEL", "--model: expected --plan, --model and --kv-heads together, found --model"),
    ("PLAN --kv-heads 3", "kv heads: expected one of [1, 2, 4] for 8 key/value heads, found 3"),
    ("PLAN --kv-heads 2 --tasks DIR",
     "--tasks: expected hub or none with --model, which reads only a config, found DIR"),
    ("PLAN --kv-heads 2 --chat a.jsonl", "--chat: expected none or generated with --model"),
    ("PLAN --kv-heads 2 --teacher DIR", "--teacher: expected source with --model"),
    ("PLAN --kv-heads 2 --student DIR", "--student: expected nothing with --model"),
    ("PLAN --kv-heads 2 --text a.txt", "--text: expected --text-tokens N with --model"),
    ("PLAN --kv-heads 2 --tasks none", "--tasks none: expected --text with --text-tokens N"),
    ("--plan 1xCPU --kv-heads 2 --model no/model", "no/model: neither a directory nor a hub repository"),
    ("--plan 1xCPU --kv-heads 2 --model docs", "docs/config.json: expected a model config"),
])
def test_a_plan_without_a_run_refuses_what_needs_one(inputs, words, message):
    words = words.replace("PLAN", "--plan 8xA100-80GB --model MODEL").replace("MODEL", inputs["model"])
    expect_error(message, STAGE, *words.split())


@pytest.mark.slow
def test_a_plan_refuses_what_stage_1_refuses_and_says_the_same(tmp_path):
    small_config(model_type="diffllama").save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        require_convertible(str(tmp_path), load_config(str(tmp_path)))
    expect_error(str(refused.value), STAGE, *PLAN, "--model", tmp_path, "--kv-heads", 2)


def table() -> list[list[str]]:
    """The rows of the manual's table of plans."""
    text = (ROOT / "docs" / "training.md").read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")]
            for line in re.findall(r"^\| +\d+B .*$", text, re.MULTILINE)]


@pytest.mark.parametrize("size", [
    pytest.param("7B", marks=pytest.mark.slow),
    *(pytest.param(size, marks=pytest.mark.release) for size in ("13B", "70B"))])
def test_the_table_of_plans_is_what_configs_give(size, tmp_path):
    hidden, inner, layers, heads, kv_heads = LLAMA2[size]
    LlamaConfig(vocab_size=32000, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=4096,
                dtype="float16").save_pretrained(tmp_path)
    rows = [row for row in table() if row[0] == size]
    assert len(rows) == 5
    for _, machine, train, needed, usable, seconds, moved, between, hours in rows:
        nodes = int(machine[0]) if machine.count("x") == 2 else 1
        printed = run(STAGE, "--plan", machine, "--model", tmp_path, "--kv-heads", kv_heads // 4, "--tasks",
                      "none", "--text", "c4", "--text-tokens", 10**8, "--batch", 64 * nodes, "--train",
                      train).stdout
        total = re.search(r"total ([\d.]+) of (\d+) usable", printed)
        assert float(total[1]) == pytest.approx(float(needed.split(",")[0]), abs=0.51) and total[2] == usable
        assert (", recomputed" in printed, "gathered once a row" in printed.partition("pruning")[2]) == (
            "recomputed" in needed, "whole" in needed)
        assert f"| {moved} GiB moved per rank" in printed and f" {seconds} s, " in printed
        assert (f", {between} GiB between nodes" in printed) == (between != "0")
        number, unit = re.search(r"MFU \| ([\d.]+) (h|min) in total", printed).groups()
        assert float(number) / {"h": 1, "min": 60}[unit] == pytest.approx(float(hours), rel=0.03)
