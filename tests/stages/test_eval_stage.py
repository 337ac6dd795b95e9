"""Stage 7 as a command: the files it writes, recomputed from its answers; what its flags come to."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.data import demo
from common.data.chat import token_lines
from common.data.rows import Sample
from common.data.tasks import example_from_row
from common.evaluation.compared import Settings
from common.models.quantized_cache import Cache
from common.run.artifact import FORMAT
from models import byte_tokenizer, save_tiny
from related.dha.modeling import DhaConfig, DhaForCausalLM
from runs import copy_run, expect_error, read, run, valid_record

stage7 = importlib.import_module("07_eval")


def test_answers_are_recorded_and_metrics_follow_from_them(inputs, tmp_path):
    """Two GQA checkpoints, three of five questions drawn by a seed; one has a card."""
    first = save_tiny(tmp_path / "first", num_key_value_heads=4)
    second = save_tiny(tmp_path / "run" / "second", seed=1, num_key_value_heads=2)
    card = Path(second, "README.md")
    card.write_text("<!-- scores -->\n<!-- /scores -->\n")
    done = run("07_eval.py", "--run", tmp_path / "run", "--model", f"a={first}", f"b={second}",
               "--tasks", inputs["tasks"], "--text", inputs["text"], "--length", 64, "--sequences", 2,
               "--limit", 3, "--seed", 1)
    home = tmp_path / "run" / "eval"
    written = read(home / "stage.json")
    assert written["begin_of_sequence"] is False and written["model"]["path"] == first  # the reference
    outcomes = [json.loads(line) for line in (home / "eval.jsonl").read_text().splitlines()]
    assert len(outcomes) == 2 * 8 * 3 and len({row["question"] for row in outcomes} - {0, 1, 2}) > 0
    for row in outcomes:
        lines = Path(inputs["tasks"], f"{row['task']}.validation.jsonl").read_text().splitlines()
        example = example_from_row(row["task"], json.loads(lines[row["question"]]))
        assert row["label"] == example.label and row["exact"] == (row["generated"] == example.answer)
    for model, figures in written["results"].items():
        for task, measured in figures["tasks"].items():
            answered = [row["exact"] for row in outcomes if (row["model"], row["task"]) == (model, task)]
            assert measured["questions"] == 3 and measured["exact_match"] == numpy.mean(answered)
        assert figures["heads"] == 8 and figures["kv_heads"] == {"a": 4, "b": 2}[model]
    assert (home / "eval.md").read_text() in done.stdout and " 2 of 8 |" in card.read_text()
    assert not Path(first, "README.md").exists()  # outside the run directory


@pytest.mark.slow
def test_layer_by_layer_memory_is_that_of_a_layer(inputs, tmp_path):
    """A model of 1.6 GiB in float32 is measured in less than half of that."""
    config = LlamaConfig(vocab_size=260, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                         num_attention_heads=16, eos_token_id=256)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="500MB")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    home, text = tmp_path / "run", ["--text", inputs["text"], "--length", 64, "--sequences", 4]
    run("07_eval.py", "--run", home, "--model", tmp_path / "model", *text, "--layerwise", fresh=True)
    weights = 2 * sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")) / 2**30
    peak = read(home / "eval/stage.json")["summary"]["peak_memory_gib"]
    assert weights > 1.5 and peak < weights / 2, (peak, weights)


@pytest.mark.slow
def test_stage_7_evaluates_a_class_of_a_module_that_is_registered(inputs, tmp_path):
    """Decoupled heads, of which a layer has more for values than for keys."""
    key_groups, value_groups = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2], [1, 3, 4], [5, 6, 7]]
    config = DhaConfig(vocab_size=260, hidden_size=48, intermediate_size=64, num_hidden_layers=3, head_dim=8,
                       num_attention_heads=8, num_key_value_heads=2, eos_token_id=256,
                       key_groups=[key_groups] * 3, value_groups=[value_groups] * 3)
    DhaForCausalLM(config).save_pretrained(tmp_path / "dha")
    byte_tokenizer().save_pretrained(tmp_path / "dha")
    run("07_eval.py", "--run", tmp_path, "--model", tmp_path / "dha", "--register", "related.dha.modeling",
        "--tasks", inputs["tasks"], "--only", "piqa", "--text", "none")
    results = read(tmp_path / "eval/stage.json")["results"]
    # layers, key and value heads, head_dim, bytes of a float32
    assert results["dha"]["cache_bytes_per_token"] == 3 * (2 + 3) * 8 * 4


def test_an_evaluation_is_complete_until_one_of_its_inputs_changes(inputs, tmp_path):
    checkpoint = shutil.copytree(inputs["model"], tmp_path / "model")
    tasks, prompts, text, chats = (tmp_path / name for name in ("tasks", "prompts", "t.txt", "c.jsonl"))
    tasks.mkdir()
    shutil.copy(f"{inputs['tasks']}/boolq.validation.jsonl", tasks)
    shutil.copy(inputs["text"], text)
    prompts.write_text("What is red?\n")
    chats.write_text(token_lines([Sample((1, 2), (3, 4))]))
    arguments = ["--run", tmp_path / "run", "--model", checkpoint, "--tasks", tasks, "--only", "boolq",
                 "--limit", 1, "--text", text, "--length", 8, "--sequences", 1, "--prompts", prompts,
                 "--chat", chats]
    run("07_eval.py", *arguments)
    assert "complete, by this command and from these inputs" in run("07_eval.py", *arguments).stdout
    for path in (tasks / "boolq.validation.jsonl", prompts, text, chats, checkpoint / "config.json"):
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        name = "model" if path.parent == checkpoint else path.name
        expect_error(f"eval already exists, made from another {name}", "07_eval.py", *arguments)
        path.write_bytes(content)


def test_the_demo_is_measured_on_its_own_held_out_text_and_tasks(tmp_path):
    assert stage7.choose_sources(str(tmp_path), None, None) == ("hub", "c4")
    record = valid_record("01_calibrate.py")
    record["model"]["name"] = "demo"
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration/stage.json").write_text(json.dumps(record))
    tasks, text = stage7.choose_sources(str(tmp_path), None, None)
    assert (tasks, text) == demo.default_sources(True) != ("hub", "c4")
    assert stage7.choose_sources(str(tmp_path), None, "other.txt") == (tasks, "other.txt")


@pytest.mark.parametrize(("tasks", "text", "chat", "expected"), [
    ("none", None, None, ["tokens.npy", None]), ("none", "t", "c", ["t", "c"]),
    ("hub", None, "c", [None, "c"])])
def test_what_a_training_without_tasks_held_out_is_measured(
        tmp_path, monkeypatch, tasks, text, chat, expected):
    for name in ("train", "tokens"):
        (tmp_path / name).mkdir()
    (tmp_path / "tokens/tokens.npy").touch()
    record = {"format": FORMAT, "arguments": {"tasks": tasks}, "heldout": "RUN/tokens"}
    (tmp_path / "train/stage.json").write_text(json.dumps(record))
    words = [*(["--text", text] if text else []), *(["--chat", chat] if chat else [])]
    monkeypatch.setattr(sys, "argv", ["07_eval.py", "--run", str(tmp_path), *words])
    args = stage7.with_heldout(stage7.parse())
    assert [args.text and args.text.rpartition("/")[2], args.chat] == expected


@pytest.mark.parametrize(("device", "words", "dtype"), [
    ("cpu", [], "float32"), ("cuda:1", [], "bfloat16"), ("cuda:1", ["--dtype", "float32"], "float32"),
])  # fmt: skip
def test_every_setting_is_settled_once(tmp_path, monkeypatch, device, words, dtype):
    monkeypatch.setattr(stage7, "pick_device", lambda name: device)
    (tmp_path / "p.txt").write_text("What?\n")
    words = ["07_eval.py", *words, "--run", tmp_path, "--tasks", "t", "--only", "siqa", "--limit", 3,
             "--seed", 5, "--text", "x.txt", "--chat", "c.jsonl", "--prompts", tmp_path / "p.txt",
             "--length", 9, "--sequences", 4, "--no-bos", "--cache", "q4_0", "q8_0/q4_0", "--batch", 2]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    assert stage7.settle(stage7.parse()) == Settings(
        "t", ("siqa",), 3, 5, "x.txt", "c.jsonl", ("What?",), 4, 9, False,
        (Cache("q4_0", "q4_0"), Cache("q8_0", "q4_0")), False, 2, device, dtype)


def test_the_students_teacher_is_the_reference_wherever_it_lies(finished_run, tmp_path):
    home = copy_run(finished_run, tmp_path / "run")
    path, shared = home / "train" / "stage.json", str(tmp_path / "shared")
    record = read(path)
    own, source = ["teacher", "merged", "gqa"], record["model"]["path"]
    for teacher, names, first in ((None, own, str(home / "teacher")), (shared, own, shared),
                                  ("source", ["source", *own], source)):
        path.write_text(json.dumps(record | {"arguments": record["arguments"] | {"teacher": teacher}}))
        checkpoints = stage7.default_checkpoints(str(home))
        assert [*checkpoints] == names and checkpoints[names[0]] == first
