"""The demo model: its files, its training, and the paper's first claims on it."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data import demo, demo_tasks
from common.data.tasks import TASKS, example_from_row, load_task, tokenize
from conftest import ROOT, expect_error, run
from pipelines import demo_model


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The demo's home: model, text and tasks."""
    home = tmp_path_factory.mktemp("demo") / "made"
    demo.build_demo(home)
    return home


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_model_is_the_one_in_the_repository(made):
    """Its figures in the docs are those of these bytes."""
    assert digests(made / "model") == digests(demo.CHECKPOINT)
    digest = digests(demo.CHECKPOINT)["model.safetensors"]
    assert f"`{digest}`" in (demo.CHECKPOINT / "README.md").read_text()
    assert len(list((made / "tasks").iterdir())) == 16 and len(list((made / "text").iterdir())) == 2
    assert len({path.stat().st_mode for path in made.rglob("*") if path.is_file()}) == 1


@pytest.mark.slow
def test_training_gives_the_same_bytes_each_time(tmp_path):
    for name in ("a", "b"):
        run("pipelines/demo_model.py", "--out", tmp_path / name, "--steps", 2, fresh=True)
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b")
    assert first.keys() | {"README.md"} == digests(demo.CHECKPOINT).keys()
    expect_error("a already exists", "pipelines/demo_model.py", "--out", tmp_path / "a")


@pytest.fixture(scope="module")
def rows() -> dict:
    """(task, split) -> rows."""
    return demo_tasks.task_rows()


@pytest.fixture(scope="module")
def examples(rows) -> dict:
    """(task, split) -> examples."""
    return {(task, split): [example_from_row(task, row) for row in rows[task, split]] for task, split in rows}


def test_rows_are_those_of_every_version(rows):
    """The demo's figures are comparable on the same questions only."""
    digest = hashlib.sha256()
    for key, split_rows in rows.items():
        digest.update(json.dumps([key, split_rows]).encode())
    assert digest.hexdigest()[:16] == "373a37be67a402b2"


@pytest.mark.parametrize("task", TASKS)
def test_tasks_are_fair(examples, task):
    """No validation prompt is trained on, the right answer is in the prompt, and no position is favoured."""
    train, validation = examples[task, "train"], examples[task, "validation"]
    assert (len(train), len(validation)) == (demo_tasks.TRAIN_ROWS, demo_tasks.VALIDATION_ROWS)
    assert not {example.prompt for example in train} & {example.prompt for example in validation}
    assert all(repr(example.answer) in example.prompt for example in train)
    choices = len(train[0].choices)
    for place in range(choices):  # 2000 draws: 5 sigma are 0.056 at most
        share = sum(example.label == place for example in train) / len(train)
        assert share == pytest.approx(1 / choices, abs=0.056)


def test_every_choice_is_the_property_of_some_fact(examples):
    """A wrong choice cannot be told by its absence from the facts, and the label follows from the facts."""
    for example in examples["hellaswag", "train"][:200]:
        passage, question = example.prompt.split("Passage: ")[1].split(". so ")
        facts, name = dict(fact.split(" is ") for fact in passage.split(", ")), question.split(" is")[0]
        assert facts[name] == example.answer and set(example.choices) == set(facts.values())


def test_text_is_split_by_file():
    train, heldout = demo.read_corpus()
    assert len(train) >= demo.TRAIN_CHARS and len(heldout) >= demo.HELDOUT_CHARS
    sources = [path.read_text() for path in Path(os.__file__).parent.glob("*.py")]
    long = [source for source in sources if len(source) > 10_000]
    assert sum(source in heldout for source in long) >= 1
    assert not any(source in train and source in heldout for source in long)


