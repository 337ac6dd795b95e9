"""The disk that --plan expects, against a run's own directories."""

import pytest

from common.models.load import load_config
from common.training import checkpoints, disk
from common.training.mask_state import switch_step
from common.training.plan import Student, Workload
from runs import STAGE, TRAINING, copy_run, run, with_teacher

# of what is measured are names and shapes in safetensors files, for a model of 60,000 parameters, and AdamW's
# counts of steps
HEADERS = 0.05


def tensor_files(home) -> int:
    """Bytes of all tensor files in a directory, unfinished ones included."""
    return sum(path.stat().st_size for path in home.rglob("*.safetensors"))


def phases(config, *students) -> list[tuple]:
    return [("", Workload(config, [1], [1], 1, False), student, None) for student in students]


@pytest.mark.slow
def test_disk_is_that_of_a_run(finished_run, inputs):
    expected = disk.disk_bytes(phases(load_config(inputs["model"]), None, Student(2)), 2, True, False)
    assert expected.pop("total") == sum(expected.values())
    for name in ("aligned", "merged", "teacher", "gqa"):
        assert tensor_files(finished_run / name) == pytest.approx(expected[name], rel=HEADERS), name
    layer = finished_run / "calibration" / "layer-00000.safetensors"  # of 512 tokens, all that there are
    counted = disk.calibration_bytes(load_config(inputs["model"]), 512)
    assert layer.stat().st_size == pytest.approx(counted, rel=0.01)  # a dozen tensors
    assert expected["calibration"] == 3 * disk.calibration_bytes(load_config(inputs["model"]), disk.SAMPLED)
    without = disk.disk_bytes(phases(load_config(inputs["model"]), Student(2)), 2, False, False)
    assert without["teacher"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("best, students, flags", [
    (True, (None, Student(2)), []),
    (True, (Student(2, (), "attention"),), ["--masks", "off", "--train", "attention"]),
])  # fmt: skip
def test_checkpoints_at_their_fullest(
    aligned_run, finished_run, inputs, tmp_path, monkeypatch, best, students, flags
):
    """Measured whenever one is complete under its temporary name: of the teacher's and of the student's
    training. The best is the first of the GQA student.
    """
    home, measured = tmp_path / "run", []
    copy_run(aligned_run, home) if None in students else with_teacher(aligned_run, finished_run, home)

    def take_name(*names, original=checkpoints.take_name):
        measured.append(sum(tensor_files(home / name) for name in ("teacher.train", "train")))
        original(*names)

    def first_after_the_switch(directory):
        saved = checkpoints.saved_checkpoints(directory)
        gqa = [path for path in saved if flags or checkpoints.step_of(path) > switch_step(12)]
        return gqa[0] if gqa and best else None

    monkeypatch.setattr(checkpoints, "take_name", take_name)
    monkeypatch.setattr(checkpoints, "best", first_after_the_switch)
    steps = ["--steps", "12", "--teacher-steps", "4", "--save-steps", "1"]
    run(STAGE, "--run", home, "--tasks", inputs["tasks"], *TRAINING, *steps, *flags)
    expected = disk.disk_bytes(phases(load_config(inputs["model"]), *students), 2, True, best)
    assert max(measured) == pytest.approx(expected["checkpoints"], rel=HEADERS)
