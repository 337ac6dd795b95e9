"""pipelines.convert: the stages' flags, what is refused before the first of them, and whole conversions."""

import shlex
from pathlib import Path

import pytest
import torch

from models import save_tiny
from pipelines import convert
from runs import expect_error, read, run

CONVERT = "pipelines/convert.py"
SETTINGS = ["--model=a model.gguf", "--kv-heads", "2", "--tokens", "5000", "--text", "c4",
            "generated:README.md", "--chat", "generated"]


@pytest.fixture
def planned(monkeypatch):
    """planned(WORDS): command lines of the stages that these flags would run, in order, in RUN."""

    def record(*words: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["convert", "--run", "RUN", *words])
        lines = []

        def run(stages, script, *given, processes=1):
            line = shlex.join((script, *given))
            lines.append(f"{processes} x {line}" if processes > 1 else line)

        monkeypatch.setattr(convert.Stages, "run", run)
        monkeypatch.setattr(convert.Commands, "check", lambda _: None)
        monkeypatch.setattr(convert, "read_text", lambda path: "table")
        monkeypatch.setattr(convert, "read_record", lambda *_: None)
        monkeypatch.setattr(convert, "source_model", lambda *_: {"path": "source"})
        convert.main()
        return lines

    return record


def test_the_recommended_road(planned):
    """Export and evaluation are made again after another training."""
    dtype = convert.cost.processor_dtype()
    assert planned(*SETTINGS, "--processes", "3", "--length", "128", "--tasks", "my tasks", "--only", "piqa",
                   "siqa", "--prompts", "my prompts", "--", "--lr", "1e-4") == [
        "01_calibrate.py --run RUN '--model=a model.gguf' --text c4 --chat generated --sequences 128 "
        "--length 128",
        "02_similarity.py --run RUN --energy",
        "03_group.py --run RUN --similarity RUN/similarity --by energy --kv-heads 2",
        "04_align.py --run RUN --calibration RUN/calibration --merge closed-form --refit attention",
        "3 x 05_prune_train.py --run-dir RUN --tasks none --text c4 generated:README.md --text-tokens 5000 "
        f"--chat generated --dtype {dtype} --lr 1e-4",
        "06_export.py --run RUN --update --cache-basis rotated",
        "07_eval.py --run RUN --update --tasks 'my tasks' --only piqa siqa --prompts 'my prompts' "
        "--cache q8_0 q8_0/q4_0 q4_0",
        "pipelines/report.py --run RUN"]


def test_defaults_take_all_of_a_file_and_some_of_what_does_not_end(planned):
    calibration, _, grouping, _, train, export, _, _ = planned("--model", "demo", "--basis", "none")
    assert calibration.endswith(" --sequences 128 --length 256")
    assert "--kv-heads" not in grouping and "--cache-basis" not in export
    assert " --text generated --text-tokens 50000" in train
    calibration, *_, train, _, _, _ = planned("--model", "x", "--text", "README.md")
    assert calibration.endswith(" --length 512") and "--text-tokens" not in train


def test_another_runs_calibration(planned):
    grouping, merge, *_ = planned(*SETTINGS, "--calibrated", "other")
    assert " --similarity other/similarity " in grouping and " --calibration other/calibration " in merge


def test_a_choice_merges_every_number_from_one_calibration(planned):
    group = "--similarity RUN/similarity --by energy --kv-heads"
    merge = "--calibration RUN/calibration --merge closed-form --refit output"
    assert planned("--model", "x", "--choose", "4", "8")[1:] == [
        "02_similarity.py --run RUN --energy",
        f"03_group.py --run RUN/kv8 {group} 8", f"03_group.py --run RUN/kv4 {group} 4",
        f"04_align.py --run RUN/kv8 {merge}", f"04_align.py --run RUN/kv4 {merge}",
        "07_eval.py --run RUN/choose --update --model source=source kv8=RUN/kv8/merged kv4=RUN/kv4/merged "
        "--tasks none --text RUN/calibration --sequences 16 --cache q8_0 q8_0/q4_0 q4_0"]


@pytest.mark.parametrize(("words", "compiler", "compiled"), [
    ([], "bash", True), ([], "no-compiler", False), (["--tokens", "9999999"], "bash", False),
    (["--", "--deterministic"], "bash", False)])
def test_on_gpus_a_long_training_is_compiled(monkeypatch, words, compiler, compiled):
    """Where its minute pays for itself and there is a compiler; it need not resume to the same bits."""
    monkeypatch.setattr("sys.argv", ["convert", "--model", "x", *words])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("CC", compiler)
    train = convert.Commands(*convert.parse()).train
    assert ("--compile" in train) == compiled and "--dtype" not in train


def save(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_what_a_stage_would_refuse_is_refused_before_the_first(aligned_run, tmp_path):
    rows = save(tmp_path / "rows.jsonl", '{"text": "a"}\n{"text": 4}\n')
    short = save(tmp_path / "short.txt", "a word")
    for words, message in (
        (["--kv-heads", 3], "kv heads: expected one of [1, 2, 4]"),
        (["--text", rows], f"{rows} line 2: column 'text': expected text, found 4"),
        (["--text", short, "--tokens", 50], "expected 50 tokens (--tokens), found 6 bytes"),
        (["--tasks", tmp_path], "expected TASK.validation.jsonl or .parquet"),
        (["--calibrated", aligned_run], "calibration: made with --model "),
        (["--", "--text-length", 999999], "--text-length: expected 2 to 256 tokens"),
        (["--", "--name=x"], "-- --name=x: expected flags of stage 5"),
    ):
        expect_error(message, CONVERT, "--model", "demo", "--run", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


def times(home: Path) -> dict[Path, int]:
    """When every JSON file of a run was written."""
    return {path: path.stat().st_mtime_ns for path in home.rglob("*.json")}


@pytest.mark.slow
def test_convert_end_to_end_after_a_choice_then_other_prompts(tmp_path):
    """All in one run directory, on the same calibration."""
    home, source = tmp_path / "a run", save_tiny(tmp_path / "model", num_key_value_heads=4, head_dim=32)
    words = ["--model", source, "--run", home, "--sequences", 8, "--length", 64]
    run(CONVERT, *words, "--choose", fresh=True)
    results = read(home / "choose/eval/stage.json")["results"]
    assert [(name, metrics["kv_heads"]) for name, metrics in results.items()] == [
        ("source", 4), ("kv2", 2), ("kv1", 1)]
    assert 0 < results["kv2"]["kl"] < results["kv1"]["kl"]

    words += ["--kv-heads", 2, "--tokens", 6000]
    done = run(CONVERT, *words, fresh=True)
    table = (home / "eval/eval.md").read_text()
    assert "| gqa              | q4_0 " in table and "What is the capital" in table
    assert done.stdout.endswith(table) and "time    05_prune_train" in done.stdout
    assert done.stdout.count(": complete") == 2
    made = times(home)
    other = run(CONVERT, *words, "--prompts", save(tmp_path / "prompts.txt", "Who?\n"), fresh=True)
    assert "Who?" in other.stdout and "What is the capital" not in other.stdout
    assert other.stdout.count(": complete") == 6
    assert {path for path, time in times(home).items() if made[path] != time} == {home / "eval/stage.json"}