def test_the_demo_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DEMO_HOME", str(tmp_path / "demo"))
    made = []
    monkeypatch.setattr(demo, "build_demo", lambda home: made.append(home) or os.makedirs(f"{home}/model"))
    assert demo.resolve_model("demo") == demo.resolve_model("demo") == str(tmp_path / "demo" / "model")
    assert made == [str(tmp_path / "demo")]
    assert demo.resolve_model(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize("function", ["read_corpus", "task_rows"])
def test_an_interruption_leaves_nothing(tmp_path, monkeypatch, function):
    def interrupt():
        assert os.listdir(tmp_path / "demo.tmp")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "DEMO_HOME", str(tmp_path / "demo"))
    monkeypatch.setattr(demo, function, interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.resolve_model("demo")
    assert os.listdir(tmp_path) == []


class Tokens(SimpleNamespace):
    """The tokenizer of a model that is never given text."""

    eos_token_id, pad_token_id = 0, 1

    def __len__(self):
        return 100


def test_the_first_layer_starts_as_a_circuit_that_looks_back():
    """Head h attends to the token h + 1 places before, but for the noise of the other coordinates."""
    model = demo_model._new_model(Tokens())
    tokens = torch.randint(2, 100, (1, 220), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attentions = model(input_ids=tokens, output_attentions=True).attentions[0][0]  # [heads, 220, 220]
    for head, attention in enumerate(attentions):
        offsets = torch.arange(20, 220) - attention[20:].argmax(-1)
        assert offsets.mode().values == head + 1


def test_losses_count_the_tokens_of_weight_one():
    model = demo_model._new_model(Tokens())
    tokens, weights = demo_model._pad([([5, 6, 7, 8], [0, 0, 1, 1]), ([9, 10, 11], [0, 1, 0])], 1)
    assert tokens.tolist() == [[5, 6, 7, 8], [9, 10, 11, 1]]
    assert weights.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    with torch.no_grad():
        losses = demo_model._losses(model, tokens, weights)
        log_probs = model(input_ids=tokens).logits.log_softmax(-1)
    expected = [-log_probs[0, 1, 7], -log_probs[0, 2, 8], -log_probs[1, 0, 10]]
    assert torch.allclose(losses, torch.stack(expected), atol=1e-5)


def test_tokenizer(made):
    """Any text can be tokenized, that of another Python, too; a word of the tasks is one token everywhere."""
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    for text in ((made / "text" / "heldout.txt").read_text()[:20_000], "".join(map(chr, range(32, 0x3000)))):
        tokens = tokenizer(text)["input_ids"]
        assert tokenizer.decode(tokens) == text and max(tokens) < 1280
    example = load_task("arc_easy", "train", str(made / "tasks"))[0][0]
    sample = tokenize(example, tokenizer)
    assert len(sample.answer) == 2 and sample.answer[0] in sample.prompt


def test_the_model_answers_by_looking_up(made, examples):
    """A plain multi-head Llama whose next token is the answer, on questions it was not trained on."""
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.vocab_size == len(tokenizer)
    assert model.config.num_key_value_heads == model.config.num_attention_heads == 8
    right = 0
    for example in examples["hellaswag", "validation"][:40]:
        sample = tokenize(example, tokenizer)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample.prompt])).logits[0, -1]
        right += int(logits.argmax() == sample.answer[0])
    assert right >= 36  # chance: 10 among the four choices


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_alignment_helps_a_trained_model(made, tmp_path, kv_heads):
    """Similarity within groups rises in every layer, and untrained merging loses less than mean-pooling."""
    home, pool = tmp_path / "aligned", tmp_path / "pool"
    text = ["--text", made / "text" / "heldout.txt", "--sequences", 8]
    run("01_calibrate.py", "--run", home, "--model", made / "model", "--text", made / "text" / "train.txt",
        "--sequences", 32)
    run("02_similarity.py", "--run", home)
    run("03_group.py", "--run", home, "--kv-heads", kv_heads)
    run("04_align.py", "--run", home, *text)
    run("03_group.py", "--run", pool, "--kv-heads", kv_heads, "--similarity", home / "similarity.safetensors",
        "--by", "none")
    run("04_align.py", "--run", pool, "--calibration", home / "calibration", "--rotate", "none", *text)
    aligned = json.loads((home / "merged" / "stage.json").read_text())["summary"]
    pooled = json.loads((pool / "merged" / "stage.json").read_text())["summary"]
    for layer in aligned["within_group_cosine"]:
        assert layer["key_after"] > layer["key_before"] and layer["value_after"] > layer["value_before"]
    assert aligned["max_logit_difference"] <= 1e-4
    assert aligned["perplexity_source"] < aligned["perplexity_merged"] < pooled["perplexity_merged"]


@pytest.mark.release
def test_whole_demo(tmp_path):
    """`make demo` without its set-up: the teacher learns every task, and alignment beats mean-pooling."""
    environment = os.environ | {"PYTHON": sys.executable, "RUN": str(tmp_path / "run")}
    subprocess.run(["bash", "pipelines/demo.sh"], cwd=ROOT, check=True, env=environment)
    results = json.loads((tmp_path / "run" / "eval.json").read_text())["results"]
    for task in results["teacher"]["tasks"].values():
        assert task["exact_match"] >= task["chance"] + 0.25
    assert results["aligned"]["macro_exact_match"] > results["mean-pool"]["macro_exact_match"]
    assert results["aligned-untrained"]["perplexity"] < results["mean-pool-untrained"]["perplexity"]
    assert results["aligned"]["cache_bytes_per_token"] * 4 == results["teacher"]["cache_bytes_per_token"]
