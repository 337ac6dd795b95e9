"""The embedded default: its files, that it is the same each time, and the paper's first claims on a trained model."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data import demo
from common.data.tasks import TASKS, load_task, tokenize
from conftest import ROOT, run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A demo model after a tenth of its training: enough for its heads to be about something."""
    home = tmp_path_factory.mktemp("demo") / "made"
    demo.build(home, steps=60)
    return home


def test_the_same_bytes_each_time(tmp_path):
    digests = []
    for name in ("a", "b"):
        demo.build(tmp_path / name, steps=2)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append({str(path.relative_to(tmp_path / name)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
    assert digests[0] == digests[1] and len(digests[0]) >= 2 + 16 + 4


def test_tasks_are_fair(made):
    """No validation prompt was trained on, the right answer is in the prompt, and no position is favoured."""
    for task in TASKS:
        train, validation = (load_task(task, split, str(made / "tasks"))[0] for split in ("train", "validation"))
        assert (len(train), len(validation)) == (demo.TRAIN_ROWS, demo.VALIDATION_ROWS)
        assert not {e.prompt for e in train} & {e.prompt for e in validation}
        assert all(repr(e.answer) in e.prompt for e in train)
        choices = len(train[0].choices)
        for place in range(choices):  # 2000 draws: 5 sigma are 0.056 at most
            assert sum(e.label == place for e in train) / len(train) == pytest.approx(1 / choices, abs=0.056)


def test_tokenizer(made):
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    text = (made / "text" / "heldout.txt").read_text()[:20_000]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    example = load_task("arc_easy", "train", str(made / "tasks"))[0][0]
    sample = tokenize(example, tokenizer)
    assert len(sample.answer) == 2 and sample.answer[0] in sample.prompt  # a word is one token wherever it stands


def test_model_is_plain_multi_head_llama(made):
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.num_key_value_heads == model.config.num_attention_heads == 8


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_alignment_helps_a_trained_model(made, tmp_path, kv_heads):
    """Within-group similarity rises in every layer, and merging without training loses less than mean-pooling."""
    home, pool = tmp_path / "aligned", tmp_path / "pool"
    run("01_calibrate.py", "--run", home, "--model", made / "model", "--text", made / "text" / "train.txt", "--sequences", 32)
    run("02_similarity.py", "--run", home)
    proof = ["--text", made / "text" / "heldout.txt", "--sequences", 8]
    run("03_group.py", "--run", home, "--kv-heads", kv_heads)
    run("04_align.py", "--run", home, *proof)
    run("03_group.py", "--run", pool, "--kv-heads", kv_heads, "--similarity", home / "similarity.safetensors", "--by", "none")
    run("04_align.py", "--run", pool, "--calibration", home / "calibration", "--rotate", "none", *proof)
    aligned, pooled = (json.loads((path / "merged" / "stage.json").read_text())["summary"] for path in (home, pool))
    for layer in aligned["within_group_cosine"]:
        assert layer["key_after"] > layer["key_before"] and layer["value_after"] > layer["value_before"]
    assert aligned["max_logit_difference"] <= 1e-4
    assert aligned["perplexity_source"] < aligned["perplexity_merged"] < pooled["perplexity_merged"]


@pytest.mark.slow
def test_whole_demo(tmp_path):
    """`make demo` without its set-up: the teacher has learnt every task, and the aligned student keeps more than the mean-pooled."""
    subprocess.run(["bash", "pipelines/demo.sh"], cwd=ROOT, check=True, env=os.environ | {"PYTHON": sys.executable, "RUN": str(tmp_path / "run")})
    results = json.loads((tmp_path / "run" / "eval.json").read_text())["results"]
    for task in results["teacher"]["tasks"].values():
        assert task["exact_match"] >= task["chance"] + 0.25
    assert results["aligned"]["macro_exact_match"] > results["mean-pool"]["macro_exact_match"]
    assert results["aligned-untrained"]["perplexity"] < results["mean-pool-untrained"]["perplexity"]
    assert results["aligned"]["cache_bytes_per_token"] * 4 == results["teacher"]["cache_bytes_per_token"]
