"""--bos: sequences and prompts that begin with a begin-of-sequence token, through the stages."""

import json
import random

import pytest
from tqdm import tqdm
from transformers import AutoTokenizer

from common import evaluate
from common.artifacts import read_layer
from common.data.tasks import choice_samples, example_from_row
from common.files import sha256
from common.models import load_model
from conftest import byte_tokenizer, copy_run, expect_error, run, save_tiny

SEQUENCES, LENGTH = 6, 24


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model with "^" as begin-of-sequence token; documents as they are, and with "^" before each."""
    home = tmp_path_factory.mktemp("bos")
    save_tiny(home / "model")
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "^"
    tokenizer.save_pretrained(home / "model")
    draw = random.Random(0)
    documents = ["".join(draw.choices("abcdefgh ", k=LENGTH - 1)) for _ in range(SEQUENCES)]
    for name, beginning in (("bare", ""), ("marked", "^")):
        lines = [json.dumps({"text": beginning + document}) + "\n" for document in documents]
        (home / f"{name}.jsonl").write_text("".join(lines))
    return home


@pytest.fixture(scope="module")
def aligned(home):
    """Run directories after stages 1-4: "bare" text with --bos, and "marked" text without."""
    for name, flags in (("bare", ["--bos"]), ("marked", [])):
        out, text = home / f"run-{name}", home / f"{name}.jsonl"
        run("01_calibrate.py", "--run", out, "--model", home / "model", "--text", text,
            "--sequences", SEQUENCES, "--length", LENGTH, *flags)
        run("02_similarity.py", "--run", out, "--energy")
        run("03_group.py", "--run", out, "--kv-heads", 2, "--by", "energy")
        run("04_align.py", "--run", out, "--merge", "closed-form", "--refit")
    return {name: home / f"run-{name}" for name in ("bare", "marked")}


def test_calibration_is_that_of_text_which_begins_so(aligned):
    for index in range(3):
        bare, marked = (read_layer(str(out / "calibration"), index) for out in aligned.values())
        assert bare.keys() == marked.keys()
        assert all(bare[name].equal(marked[name]) for name in bare)


def test_alignment_and_refit_take_it_from_the_calibration(aligned):
    records = [json.loads((out / "merged" / "stage.json").read_text()) for out in aligned.values()]
    for name in ("perplexity_source", "perplexity_merged", "refit_layers"):
        assert records[0]["summary"][name] == records[1]["summary"][name]
    shards = [sorted((out / "merged").glob("*.safetensors")) for out in aligned.values()]
    assert [sha256(str(shard)) for shard in shards[0]] == [sha256(str(shard)) for shard in shards[1]]


def test_other_text_of_the_equivalence_check_begins_so_too(home, aligned, tmp_path):
    perplexities = []
    for name, out in aligned.items():
        copy = copy_run(out, tmp_path / name)
        run("04_align.py", "--run", copy, "--text", home / f"{name}.jsonl", "--sequences", 2, "--force")
        record = json.loads((copy / "merged" / "stage.json").read_text())
        perplexities.append(record["summary"]["perplexity_source"])
    assert perplexities[0] == perplexities[1]


def test_evaluation_begins_text_and_prompts_with_it(home, inputs):
    out = home / "evaluation"
    shared = ["--model", home / "model", "--tasks", inputs["tasks"], "--limit", 2, "--only", "piqa",
              "--sequences", SEQUENCES, "--length", LENGTH]
    results = {}
    for name, flags in (("bare", ["--bos"]), ("marked", [])):
        run("07_eval.py", "--run", out / name, *shared, "--text", home / f"{name}.jsonl", *flags)
        results[name] = json.loads((out / name / "eval.json").read_text())
    perplexities = [written["results"]["model"]["perplexity"] for written in results.values()]
    assert perplexities[0] == perplexities[1]
    assert [written["begin_of_sequence"] for written in results.values()] == [True, False]
    assert "with a begin-of-sequence token" in (out / "bare" / "eval.md").read_text()
    assert "no begin-of-sequence token" in (out / "marked" / "eval.md").read_text()

    with open(f"{inputs['tasks']}/piqa.validation.jsonl") as file:
        examples = [example_from_row("piqa", json.loads(next(file))) for _ in range(2)]
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    samples = [choice_samples(example, tokenizer, bos=True) for example in examples]
    model, bar = load_model(str(home / "model")), tqdm(disable=True)
    expected = evaluate.choice_likelihoods(model, samples, 64, bar)
    outcomes = [json.loads(line) for line in (out / "bare" / "eval.jsonl").read_text().splitlines()]
    assert [outcome["likelihood_scores"] for outcome in outcomes] == expected


def test_a_tokenizer_without_one_is_refused(inputs, tmp_path):
    message = "--bos: expected a tokenizer with a begin-of-sequence token, found none"
    for command in ("01_calibrate.py", "07_eval.py"):
        arguments = ["--model", inputs["model"], "--text", inputs["text"], "--length", 16, "--sequences", 2]
        tasks = ["--tasks", inputs["tasks"]] if command.startswith("07") else []
        expect_error(message, command, "--run", tmp_path, *arguments, *tasks, "--bos")
    assert not list(tmp_path.rglob("*.json"))
    expect_error("--length: expected 2 to", "01_calibrate.py", "--run", tmp_path, "--model", inputs["model"],
                 "--text", inputs["text"], "--length", 1, "--bos")
