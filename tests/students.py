"""Tiny students, teachers and jobs, and distillation written out."""

from pathlib import Path

import torch

import paper
from common.data.samples import Sample
from common.method import masks
from common.models import load_config
from common.training import jobs
from common.training.distill import Distillation, MaskedDistillation, Settings
from common.training.engine import Job, Plan
from common.training.sharding import Execution, Trainee, build, sum_over_ranks
from common.training.teacher import frozen
from conftest import save_tiny, tiny_model

SAMPLES = [Sample((1, 2, 3, 4), (5, 6)), Sample((7, 8), (9, 10, 11)), Sample((12, 13, 14), (15,))]
STEPS = 5
PLAN = Plan(steps=STEPS, batch=2, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=64, save_steps=None,
            save_minutes=60.0, print_every=100)
SETTINGS = Settings(lr=1e-2, mask_lr=1.0, loss_chunk=7)


def sample_logits(trainee, sample: Sample) -> torch.Tensor:
    """Logits [T - 1, V] of the predicted tokens of a sample by itself."""
    tokens = torch.tensor([[*sample.prompt, *sample.answer]])
    return trainee.net(input_ids=tokens, use_cache=False).logits[0, :-1]


def distillation_terms(student, teacher, kl_on: str = "prompt") -> dict[str, torch.Tensor]:
    """Eq. 30's two terms from whole logits: means over a sample's tokens, then over the samples."""
    terms = {"kl": 0.0, "bild": 0.0}
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        ours, theirs = sample_logits(student, sample), sample_logits(teacher, sample).detach()
        last = prompt if kl_on == "prompt" else None
        answer = [paper.bild(*logits) for logits in zip(ours[prompt:], theirs[prompt:], strict=True)]
        terms["kl"] = terms["kl"] + paper.kl(ours[:last], theirs[:last]).mean() / len(SAMPLES)
        terms["bild"] = terms["bild"] + sum(answer) / len(answer) / len(SAMPLES)
    return terms


def tiny_trainee(seed: int) -> Trainee:
    return Trainee(tiny_model(seed=seed, attn_implementation="packed"))


def masked_student(log_alpha: torch.Tensor) -> Trainee:
    """A student whose merged projections are random, with these mask parameters."""
    model = tiny_model(seed=0, attn_implementation="packed")
    torch.manual_seed(1)
    masks.patch(model, 2)
    return Trainee(model, {"log_alpha": log_alpha})


def run_masked_step(student, settings: Settings, step: int, rows: list, phase=None) -> dict:
    """A step of masked distillation without the optimizer; returns its figures."""
    phase = phase or MaskedDistillation(student, tiny_trainee(2), 100, settings)
    phase.begin_step(step)
    for row in rows:
        phase.row_loss(row)[0].backward()
    sum_over_ranks(phase.leaves(student))
    return phase.end_step(step)


def rates(optimizer, trainee) -> dict[str, float]:
    """The peak learning rate of each parameter, by name."""
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: group["initial_lr"] for group in groups for parameter in group["params"]}


def saved(path: Path, **options) -> str:
    """A tiny model's directory, written once."""
    return str(path) if path.exists() else save_tiny(path, **options)


def teacher_of(ranks, tmp_path):
    return frozen(saved(tmp_path / "teacher", seed=1), ranks, Execution())


def gqa_job(ranks, tmp_path, name: str = "train") -> tuple[Job, Distillation]:
    """A student with two kv heads and dropout, which would show if measuring drew or changed anything."""
    source = saved(tmp_path / "student", num_key_value_heads=2, attention_dropout=0.5)
    student = build(load_config(source), ranks, Execution(), lambda name: (source, name))
    (tmp_path / name).mkdir(exist_ok=True)
    optimizer = jobs.gqa_optimizer(student, SETTINGS, masks.KEY_VALUE)
    job = Job(student, optimizer, str(tmp_path / name), ranks)
    return job, Distillation(student, teacher_of(ranks, tmp_path), SETTINGS)


def masked_job(ranks, tmp_path, name: str = "train") -> tuple[Job, MaskedDistillation]:
    """A student whose masks are partly open."""
    aligned = saved(tmp_path / "aligned")
    merged = saved(tmp_path / "merged", seed=2, num_key_value_heads=2)
    student = build(load_config(aligned), ranks, Execution(), jobs.start_of_masked(aligned, merged),
                    lambda model: masks.patch(model, 2), {"log_alpha": torch.linspace(-4, 4, 24).view(3, 8)})
    (tmp_path / name).mkdir(exist_ok=True)
    job = Job(student, jobs.masked_optimizer(student, SETTINGS), str(tmp_path / name), ranks)
    return job, MaskedDistillation(student, teacher_of(ranks, tmp_path), STEPS, SETTINGS)
