"""Stage 5 in one process: resuming, signals, settings, refusals, and what a finished run has recorded."""

import gc
import json
import signal
import weakref
from types import SimpleNamespace

import filelock
import pytest
import torch
from safetensors.torch import load_file

from common.data.pool import Sources, load_tasks
from common.models import blending
from common.models.load import load_model, load_tokenizer
from common.run.errors import UserError
from common.training import checkpoints, sharding
from common.training.conversion import read_conversion
from common.training.engine import STOPPED
from common.training.packing import batch_indices
from reference import stage5
from runs import (
    STAGE,
    assert_same_bits,
    copy_run,
    expect_error,
    interrupt,
    read,
    run,
    stop,
    train,
    train_arguments,
    with_teacher,
)


@pytest.mark.parametrize("words", [[], ["--deterministic"]])
def test_deterministic_kernels_are_chosen_on_request(tmp_path, monkeypatch, words):
    def note():
        raise UserError(f"deterministic: {torch.are_deterministic_algorithms_enabled()}")

    monkeypatch.setattr(sharding, "joined_ranks", note)
    expect_error(f"deterministic: {bool(words)}", STAGE, "--run", tmp_path, *words)


@pytest.mark.parametrize(("given", "restarts", "moved"), [
    (False, 0, {"train.old-2", "teacher.old-1", "teacher.train.old-1"}),
    pytest.param(True, 0, {"train.old-2"}, marks=pytest.mark.slow),
    pytest.param(False, 1, set(), marks=pytest.mark.slow),
])
def test_force_moves_trainings_aside_but_no_teacher_that_is_given(
    finished_run, inputs, tmp_path, monkeypatch, given, restarts, moved
):
    """Nor anything where torchrun restarts the ranks: they were started with it, and have trained since."""
    home = copy_run(finished_run, tmp_path / "run")
    for name in ("teacher.train", "train.old-1"):
        (home / name).mkdir()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    interrupt(monkeypatch, 0)
    words = ["--force", "--teacher", home / "teacher"] if given else ["--force"]
    train(home, inputs, *words, code=STOPPED if moved else 0)
    assert {path.name for path in home.glob("*.old*")} == moved | {"train.old-1"}


def test_a_teacher_learns_by_its_own_schedule_and_is_freed_before_the_student_is_built(
    group_of_one, monkeypatch
):
    """Modules refer to each other in circles, which only the garbage collector takes apart."""
    given, alive = [], []

    def train_teacher(run, *schedule_and_rates):
        model = torch.nn.Linear(1, 1)
        model.circle = [model]
        given.extend(schedule_and_rates)
        alive.append(weakref.ref(model))
        return True

    settings = SimpleNamespace(teacher=None, schedules=SimpleNamespace(teacher="of the teacher"),
                               teacher_rates="its own", execution="on GPUs")
    monkeypatch.setattr(stage5, "train_teacher", train_teacher)
    monkeypatch.setattr(stage5, "train_student", lambda *_: alive[0]() is None)
    gc.disable()
    try:
        assert stage5.train(SimpleNamespace(ranks=group_of_one), settings) == 0
    finally:
        gc.enable()
    assert given == ["of the teacher", "its own", "on GPUs"]


@pytest.mark.parametrize("step, number", [
    (7, signal.SIGINT),
    pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param(8, signal.SIGTERM, marks=pytest.mark.slow),
])
def test_a_stopped_run_exits_with_75_and_resumes_to_the_same_bits(
    finished_run, aligned_run, inputs, tmp_path, step, number
):
    """Stopped in the last of the masked steps, among them, and in the first as a GQA model. It goes on with
    the rows that it began with.
    """
    home = with_teacher(aligned_run, finished_run, tmp_path / "run [1]")  # glob characters
    longer = train_arguments(home, inputs, "--tokens-per-microbatch", 4096)
    assert f"stopped by a signal after step {step + 1}" in stop(step, *longer, number=number).stdout
    done = train(home, inputs)
    assert f"resumes {home / 'train'} after step {step + 1}\n" in done.stdout
    assert_same_bits(home, finished_run)
    assert "--force starts over" in train(home, inputs).stdout


@pytest.mark.slow
def test_a_teacher_in_the_making_is_continued_to_the_same_bits_and_for_no_other_source(
    finished_run, aligned_run, inputs, tmp_path
):
    home = copy_run(aligned_run, tmp_path / "run")
    stop(1, *train_arguments(home, inputs))
    path = home / "teacher.train" / checkpoints.SETTINGS
    settings = path.read_text()
    path.write_text(json.dumps(read(path) | {"source": "another"}))
    expect_error("source", STAGE, *train_arguments(home, inputs))
    path.write_text(settings)
    done = train(home, inputs)
    assert f"resumes {home / 'teacher.train'} after step 2\n" in done.stdout
    ours, theirs = (load_file(place / "teacher" / "model.safetensors") for place in (home, finished_run))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_shared_teacher_in_the_making_is_locked(aligned_run, inputs, tmp_path):
    home, shared = copy_run(aligned_run, tmp_path / "run"), tmp_path / "shared"
    with filelock.FileLock(tmp_path / ".shared.lock"):
        expect_error("expected no shared running there, found ", STAGE,
                     *train_arguments(home, inputs, "--teacher", shared))
    assert not shared.exists()


def test_the_teacher_learns_the_answers(group_of_one, finished_run, inputs):
    """Its first loss is the source's: the mean over the batch of the mean cross-entropy of answer tokens."""
    model, tokenizer = load_model(inputs["model"]), load_tokenizer(inputs["model"], bos=False)
    samples = load_tasks(Sources(inputs["tasks"]), tokenizer, 256, group_of_one)
    settings = read(finished_run / "teacher/stage.json")["summary"]
    batch, losses = batch_indices(0, settings["batch"], len(samples), settings["seed"]), []
    for sample in (samples[index] for index in batch):
        ids = torch.tensor([[*sample.prompt, *sample.answer]])
        labels = torch.where(torch.arange(ids.shape[1]) < len(sample.prompt), -100, ids)
        losses.append(float(model(ids, labels=labels).loss.detach()))
    first = json.loads((finished_run / "teacher" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("flags, blended", [
    ([], blending.KEY_VALUE), (["--refit"], blending.WHOLE_HEAD),
    (["--merge", "closed-form"], blending.WHOLE_HEAD),
])
def test_masks_move_what_merging_has_changed(aligned_run, tmp_path, flags, blended, request):
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", *flags)
    ranks = request.getfixturevalue("group_of_one")  # after a stage, which joins a group of its own
    assert {*read_conversion(str(home), ranks).blended} == {*blended}
