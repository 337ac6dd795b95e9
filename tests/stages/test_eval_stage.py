"""Stage 7 as a command: the files it writes, recomputed from its answers; what it refuses before any work."""

import argparse
import contextlib
import importlib
import json
import math
import os
import shutil
import sys

import accelerate
import numpy
import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig, LlamaForCausalLM

from common.data import demo, text
from common.data.chat import load_chats, token_lines
from common.data.rows import Sample
from common.data.tasks import example_from_row
from common.evaluation import evaluate
from common.evaluation.evaluate import require_finite
from common.models import load as models
from common.run.errors import UserError
from models import byte_tokenizer, save_tiny, tiny_model
from runs import copy_run, evaluate_arguments, expect_error, run

stage7 = importlib.import_module("07_eval")


def results_of(home) -> dict[str, dict]:
    return json.loads((home / "eval" / "stage.json").read_text())["results"]


def read_outcomes(home) -> list[dict]:
    return [json.loads(line) for line in (home / "eval/eval.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def evaluation(inputs, tmp_path_factory):
    """Two GQA checkpoints, three of five questions drawn by a seed; (directory, arguments, printed text)."""
    home = tmp_path_factory.mktemp("evaluation")
    first = save_tiny(home / "first", num_key_value_heads=4)
    second = save_tiny(home / "run" / "second", seed=1, num_key_value_heads=2)
    (home / "run" / "second" / "README.md").write_text("<!-- scores -->\n<!-- /scores -->\n")
    arguments = ["--run", home / "run", "--model", f"a={first}", f"b={second}", "--tasks", inputs["tasks"],
                 "--text", inputs["text"], "--length", 64, "--sequences", 2]
    done = run("07_eval.py", *arguments, "--limit", 3, "--seed", 1)
    shutil.copy(home / "run" / "second" / "README.md", home / "card.md")  # tests evaluate it again
    return home, arguments, done.stdout


def test_metrics_follow_from_the_answers_and_are_put_into_the_card(evaluation, inputs):
    home, _, output = evaluation
    written = json.loads((home / "run/eval/stage.json").read_text())
    outcomes = read_outcomes(home / "run")
    assert written["begin_of_sequence"] is False and len(outcomes) == 2 * 8 * 3
    assert (written["device"], written["model"]["path"]) == ("cpu", f"{home}/first")  # the reference
    for model, figures in written["results"].items():
        for task, measured in figures["tasks"].items():
            answered = [row for row in outcomes if (row["model"], row["task"]) == (model, task)]
            likeliest = [row["likelihood_choice"] == row["label"] for row in answered]
            assert measured["questions"] == len(answered) == 3
            assert measured["exact_match"] == numpy.mean([row["exact"] for row in answered])
            assert measured["likelihood"] == numpy.mean(likeliest)
        assert figures["perplexity_tokens"] == 2 * 63
        assert figures["heads"] == 8 and figures["kv_heads"] == {"a": 4, "b": 2}[model]
        percent = [100 * figures[name] for name in ("macro_likelihood", "macro_likelihood_stderr")]
        assert "{:.1f} ± {:.1f}".format(*percent) in output
    assert output.count(f"reads   {inputs['text']}: ") == 1  # though both checkpoints read it
    card = (home / "card.md").read_text()
    assert "24 validation questions" in card and "| 2 of 8 " in card
    assert not (home / "first" / "README.md").exists()


def test_answers_are_those_of_the_questions(evaluation, inputs):
    home, _, _ = evaluation
    outcomes = read_outcomes(home / "run")
    drawn = {row["question"] for row in outcomes}
    assert len(drawn) == 3 and drawn != {0, 1, 2}
    for row in outcomes:
        with open(f"{inputs['tasks']}/{row['task']}.validation.jsonl") as file:
            example = example_from_row(row["task"], json.loads(file.read().splitlines()[row["question"]]))
        assert row["label"] == example.label and row["exact"] == (row["generated"] == example.answer)
        assert len(row["likelihood_scores"]) == len(example.choices)
        assert row["likelihood_choice"] == numpy.argmax(row["likelihood_scores"])


@pytest.fixture
def checkpoint(inputs, tmp_path) -> str:
    return shutil.copytree(inputs["model"], tmp_path / "model")


def test_layer_by_layer_other_families_are_refused(tmp_path):
    GPTNeoXConfig().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--layerwise: GPTNeoXForCausalLM cannot be taken apart: it is not a"):
        stage7.prepare(str(tmp_path), {}, "none", None, [], argparse.Namespace(layerwise=True))


def test_a_question_beyond_the_positions_is_refused_before_any_scoring(inputs):
    """Counted with the longest choice and end-of-sequence, whichever choice is right."""
    args = argparse.Namespace(layerwise=False, cache=None, length=2, sequences=1, bos=None, chat=None)
    rest = len("p\nQuestion: ?\nChoices: ['true', 'false']\nAnswer:false") + 1
    for length, fits in ((257, False), (256, True)):
        row = {"question": "q" * (length - rest), "passage": "p", "label": True}
        tasks = {"boolq": {1: example_from_row("boolq", row)}}
        message = "boolq.validation row 1: expected at most 256 tokens"
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match=message):
            stage7.prepare(inputs["model"], tasks, "none", None, [], args)


@pytest.mark.slow
def test_layer_by_layer_metrics_are_the_whole_models(evaluation):
    home, arguments, _ = evaluation
    other, flags = home / "layerwise", [*arguments, "--layerwise"]
    del flags[flags.index("--tasks") : flags.index("--tasks") + 2]
    run("07_eval.py", *flags, "--run", other)
    results, expected = results_of(other), results_of(home / "run")
    for name in ("a", "b"):
        for metric in ("perplexity", "perplexity_stderr"):
            assert results[name].pop(metric) == pytest.approx(expected[name][metric], rel=1e-5)
        assert results[name].pop("tasks") == {}
        assert os.path.basename(results[name].pop("path")) == os.path.basename(expected[name]["path"])
        for metric, value in results[name].items():
            assert value == expected[name][metric], metric
        assert "heads" in results[name]
        assert not [key for key in results[name] if "tokens_per_s" in key]
    assert read_outcomes(other) == []


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
    peak = json.loads((home / "eval" / "stage.json").read_text())["summary"]["peak_memory_gib"]
    assert weights > 1.5 and peak < weights / 2, (peak, weights)


@pytest.mark.slow
def test_a_model_too_large_for_one_gpu_is_spread_over_all(evaluation, tmp_path, monkeypatch):
    home, arguments, _ = evaluation
    load, maps = models.AutoModelForCausalLM.from_pretrained, []

    def from_pretrained(path, device_map, **options):
        maps.append(device_map)
        model, report = load(path, **options)
        places = {"model": "cpu", "lm_head": "disk"}
        folder = tmp_path / str(len(maps))
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)
        model.hf_device_map = {"model": 0, "lm_head": 1}
        return model, report

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(models, "check_finite", lambda tensors, where: None)  # lm_head is on the disk
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 200_000))  # bytes: free, all
    flags = ["--limit", 3, "--seed", 1, "--only", "piqa", "--device", "cuda", "--dtype", "float32"]
    done = run("07_eval.py", *arguments, "--run", tmp_path / "run", *flags)
    assert maps == ["auto", "auto"] and "first, spread over all GPUs" in done.stdout
    answered = [row for row in read_outcomes(home / "run") if row["task"] == "piqa"]
    assert read_outcomes(tmp_path / "run") == answered and len(answered) == 2 * 3
    results, expected = results_of(tmp_path / "run"), results_of(home / "run")
    assert results["b"]["perplexity"] == expected["b"]["perplexity"]


