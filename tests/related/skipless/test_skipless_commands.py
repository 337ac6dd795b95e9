"""The commands of related/skipless: what they write, what they refuse."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.training.engine import STOPPED
from conftest import copy_run, expect_error, run, run_in_process, save_tiny
from related.skipless import exactness
from related.skipless.exactness import LOGIT_TOLERANCE
from skipless_models import COMPARE, FOLD, TRAIN, VARIANTS, contents, stop_after_two

SHORT = ["--length", 32, "--steps", 3, "--batch", 2, "--warmup", 1]


@pytest.fixture(scope="module")
def compared(inputs, tmp_path_factory):
    """A run directory after compare.py on a tiny model, what it printed, and the model."""
    home = tmp_path_factory.mktemp("skipless")
    model = save_tiny(home / "model", head_dim=6)
    text = ["--text", inputs["text"], "--heldout", inputs["text"]]
    done = run(COMPARE, "--run", home / "run", "--model", model, "--shape", model, *text, *SHORT)
    return home / "run", done.stdout, model


@pytest.mark.slow
def test_one_command_trains_folds_and_reports(compared):
    home, printed, _ = compared
    results = json.loads((home / "compare.json").read_text())
    lines = [line for line in results["exactness"] if line["remove"]]
    assert "40 folds exact" in printed
    assert len(lines) == 12 * 4 and sum("refused" in line for line in lines) == 8
    assert max(line["float64"] for line in lines if "float64" in line) < LOGIT_TOLERANCE
    assert len(results["conditions"]) == 3 and set(results["conditions"][0]) == set("qkvp")
    assert results["trained"]["serial"]["before"] != results["trained"]["serial"]["after"]
    assert [line["condition"] for line in results["sweep"]] == exactness.SWEEP
    assert "trained parallel" in (home / "compare.md").read_text()


@pytest.mark.slow
def test_fold_writes_a_checkpoint_and_replaces_only_its_own(compared, inputs):
    home, _, _ = compared
    flags = ["--run", home, "--text", inputs["text"], "--length", 32]
    done = run(FOLD, *flags, "--remove", "v", "--dtype", "bfloat16")
    assert "v_proj, o_proj removed" in done.stdout
    source = AutoModelForCausalLM.from_pretrained(home / "serial")
    folded = AutoModelForCausalLM.from_pretrained(home / "serial-without-v")
    summary = json.loads((home / "serial-without-v" / "stage.json").read_text())["summary"]
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() == summary["parameters_after"]
    assert summary["parameters_after"] < summary["parameters_before"] == source.num_parameters()
    stored = summary["max_relative_difference_stored"]
    assert summary["max_relative_difference"] < LOGIT_TOLERANCE < stored < 0.1
    run(FOLD, *flags, "--remove", "v", fails=True)
    run(FOLD, *flags, "--remove", "v", "--force")
    refused = run(FOLD, *flags, "--out", home / "serial", "--force", fails=True).stderr
    assert "found one of related/skipless/train.py" in refused
    assert AutoModelForCausalLM.from_pretrained(home / "serial").num_parameters() == source.num_parameters()


@pytest.mark.slow
def test_fold_refuses_what_it_cannot_do(compared, inputs):
    home, _, model = compared
    flags = ["--run", home, "--text", inputs["text"], "--length", 32]
    for changes, message in (
        (["--model", model], "norms and skip connections"),
        (["--max-condition", 0.5], "condition number at most 5e-01"),
        (["--max-condition", "nan"], "--max-condition"),
        (["--length", 257], "--length: expected at most 256"),
        (["--model", home / "none"], "none"),
    ):
        assert message in run(FOLD, *flags, "--out", home / "new", *changes, fails=True).stderr
    assert not (home / "new").exists()


@pytest.mark.slow
def test_bad_arguments_of_training_are_refused_before_any_work(inputs, tmp_path):
    square = save_tiny(tmp_path / "square", head_dim=6)
    flags = ["--run", tmp_path / "run", "--text", inputs["text"], "--heldout", inputs["text"]]
    flags += ["--steps", 3, "--batch", 2]
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for command, changes, message in (
        (TRAIN, ["--model", square, "--length", 1], "--length: expected 2 to 256"),
        (TRAIN, ["--model", square, "--length", 257], "--length: expected 2 to 256"),
        (TRAIN, ["--model", square, "--lr", -1], "--lr"),
        (TRAIN, ["--model", square, "--seed", -1], "--seed"),
        (TRAIN, ["--model", inputs["text"]], inputs["text"]),
        (COMPARE, ["--model", square, "--shape", inputs["model"]], "--shape: expected a square Q"),
        (COMPARE, ["--model", square, "--shape", square, "--length", 300], "--length: expected 2 to 256"),
        (COMPARE, ["--model", square, "--config", inputs["text"], "--report-only"], inputs["text"]),
        (TRAIN, ["--model", square, "--heldout", short], f"{short}: expected"),
    ):
        assert message in run(command, *flags, *changes, fails=True).stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_with_other_steps_is_refused_by_the_command(inputs, tmp_path, monkeypatch):
    """The checkpoints of a stopped training stay where they are."""
    flags = ["--run", tmp_path / "run", "--model", inputs["model"], "--text", inputs["text"], "--warmup", 1]
    flags += ["--heldout", inputs["text"], "--length", 16, "--batch", 2]
    stop_after_two(monkeypatch)
    assert run_in_process(TRAIN, [str(flag) for flag in (*flags, "--steps", 3)]).returncode == STOPPED
    monkeypatch.undo()
    before = contents(tmp_path / "run")
    assert any("step-00000002" in name for name in before)
    assert "steps 3 -> 4" in run(TRAIN, *flags, "--steps", 4, fails=True).stderr
    assert contents(tmp_path / "run") == before
    run(TRAIN, *flags, "--steps", 3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["serial"]


@pytest.mark.slow
def test_training_on_other_text_is_refused(inputs, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    flags = ["--run", tmp_path / "run", "--model", inputs["model"], "--text", text]
    flags += ["--heldout", inputs["text"]]
    flags += ["--steps", 3, "--batch", 2, "--length", 16, "--warmup", 1]
    text.write_text("some text, repeated " * 40)
    stop_after_two(monkeypatch)
    assert run_in_process(TRAIN, [str(flag) for flag in flags]).returncode == STOPPED
    monkeypatch.undo()
    text.write_text("other text, repeated " * 40)
    before = contents(tmp_path / "run")
    assert "samples_sha256" in run(TRAIN, *flags, fails=True).stderr and contents(tmp_path / "run") == before
    text.write_text("some text, repeated " * 40)
    run(TRAIN, *flags)


@pytest.mark.slow
def test_a_trained_model_of_another_shape_or_changed_is_refused(compared, inputs, tmp_path):
    home, _, model = compared
    other = save_tiny(tmp_path / "other", head_dim=6, seed=1)
    text = ["--text", inputs["text"], "--heldout", inputs["text"]]
    flags = ["--run", tmp_path / "run", "--model", model, *text, *SHORT]
    copy_run(home, tmp_path / "run")
    (tmp_path / "run" / "compare.json").unlink()
    assert "expected an artifact of model" in run(COMPARE, *flags, "--shape", other, fails=True).stderr
    weights_file = tmp_path / "run" / "parallel" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"x")
    assert "its content does not match" in run(COMPARE, *flags, "--shape", model, fails=True).stderr


@pytest.mark.slow
def test_matrices_that_are_not_square_are_reported(inputs, tmp_path):
    done = run(COMPARE, "--run", tmp_path, "--model", inputs["model"], "--report-only")
    assert "no attention matrix of" in done.stdout and "not square" in (tmp_path / "compare.md").read_text()


@pytest.mark.slow
def test_all_variants_are_trained_and_compared_seed_by_seed(inputs, tmp_path):
    model, home = save_tiny(tmp_path / "model", head_dim=6), tmp_path / "run"
    flags = ["--model", model, "--text", inputs["text"], "--heldout", inputs["text"], *SHORT]
    run(VARIANTS, "--run", home, "--seeds", 2, *flags)
    summary = json.loads((home / "variants.json").read_text())["summary"]
    names = {"serial": set(), "serial-trained-without-q": {"q_proj", "o_proj"},
             "serial-trained-without-k": {"k_proj", "o_proj"},
             "serial-trained-without-v": {"v_proj", "o_proj"}}
    for (name, removed), title in zip(names.items(), summary["losses"], strict=True):
        for seed in (0, 1):
            path = home / f"seed-{seed}" / name
            trained = AutoModelForCausalLM.from_pretrained(path)
            assert set(trained.config.removed) == removed
            assert trained.num_parameters() == summary["parameters"][title]
            perplexity = json.loads((path / "stage.json").read_text())["summary"]["perplexity"]
            assert summary["losses"][title][seed] == pytest.approx(math.log(perplexity))
        assert len(set(summary["losses"][title])) == 2  # another seed is another training
    losses = {title: sum(values) / 2 for title, values in summary["losses"].items()}
    row = next(line for line in (home / "variants.md").read_text().splitlines() if "without Q" in line)
    assert f"{losses['without Q and P'] - losses['full']:+.3f} ±" in row
    grouped = save_tiny(tmp_path / "grouped", head_dim=6, num_key_value_heads=4)
    expect_error("expected a square K", VARIANTS, "--run", tmp_path / "other", "--model", grouped, *flags[2:])
    expect_error("expected a square V", TRAIN, "--run", tmp_path / "other", "--model", grouped, *flags[2:],
                 "--without", "v")
    run(TRAIN, "--run", home, *flags[:2], "--parallel", "--without", "q", *flags[2:])
    assert (home / "parallel-trained-without-q").is_dir()
