"""Training checkpoints: what comes back of them, damage, names, and the settings beside them."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.models.load import load_config
from common.run.errors import UserError
from common.training import checkpoints
from common.training.engine import Job, make_optimizer
from common.training.sharding import Execution, build
from models import save_tiny
from runs import full_disk


def new_job(source: str, directory, ranks, shift: float = 0.0) -> Job:
    """A tiny model with a replicated parameter, after one step of Adam."""
    extra = {"extra": torch.ones(2, 3)}
    trainee = build(load_config(source), ranks, Execution(), lambda name: (source, name), None, extra)
    optimizer = make_optimizer(trainee, {"initial_lr": 1e-3}, {})
    job = Job(trainee, optimizer, str(directory), ranks, step=1)
    for parameter in trainee.parameters():
        parameter.grad = parameter.detach() - shift
    job.optimizer.step()
    job.optimizer.zero_grad()
    return job


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def write_metrics(directory: Path, lines: list[dict]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def saved(group_of_one, tmp_path):
    """A job, and the path of its checkpoint step-00000001."""
    directory = tmp_path / "run [1]" / "train"  # glob characters in the name
    directory.mkdir(parents=True)
    job = new_job(save_tiny(tmp_path / "model"), directory, group_of_one)
    checkpoints.save(job)
    return job, str(directory / "step-00000001")


def test_a_checkpoint_gives_back_weights_replicated_parameters_optimizer_and_step(saved, tmp_path):
    """A layer is a file, and its tensors are what safetensors reads."""
    job, path = saved
    other = new_job(str(tmp_path / "model"), tmp_path, job.ranks, shift=0.1)
    other.step = 0
    checkpoints.load(other, path)
    assert other.step == 1
    files = [load_file(file) for file in sorted(Path(path).glob("*.safetensors"))]
    assert len(files) == 1 + 3 and all(".layers.2." in name for name in files[3])
    stored = {name: tensor for tensors in files for name, tensor in tensors.items()}
    for (name, ours), theirs in zip(other.trainee.named_parameters(), job.trainee.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs)) and torch.equal(stored[f"weights.{name}"], whole(ours))
        for kind, tensor in job.optimizer.state[theirs].items():
            assert torch.equal(whole(other.optimizer.state[ours][kind]), whole(tensor)), (name, kind)
    for part in ("net", "replicated"):
        weights = checkpoints.whole_weights(path, part)
        parameters = dict(getattr(job.trainee, part).named_parameters())
        assert weights.keys() == parameters.keys()
        assert all(torch.equal(weights[name], whole(parameters[name])) for name in weights)


def test_the_last_two_and_the_best_are_kept_and_other_names_are_not_checkpoints(saved):
    job, _ = saved
    write_metrics(Path(job.directory), [{"step": step, "heldout_kl": abs(step - 2)} for step in range(1, 7)])
    for name in ("step-00000009.tmp", "step-00000009.damaged-1", "step-9", "notes"):
        os.mkdir(os.path.join(job.directory, name))
    for job.step in range(2, 7):
        checkpoints.save(job)
    steps = [checkpoints.step_of(path) for path in checkpoints.saved_checkpoints(job.directory)]
    assert steps == [2, 5, 6]
    assert checkpoints.newest(job.directory, job.ranks).endswith("step-00000006")
    assert checkpoints.saved_checkpoints(os.path.join(job.directory, "missing")) == []


@pytest.mark.parametrize(("name", "fault"), [
    ("stage.json", Path.unlink), ("shard-*-00002-*", Path.unlink),  # as in a partial copy
    ("shard-*-00002-*", lambda path: path.write_bytes(bytes(path.stat().st_size))),  # of a power cut
])
def test_damage_is_noticed_and_the_checkpoint_before_is_used(saved, name, fault, capsys):
    job, path = saved
    job.step = 2
    checkpoints.save(job)
    damaged = Path(job.directory, "step-00000002")
    fault(next(damaged.glob(name)))
    with pytest.raises(UserError, match="expected an intact training checkpoint, found that "):
        checkpoints.whole_weights(str(damaged))
    Path(job.directory, "step-00000002.damaged-1").mkdir()  # of an earlier time: stays
    assert checkpoints.newest(job.directory, job.ranks) == path
    assert "moved to step-00000002.damaged-2; using the one before it" in capsys.readouterr().out
    next(Path(path).glob("shard-*")).write_bytes(b"")
    with pytest.raises(UserError, match="expected an intact checkpoint, found 1 damaged; --force starts"):
        checkpoints.newest(job.directory, job.ranks)


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(saved):
    job, path = saved
    job.step = 2
    with full_disk(1 << 12), pytest.raises(UserError, match="cannot be written .*File too large.*GiB free"):
        checkpoints.save(job)
    assert os.listdir(job.directory) == [os.path.basename(path)]
    checkpoints.whole_weights(path)


def test_a_directory_of_something_else_and_damaged_settings_are_refused(group_of_one, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / ".settings.json.1-0.unfinished").write_text("{")  # of a process that was killed
    for _ in range(2):
        checkpoints.begin(str(tmp_path / "train"), {"lr": 1.0}, group_of_one)
    (tmp_path / "train" / "settings.json").write_text("{")
    with pytest.raises(UserError, match="settings.json: .*; --force starts over"):
        checkpoints.begin(str(tmp_path / "train"), {"lr": 1.0}, group_of_one)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").touch()
    with pytest.raises(UserError, match="notes: expected nothing or a training with its settings.json"):
        checkpoints.begin(str(tmp_path / "notes"), {}, group_of_one)


@pytest.mark.parametrize("kls, best", [
    ({20: (0.3, 0.3), 30: (0.4, 0.0), 40: (0.0, 0.5)}, 30), ({20: (0.2, 0.2), 40: (0.1, 0.3)}, 40),
    ({35: (0.1, 0.1), 40: (0.2, 0.2)}, 40), ({}, None),
])
def test_the_best_checkpoint_is_a_gqa_students_with_the_lowest_held_out_kl(tmp_path, kls, best):
    """The mean of that of text and that of chats; not of the questions, which stage 7 asks."""
    lines = [{"step": 10, "heldout_kl": 0.01, "mask_target": 0.5}]  # open masks: nearly the source
    for step in (20, 30, 35, 40):
        lines.append({"step": step, "heldout_task_kl": 1 / step})
        if step in kls:
            lines[-1]["heldout_kl"], lines[-1]["heldout_chat_kl"] = kls[step]
    write_metrics(tmp_path, lines)
    for step in (10, 20, 30, 40):
        Path(checkpoints.path_of(str(tmp_path), step)).mkdir()
    assert checkpoints.best(str(tmp_path)) == (checkpoints.path_of(str(tmp_path), best) if best else None)
