"""The teacher: the source after supervised fine-tuning (Section 4.1 of the paper), or the source itself."""

import argparse
import os
import shutil
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from common.artifacts import claim, make_record, read_record, verify_files, write_record
from common.cli import UserError
from common.files import write_directory
from common.models import load_config, load_tokenizer
from common.training import checkpoints, distill, jobs
from common.training.engine import Job, Plan, train
from common.training.inputs import SOURCE, STAGE, Pool, Run
from common.training.metrics import METRICS, read_metrics, summarize
from common.training.sharding import Execution, Ranks, Trainee, build


def read_teacher(run: Run) -> bool:
    """Whether a teacher exists, the source or a fine-tune of it; False if one is to be trained.

    Raises UserError for one that is damaged or of another model, and if there are no answers to train one on.
    """
    for path in (run.directory, run.teacher):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise UserError(f"{path}: expected nothing or a directory, found a file; remove it first")
    if run.args.teacher == SOURCE:
        return True
    if os.path.realpath(run.teacher) == os.path.realpath(run.directory):
        raise UserError(f"--teacher: expected another directory than the student's, found {run.teacher}")
    if not os.path.lexists(run.teacher):
        if not run.pool.answered:
            raise UserError(f"--teacher {run.teacher}: expected one that exists, or source, as text has no "
                            "answers to fine-tune one on")
        return False
    teacher_record = read_record(run.teacher, STAGE, run.pair.model)
    if run.ranks.first:
        verify_files(run.teacher, teacher_record)
    return True


def train_teacher(run: Run, plan: Plan) -> bool:
    """Fine-tune the source model and write teacher/. Returns False if a signal stopped it."""
    source, directory, ranks = run.pair.model["path"], run.teacher + ".train", run.ranks
    if run.args.teacher:  # shared: another run may be training it, too
        parent, name = os.path.split(os.path.abspath(run.teacher))
        claim(name, argparse.Namespace(run=parent))
    ranks.say(f"teacher {source}: {plan.steps} steps of {plan.batch} samples on {ranks}")
    samples = run.pool.answered
    adam = {"lr": run.args.teacher_lr, "beta2": run.args.beta2, "weight_decay": run.args.weight_decay}
    source_fingerprint = {"source": run.pair.model["fingerprint"]}
    settings = plan.to_resume() | adam | Pool(samples).description() | source_fingerprint
    checkpoints.begin(directory, settings, ranks)
    saved = checkpoints.resume_from(directory, plan, ranks)
    trainee = build(load_config(source), ranks, run.execution, None if saved else lambda name: (source, name))
    job = Job(trainee, jobs.teacher_optimizer(trainee, **adam), directory, ranks)
    if saved:
        checkpoints.load(job, saved)
    if not train(job, distill.Sft(trainee, run.args.loss_chunk), samples, plan):
        return False
    if ranks.first:
        write_teacher(run, directory, settings)
    dist.barrier()
    return True


def write_teacher(run: Run, directory: str, settings: dict) -> None:
    """Write teacher/ from the last checkpoint in `directory`, then remove that directory."""
    source = run.pair.model["path"]
    config = load_config(source)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    model.load_state_dict(checkpoints.whole_weights(checkpoints.saved_checkpoints(directory)[-1]))
    lines = read_metrics(os.path.join(directory, METRICS))
    summary = settings | summarize(lines)
    with write_directory(run.teacher) as aside:
        model.save_pretrained(aside)
        load_tokenizer(source).save_pretrained(aside)
        shutil.copy(os.path.join(directory, METRICS), aside)
        write_record(aside, make_record(STAGE, run.args, run.pair.model, [], summary, run.clock()))
    shutil.rmtree(directory)
    print(f"wrote   {run.teacher}: loss on answers {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")


def frozen(path: str, ranks: Ranks, execution: Execution) -> Trainee:
    """The teacher: sharded, without gradients, its weights in the compute dtype."""
    execution = replace(execution, weights=execution.compute, recompute=False)
    teacher = build(load_config(path), ranks, execution, lambda name: (path, name))
    return teacher.eval().requires_grad_(False)