def test_one_value_that_is_not_finite_is_enough():
    require_finite([0.5, -3.0], "a", tiny_model())
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(UserError, match="a: expected finite log-probabilities, found NaN or Inf"):
            require_finite([0.5, value, -3.0], "a", tiny_model())


@pytest.mark.slow
def test_overflow_is_one_line_and_nothing_is_written(inputs, tmp_path):
    """Weights that are finite in float16, and activations that are not."""
    model, home = tiny_model(), tmp_path / "run"
    with torch.no_grad():
        model.model.norm.weight.fill_(6e4)
        model.lm_head.weight.fill_(6e4)
    model.half().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["--run", home, "--model", tmp_path / "model", *evaluate_arguments(inputs)]
    message = "perplexity: expected a loss of at most 700 nats, found nan"
    expect_error(message, "07_eval.py", *arguments, "--tasks", "none", "--dtype", "float16")
    assert not home.exists()


@pytest.mark.slow
def test_without_tasks_there_are_text_answers_and_speed(evaluation, inputs, tmp_path):
    """A card outside the run directory stays as it is."""
    home, arguments, _ = evaluation
    prompts, card = tmp_path / "prompts.txt", (home / "run" / "second" / "README.md").read_bytes()
    asked = ["What is red?", "And blue?"]
    prompts.write_text("\n\n".join(asked))
    third = ["--model", f"a={home}/first", f"b={home}/run/second", f"again={home}/first"]
    arguments = [*arguments, "--run", tmp_path, "--tasks", "none", "--prompts", prompts, *third]
    run("07_eval.py", *arguments)
    written = json.loads((tmp_path / "eval" / "stage.json").read_text())
    results = written["results"]
    assert written["prompts"] == asked
    assert [len(results[name]["answers"]) for name in ("a", "b")] == [2, 2]
    again = results["again"]  # compared with the first, not the second
    assert (again["kl"], again["agreement"], again["loss_above"], again["loss_above_stderr"]) == (0, 1, 0, 0)
    assert results["again"]["answers"] == results["a"]["answers"] != results["b"]["answers"]
    assert "kl" not in results["a"] and results["b"]["kl"] > 0 and 0 <= results["b"]["agreement"] <= 1
    assert read_outcomes(tmp_path) == []
    assert (home / "run" / "second" / "README.md").read_bytes() == card


