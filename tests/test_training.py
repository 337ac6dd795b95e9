"""Stage 5 and its loop: resuming, signals, settings, refusals; under torchrun in the slow tier.

Two processes equal one, a killed run equals one that was not, two nodes equal one process.
"""

import argparse
import contextlib
import functools
import json
import os
import pickle
import random
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.artifacts import write_record
from common.cli import UserError
from common.data.samples import Sample
from common.method import masks
from common.models import load_config
from common.training import checkpoints, distill, engine, schedule
from common.training import inputs as training_inputs
from common.training import metrics as training_metrics
from common.training.checkpoints import steps_saved, whole_weights
from common.training.distill import Settings, gqa_optimizer, masked_optimizer, start_masks
from common.training.engine import STOPPED, Job, Plan, learning_rate
from common.training.inputs import Pair, Pool, Run, samples_digest
from common.training.packing import build_row, rows_of_step
from common.training.sharding import Execution, Trainee, build
from conftest import (
    ROOT,
    TRAINING,
    copy_run,
    expect_error,
    run,
    run_in_process,
    save_tiny,
    tiny_model,
)
from test_checkpoints import Attack, seal
from test_heldout import gqa_job, masked_job

STAGE = "05_prune_train.py"
SHARED = [*TRAINING, "--steps", "6", "--seed", "1", "--tokens-per-microbatch", "200"]  # several rows
TIMING = {"seconds", "tokens_per_s", "heldout_seconds"}


def metrics(home) -> list[dict]:
    return [json.loads(line) for line in (home / "train" / "metrics.jsonl").read_text().splitlines()]


def final_weights(home) -> dict[str, torch.Tensor]:
    return whole_weights(steps_saved(str(home / "train"))[-1])


def assert_same_training(home, other) -> None:
    # BiLD is not continuous: rounding may swap a student's 16th and 17th logits, of which it takes only one
    tolerances = {"loss": 1e-4, "bild": 1e-4, "kl": 1e-5, "mask_mean": 1e-5, "mask_expected": 1e-5}
    for ours, theirs in zip(metrics(home), metrics(other), strict=True):
        for name, tolerance in tolerances.items():
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=tolerance), (ours["step"], name)
    expected = final_weights(other)
    for name, tensor in final_weights(home).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


def assert_same_bits(home, other) -> None:
    ours, theirs = final_weights(home), final_weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    figures = []
    for lines in (metrics(home), metrics(other)):
        figures.append([{name: line[name] for name in line.keys() - TIMING} for line in lines])
    assert figures[0] == figures[1]


def with_teacher(source, trained, home):
    """A copy of an aligned run with the teacher of a trained one."""
    copy_run(source, home)
    shutil.copytree(trained / "teacher", home / "teacher")
    return home


def plan_of(steps: int, **changes) -> Plan:
    numbers = {"batch": 1, "warmup": 1, "clip": 1.0, "seed": 0, "tokens_per_microbatch": 64,
               "save_steps": None, "save_minutes": 60.0, "print_every": 1}
    return Plan(steps=steps, **(numbers | changes))


# the loop


class Squares(engine.Phase):
    """A loss that needs no teacher."""

    def __init__(self, trainee):
        self.trainee = trainee

    def row_loss(self, row):
        return self.trainee(row).square().mean(), {}


def squares_job(group_of_one, tmp_path, name: str = "train") -> Job:
    source = save_tiny(tmp_path / "model")
    trainee = build(load_config(source), group_of_one, Execution(), lambda name: (source, name))
    optimizer = torch.optim.SGD([{"params": list(trainee.parameters()), "initial_lr": 1e-3}])
    directory = tmp_path / name
    directory.mkdir()
    return Job(trainee, optimizer, str(directory), group_of_one)


SAMPLES = [Sample((1, 2), (3,)), Sample((4, 5, 6), (7,))]


@pytest.mark.parametrize("minutes, expected", [(0.0, [4, 5]), (60.0, [5])])
def test_checkpoints_by_the_clock(group_of_one, tmp_path, minutes, expected):
    job = squares_job(group_of_one, tmp_path)
    assert engine.train(job, Squares(job.trainee), SAMPLES, plan_of(5, save_minutes=minutes))
    assert [checkpoints.step_of(path) for path in steps_saved(job.directory)] == expected and job.step == 5


def test_the_loop_trains_with_the_scheduled_rate_and_clipped_gradients(group_of_one, tmp_path):
    """Three steps of SGD by hand on the same batches, each sample in a row of its own."""
    job = squares_job(group_of_one, tmp_path)
    reference = Trainee(tiny_model(attn_implementation="packed"))
    plan = plan_of(3, clip=0.5, warmup=2, batch=2, final_share=0.2, tokens_per_microbatch=1)
    assert engine.train(job, Squares(job.trainee), SAMPLES, plan)
    lines = [json.loads(line) for line in Path(job.directory, "metrics.jsonl").read_text().splitlines()]
    for step in range(3):
        reference.zero_grad()
        total = 0.0
        for row in rows_of_step(SAMPLES, step, plan, group_of_one):
            loss = reference(row).square().mean()
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(reference.net.parameters(), 0.5))
        assert norm > 0.5 and lines[step]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert lines[step]["lr"] == pytest.approx(1e-3 * learning_rate(step, plan))
        assert lines[step]["loss"] == pytest.approx(total, rel=1e-4)
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * learning_rate(step, plan) * parameter.grad
    for ours, theirs in zip(job.trainee.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-6)


