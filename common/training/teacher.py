"""The teacher of stage 5: found, or the source fine-tuned on the samples' answers (SFT)."""

import os
import shutil
from dataclasses import replace

import torch
import torch.distributed as dist

from common.data.pool import Pool
from common.models.layers import CheckpointWriter, Layers
from common.models.load import load_config, weight_dtype
from common.run.artifact import read_record, verify_files, write_directory, write_record
from common.run.errors import UserError
from common.run.kinds import SOURCE
from common.training import checkpoints
from common.training.attention import Trainee
from common.training.chunked import next_token_loss
from common.training.conversion import HUB_COMMITS, STAGE, TrainingRun
from common.training.engine import Job, Schedule, steps
from common.training.flops import sft_flops
from common.training.lines import METRICS, read_metrics, summarize
from common.training.sharding import Execution, Ranks, build
from common.training.students import Rates, student_optimizer

# settings that only round a result, or are told by the samples
NOT_COMPARED = ("tokens_per_microbatch", "reduce", "dtype", HUB_COMMITS)


def build_teacher(path: str, ranks: Ranks, execution: Execution) -> Trainee:
    """The teacher: sharded, without gradients, its weights in the compute dtype."""
    execution = replace(execution, weights=execution.compute, recompute=False)
    teacher = build(load_config(path), ranks, execution, lambda name: (path, name))
    return teacher.requires_grad_(False)


def find_teacher(run: TrainingRun, given: str | None, force: bool) -> bool:
    """Whether there is a teacher, the source or a fine-tune of it; False if one is to be trained.

    given: --teacher, which --force leaves alone. Raises UserError for one that is damaged or of
    another model, and if there are no answers to train one on.
    """
    for path in [run.directory] + [run.teacher] * (given != SOURCE):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise UserError(f"{path}: expected nothing or a directory, found a file; remove it first")
    if given == SOURCE:
        return True
    if os.path.realpath(run.teacher) == os.path.realpath(run.directory):
        raise UserError(f"--teacher: expected another directory than the student's, found {run.teacher}")
    if os.path.lexists(run.teacher) and (given or not force):
        teacher_record = read_record(run.teacher, STAGE, run.conversion.model)
        if run.ranks.first:
            verify_files(run.teacher, teacher_record)
        return True
    if not run.pool.answered:
        raise UserError(f"--teacher {run.teacher}: expected one that exists, or source, as text has no "
                        "answers to fine-tune one on")
    return False


def teacher_settings(run: TrainingRun, schedule: Schedule, rates: Rates) -> dict:
    """Everything that must match to resume the teacher's training, or to take a teacher for its result."""
    settings = schedule.to_resume() | run.computation | Pool(run.pool.answered).description()
    return settings | {"source": run.conversion.model["fingerprint"], "lr": rates.lr, "beta2": rates.beta2,
                       "weight_decay": rates.weight_decay}


def check_teacher(run: TrainingRun, schedule: Schedule, rates: Rates) -> None:
    """Raise UserError if the teacher in RUN was trained with other settings."""
    settings = {name: value for name, value in teacher_settings(run, schedule, rates).items()
                if name not in NOT_COMPARED}
    found = read_record(run.teacher, STAGE, run.conversion.model)["summary"]
    if changes := checkpoints.changes_of(found, settings):
        raise UserError(f"{run.teacher} was trained with other settings ({changes}): pass the same, "
                        f"--teacher {run.teacher} to take it as it is, or --force to start over")


def train_teacher(run: TrainingRun, schedule: Schedule, rates: Rates, execution: Execution) -> bool:
    """Fine-tune the source model on the samples' answers. Returns False if a signal stopped it."""
    source, directory, samples = run.conversion.model["path"], run.teacher + ".train", run.pool.answered
    ranks = run.ranks
    ranks.say(f"teacher {source}: {schedule.steps} steps of {schedule.batch} samples on {ranks}")
    settings = teacher_settings(run, schedule, rates)
    checkpoints.begin(directory, settings, ranks)
    saved = checkpoints.newest(directory, ranks)
    teacher = build(load_config(source), ranks, execution, None if saved else lambda name: (source, name))
    job = Job(teacher, student_optimizer(teacher, rates), directory, ranks, sft_flops(teacher))
    checkpoints.load(job, saved)

    for step in steps(job, schedule, samples):
        for row in step.rows:
            loss = next_token_loss(teacher, row, row.answer_at, row.answer_weight, schedule.loss_chunk)
            step.backward(loss)
        step.update()
    if job.stopped:
        return False
    if ranks.first:
        write_teacher(run, directory, settings)
    dist.barrier()
    return True


def write_teacher(run: TrainingRun, directory: str, settings: dict) -> None:
    """Write teacher/ from the last checkpoint in `directory`, then remove that directory."""
    source = run.conversion.model["path"]
    config = load_config(source)
    weights = checkpoints.TrainedWeights(checkpoints.saved_checkpoints(directory)[-1])
    layers = Layers(weights.path, torch.float32, "cpu", layerwise=True, config=config, weights=weights)
    lines = read_metrics(os.path.join(directory, METRICS))
    summary = settings | summarize(lines)
    with write_directory(run.teacher) as aside:
        with CheckpointWriter(aside, config, weight_dtype("source", config), source) as writer:
            for index, layer in enumerate(layers.decoder_layers()):
                writer.write(f"model.layers.{index}", layer)
            writer.write_rest(layers)
        shutil.copy(os.path.join(directory, METRICS), aside)
        write_record(aside, run.started.record(run.conversion.model, summary))
    checkpoints.remove_training(directory)
    print(f"wrote   {run.teacher}: loss on answers {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
