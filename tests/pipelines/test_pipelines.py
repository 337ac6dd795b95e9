"""The recipes as a user runs them: bad settings and odd paths at once; end to end on the demo model, slow."""

import itertools

import pytest

from common.data.tasks import TASKS
from common.training.engine import epochs_to_steps
from pipelines import table6
from runs import read, recipe

ROWS = ["baseline", "default-cos", "default-dist", "key-cos", "key-dist", "value-cos", "value-dist"]
RECIPES = ["llama2_7b.sh", "sheared_llama_1.3b.sh", "table1.sh", "table2.sh"]


def commands(name: str, **settings) -> list[str]:
    """What a script would have Python run, in order."""
    done = recipe(name, PYTHON="echo", **{"RUN": "RUN"} | settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_wrong_number_is_refused_before_anything_runs():
    for name in RECIPES:
        done = recipe(name, PYTHON="false", KV=5)
        assert done.returncode == 2 and done.stderr.startswith("error: KV: expected "), name


@pytest.mark.slow
@pytest.mark.parametrize("name, blocks, options, epochs, teacher_epochs", [
    ("table1.sh", [16, 8, 4], {}, [5, 10, 15], 2), ("table1.sh", [8, 4], {"V1": 1, "KV": "8 4"}, [15, 20], 2),
    ("table2.sh", [8, 4], {}, [6, 12], 3),
])
def test_tables_1_and_2_row_by_row(name, blocks, options, epochs, teacher_epochs):
    """Every row on one calibration and one teacher, with the published epochs of 147,580 samples."""
    expected, models = [], ["teacher=RUN/teacher"]
    for (kv_heads, budget), row in itertools.product(zip(blocks, epochs, strict=True), ROWS):
        home, (kind, _, criterion) = f"RUN/gqa{kv_heads}-{row}", row.partition("-")
        by = kind if kind in ("key", "value") else "none"
        steps = epochs_to_steps(budget, 147580, 64), epochs_to_steps(teacher_epochs, 147580, 128)
        expected += [
            f"03_group.py --run {home} --similarity RUN/similarity --kv-heads {kv_heads} "
            f"--by {by} --criterion {criterion or 'dist'}",
            f"04_align.py --run {home} --calibration RUN/calibration --rotate {criterion or 'none'} "
            "--merge mean",
            "-m torch.distributed.run --standalone --nproc-per-node 8 --shutdown-timeout 600 "
            f"05_prune_train.py --run-dir {home} --teacher RUN/teacher --tasks hub --text none --no-bos "
            f"--steps {steps[0]} --teacher-steps {steps[1]}",
            f"06_export.py --run {home}"]
        models.append(f"gqa{kv_heads}-{row}={home}/gqa")
    calibration, similarity, *rows, evaluation = commands(name, **options)
    assert calibration.startswith("01_calibrate.py --run RUN ") and similarity == "02_similarity.py --run RUN"
    assert rows == expected
    assert evaluation.startswith("07_eval.py --run RUN ") and evaluation.endswith(" ".join(models))


@pytest.mark.slow
def test_options_reach_the_training_of_the_chosen_row_and_no_other_stage():
    """They come last, where they override a recipe's own; other options have another RUN."""
    options = "--masks l0 --kl-on all"
    settings = {"KV": 16, "ROWS": "key-cos", "TEACHER": "other", "FLAGS": options}
    *others, training, _ = commands("table1.sh", RUN="", **settings)
    assert training.endswith(f" {options}") and " --teacher other " in training
    assert "--run-dir runs/table1_--masks_l0_--kl-on_all/gqa16-key-cos " in training
    assert len(others) == 4 and not any(" --kl-on" in line for line in others)  # and no evaluation


@pytest.mark.slow
def test_table_6_transforms_with_grouping_and_without():
    _, _, *rows, last = commands("table6.sh", KV="16 4")
    assert [command.removesuffix(" --criterion dist") for command in rows[::2]] == [
        f"03_group.py --run RUN/gqa{kv_heads}-{row} --similarity RUN/similarity "
        f"--kv-heads {kv_heads} --by {by}"
        for kv_heads in (16, 4) for row, by in (("grouped", "value"), ("default", "none"))]
    assert all("04_align.py" in command for command in rows[1::2])
    assert last == "-m pipelines.table6 --run RUN --kv-heads 16 4"


@pytest.mark.slow
def test_table_6_adds_up_the_seconds_of_its_stages(monkeypatch):
    seconds = {"RUN/calibration": 9.0, "RUN/similarity": 3.0,
               "RUN/gqa8-grouped/groups": 1.0, "RUN/gqa8-grouped/aligned": 0.5,
               "RUN/gqa8-default/groups": 0.25, "RUN/gqa8-default/aligned": 0.5}
    monkeypatch.setattr(table6, "read_record",
                        lambda path, stage: {"seconds": seconds[path], "model": {"name": "m"}})
    *_, calibration, grouped, default = table6.table("RUN", [8]).splitlines()
    assert "9.0" in calibration and "4.5" in grouped and "0.8" in default


@pytest.mark.slow
@pytest.mark.parametrize("name, epochs, teacher_epochs", [
    ("llama2_7b.sh", 10, 2), ("sheared_llama_1.3b.sh", 12, 3)])
def test_recipes_pass_the_published_budgets(name, epochs, teacher_epochs):
    """Epochs of 147,580 samples (Appendix A): 10 at a batch of 64 for 8 of 32 heads, 12 for 4 of 16. A plan
    trains nothing.
    """
    steps = epochs_to_steps(epochs, 147580, 64), epochs_to_steps(teacher_epochs, 147580, 128)
    (planned,), trained = commands(name, PLAN="8xA100-80GB"), "\n".join(commands(name))
    assert planned.startswith("-m pipelines.plan ")
    assert all(f" --steps {steps[0]} --teacher-steps {steps[1]}" in lines for lines in (planned, trained))


@pytest.mark.release
def test_table1_end_to_end(tmp_path):
    run = tmp_path / "a [1] run"
    small = {"SMALL": 1, "KV": 8, "SMALL_STEPS": 20, "SMALL_TEACHER_STEPS": 10, "LIMIT": 20, "RUN": run}
    planned = recipe("table1.sh", PLAN="8xA100-80GB", **small)
    assert planned.returncode == 0 and planned.stdout.count("  fits\n") == 2
    assert not (run / "teacher").exists()
    done = recipe("table1.sh", **small)
    assert done.returncode == 0, done.stdout + done.stderr
    results = read(run / "eval/stage.json")["results"]
    assert list(results) == ["teacher", *(f"gqa8-{row}" for row in ROWS)]
    groups = {row: read(run / f"gqa8-{row}/groups/stage.json")["groups"] for row in ROWS}
    for metrics in list(results.values())[1:]:
        assert metrics["kv_heads"] == 2 and set(metrics["tasks"]) == set(TASKS)
    assert groups["default-cos"] == groups["default-dist"] == groups["baseline"] != groups["key-cos"]


@pytest.mark.release
def test_recipe_end_to_end(tmp_path):
    run = tmp_path / "it's a run"
    done = recipe("llama2_7b.sh", SMALL=1, SMALL_STEPS=10, SMALL_TEACHER_STEPS=5, LIMIT=5, RUN=run)
    assert done.returncode == 0, done.stdout + done.stderr
    results = read(run / "eval/stage.json")["results"]
    assert list(results) == ["teacher", "merged", "gqa"] and results["gqa"]["kv_heads"] == 2