class Operations(TorchDispatchMode):
    """The names of the operations in a block, in order."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(str(function))
        return function(*arguments, **(options or {}))

    def __enter__(self):
        self.names = []
        return super().__enter__()


@pytest.mark.parametrize("make_job", [masked_job, gqa_job])
def test_the_host_reads_no_number_before_a_step_is_queued(group_of_one, tmp_path, make_job):
    """On a GPU, float() of a tensor waits for all work before it: none until the gradients are complete."""
    job, phase = make_job(group_of_one, tmp_path)
    rows = [build_row(SAMPLES[:1], 2), build_row(SAMPLES[1:], 2)]
    with Operations() as operations:
        figures = engine.run_step(job, phase, rows, SAMPLES, plan_of(5, clip=1.0))
    assert figures["loss"] > 0 and figures["tokens"] == 7
    norms = [number for number, name in enumerate(operations.names) if "_foreach_norm" in name]
    reads = [number for number, name in enumerate(operations.names) if "_local_scalar_dense" in name]
    assert norms and reads and reads[0] > norms[-1]


@pytest.mark.parametrize("final_share", [0.0, 0.1])
def test_learning_rate_warms_up_and_falls_along_a_cosine(final_share):
    plan = plan_of(100, warmup=10, final_share=final_share)
    shares = [learning_rate(step, plan) for step in range(101)]
    assert shares[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])
    assert shares[55] == pytest.approx((1 + final_share) / 2)  # halfway
    assert shares[100] == pytest.approx(final_share) and shares[99] > final_share


def test_no_clipping_leaves_gradients_as_they_are():
    trainee = Trainee(tiny_model(), {"log_alpha": torch.zeros(2)})
    for parameter in trainee.parameters():
        parameter.grad = torch.ones_like(parameter)
    size = sum(parameter.numel() for parameter in trainee.net.parameters())
    assert float(engine.clip_gradients(trainee, 0)) == pytest.approx(size**0.5, rel=1e-4)
    assert all((parameter.grad == 1).all() for parameter in trainee.parameters())
    engine.clip_gradients(trainee, 1.0)
    norm = sum(float(parameter.grad.square().sum()) for parameter in trainee.net.parameters()) ** 0.5
    assert norm == pytest.approx(1, rel=1e-3) and (trainee.replicated["log_alpha"].grad == 1).all()


def test_non_finite_gradient_stops_before_the_update(group_of_one, tmp_path):
    """A loss can be finite where its gradient is not: sqrt at 0."""
    job = squares_job(group_of_one, tmp_path)

    class Faulty(engine.Phase):
        def row_loss(self, row):
            return (0 * job.trainee(row)).abs().sum().sqrt(), {}

    before = [p.full_tensor().clone() for p in job.trainee.parameters()]
    message = r"step 1: expected a finite loss, found a gradient of norm nan, samples \[[01]\]"
    with pytest.raises(UserError, match=message):
        engine.train(job, Faulty(), SAMPLES, plan_of(3, save_steps=1))
    after = [p.full_tensor() for p in job.trainee.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert steps_saved(job.directory) == []


def test_a_signal_ends_training_after_the_step_and_handlers_are_restored(group_of_one, tmp_path, capsys):
    job, handler = squares_job(group_of_one, tmp_path), signal.getsignal(signal.SIGTERM)

    class Interrupted(Squares):
        def begin_step(self, step: int) -> None:
            if step == 1:
                signal.raise_signal(signal.SIGTERM)

    assert not engine.train(job, Interrupted(job.trainee), SAMPLES, plan_of(5))
    assert job.step == 2 and steps_saved(job.directory)[-1].endswith("step-00000002")
    assert "stopped by a signal after step 2; the same command resumes" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == handler
    assert engine.train(job, Squares(job.trainee), SAMPLES, plan_of(5)) and job.step == 5


def test_a_signal_after_the_last_step_is_passed_on():
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with engine.Signals():
            signal.raise_signal(signal.SIGTERM)
            assert not received
        assert received == [signal.SIGTERM]
        with engine.Signals() as signals:
            signal.raise_signal(signal.SIGTERM)
            signals.asked = None
        assert len(received) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_metrics_after_the_checkpoint_are_dropped_on_resume(group_of_one, tmp_path):
    """A kill between two checkpoints leaves lines of steps that are trained again."""
    job = squares_job(group_of_one, tmp_path)
    path = Path(job.directory, training_metrics.METRICS)
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    job.step = 2
    training_metrics.Metrics(job, plan_of(4)).close()
    assert [line["step"] for line in training_metrics.read_metrics(str(path))] == [1, 2]


def test_tensorboard_that_cannot_be_written_costs_a_line(group_of_one, tmp_path, capsys):
    job = squares_job(group_of_one, tmp_path)
    Path(job.directory, "tensorboard").write_text("a file")
    assert engine.train(job, Squares(job.trainee), SAMPLES, plan_of(2))
    assert "skipped tensorboard/: cannot be written" in capsys.readouterr().out
    assert len(steps_saved(job.directory)) == 1


@pytest.mark.parametrize("line", [b"{", b"[]", b"null", b'{"loss": 1}', b'{"step": "1"}', b"\xff",
                                  b"[" * 100_000])
def test_a_damaged_line_of_metrics_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0, "tokens": 2}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl line 2: expected a step's figures, found "):
        training_metrics.read_metrics(str(path))
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')  # cut off by a kill
    assert training_metrics.read_metrics(str(path)) == [{"step": 1}]
    for lines in ([], [{"step": 1}], [{"step": 1, "loss": None, "tokens": 1}]):
        with pytest.raises(UserError, match="expected loss and tokens of every step"):
            training_metrics.summarize(lines)
    summary = training_metrics.summarize([{"loss": 2.0, "tokens": 3.0}, {"loss": 1.0, "tokens": 4.0}])
    assert summary == {"loss": 1.0, "tokens": 7}


def test_switch_frees_what_masks_needed_and_keeps_the_rest(group_of_one, tmp_path):
    """A masked student after some steps of Adam, saved and loaded as the GQA model: the same weights and the
    same AdamW state where there is a counterpart, nothing else."""
    mha = load_config(save_tiny(tmp_path / "mha", bias=True))
    grouped = load_config(save_tiny(tmp_path / "gqa", bias=True, num_key_value_heads=2))
    settings = Settings(lr=1e-3, merged_lr_factor=2)
    student = build(
        mha, group_of_one, Execution(), None, lambda model: masks.patch(model, 2), start_masks(3, 8)
    )
    masked = Job(student, masked_optimizer(student, settings), str(tmp_path), group_of_one, 3)
    for _ in range(3):
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter)
            parameter.grad = torch.randn_like(parameter)
        masked.optimizer.step()
    checkpoints.save(masked)
    student = build(grouped, group_of_one, Execution())
    gqa = Job(student, gqa_optimizer(student, settings, masks.KEY_VALUE), str(tmp_path), group_of_one)
    groups = [(len(group["params"]), group["initial_lr"]) for group in gqa.optimizer.param_groups]
    shared, undecayed = 3 * 4, 3 * 4 + 1  # of 3 layers: k and v; norms and the biases of q and o
    assert groups == [(len(list(student.parameters())) - shared - undecayed, 1e-3), (shared, 2e-3),
                      (undecayed, 1e-3)]
    for fault in (False, True):  # names as they are do not lead to the shared projections
        def stored(name, fault=fault):
            renamed = name.replace("k_proj.", "k_proj.merged.").replace("v_proj.", "v_proj.merged.")
            return name if fault else renamed

        if fault:
            with pytest.raises(UserError, match=r"expected a tensor optimizer\..*k_proj\.bias.*, found none"):
                checkpoints.load(gqa, str(tmp_path / "step-00000003"), stored)
            continue
        checkpoints.load(gqa, str(tmp_path / "step-00000003"), stored)
        assert gqa.step == 3
        before = dict(masked.trainee.named_parameters())
        for name, parameter in gqa.trainee.named_parameters():
            assert torch.equal(parameter.to_local(), before[stored(name)].to_local()), name
            for kind, tensor in masked.optimizer.state[before[stored(name)]].items():
                assert torch.equal(local(gqa.optimizer.state[parameter][kind]), local(tensor)), (name, kind)
    sizes = [sum(p.numel() for p in job.trainee.parameters()) for job in (gqa, masked)]
    assert sizes[0] < sizes[1]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of a sharded tensor, the whole of any other."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# the stage, in this process


@functools.cache
def stage() -> dict:
    """The functions of the stage."""
    return runpy.run_path(str(ROOT / STAGE))


def flags(*words) -> argparse.Namespace:
    """The parsed flags of a command line."""
    before, sys.argv = sys.argv, [STAGE, *words]
    try:
        return stage()["parse"]()
    finally:
        sys.argv = before


def pair_of(group_size: int) -> Pair:
    return Pair("a", "m", {"kv_heads": 16}, 16 // group_size, "mean", masks.KEY_VALUE)


def planned(demo: bool, samples: int, group_size: int, *words, texts: int = 0) -> dict[str, int]:
    """Steps of each phase."""
    args = flags(*words)
    schedule.set_defaults(args, demo, positions=2048)
    pool = Pool([Sample((1,), (2,))] * samples, [Sample((1, 2))] * texts)
    plans = schedule.make_plans(args, pair_of(group_size), pool, False, args.teacher == "source")
    return {name: plan.steps for name, plan in plans.items()}


def steps(teacher: int, student: int) -> dict[str, int]:
    return {"teacher": teacher, "student": student}


def test_budgets_are_those_of_the_paper_unless_flags_say_otherwise():
    for group_size, student in ((2, 11530), (4, 23060), (8, 34590)):
        assert planned(False, 147_580, group_size) == steps(2306, student)
    assert planned(False, 640, 4, "--epochs", "0.5", "--teacher-epochs", "1") == steps(5, 5)
    assert planned(False, 640, 16, "--steps", "7", "--teacher-steps", "3") == steps(3, 7)
    assert planned(True, 640, 16) == steps(100, 350)
    assert planned(True, 640, 16, "--epochs", "2", "--teacher-epochs", "3") == steps(60, 80)
    with pytest.raises(UserError, match="no published value for groups of 16 kv heads"):
        planned(False, 640, 16)
    with pytest.raises(UserError, match="--steps: expected at least 2"):
        planned(False, 640, 4, "--steps", "1")
    assert planned(False, 640, 4, "--steps", "1", "--masks", "off") == steps(10, 1)


def test_budgets_of_texts_and_chats():
    """Text adds to the student's epochs, not to SFT; without tasks the source teaches for one epoch."""
    assert planned(False, 640, 2, texts=640) == steps(10, 100)
    assert planned(False, 640, 16, "--tasks", "none", texts=640) == {"student": 20}
    assert planned(False, 0, 16, "--tasks", "none", "--epochs", "2", texts=640) == {"student": 20}
    assert planned(False, 640, 2, "--teacher", "source") == {"student": 50}
    assert planned(False, 640, 16, "--tasks", "none", "--teacher", "DIR", texts=640) == steps(10, 20)


