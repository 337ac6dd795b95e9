"""Stage 5 under torchrun: two processes equal one, a killed run equals one that was not, signals and NaN are handled."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from common.cli import UserError
from common.data.tasks import Sample
from common.method import masks
from common.method.losses import bild, kl
from common.models import load_config
from common.reporting import plots
from common.training import checkpoints, engine
from common.training.checkpoints import steps_saved, whole_weights
from common.training.distill import Distillation, Settings, gqa_optimizer, masked_optimizer, start_masks
from common.training.engine import Job, learning_rate
from common.training.packing import build_row
from common.training.sharding import Execution, Trainee, build
from conftest import ROOT, TRAINING, copy_run, run, save_tiny, tiny_model


def metrics(home) -> list[dict]:
    return [json.loads(line) for line in (home / "train" / "metrics.jsonl").read_text().splitlines()]


def final_weights(home) -> dict[str, torch.Tensor]:
    return whole_weights(steps_saved(str(home / "train"))[-1])


SHARED = [*TRAINING, "--steps", "6", "--seed", "1", "--tokens-per-microbatch", "200"]  # several rows, not as many on each rank


@pytest.fixture(scope="module")
def alone(aligned_run, inputs, tmp_path_factory):
    """A run on one process. Others are compared with it under the same teacher and for few steps: BiLD's top 16 is a choice
    that rounding flips once in some ten steps of a random model, and a flip is a jump of 1e-4."""
    home = copy_run(aligned_run, tmp_path_factory.mktemp("alone") / "run")
    run("05_prune_train.py", "--run", home, "--tasks", inputs["tasks"], *SHARED)
    return home


def assert_same_training(home, other) -> None:
    for ours, theirs in zip(metrics(home), metrics(other), strict=True):
        for name in ("loss", "kl", "bild", "mask_mean", "mask_expected"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-5), (ours["step"], name)
    expected = final_weights(other)
    for name, tensor in final_weights(home).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


def test_one_process_equals_two(alone, aligned_run, inputs, tmp_path):
    together = copy_run(aligned_run, tmp_path / "together")
    shutil.copytree(alone / "teacher", together / "teacher")
    run("05_prune_train.py", "--run-dir", together, "--tasks", inputs["tasks"], *SHARED, processes=2)
    assert_same_training(together, alone)
    run("05_prune_train.py", "--run-dir", together, "--tasks", inputs["tasks"], *SHARED, "--force", processes=2)  # a teacher of its own this time
    trained = safetensors.torch.load_file(alone / "teacher" / "model.safetensors")
    for name, tensor in safetensors.torch.load_file(together / "teacher" / "model.safetensors").items():
        torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-5)


def test_recomputed_layers_train_the_same(alone, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(alone / "teacher", home / "teacher")
    run("05_prune_train.py", "--run", home, "--tasks", inputs["tasks"], *SHARED, "--recompute")
    assert_same_training(home, alone)


@pytest.mark.parametrize("kl_on", ["prompt", "all"])
def test_distillation_is_equation_30(kl_on):
    """From whole logits of each sample by itself: means over its tokens, then over samples."""
    student, teacher = (Trainee(tiny_model(seed=seed, attn_implementation="packed")) for seed in (0, 1))
    samples = [Sample((1, 2, 3, 4), (5, 6)), Sample((7, 8), (9, 10, 11)), Sample((12, 13, 14), (15,))]
    phase = Distillation(student, teacher, Settings(lr=1.0, kl_on=kl_on, loss_chunk=2))
    loss, parts = phase.row_loss(build_row(samples, 3))
    expected = {"kl": 0.0, "bild": 0.0}
    for sample in samples:
        tokens = torch.tensor([[*sample.prompt, *sample.answer]])
        ours, theirs = (trainee.net(input_ids=tokens).logits[0, :-1].detach() for trainee in (student, teacher))
        prompt = len(sample.prompt) - 1
        last = prompt if kl_on == "prompt" else None
        expected["kl"] += float(kl(ours[:last], theirs[:last]).mean()) / 3
        expected["bild"] += float(bild(ours[prompt:], theirs[prompt:]).mean()) / 3
    assert {name: float(part) for name, part in parts.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(sum(expected.values()), rel=1e-4)


def test_resumed_at_another_world_size(alone, aligned_run, inputs, tmp_path):
    """Three steps on two processes, the rest, over the switch to GQA, on one; likewise the other way round."""
    for name, first, then in (("fewer", 2, 0), ("more", 0, 2)):
        home = copy_run(aligned_run, tmp_path / name)
        shutil.copytree(alone / "teacher", home / "teacher")
        process = start(home, inputs, *SHARED, processes=first)
        wait_for_step(home, 4)  # by then the checkpoint of step 3 stands
        kill(process)
        done = run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *SHARED, processes=then)
        assert "resumes" in done.stdout
        assert_same_training(home, alone)


def test_two_nodes_of_two_equal_one_process(alone, aligned_run, inputs, tmp_path):
    """HSDP: weights sharded within a node, replicated over nodes."""
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(alone / "teacher", home / "teacher")
    port = str(20_000 + os.getpid() % 10_000)  # below those the system hands out by itself
    nodes = []
    for node in ("0", "1"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port,
                   "--nproc-per-node", "2", str(ROOT / "05_prune_train.py"), "--run-dir", str(home), "--tasks", inputs["tasks"], *SHARED]
        nodes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}))
    try:
        for node in nodes:
            output, _ = node.communicate(timeout=120)
            assert node.returncode == 0, output
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)
    assert_same_training(home, alone)
    shards = {path.name.split("_")[2] for path in Path(steps_saved(str(home / "train"))[-1]).glob("__*.distcp")}
    assert len(shards) >= 2  # more than one rank wrote


def start(home, inputs, *arguments, processes: int = 2, **options) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, str(ROOT / "05_prune_train.py"), "--run-dir", str(home), "--tasks", inputs["tasks"]]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, *(arguments or TRAINING)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **(quiet | options))


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of torchrun's ranks; of a single process its own."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()] or [process.pid]


def kill(process: subprocess.Popen) -> None:
    for pid in (process.pid, *ranks_of(process)):  # the launcher first, so that it has no time to tidy up
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def wait_for_step(home, step: int) -> None:
    path, limit = home / "train" / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


TIMING = {"seconds", "tokens_per_s"}


def assert_same_bits(home, other) -> None:
    ours, theirs = final_weights(home), final_weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [{k: v for k, v in a.items() if k not in TIMING} for a in metrics(home)] == [{k: v for k, v in b.items() if k not in TIMING} for b in metrics(other)]


def with_teacher(source, distributed_run, home):
    copy_run(source, home)
    shutil.copytree(distributed_run / "teacher", home / "teacher")
    return home


def test_killed_and_resumed_is_bit_identical(distributed_run, aligned_run, inputs, tmp_path):
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    step = random.randint(1, 8)
    print(f"killed at step {step}")
    process = start(home, inputs)
    wait_for_step(home, step)
    kill(process)
    assert not (home / "train" / "stage.json").exists()
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    assert_same_bits(home, distributed_run)


@pytest.mark.slow
def test_twenty_kills_in_one_run(distributed_run, aligned_run, inputs, tmp_path):
    """One rank or all of them, killed at random moments twenty times; the run ends as one that was left alone."""
    settings = [*TRAINING, "--steps", "40", "--save-steps", "1"]
    quiet, home = (with_teacher(aligned_run, distributed_run, tmp_path / name) for name in ("quiet", "killed"))
    run("05_prune_train.py", "--run-dir", quiet, "--tasks", inputs["tasks"], *settings, processes=2)
    kills = 0
    while kills < 20:
        done = len(metrics(home)) if (home / "train" / "metrics.jsonl").exists() else 0
        process = start(home, inputs, *settings)
        wait_for_step(home, min(done + random.randint(0, 2), 39))
        time.sleep(random.uniform(0, 0.3))
        if process.poll() is not None:
            break  # finished before the last kills
        if random.random() < 0.5:
            kill(process)
        else:
            os.kill(random.choice(ranks_of(process)), signal.SIGKILL)
            assert process.wait() != 0
        kills += 1
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *settings, processes=2)
    print(f"{kills} kills")
    assert kills == 20
    assert_same_bits(home, quiet)


def saved_files(home) -> list[list[Path]]:
    """The tensor files of each checkpoint, oldest first."""
    return [sorted(Path(path).glob("*.distcp")) for path in steps_saved(str(home / "train"))]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_checkpoint_is_set_aside_and_the_one_before_used(distributed_run, inputs, tmp_path, damage):
    home = copy_run(distributed_run, tmp_path / "run")
    (home / "train" / "stage.json").unlink()
    damage(saved_files(home)[-1][0])
    done = run("06_export.py", "--run", home, "--force", fails=True)
    assert "train not found" in done.stderr or "expected the record" in done.stderr
    done = run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    assert "damaged" in done.stdout and "after step 9 of 10" in done.stdout and "switch" not in done.stdout
    assert (home / "train" / "step-00000010.damaged-1").is_dir()
    assert_same_bits(home, distributed_run)


def test_nothing_but_damaged_checkpoints(distributed_run, inputs, tmp_path):
    home = copy_run(distributed_run, tmp_path / "run")
    for files in saved_files(home):
        flip(files[-1])
    done = run("06_export.py", "--run", home, "--force", fails=True)
    assert "is not what was written" in done.stderr and (home / "gqa").is_dir()
    (home / "train" / "stage.json").unlink()
    done = run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2, fails=True)
    assert "expected a whole checkpoint, found 2 damaged" in done.stderr


def test_full_disk_leaves_the_last_checkpoint(distributed_run, aligned_run, inputs, tmp_path):
    """The operating system refuses files of more than 64 KiB, as it would on a full disk, once a checkpoint stands."""
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    process = start(home, inputs)
    wait_for_step(home, 4)
    kill(process)
    before = [path.read_bytes() for path in saved_files(home)[-1]]
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    process = start(home, inputs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limited)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "cannot be written" in lines[0] and "File too large" in lines[0] and "GiB free there" in lines[0], errors
    assert not list((home / "train").glob("*.tmp")) and [path.read_bytes() for path in saved_files(home)[-1]] == before
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    assert_same_bits(home, distributed_run)


def test_switch_frees_what_masks_needed_and_keeps_the_rest(group_of_one, tmp_path):
    """A masked student after some steps of Adam, saved and loaded as the GQA model: the same weights and the same memory of
    AdamW where there is a counterpart, nothing else."""
    sources = {"mha": save_tiny(tmp_path / "mha", bias=True), "gqa": save_tiny(tmp_path / "gqa", bias=True, num_key_value_heads=2)}
    settings = Settings(lr=1e-3, merged_lr_factor=2)
    student = build(load_config(sources["mha"]), group_of_one, Execution(), None, lambda model: masks.patch(model, 2), start_masks(3, 8))
    masked = Job(student, masked_optimizer(student, settings), str(tmp_path), group_of_one, 3)
    for _ in range(3):
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter)
            parameter.grad = torch.randn_like(parameter)
        masked.optimizer.step()
    checkpoints.save(masked)
    student = build(load_config(sources["gqa"]), group_of_one, Execution())
    gqa = Job(student, gqa_optimizer(student, settings, masks.KEY_VALUE), str(tmp_path), group_of_one)
    groups = [(len(group["params"]), group["initial_lr"]) for group in gqa.optimizer.param_groups]
    assert groups == [(len(list(student.parameters())) - 12, 1e-3), (12, 2e-3)]  # 3 layers, weight and bias of k and v
    for fault in (False, True):  # names as they are do not lead to the shared projections
        def stored(name, fault=fault):
            return name if fault else name.replace("k_proj.", "k_proj.merged.").replace("v_proj.", "v_proj.merged.")

        if fault:
            with pytest.raises(UserError, match=r"expected a tensor optimizer\.state\.net\..*k_proj\.bias.*, found none"):
                checkpoints.load(gqa, str(tmp_path / "step-00000003"), stored)
            continue
        checkpoints.load(gqa, str(tmp_path / "step-00000003"), stored)
        assert gqa.step == 3
        before = dict(masked.trainee.named_parameters())
        for name, parameter in gqa.trainee.named_parameters():
            assert torch.equal(parameter.to_local(), before[stored(name)].to_local()), name
            for kind, tensor in masked.optimizer.state[before[stored(name)]].items():
                assert torch.equal(local(gqa.optimizer.state[parameter][kind]), local(tensor)), (name, kind)
    assert sum(p.numel() for p in gqa.trainee.parameters()) < sum(p.numel() for p in masked.trainee.parameters())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's part of a sharded tensor, the whole of any other."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Squares(engine.Phase):
    """A loss that needs no teacher."""

    def __init__(self, trainee):
        self.trainee = trainee

    def row_loss(self, row):
        return self.trainee(row).square().mean(), {}


def test_checkpoints_by_the_clock(group_of_one, tmp_path):
    source = save_tiny(tmp_path / "model")
    for minutes, expected in ((0.0, [4, 5]), (60.0, [5])):
        trainee = build(load_config(source), group_of_one, Execution(), lambda name: (source, name))
        optimizer = torch.optim.SGD([{"params": list(trainee.parameters()), "initial_lr": 1e-3}])
        plan = engine.Plan(steps=5, batch=1, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=64, save_steps=None, save_minutes=minutes, print_every=1)
        home = tmp_path / f"{minutes}"
        home.mkdir()
        assert engine.train(Job(trainee, optimizer, str(home), group_of_one), Squares(trainee), [Sample((1, 2), (3,))], plan)
        assert [checkpoints.step_of(path) for path in steps_saved(str(home))] == expected


def test_tensorboard_has_what_metrics_have(distributed_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(distributed_run / "train" / "tensorboard")).Reload()
    lines = metrics(distributed_run)
    for name in ("loss", "kl", "bild", "lr", "grad_norm", "tokens_per_s"):
        assert [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars(name)] == [(line["step"], line[name]) for line in lines]
    assert len(events.Scalars("mask_mean")) == sum("mask_mean" in line for line in lines) == 8


def test_sigterm_to_torchrun_saves(distributed_run, aligned_run, inputs, tmp_path):
    home = with_teacher(aligned_run, distributed_run, tmp_path / "run")
    process = start(home, inputs, *TRAINING, "--steps", "2000", "--save-steps", "5000")
    wait_for_step(home, 2)
    process.terminate()
    process.wait(timeout=60)
    assert [checkpoints.step_of(path) for path in steps_saved(str(home / "train"))] == [len(metrics(home))]


def test_sigterm_saves_and_other_settings_are_refused(distributed_run, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(distributed_run / "teacher", home / "teacher")
    command = [sys.executable, str(ROOT / "05_prune_train.py"), "--run", str(home), "--tasks", inputs["tasks"], *TRAINING, "--steps", "2000", "--save-steps", "5000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for_step(home, 2)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and "stopped by a signal" in output
    step = len(metrics(home))
    assert steps_saved(str(home / "train")) == [str(home / "train" / f"step-{step:08d}")]
    done = run("05_prune_train.py", "--run", home, "--tasks", inputs["tasks"], *TRAINING, fails=True)
    assert "was begun with other settings (steps 2000 -> 10" in done.stderr


def test_non_finite_loss_names_step_rank_and_samples(distributed_run, aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(distributed_run / "teacher", home / "teacher")
    done = run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, "--lr", "1e30", "--clip", "0", fails=True)
    assert "expected a finite loss, found rank 0: loss nan, samples [" in done.stderr and "the last checkpoint is kept" in done.stderr


def test_non_finite_gradient_stops_before_the_update(group_of_one, tmp_path):
    """A loss can be finite where its gradient is not: sqrt at 0."""

    class Faulty(engine.Phase):
        def row_loss(self, row):
            return (0 * trainee(row)).abs().sum().sqrt(), {}

    trainee = Trainee(tiny_model())
    before = [p.clone() for p in trainee.parameters()]
    optimizer = torch.optim.SGD([{"params": list(trainee.parameters()), "initial_lr": 1.0}])
    plan = engine.Plan(steps=3, batch=1, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=64, save_steps=1, save_minutes=1, print_every=1)
    with pytest.raises(UserError, match=r"step 1: expected a finite loss, found a gradient of norm nan, samples \[0\]"):
        engine.train(Job(trainee, optimizer, str(tmp_path), group_of_one), Faulty(), [Sample((1, 2), (3,))], plan)
    assert all(torch.equal(a, b) for a, b in zip(before, trainee.parameters(), strict=True))
    assert steps_saved(str(tmp_path)) == []


@pytest.mark.parametrize("final_share", [0.0, 0.1])
def test_learning_rate_warms_up_and_falls_along_a_cosine(final_share):
    plan = engine.Plan(100, 1, 10, 1.0, 0, 64, None, 1, 1, final_share)
    shares = [learning_rate(step, plan) for step in range(101)]
    assert shares[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]) and shares[10] == 1
    assert shares[55] == pytest.approx((1 + final_share) / 2)  # halfway
    assert shares[100] == pytest.approx(final_share) and shares[99] > final_share


def test_curves_of_a_run_too_short_for_masks(tmp_path):
    plots.curves(str(tmp_path / "curves.png"), [{"step": 1, "loss": 2.0, "kl": 1.0, "bild": 1.0}], "one step")
    assert (tmp_path / "curves.png").stat().st_size > 5_000
