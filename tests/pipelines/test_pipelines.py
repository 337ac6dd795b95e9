"""The recipes as a user runs them: bad settings and odd paths at once; end to end on the demo model, slow."""

import itertools
import json
import shlex
from pathlib import Path

import pytest

from common.data.tasks import TASKS
from common.training.engine import epochs_to_steps
from models import save_tiny
from pipelines import table6
from runs import recipe

ROWS = ["baseline", "default-cos", "default-dist", "key-cos", "key-dist", "value-cos", "value-dist"]
RECIPES = ["llama2_7b.sh", "sheared_llama_1.3b.sh", "table1.sh", "table2.sh"]


@pytest.fixture
def recorded(tmp_path):
    """recorded(SCRIPT, settings): the command lines that a script would run, in order."""
    recorder, log = tmp_path / "a python", tmp_path / "log"
    recorder.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >> "$LOG"; echo >> "$LOG"\n')
    recorder.chmod(0o755)

    def record(name: str, **settings) -> list[list[str]]:
        done = recipe(name, PYTHON=recorder, LOG=log, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return [line.split("\0")[:-1] for line in log.read_text().splitlines()]

    return record


def after(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


def of_stage(stage: str, commands: list[list[str]]) -> list[list[str]]:
    return [words for words in commands if stage in words]


def shown(commands: list[list[str]], run) -> list[str]:
    """Command lines in which the run directory is RUN."""
    return [shlex.join(word.replace(str(run), "RUN") for word in words) for words in commands]


LAUNCHER = "-m torch.distributed.run --standalone --nproc-per-node {} --shutdown-timeout 600"
CONVERT = ["convert.sh"]
FOUND = "TEXT, CHAT: expected generated, c4, hf:NAME[:CONFIG[:SPLIT]], none or files, found "


@pytest.mark.parametrize(("names", "settings", "message"), [
    (RECIPES, {"KV": 5}, "KV: expected "),
    (CONVERT, {"MODEL": ""}, "MODEL: expected a directory"),
    (CONVERT, {"KV_HEADS": "4 x", "PLAN": "choose"}, "KV_HEADS: expected a positive number, found 4 x\n"),
    (CONVERT, {"FROM": "docs"}, "FROM: expected a run directory with a calibration, found docs\n"),
    (CONVERT, {"TEXT": "generated:gone.txt", "PYTHON": "true"}, f"{FOUND}generated:gone.txt"),
])
def test_mistakes_are_refused_before_anything_runs(names, settings, message):
    for name in names:
        done = recipe(name, **{"PYTHON": "false", "MODEL": "demo"} | settings)
        assert done.returncode == 2 and done.stderr.startswith(f"error: {message}"), name


@pytest.mark.slow
@pytest.mark.parametrize("name, blocks, options, epochs, teacher_epochs", [
    ("table1.sh", [16, 8, 4], {"V1": 1}, [5, 15, 20], 2), ("table1.sh", [8], {"KV": 8}, [10], 2),
    ("table2.sh", [8, 4], {}, [6, 12], 3),
])
def test_tables_1_and_2_row_by_row(recorded, tmp_path, name, blocks, options, epochs, teacher_epochs):
    """Every row on one calibration and one teacher, with the published epochs of 147,580 samples."""
    run, expected, models = tmp_path / "run", [], ["teacher=RUN/teacher"]
    for (kv_heads, budget), row in itertools.product(zip(blocks, epochs, strict=True), ROWS):
        home, (kind, _, criterion) = f"RUN/gqa{kv_heads}-{row}", row.partition("-")
        by = kind if kind in ("key", "value") else "none"
        steps = epochs_to_steps(budget, 147580, 64), epochs_to_steps(teacher_epochs, 147580, 128)
        expected += [
            f"03_group.py --run {home} --similarity RUN/similarity --kv-heads {kv_heads} "
            f"--by {by} --criterion {criterion or 'dist'}",
            f"04_align.py --run {home} --calibration RUN/calibration --rotate {criterion or 'none'} "
            "--merge mean",
            f"{LAUNCHER.format(8)} 05_prune_train.py --run-dir {home} --teacher RUN/teacher --tasks hub "
            f"--text none --no-bos --steps {steps[0]} --teacher-steps {steps[1]}",
            f"06_export.py --run {home}"]
        models.append(f"gqa{kv_heads}-{row}={home}/gqa")
    calibration, similarity, *rows, evaluation = shown(recorded(name, RUN=run, **options), run)
    assert calibration.startswith("01_calibrate.py --run RUN ") and similarity == "02_similarity.py --run RUN"
    assert rows == expected
    assert evaluation.startswith("07_eval.py --run RUN ") and evaluation.endswith(" ".join(models))


@pytest.mark.slow
def test_some_rows_are_trained_alone(recorded, tmp_path):
    commands = recorded("table1.sh", RUN=tmp_path, KV="8 4", ROWS="key-cos value-dist")
    assert [after("--rotate", words) for words in of_stage("04_align.py", commands)] == ["cos", "dist"] * 2
    assert not of_stage("07_eval.py", commands)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES[::2])
def test_options_reach_every_training_and_no_other_stage(recorded, tmp_path, name):
    """They come last, where they override a recipe's own; other options have another RUN."""
    commands = recorded(name, TEACHER=tmp_path / "one teacher", FLAGS="--masks l0 --kl-on all")
    training = of_stage("05_prune_train.py", commands)
    assert training and all(words[-4:] == ["--masks", "l0", "--kl-on", "all"] for words in training)
    for flag in ("--kl-on", "--no-bos"):
        assert of_stage(flag, commands) == training
    for words in training:
        assert after("--teacher", words) == f"{tmp_path}/one teacher"
        assert after("--run-dir", words).split("/")[1].endswith("_--masks_l0_--kl-on_all")
    assert f"teacher={tmp_path}/one teacher" in commands[-1]


@pytest.mark.slow
def test_table_6_transforms_with_grouping_and_without(recorded, tmp_path):
    _, _, *commands, last = shown(recorded("table6.sh", RUN=tmp_path, KV="16 4"), tmp_path)
    assert [command.removesuffix(" --criterion dist") for command in commands[::2]] == [
        f"03_group.py --run RUN/gqa{kv_heads}-{row} --similarity RUN/similarity "
        f"--kv-heads {kv_heads} --by {by}"
        for kv_heads in (16, 4) for row, by in (("grouped", "value"), ("default", "none"))]
    assert all("04_align.py" in command for command in commands[1::2])
    assert last == "-m pipelines.table6 --run RUN --kv-heads 16 4"


@pytest.mark.slow
def test_table_6_adds_up_the_seconds_of_its_stages(tmp_path, monkeypatch):
    seconds = {"01_calibrate.py calibration": 9.0, "02_similarity.py similarity": 3.0,
               "03_group.py gqa8-grouped/groups": 1.0, "04_align.py gqa8-grouped/aligned": 0.5,
               "03_group.py gqa8-default/groups": 0.25, "04_align.py gqa8-default/aligned": 0.5}

    def read_record(path, stage):
        return {"seconds": seconds[f"{stage} {Path(path).relative_to(tmp_path)}"], "model": {"name": "m"}}

    monkeypatch.setattr(table6, "read_record", read_record)
    lines = table6.table(tmp_path, [8]).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["m", "", "seconds"] and rows[2:] == [
        ["calibration", "", "9.0"], ["GQA-8", "w/ grouping", "4.5"], ["GQA-8", "w/o grouping", "0.8"]]


@pytest.mark.slow
def test_other_nodes_wait_for_the_first_one_and_train(recorded, tmp_path):
    run = tmp_path / "run"
    for name in ("calibration", "similarity", "value-dist/groups", "value-dist/merged", "value-dist/gqa"):
        (run / name / "stage.json").mkdir(parents=True)
    settings = {"RUN": run, "NNODES": 2, "RDZV": "first:29500"}
    (train,) = recorded("llama2_7b.sh", NODE=1, **settings)
    assert after("--nnodes", train) == "2" and after("--rdzv-endpoint", train) == "first:29500"
    *_, again, _, evaluation = recorded("llama2_7b.sh", NODE=0, **settings)
    assert again == train and "07_eval.py" in evaluation


@pytest.mark.slow
@pytest.mark.parametrize("name, epochs, teacher_epochs", [
    ("llama2_7b.sh", 10, 2), ("sheared_llama_1.3b.sh", 12, 3)])
def test_recipes_pass_the_published_budgets(name, epochs, teacher_epochs, recorded, tmp_path):
    """Epochs of 147,580 samples (Appendix A): 10 at a batch of 64 for 8 of 32 heads, 12 for 4 of 16."""
    (training,) = of_stage("05_prune_train.py", recorded(name, RUN=tmp_path))
    assert after("--steps", training) == str(epochs_to_steps(epochs, 147580, 64))
    assert after("--teacher-steps", training) == str(epochs_to_steps(teacher_epochs, 147580, 128))


def finished(run: Path) -> Path:
    """A run directory with what convert.sh shows at its end."""
    (run / "eval").mkdir(parents=True)
    (run / "eval/eval.md").write_text("table")
    return run


CONVERTED = {"MODEL": "a model.gguf", "KV_HEADS": 2, "TEXT": "c4 generated:README.md", "TOKENS": 5000,
             "CHAT": "generated"}


def test_convert_takes_the_recommended_road(recorded, tmp_path):
    """Export and evaluation are made again after another training."""
    run = finished(tmp_path / "it's a [1] run *")
    tasks, prompts = tmp_path / "my tasks", tmp_path / "my prompts.txt"
    for directory in (run / "train", tasks):
        directory.mkdir()
    for file in (run / "train" / "heldout.npy", run / "train" / "heldout_chats.jsonl", prompts):
        file.touch()
    settings = CONVERTED | {"TASKS": tasks, "ONLY": "piqa siqa", "PROMPTS": prompts}
    commands = recorded("convert.sh", RUN=run, NPROC=3, FLAGS="--lr 1e-4", LENGTH=128, **settings)
    training = ("--run-dir RUN --tasks none --text c4 generated:README.md --text-tokens 5000 "
                "--chat generated --lr 1e-4")
    evaluation = f"--run RUN --update --tasks '{tasks}' --only piqa siqa --prompts '{prompts}'"
    assert shown(commands[1:], run) == [
        f"-m pipelines.flags 05_prune_train {training} ::: 07_eval {evaluation} :::",
        "01_calibrate.py --run RUN '--model=a model.gguf' --text c4 --chat generated --sequences 128 "
        "--length 128",
        "02_similarity.py --run RUN --energy",
        "03_group.py --run RUN --similarity RUN/similarity --by energy --kv-heads 2",
        "04_align.py --run RUN --calibration RUN/calibration --merge closed-form --refit attention",
        f"{LAUNCHER.format(3)} 05_prune_train.py {training}",
        "06_export.py --run RUN --update --cache-basis rotated",
        f"07_eval.py {evaluation} --chat RUN/train/heldout_chats.jsonl --text RUN/train/heldout.npy "
        "--cache q8_0 q8_0/q4_0 q4_0",
        "pipelines/report.py --run RUN"]


@pytest.mark.slow
def test_what_convert_takes_where_nothing_is_said(recorded, tmp_path):
    """On a CPU; a recorder in the place of Python names no GPUs. One process needs no torchrun."""
    text, run = tmp_path / "my text.txt", finished(tmp_path / "run")
    text.touch()
    commands = recorded("convert.sh", MODEL="-odd/model", RUN=run, TEXT=text)
    _, _, calibration, _, grouping, _, train, _, evaluation, _ = shown(commands, run)
    assert calibration == (f"01_calibrate.py --run RUN --model=-odd/model --text '{text}' --sequences 128 "
                           "--length 512")
    assert "--kv-heads" not in grouping
    assert train == f"05_prune_train.py --run-dir RUN --tasks none --text '{text}' --text-tokens 50000"
    assert evaluation == ("07_eval.py --run RUN --update --tasks none --prompts pipelines/prompts.txt "
                          "--text none")
    *_, export, _, _ = commands = recorded("convert.sh", MODEL="demo", RUN=run, BASIS="none")
    assert "--cache-basis" not in export
    demo = commands[-8]
    assert after("--length", demo) == "256" and after("--text", demo) == "generated"


@pytest.mark.slow
def test_a_conversion_takes_the_calibration_of_another(recorded, tmp_path):
    other = tmp_path / "other run"
    (other / "calibration").mkdir(parents=True)
    commands = recorded("convert.sh", FROM=other, RUN=finished(tmp_path / "run"), **CONVERTED)
    *_, grouping, merge, _, _, _, _ = commands
    assert not of_stage("01_calibrate.py", commands) and not of_stage("02_similarity.py", commands)
    assert after("--similarity", grouping) == f"{other}/similarity"
    assert after("--calibration", merge) == after("--calibration", commands[-3]) == f"{other}/calibration"


@pytest.mark.slow
def test_flags_of_stages_are_parsed_before_any_stage_runs(tmp_path):
    done = recipe("convert.sh", MODEL=tmp_path / "none", RUN=tmp_path / "run", FLAGS="--lrr 1")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "--lrr" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_plan_of_a_conversion_trains_nothing(recorded, tmp_path):
    _, planned = recorded("convert.sh", RUN=f"{tmp_path}/run", PLAN="8xA100-80GB", **CONVERTED)
    assert planned[:4] == ["-m", "pipelines.plan", "--on", "8xA100-80GB"] and "--dtype" not in planned
    done = recipe("convert.sh", PLAN="8xA100", MODEL="demo")
    assert done.returncode == 2 and done.stderr.startswith("error: --on: expected COUNTxDEVICE")
    for name in RECIPES:
        _, *commands = recorded(name, RUN=f"{tmp_path}/run", PLAN="8xA100-80GB")
        assert all(words[:2] == planned[:2] for words in commands)


@pytest.mark.slow
def test_on_gpus_a_long_training_is_compiled(recorded, tmp_path):
    """Where its minute pays for itself and there is a compiler; it need not resume to the same bits."""
    for tokens, flags, compiler, compiled in (
        ("", "", "bash", True), ("", "", "no-compiler", False), (9999999, "", "bash", False),
        ("", "--deterministic", "bash", False),
    ):
        settings = CONVERTED | {"TOKENS": tokens, "FLAGS": flags, "PLAN": "8xA100-80GB", "CC": compiler}
        *_, training = recorded("convert.sh", RUN=tmp_path, **settings)
        assert ("--compile" in training) == compiled


@pytest.mark.slow
def test_a_choice_makes_every_number_from_one_calibration(recorded, tmp_path):
    run, settings = tmp_path / "it's a [1] run *", CONVERTED | {"KV_HEADS": "16 8  4", "PLAN": "choose"}
    _, _, calibration, *others = shown(recorded("convert.sh", RUN=run, **settings), run)
    others = [line for line in others if not line.startswith("-c ")]
    assert calibration.startswith("01_calibrate.py --run RUN ")
    grouping = "--similarity RUN/similarity --by energy --kv-heads"
    merge = "--calibration RUN/calibration --merge closed-form --refit output"
    assert others == ["02_similarity.py --run RUN --energy",
                      *(f"03_group.py --run RUN/kv{heads} {grouping} {heads}" for heads in (16, 8, 4)),
                      *(f"04_align.py --run RUN/kv{heads} {merge}" for heads in (16, 8, 4)),
                      "07_eval.py --run RUN/choose --update --model source= kv16=RUN/kv16/merged "
                      "kv8=RUN/kv8/merged kv4=RUN/kv4/merged --tasks none --text RUN/calibration "
                      "--sequences 16 --cache q8_0 q8_0/q4_0 q4_0"]


def times(run: Path) -> dict[Path, int]:
    """When every JSON file of a run was written."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*.json")}


@pytest.mark.slow
def test_a_choice_of_every_allowed_number_goes_on_with_one(tmp_path):
    run = tmp_path / "a run"
    settings = {"MODEL": save_tiny(tmp_path / "model", num_key_value_heads=4, head_dim=32), "RUN": run,
                "SEQUENCES": 8, "LENGTH": 64}
    done = recipe("convert.sh", PLAN="choose", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    results, made = json.loads((run / "choose/eval/stage.json").read_text())["results"], times(run)
    assert [(name, metrics["kv_heads"]) for name, metrics in results.items()] == [
        ("source", 4), ("kv2", 2), ("kv1", 1)]
    assert 0 < results["kv2"]["kl"] < results["kv1"]["kl"]
    assert all(metrics["perplexity_tokens"] == 16 * 63 for metrics in results.values())
    assert (run / "choose/eval/frontier.png").read_bytes().startswith(b"\x89PNG")
    again = recipe("convert.sh", PLAN="choose", **settings)
    assert again.stdout.count(": complete") == 7 and times(run) == made


@pytest.mark.slow
def test_convert_end_to_end_makes_nothing_again_and_answers_other_prompts_with_the_same_models(tmp_path):
    run = tmp_path / "a run"
    settings = {"MODEL": save_tiny(tmp_path / "model", head_dim=32), "RUN": run, "KV_HEADS": 2,
                "SEQUENCES": 8, "LENGTH": 64, "TOKENS": 6000}
    done = recipe("convert.sh", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (run / "eval/eval.md").read_text()
    assert "| gqa              | q4_0 " in table and "What is the capital" in table
    assert done.stdout.endswith(table)
    made = times(run)
    again = recipe("convert.sh", **settings)
    assert again.stdout.endswith(table) and "is complete" in again.stdout and times(run) == made
    (tmp_path / "prompts.txt").write_text("Who?\n")
    other = recipe("convert.sh", PROMPTS=tmp_path / "prompts.txt", **settings)
    assert "Who?" in other.stdout and "What is the capital" not in other.stdout


@pytest.mark.release
def test_table1_end_to_end(tmp_path):
    run = tmp_path / "a [1] run"
    small = {"SMALL": 1, "KV": 8, "SMALL_STEPS": 20, "SMALL_TEACHER_STEPS": 10, "LIMIT": 20, "RUN": run}
    planned = recipe("table1.sh", PLAN="8xA100-80GB", **small)
    assert planned.returncode == 0 and planned.stdout.count("  fits\n") == 2
    assert not (run / "teacher").exists()
    done = recipe("table1.sh", **small)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((run / "eval" / "stage.json").read_text())["results"]
    assert list(results) == ["teacher", *(f"gqa8-{row}" for row in ROWS)]
    groups = {row: json.loads((run / f"gqa8-{row}" / "groups").read_text())["groups"] for row in ROWS}
    for figures in list(results.values())[1:]:
        assert figures["kv_heads"] == 2 and set(figures["tasks"]) == set(TASKS)
    assert groups["default-cos"] == groups["default-dist"] == groups["baseline"] != groups["key-cos"]
    before = (run / "eval" / "stage.json").read_bytes()
    again = recipe("table1.sh", **small)  # everything exists: the table is shown again, nothing is made
    assert again.returncode == 0 and "| gqa8-baseline" in again.stdout
    assert (run / "eval" / "stage.json").read_bytes() == before


@pytest.mark.release
@pytest.mark.parametrize(("name", "kv_heads"), [("llama2_7b.sh", 2), ("sheared_llama_1.3b.sh", 2)])
def test_recipe_end_to_end(name, kv_heads, tmp_path):
    run = tmp_path / "it's a run"
    done = recipe(name, SMALL=1, SMALL_STEPS=10, SMALL_TEACHER_STEPS=5, LIMIT=5, RUN=run)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((run / "eval" / "stage.json").read_text())["results"]
    assert list(results) == ["teacher", "merged", "gqa"] and results["gqa"]["kv_heads"] == kv_heads