def test_data_flags_left_out():
    cases = [(False, [], "hub", [], None), (True, [], "runs/demo-model/tasks", ["demo"], None),
             (False, ["--tasks", "none"], "none", [], "source"), (True, ["--text", "none"], None, [], None),
             (False, ["--tasks", "none", "--teacher", "DIR", "--text", "a", "b"], "none", ["a", "b"], "DIR")]
    for demo, words, tasks, text, teacher in cases:
        args = flags(*words)
        schedule.set_defaults(args, demo, positions=100)
        assert args.tasks == (tasks or "runs/demo-model/tasks")
        assert (args.text, args.chat, args.teacher, args.text_length) == (text, [], teacher, 100)
    with pytest.raises(UserError, match="--text-length: expected 2 to 100 tokens"):
        schedule.set_defaults(flags("--text-length", "101"), False, positions=100)


def test_flags_left_out_take_the_published_values():
    for demo, expected in ((False, distill.PUBLISHED_SETTINGS), (True, distill.DEMO_SETTINGS)):
        args = flags()
        schedule.set_defaults(args, demo, positions=2048)
        assert {name: getattr(args, name) for name in expected} == expected
        plans = schedule.make_plans(args, pair_of(4), Pool([Sample((1,), (2,))] * 640), False, False)
        for name, prefix in (("teacher", "teacher_"), ("student", "")):
            plan, batch, warmup = plans[name], expected[f"{prefix}batch"], expected[f"{prefix}warmup"]
            assert (plan.batch, plan.warmup, plan.clip, plan.final_share) == (batch, warmup, 1.0, 0.0)
            assert (plan.seed, plan.tokens_per_microbatch, plan.save_minutes) == (0, 2048, 20)
    args = flags("--lr", "3e-4", "--batch", "5")
    schedule.set_defaults(args, False, positions=2048)
    assert (args.lr, args.batch, args.tasks) == (3e-4, 5, "hub")