def with_template(path, directory):
    """A copy of a checkpoint whose tokenizer has a chat template."""
    shutil.copytree(path, directory)
    template = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
                "{% if add_generation_prompt %}<assistant>{% endif %}")
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.slow
def test_answers_of_chats_come_first_from_messages_as_from_their_tokens(evaluation, tmp_path):
    """heldout_chats.jsonl has the same chats as tokens, which suit one tokenizer alone."""
    home, _, _ = evaluation
    paths = {name: with_template(home / path, tmp_path / name) for name, path in
             (("a", "first"), ("b", "run/second"))}
    (tmp_path / "run").mkdir()
    paths["b"] = paths["b"].rename(tmp_path / "run" / "b")
    chats, tokens = tmp_path / "chats.jsonl", tmp_path / "tokens.jsonl"
    turns = [("user", "What?"), ("assistant", "It is a colour."), ("user", "And?"), ("assistant", "No.")]
    rows = [{"messages": [{"role": role, "content": f"{content}{number}"} for role, content in turns]}
            for number in range(3)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples, _ = load_chats(str(chats), models.load_tokenizer(str(paths["a"])), 256, text.EVALUATION)
    tokens.write_text(token_lines(samples))
    words = ["--run", tmp_path / "run", "--model", f"a={paths['a']}", f"b={paths['b']}", "--tasks", "none",
             "--text", "none"]
    run("07_eval.py", *words, "--chat", chats)
    results = results_of(tmp_path / "run")
    nets = [models.load_model(str(path)) for path in paths.values()]
    _, reference = evaluate.prediction_metrics(nets[0], samples, None)
    expected, _ = evaluate.prediction_metrics(nets[1], samples, reference)
    assert {key: results["b"][f"chat_{key}"] for key in expected} == pytest.approx(expected)
    assert "chat_kl" not in results["a"] and results["a"]["chat_perplexity"] > 1
    assert results["b"]["chat_perplexity_tokens"] == sum(sample.answer_tokens for sample in samples)
    assert "answers of chats" in (paths["b"] / "README.md").read_text()
    run("07_eval.py", *words, "--chat", tokens, "--update")
    again = results_of(tmp_path / "run")["b"]
    assert {key: again[f"chat_{key}"] for key in expected} == pytest.approx(expected)


def test_an_evaluation_is_complete_until_one_of_its_inputs_changes(inputs, checkpoint, tmp_path):
    tasks, prompts, text = tmp_path / "tasks", tmp_path / "prompts.txt", tmp_path / "text.txt"
    chats = tmp_path / "chats.jsonl"
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


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--cache", "f16"], ["--layerwise"]])
def test_only_checkpoints_of_one_tokenizer_are_compared(inputs, tmp_path, flags):
    """Tokens may be the same by chance; tokens of a file mean the same to one tokenizer only."""
    other, texts = shutil.copytree(inputs["model"], tmp_path / "other"), tmp_path / "text.txt"
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["?"] = vocabulary["?"], vocabulary["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts.write_text("without those marks " * 3 + "and long")  # 64 tokens, but not in nine tenths of it
    models = ["--model", f"a={inputs['model']}", f"b={inputs['model']}", f"other={other}"]
    words = ["--tasks", "none", "--length", 32, "--sequences", 2, *flags]
    run("07_eval.py", "--run", tmp_path / "run", *models, *words, "--text", texts)
    results = results_of(tmp_path / "run")
    compared = [name for name, figures in results.items() if "kl" in figures]
    caches = {name: figures.get("caches", {"f16": {"pairs": {}}}) for name, figures in results.items()}
    cached = [name for name, formats in caches.items() if "kl" in formats["f16"]["pairs"]]
    assert (compared, cached) == (([], []) if flags == ["--layerwise"] else (["b"], ["a", "b"]))
    assert results["other"]["perplexity"] == results["a"]["perplexity"]
    rows = tmp_path / "rows.npy"
    numpy.save(str(rows), numpy.arange(64, dtype="<i4").reshape(2, 32))
    message = f"{rows}: expected checkpoints with one tokenizer, as it has tokens, found those of "
    expect_error(message, "07_eval.py", "--run", tmp_path / "tokens", *models, *words, "--text", rows)


def test_the_demo_is_measured_on_its_own_held_out_text_and_tasks(aligned_run, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    args, path = argparse.Namespace(run=str(home), tasks=None, text=None), home / "calibration" / "stage.json"
    assert stage7.choose_sources(args) == ("hub", "c4")
    record = json.loads(path.read_text())
    record["model"]["name"] = "demo"
    path.write_text(json.dumps(record))
    assert stage7.choose_sources(args) == demo.default_sources(True) != ("hub", "c4")
    args.text = "other.txt"
    assert stage7.choose_sources(args)[1] == "other.txt"


@pytest.mark.parametrize("device, given, expected", [
    ("cpu", [], "float32"), ("cuda:1", [], "bfloat16"), ("cuda:1", ["--dtype", "float32"], "float32"),
])  # fmt: skip
def test_forward_passes_are_in_bfloat16_on_gpus(monkeypatch, device, given, expected):
    monkeypatch.setattr(stage7, "pick_device", lambda name: device)
    monkeypatch.setattr(sys, "argv", ["07_eval.py", *given])
    assert stage7.parse().dtype == expected


def test_a_prompt_is_a_line_of_its_file(tmp_path):
    """Whatever else str.splitlines would split at."""
    line, path = "Translate:\u2028good\u0085morning\x0bto\x0call\x1cof us", tmp_path / "prompts.txt"
    path.write_text(f"\n{line}\r\n \n last", encoding="utf-8")
    assert stage7.read_prompts(str(path)) == [line, "last"]


@pytest.mark.slow
def test_execution_flags_reach_the_model(evaluation, tmp_path, monkeypatch):
    home, arguments, _ = evaluation
    seen = []

    def answer_questions(name, model, tokenizer, tasks, samples, batch):
        seen.append((model.dtype, batch))
        return {}, []

    monkeypatch.setattr(evaluate, "answer_questions", answer_questions)
    monkeypatch.setattr(evaluate, "speed", lambda model, row: seen.append(len(row)) or {})
    run("07_eval.py", *arguments, "--run", tmp_path, "--model", home / "first", "--dtype", "bfloat16",
        "--batch", 3, "--length", 32)
    assert seen == [(torch.bfloat16, 3), 32]


def test_tokens_and_prompts_that_the_model_cannot_take_are_refused(inputs, tmp_path):
    """260 tokens in its vocabulary, 256 positions, of which an answer takes 64."""
    args = argparse.Namespace(layerwise=False, cache=None, length=2, sequences=1, bos=None, chat=None,
                              prompts="p.txt")
    for token, prompt in ((259, "x" * 192), (260, ""), (259, "x" * 193)):
        numpy.save(f"{tmp_path}/tokens.npy", numpy.array([[1, token]], text.TOKEN))
        message = f"expected tokens below 260, the vocabulary of {inputs['model']}, found 260"
        if token < 260:
            message = "--prompts p.txt: expected at most 192 tokens, for an answer of 64 .*, found 193"
        fits = len(prompt) == 192
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match=message):
            stage7.prepare(inputs["model"], {}, f"{tmp_path}/tokens.npy", None, [prompt], args)


def test_questions_are_all_or_the_first_ones_or_drawn_by_the_seed(inputs):
    for limit, seed, numbers in ((None, None, range(5)), (3, None, range(3)), (3, 5, [2, 3, 4])):
        args = argparse.Namespace(only=["siqa"], limit=limit, seed=seed)
        assert list(stage7.read_questions(args, inputs["tasks"])["siqa"]) == list(numbers)


def test_the_students_teacher_is_the_reference_wherever_it_lies(finished_run, tmp_path):
    home = copy_run(finished_run, tmp_path / "run")
    path, shared = home / "train" / "stage.json", str(tmp_path / "shared")
    record = json.loads(path.read_text())
    own, source = ["teacher", "merged", "gqa"], record["model"]["path"]
    for teacher, names, first in ((None, own, str(home / "teacher")), (shared, own, shared),
                                  ("source", ["source", *own], source)):
        path.write_text(json.dumps(record | {"arguments": record["arguments"] | {"teacher": teacher}}))
        checkpoints = stage7.default_checkpoints(str(home))
        assert [*checkpoints] == names and checkpoints[names[0]] == first
