"""The teacher: the source after supervised fine-tuning (Section 4.1 of the paper), or the source itself."""

import argparse
import os
import shutil
from dataclasses import replace

import torch
import torch.distributed as dist

from common.artifacts import claim, read_record, verify_files, write_record
from common.cli import UserError
from common.files import write_directory
from common.layers import CheckpointWriter, Layers
from common.models import load_config
from common.records import SOURCE
from common.training import checkpoints
from common.training.distill import next_token_loss, sft_flops
from common.training.engine import Job, Schedule, steps
from common.training.metrics import METRICS, read_metrics, summarize
from common.training.pool import Pool
from common.training.run import STAGE, Run
from common.training.sharding import Execution, Ranks, Trainee, build
from common.training.students import Rates, teacher_optimizer


def find_teacher(run: Run) -> bool:
    """Whether there is a teacher, the source or a fine-tune of it; False if one is to be trained.

    Raises UserError for one that is damaged or of another model, and if there are no answers to train one on.
    """
    for path in (run.directory, run.teacher):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise UserError(f"{path}: expected nothing or a directory, found a file; remove it first")
    if run.args.teacher == SOURCE:
        return True
    if os.path.realpath(run.teacher) == os.path.realpath(run.directory):
        raise UserError(f"--teacher: expected another directory than the student's, found {run.teacher}")
    replaced = run.args.force and not run.args.teacher
    if os.path.lexists(run.teacher) and not replaced:
        teacher_record = read_record(run.teacher, STAGE, run.pair.model)
        if run.ranks.first:
            verify_files(run.teacher, teacher_record)
        return True
    if not run.pool.answered:
        raise UserError(f"--teacher {run.teacher}: expected one that exists, or source, as text has no "
                        "answers to fine-tune one on")
    return False


def train_teacher(run: Run, schedule: Schedule) -> bool:
    """Fine-tune the source model on the samples' answers. Returns False if a signal stopped it."""
    args, ranks, samples = run.args, run.ranks, run.pool.answered
    source, directory = run.pair.model["path"], run.teacher + ".train"
    if args.teacher:  # shared: another run may be training it, too
        parent, name = os.path.split(os.path.abspath(run.teacher))
        claim(name, argparse.Namespace(run=parent))
    ranks.say(f"teacher {source}: {schedule.steps} steps of {schedule.batch} samples on {ranks}")
    settings = schedule.to_resume() | run.computation | Pool(samples).description()
    settings |= {"source": run.pair.model["fingerprint"], "lr": args.teacher_lr, "beta2": args.beta2,
                 "weight_decay": args.weight_decay}
    checkpoints.begin(directory, settings, ranks)
    saved = checkpoints.resume_from(directory, schedule, ranks)
    teacher = build(load_config(source), ranks, run.execution, None if saved else lambda name: (source, name))
    optimizer = teacher_optimizer(teacher, Rates(args.teacher_lr, args.beta2, args.weight_decay))
    job = Job(teacher, optimizer, directory, ranks, sft_flops(teacher))
    if saved:
        checkpoints.load(job, saved)

    for step in steps(job, schedule, samples):
        for row in step.rows:
            step.backward(next_token_loss(teacher, row, row.answer_at, row.answer_weight, args.loss_chunk))
        step.update()
    if job.stopped:
        return False
    if ranks.first:
        write_teacher(run, directory, settings)
    dist.barrier()
    return True


def write_teacher(run: Run, directory: str, settings: dict) -> None:
    """Write teacher/ from the last checkpoint in `directory`, then remove that directory."""
    source = run.pair.model["path"]
    config = load_config(source)
    dtype = config.dtype or torch.float32  # before Layers, which changes the config's
    weights = checkpoints.TrainedWeights(checkpoints.saved_checkpoints(directory)[-1])
    layers = Layers(weights.path, torch.float32, "cpu", layerwise=True, config=config, weights=weights)
    lines = read_metrics(os.path.join(directory, METRICS))
    summary = settings | summarize(lines)
    with write_directory(run.teacher) as aside:
        with CheckpointWriter(aside, config, dtype, source) as writer:
            for index, layer in enumerate(layers.decoder_layers()):
                writer.write(f"model.layers.{index}", layer)
            writer.write_rest(layers)
        shutil.copy(os.path.join(directory, METRICS), aside)
        write_record(aside, run.started.record(run.pair.model, summary))
    checkpoints.remove_training(directory)
    print(f"wrote   {run.teacher}: loss on answers {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")


def frozen(path: str, ranks: Ranks, execution: Execution) -> Trainee:
    """The teacher: sharded, without gradients, its weights in the compute dtype."""
    execution = replace(execution, weights=execution.compute, recompute=False)
    teacher = build(load_config(path), ranks, execution, lambda name: (path, name))
    return teacher.eval().requires_grad_(False)