@pytest.mark.parametrize("words", [
    "--epochs 0", "--epochs -1", "--epochs inf", "--epochs nan", "--teacher-epochs 0", "--clip -1",
    "--clip nan", "--l0-weight -1", "--save-minutes -1", "--lr 0", "--lr -1", "--mask-lr 0",
    "--teacher-lr inf", "--seed -1", "--beta2 1", "--weight-decay -1",
    "--merged-lr-factor 0", "--steps 0", "--steps 1.5", "--batch 0", "--loss-chunk 0", "--masks on",
    "--text-length 0", "--text-tokens 0", "--train mlp", "--dtype float16", "--temperature 0",
    "--save-steps 0", "--print-every 0", "--tokens-per-microbatch 0", "--kl-on answer", "--only foo",
])  # fmt: skip
def test_flags_out_of_range_are_refused_when_parsed(words):
    with pytest.raises(UserError, match=rf"{words.split()[0]}: expected .*, found {words.split()[1]}"):
        flags(*words.split())


def test_deterministic_kernels_are_chosen_on_request(aligned_run, inputs, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", chosen.append)
    for asked in ([], ["--deterministic"]):
        run(STAGE, *train_arguments(aligned_run, inputs, "--plan", "1xH200-141GB", *asked))
    assert chosen == [False, True, False]  # run() restores it each time


def test_the_plan_has_a_teacher_only_where_one_will_be_trained(aligned_run, finished_run, inputs):
    plan = ["--plan", "1xH200-141GB"]
    trained = run(STAGE, *train_arguments(aligned_run, inputs, *plan)).stdout
    assert "\nteacher: " in trained and "including the teacher" in trained
    shared = ["--teacher", finished_run / "teacher", "--tasks", "none", "--text", inputs["text"]]
    for home, words in ((finished_run, ["--tasks", inputs["tasks"]]), (aligned_run, shared)):
        printed = run(STAGE, "--run", home, *TRAINING, *words, *plan).stdout
        assert "teacher: " not in printed and "including the teacher" not in printed


def test_the_plan_of_float32_is_refused():
    with pytest.raises(UserError, match="--plan: expected --dtype bfloat16, which it assumes, found float32"):
        flags("--plan", "1xH200-141GB", "--dtype", "float32")


def train_arguments(home, inputs, *arguments) -> list:
    return ["--run", home, "--tasks", inputs["tasks"], *TRAINING, *arguments]


def interrupt(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal during a training step."""
    rate = engine.learning_rate

    def interrupting(now, plan):
        if now == step:
            signal.raise_signal(number)
        return rate(now, plan)

    monkeypatch.setattr(engine, "learning_rate", interrupting)


@pytest.mark.parametrize("step, number", [
    (7, signal.SIGINT),
    pytest.param(2, signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param(8, signal.SIGTERM, marks=pytest.mark.slow),
])
def test_a_stopped_run_exits_with_75_and_resumes_to_the_same_bits(
    finished_run, aligned_run, inputs, tmp_path, monkeypatch, step, number
):
    """Stopped in the last of the masked steps, among them, and in the first as a GQA model."""
    home = with_teacher(aligned_run, finished_run, tmp_path / "run [1]")  # glob characters
    command = [str(word) for word in train_arguments(home, inputs)]
    with monkeypatch.context() as patched:
        interrupt(patched, step, number)
        done = run_in_process(STAGE, command)
    assert done.returncode == STOPPED == 75, done.stdout + done.stderr
    assert f"stopped by a signal after step {step + 1}" in done.stdout
    done = run(STAGE, *command)
    assert f"resumes {home / 'train'} after step {step + 1} of 10" in done.stdout
    assert_same_bits(home, finished_run)
    assert "is complete; --force starts over" in run(STAGE, *command).stdout


def test_a_signal_before_the_first_step_is_answered_with_a_line(aligned_run, inputs, tmp_path, monkeypatch):
    home = copy_run(aligned_run, tmp_path / "run")
    original = training_inputs.tokenize

    def interrupting(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(training_inputs, "tokenize", interrupting)
    done = run_in_process(STAGE, [str(word) for word in train_arguments(home, inputs)])
    assert done.returncode == 130
    assert done.stderr == "interrupted: unfinished output was removed, checkpoints are kept\n"
    assert not (home / "train").exists() and not (home / "teacher.train").exists()
    assert not list(home.glob(".*lock"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["aligned", "merged", "teacher"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_changed_weights_are_refused_before_anything_is_written(
    finished_run, inputs, tmp_path, name, force
):
    home = copy_run(finished_run, tmp_path / "run")
    options = ["--teacher", home / "teacher"] if force else []  # a shared one stays with --force
    shutil.move(home / "train", home / "before")
    flip(next((home / name).glob("*.safetensors")))
    message = "its content does not match stage.json"
    expect_error(message, STAGE, *train_arguments(home, inputs, *options, *force))
    assert not (home / "train").exists() and (home / "teacher").exists()


def test_the_pair_must_be_of_one_grouping(finished_run, inputs, tmp_path):
    home = copy_run(finished_run, tmp_path / "run")
    path = home / "aligned" / "stage.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"date": "another time"}))
    message = "expected the artifact that 04_align.py read"
    expect_error(message, STAGE, *train_arguments(home, inputs, "--force"))


def test_a_teacher_in_the_making_is_not_continued_for_another_source(
    aligned_run, inputs, tmp_path, monkeypatch
):
    home = copy_run(aligned_run, tmp_path / "run")
    path = home / "teacher.train" / checkpoints.SETTINGS
    with monkeypatch.context() as patched:
        interrupt(patched, 1)
        done = run_in_process(STAGE, [str(word) for word in train_arguments(home, inputs)])
    assert done.returncode == STOPPED
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"source": "another"}))
    expect_error("source", STAGE, *train_arguments(home, inputs))


def test_a_file_as_teacher_is_refused_and_stays(aligned_run, inputs, tmp_path):
    home, file = copy_run(aligned_run, tmp_path / "run"), tmp_path / "notes.txt"
    file.write_text("mine")
    expect_error("expected nothing or a directory, found a file", STAGE,
                 *train_arguments(home, inputs, "--teacher", file))
    expect_error("--teacher: expected another directory than the student's", STAGE,
                 *train_arguments(home, inputs, "--teacher", home / "train"))
    (home / "train").write_text("mine")
    expect_error("train: expected nothing or a directory, found a file", STAGE,
                 *train_arguments(home, inputs))
    assert (home / "train").read_text() == "mine" and not (home / "teacher").exists()
    (home / "train").unlink()
    assert file.read_text() == "mine" and not (home / "train").exists()


def test_a_shared_teacher_in_the_making_is_locked(aligned_run, inputs, tmp_path):
    home, shared = copy_run(aligned_run, tmp_path / "run"), tmp_path / "shared"
    with filelock.FileLock(tmp_path / ".shared.lock"):
        expect_error("expected no other shared running there, found ", STAGE,
                     *train_arguments(home, inputs, "--teacher", shared))
    assert not shared.exists()


def test_other_training_data_of_the_same_size_is_refused(finished_run, inputs, tmp_path):
    home, tasks = copy_run(finished_run, tmp_path / "run"), tmp_path / "tasks"
    shutil.copytree(inputs["tasks"], tasks)
    path = tasks / "piqa.train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["label"] = 1 - rows[0]["label"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expect_error("was started with other settings (samples_sha256 ", STAGE,
                 *train_arguments(home, inputs, "--tasks", tasks))


def test_the_digest_of_samples_sees_every_token_and_boundary():
    samples = [Sample((1, 2), (3,)), Sample((4,), (5, 6))]
    token, boundary = Sample((1, 2), (4,)), Sample((1,), (2, 3))
    others = [[token, samples[1]], [boundary, samples[1]], samples[::-1], samples[:1]]
    assert len({samples_digest(other) for other in [samples, *others]}) == 5
    assert samples_digest(list(samples)) == samples_digest(samples)


@pytest.mark.parametrize("changes, message", [
    (["--lr", "2e-3"], "lr 0.001 -> 0.002"), (["--mask-lr", "3"], "mask_lr 2.0 -> 3.0"),
    (["--l0-weight", "2"], "l0_weight 1.0 -> 2.0"), (["--kl-on", "all"], "kl_on prompt -> all"),
    (["--batch", "4"], "batch 8 -> 4"), (["--seed", "1"], "seed 0 -> 1"), (["--clip", "2"], "clip 1.0 -> 2"),
    (["--masks", "off"], "masks l0 -> off"), (["--merged-lr-factor", "2"], "merged_lr_factor 1.0 -> 2.0"),
    (["--steps", "12"], "steps 10 -> 12"), (["--warmup", "2"], "warmup 1 -> 2"),
    (["--beta2", "0.9"], "beta2 0.95 -> 0.9"), (["--weight-decay", "0"], "weight_decay 0.0001 -> 0.0"),
])  # fmt: skip
def test_a_run_resumed_with_other_settings_is_refused(finished_run, inputs, changes, message):
    expect_error(message, STAGE, *train_arguments(finished_run, inputs, *changes))


def test_damaged_metrics_and_settings_are_one_line(finished_run, inputs, tmp_path):
    home = copy_run(finished_run, tmp_path / "run")
    (home / "train" / "stage.json").unlink()
    (home / "train" / "metrics.jsonl").write_text("[]\n")
    expect_error("metrics.jsonl line 1: expected a step's figures", STAGE, *train_arguments(home, inputs))
    (home / "train" / "metrics.jsonl").unlink()
    expect_error("expected loss and tokens of every step", STAGE, *train_arguments(home, inputs))
    (home / "train" / "plan.json").write_text("{")
    expect_error("plan.json: expected the settings of a training run", STAGE, *train_arguments(home, inputs))


def test_a_crafted_checkpoint_runs_nothing_in_stages_5_and_6(finished_run, inputs, tmp_path):
    """A .metadata that would run a command when unpickled, with all digests made to fit."""
    home, mark = copy_run(finished_run, tmp_path / "run"), tmp_path / "executed"
    for path in steps_saved(str(home / "train")):
        Path(path, ".metadata").write_bytes(pickle.dumps(Attack(f"touch '{mark}'")))
        seal(path)
    record = json.loads((home / "train" / "stage.json").read_text())
    write_record(str(home / "train"), record)
    message = "found none that can be read: a reference to posix.system, which is not allowed"
    expect_error(message, "06_export.py", "--run", home, "--force")
    (home / "train" / "stage.json").unlink()
    expect_error(message, STAGE, *train_arguments(home, inputs))
    assert not mark.exists()


def test_a_sample_longer_than_the_models_positions_is_refused(aligned_run, inputs, tmp_path):
    home, tasks = copy_run(aligned_run, tmp_path / "run"), tmp_path / "tasks"
    tasks.mkdir()
    row = {"goal": "word " * 100, "sol1": "a", "sol2": "b", "label": 0}
    (tasks / "piqa.train.jsonl").write_text(json.dumps(row) + "\n")
    message = "piqa.train.jsonl row 1: expected at most 256 tokens (the model's positions), found 591"
    expect_error(message, STAGE, *train_arguments(home, inputs, "--tasks", tasks, "--only", "piqa"))
    assert not (home / "train").exists() and not (home / "teacher.train").exists()


def test_what_force_moves_aside_gets_a_name_of_its_own(group_of_one, tmp_path):
    for given in ([], ["--teacher", str(tmp_path / "teacher")]):
        for name in ("train", "teacher", "teacher.train", "train.old", "train.old-1"):
            (tmp_path / name).mkdir(exist_ok=True)
        args = flags("--run", str(tmp_path), "--force", *given)
        before = set(os.listdir(tmp_path))
        stage()["start_anew"](Run(args, group_of_one, None, Pool([]), Execution(), None))
        after = set(os.listdir(tmp_path))
        if given:
            assert (after - before, before - after) == ({"train.old-3"}, {"train"})
        else:
            assert after - before == {"train.old-2", "teacher.old-1", "teacher.train.old-1"}
            assert before - after == {"train", "teacher", "teacher.train"}


@pytest.mark.slow
def test_force_never_replaces_what_an_earlier_one_moved_aside(finished_run, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    short = ["--masks", "off", "--steps", "1", "--teacher-steps", "1"]
    marks = [home / "train.old", home / "teacher.old-1"]
    for mark in marks:
        mark.mkdir()
    for number in range(3):
        run(STAGE, *train_arguments(home, inputs, *short, "--seed", number, "--force"))
    for name in ("train.old-1", "train.old-2", "teacher.old-2", "teacher.old-3", "train", "teacher"):
        assert (home / name / "stage.json").exists(), name
    assert all(mark.is_dir() and not list(mark.iterdir()) for mark in marks)
    for seed, name in enumerate(("train.old-1", "train.old-2", "train")):
        assert json.loads((home / name / "plan.json").read_text())["seed"] == seed
    run(STAGE, *train_arguments(home, inputs, *short, "--force", "--teacher", home / "teacher"))
    assert (home / "teacher" / "stage.json").exists() and not (home / "teacher.old-4").exists()


def test_the_teacher_is_recorded_with_its_adam(finished_run):
    summary = json.loads((finished_run / "teacher" / "stage.json").read_text())["summary"]
    assert (summary["lr"], summary["beta2"], summary["weight_decay"]) == (1e-3, 0.95, 1e-4)


def test_tensorboard_has_what_metrics_have(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run / "train" / "tensorboard")).Reload()
    lines = metrics(finished_run)
    for name in ("loss", "kl", "bild", "lr", "grad_norm", "tokens_per_s"):
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        assert scalars == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    assert len(events.Scalars("mask_mean")) == sum("mask_mean" in line for line in lines) == 8


def test_non_finite_loss_names_step_rank_and_samples(finished_run, aligned_run, inputs, tmp_path):
    home = with_teacher(aligned_run, finished_run, tmp_path / "run")
    done = run(STAGE, *train_arguments(home, inputs, "--lr", "1e30", "--clip", "0"), fails=True)
    assert "expected a finite loss, found rank 0: loss nan, samples [" in done.stderr
    assert "the last checkpoint is kept" in done.stderr


def test_the_whole_run_is_masked_for_80_percent_and_ends_as_gqa(finished_run):
    lines = metrics(finished_run)
    assert [line["step"] for line in lines if "mask_mean" in line] == list(range(1, 9))
    assert [line["mask_target"] for line in lines[:4]] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    weights = final_weights(finished_run)
    assert not [name for name in weights if "merged" in name or "original" in name]
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16, 48)


# under torchrun: slow


@pytest.fixture(scope="module")
def alone(aligned_run, inputs, tmp_path_factory):
    """A run on one process. Others are compared with it under the same teacher and for few steps: BiLD's
    top 16 is a choice that rounding flips once in some ten steps of a random model, and a flip is a jump of
    1e-4.
    """
    home = copy_run(aligned_run, tmp_path_factory.mktemp("alone") / "run")
    run(STAGE, "--run", home, "--tasks", inputs["tasks"], *SHARED)
    return home


def start(home, inputs, *arguments, processes: int = 2, **options) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = [*launcher, "--local-addr", "127.0.0.1"] if processes else []
    command = [sys.executable, *launcher, str(ROOT / "05_prune_train.py"), "--run-dir", str(home)]
    command += ["--tasks", inputs["tasks"], *(arguments or TRAINING)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **(quiet | options))


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of torchrun's ranks; of a single process its own."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()] or [process.pid]


def kill(process: subprocess.Popen) -> None:
    ranks = ranks_of(process)
    for pid in (process.pid, *ranks):  # the launcher first, so that it has no time to tidy up
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):  # a dying rank's threads still hold the lock
        assert time.monotonic() < limit, f"ranks {ranks} do not end"
        time.sleep(0.01)


def wait_for_step(home, step: int) -> None:
    path, limit = home / "train" / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


@pytest.mark.slow
def test_one_process_equals_two(alone, aligned_run, inputs, tmp_path):
    together = copy_run(aligned_run, tmp_path / "together")
    shutil.copytree(alone / "teacher", together / "teacher")
    run(STAGE, "--run-dir", together, "--tasks", inputs["tasks"], *SHARED, processes=2)
    assert_same_training(together, alone)
    # once more with a teacher that two processes made
    run(STAGE, "--run-dir", together, "--tasks", inputs["tasks"], *SHARED, "--force", processes=2)
    trained = safetensors.torch.load_file(alone / "teacher" / "model.safetensors")
    for name, tensor in safetensors.torch.load_file(together / "teacher" / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_released_masks_resume_to_the_same_bits_and_two_processes_equal_one(
    alone, aligned_run, inputs, tmp_path, monkeypatch
):
    homes = [with_teacher(aligned_run, alone, tmp_path / name) for name in ("whole", "stopped", "together")]
    words = ["--tasks", inputs["tasks"], *SHARED, "--mask-lr", "0.3", "--masks", "l0-released"]
    run(STAGE, "--run", homes[0], *words)
    with monkeypatch.context() as patched:
        interrupt(patched, 2)
        stopped = run_in_process(STAGE, [str(word) for word in ("--run", homes[1], *words)])
    assert stopped.returncode == STOPPED
    assert "after step 3 of 6" in run(STAGE, "--run", homes[1], *words).stdout
    assert_same_bits(homes[1], homes[0])
    run(STAGE, "--run-dir", homes[2], *words, processes=2)
    assert_same_training(homes[2], homes[0])
    lines = metrics(homes[0])
    assert [line["mask_target"] for line in lines[:4]] == pytest.approx([1, 4 / 9, 0, 0])
    assert lines[0]["mask_mean"] > 0.99 and lines[3]["mask_mean"] < 0.1 and "mask_mean" not in lines[4]


@pytest.mark.slow
def test_recomputed_layers_train_the_same(alone, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(alone / "teacher", home / "teacher")
    run(STAGE, "--run", home, "--tasks", inputs["tasks"], *SHARED, "--recompute")
    assert_same_training(home, alone)


@pytest.mark.slow
def test_resumed_at_another_world_size(alone, aligned_run, inputs, tmp_path):
    """Three steps on two processes, the rest, over the switch to GQA, on one; likewise the other way
    round.
    """
    for name, first, then in (("fewer", 2, 0), ("more", 0, 2)):
        home = copy_run(aligned_run, tmp_path / name)
        shutil.copytree(alone / "teacher", home / "teacher")
        process = start(home, inputs, *SHARED, processes=first)
        wait_for_step(home, 4)  # after the checkpoint of step 3
        kill(process)
        done = run(STAGE, "--run-dir", home, "--tasks", inputs["tasks"], *SHARED, processes=then)
        assert "resumes" in done.stdout
        assert_same_training(home, alone)


@pytest.mark.slow
def test_two_nodes_of_two_equal_one_process(alone, aligned_run, inputs, tmp_path):
    """HSDP: weights sharded within a node, replicated over nodes."""
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(alone / "teacher", home / "teacher")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    nodes = []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1",
                "--master-port", port, "--nproc-per-node", "2"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    for node in ("0", "1"):
        command = [*launcher, "--node-rank", node, str(ROOT / STAGE), "--run-dir", str(home)]
        command += ["--tasks", inputs["tasks"], *SHARED]
        nodes.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **options))
    try:
        for node in nodes:
            output, _ = node.communicate(timeout=120)
            assert node.returncode == 0, output
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)
    assert_same_training(home, alone)
    shards = {path.name.split("_")[2] for path in saved_files(home)[-1]}
    assert len(shards) >= 2  # more than one rank wrote


@pytest.mark.slow
def test_killed_and_resumed_is_bit_identical(distributed_run, aligned_run, inputs, tmp_path):
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    step = random.Random(0).randint(1, 8)
    process = start(home, inputs)
    wait_for_step(home, step)
    kill(process)
    assert not (home / "train" / "stage.json").exists()
    run(STAGE, "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    assert_same_bits(home, distributed_run)


@pytest.mark.slow
def test_twenty_kills_in_one_run(distributed_run, aligned_run, inputs, tmp_path):
    """One rank or all of them, killed at random moments twenty times; the run ends as one that was left
    alone.
    """
    settings = [*TRAINING, "--steps", "40", "--save-steps", "1"]
    quiet = with_teacher(aligned_run, distributed_run, tmp_path / "quiet")
    home = with_teacher(aligned_run, distributed_run, tmp_path / "killed")
    run(STAGE, "--run-dir", quiet, "--tasks", inputs["tasks"], *settings, processes=2)
    kills, draw = 0, random.Random(0)
    while kills < 20:
        done = len(metrics(home)) if (home / "train" / "metrics.jsonl").exists() else 0
        process = start(home, inputs, *settings)
        wait_for_step(home, min(done + draw.randint(0, 2), 39))
        time.sleep(draw.uniform(0, 0.3))
        if process.poll() is not None:
            break  # finished before the last kills
        if draw.random() < 0.5:
            kill(process)
        else:
            os.kill(draw.choice(ranks_of(process)), signal.SIGKILL)
            assert process.wait() != 0
        kills += 1
    run(STAGE, "--run-dir", home, "--tasks", inputs["tasks"], *settings, processes=2)
    assert kills == 20
    assert_same_bits(home, quiet)


def saved_files(home) -> list[list[Path]]:
    """The tensor files of each checkpoint, oldest first."""
    return [sorted(Path(path).glob("*.distcp")) for path in steps_saved(str(home / "train"))]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_checkpoint_is_set_aside_and_the_one_before_used(distributed_run, inputs, tmp_path, damage):
    home = copy_run(distributed_run, tmp_path / "run")
    (home / "train" / "stage.json").unlink()
    damage(saved_files(home)[-1][0])
    done = run("06_export.py", "--run", home, "--force", fails=True)
    assert "train not found" in done.stderr or "expected the record" in done.stderr
    done = run(STAGE, "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    assert "damaged" in done.stdout and "after step 9 of 10" in done.stdout and "switch" not in done.stdout
    assert (home / "train" / "step-00000010.damaged-1").is_dir()
    assert_same_bits(home, distributed_run)


@pytest.mark.slow
def test_nothing_but_damaged_checkpoints(distributed_run, inputs, tmp_path):
    home = copy_run(distributed_run, tmp_path / "run")
    for files in saved_files(home):
        flip(files[-1])
    done = run("06_export.py", "--run", home, "--force", fails=True)
    assert "its content does not match stage.json" in done.stderr and (home / "gqa").is_dir()
    (home / "train" / "stage.json").unlink()
    command = ["--run-dir", home, "--tasks", inputs["tasks"], *TRAINING]
    done = run(STAGE, *command, processes=2, fails=True)
    assert "expected an intact checkpoint, found 2 damaged" in done.stderr


@pytest.mark.slow
def test_full_disk_leaves_the_last_checkpoint(distributed_run, aligned_run, inputs, tmp_path):
    """The operating system refuses files of more than 64 KiB, as it would on a full disk."""
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    process = start(home, inputs)
    wait_for_step(home, 4)
    kill(process)
    before = [path.read_bytes() for path in saved_files(home)[-1]]

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = start(home, inputs, preexec_fn=limited, **pipes)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    assert "cannot be written (" in lines[0] and "GiB free there" in lines[0], errors
    reasons = ("File too large", "inline_container")  # torch's own zip writer may speak first
    assert any(reason in lines[0] for reason in reasons), errors
    assert not list((home / "train").glob("*.tmp"))
    assert [path.read_bytes() for path in saved_files(home)[-1]] == before
    run(STAGE, "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    assert_same_bits(home, distributed_run)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves(distributed_run, aligned_run, inputs, tmp_path):
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    process = start(home, inputs, *TRAINING, "--steps", "2000", "--save-steps", "5000")
    wait_for_step(home, 2)
    process.terminate()
    assert process.wait(timeout=60) != 0  # so that a command after && does not run
    assert [checkpoints.step_of(path) for path in steps_saved(str(home / "train"))] == [len(metrics(home))]


