"""Tiny students and teachers, the steps of stage 5; merging a whole model, and distillation written out."""

import contextlib
import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import paper
from common.data.rows import Sample
from common.forward import attending
from common.method import masks
from common.method.merge import Merge, mean_merge, merge_layer, merged_config
from common.models import load_config
from common.training import students
from common.training.attention import Trainee
from common.training.conversion import Conversion
from common.training.engine import Job, Schedule, Step, steps
from common.training.heldout import Heldout
from common.training.mask_state import Masks
from common.training.sharding import Execution, Ranks, build
from common.training.students import Rates
from common.training.teacher import build_teacher
from helpers import save_tiny, tiny_model

stage5 = importlib.import_module("05_prune_train")

SAMPLES = [Sample((1, 2, 3, 4), (5, 6)), Sample((7, 8), (9, 10, 11)), Sample((12, 13, 14), (15,))]
STEPS = 5
SCHEDULE = Schedule(steps=STEPS, batch=2, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=64,
                    save_steps=None, save_minutes=60.0, print_every=100, loss_chunk=7)
RATES = Rates(1e-2, beta2=0.999, weight_decay=0.0)
LOSS = stage5.Loss(kl_on="prompt", temperature=1.0, l0_weight=1.0)
ALONE = Ranks(0, 1, torch.device("cpu"))
NOTHING = Heldout({}, 1)
IN_FLOAT32 = Execution()


def plain_merge(merge, source_kv_heads: int, kv_heads: int, head_dim: int) -> Merge:
    """A merge that no Gram or rotation changes, of groups of adjacent heads."""
    groups = torch.arange(source_kv_heads).view(kv_heads, -1)
    return merge(None, groups, torch.empty(*groups.shape, head_dim, head_dim), None)


@torch.no_grad()
def merge_model(model, kv_heads: int, merges: list[Merge] | None = None):
    """A stock GQA model from a model whose groups are consecutive; the two share no tensors.

    merges: one per layer; default: the paper's means.
    """
    config = merged_config(model.config, kv_heads)
    merged = type(model)(config).to(model.dtype).eval()
    state = model.state_dict()
    for index, layer in enumerate(model.model.layers):
        head_dim = layer.self_attn.head_dim
        source_kv_heads = model.config.num_key_value_heads
        merge = merges[index] if merges else plain_merge(mean_merge, source_kv_heads, kv_heads, head_dim)
        merged_layer = merge_layer(layer, index, config, merge).state_dict()
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in merged_layer.items()}
    merged.load_state_dict(state)
    return merged


def sample_logits(trainee, sample: Sample) -> torch.Tensor:
    """Logits [T - 1, V] of the predicted tokens of a sample by itself."""
    tokens = torch.tensor([[*sample.prompt, *sample.answer]])
    with attending(trainee.net, "sdpa"):
        return trainee.net(input_ids=tokens, use_cache=False).logits[0, :-1]


def distillation_terms(student, teacher, kl_on="prompt", temperature=1.0) -> dict[str, torch.Tensor]:
    """Eq. 30's two terms from whole logits: means over a sample's tokens, then over the samples.

    The KL is of softened distributions, times the temperature squared so that gradients keep their size.
    """
    terms = {"kl": 0.0, "bild": 0.0}
    for sample in SAMPLES:
        prompt = len(sample.prompt) - 1
        ours, theirs = sample_logits(student, sample), sample_logits(teacher, sample).detach()
        last = prompt if kl_on == "prompt" else None
        answer = [paper.bild(*logits) for logits in zip(ours[prompt:], theirs[prompt:], strict=True)]
        kl = temperature**2 * paper.kl(ours[:last] / temperature, theirs[:last] / temperature).mean()
        terms["kl"] = terms["kl"] + kl / len(SAMPLES)
        terms["bild"] = terms["bild"] + sum(answer) / len(answer) / len(SAMPLES)
    return terms


def tiny_trainee(seed: int) -> Trainee:
    return Trainee(tiny_model(seed=seed, attn_implementation="packed"))


def masked_student(log_alpha: torch.Tensor) -> Trainee:
    """A student whose merged projections are random, with these mask parameters."""
    model = tiny_model(seed=0, attn_implementation="packed")
    torch.manual_seed(1)
    masks.patch(model, 2)
    for _, _, projections in masks.blended_projections(model):
        for projection in projections:
            torch.nn.init.normal_(projection.merged.weight, std=0.1)
    return Trainee(model, {"log_alpha": log_alpha})


class Gradients(Step):
    """A step of a model that is not sharded, which leaves the gradients as they are."""

    @property
    def rows(self):
        return iter(self._rows)

    def update(self, **figures) -> None:
        self.metrics |= figures


def run_masked_step(trained: Masks, student, step: int, rows: list, l0_weight: float = 1.0) -> dict:
    """Stage 5's step with masks up to the optimizer; returns its figures."""
    loss = replace(LOSS, l0_weight=l0_weight)
    taken = Gradients(Job(student, None, "", ALONE, step=step), SCHEDULE, rows, SAMPLES)
    stage5.masked_step(taken, trained, tiny_trainee(2), loss)
    return taken.metrics


def rates(optimizer, trainee) -> dict[str, float]:
    """The peak learning rate of each parameter, by name."""
    names = {id(parameter): name for name, parameter in trainee.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(parameter)]: group["initial_lr"] for group in groups for parameter in group["params"]}


def saved(path: Path, **options) -> str:
    """A tiny model's directory, written once."""
    return str(path) if path.exists() else save_tiny(path, **options)


def built(source: str, ranks, execution: Execution = IN_FLOAT32) -> Trainee:
    """A checkpoint's model, sharded."""
    return build(load_config(source), ranks, execution, lambda name: (source, name))


def saved_pair(directory: Path, blended=masks.KEY_VALUE, dtype=torch.float32, **options) -> Conversion:
    """Random models of 8 and of 2 kv heads in place of aligned/ and merged/."""
    paths = [save_tiny(directory / f"of-{kv_heads}", dtype, num_key_value_heads=kv_heads, **options)
             for kv_heads in (8, 2)]
    return Conversion(*paths, {"layers": 3, "kv_heads": 8}, 2, "mean", blended)


@contextlib.contextmanager
def pretended_ranks(world: int):
    """Context manager: the first of so many ranks, eight a node, whose collectives do nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", "8")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield Ranks(0, world, torch.device("cpu"))
        finally:
            dist.destroy_process_group()


def teacher_of(ranks, tmp_path, execution: Execution = IN_FLOAT32):
    return build_teacher(saved(tmp_path / "teacher", seed=1), ranks, execution)


@dataclass
class Student:
    """A student in training by the steps of stage 5."""

    job: Job
    teacher: Trainee
    masks: Masks | None = None

    def take(self, step: Step) -> None:
        """A step's body."""
        if self.masks:
            stage5.masked_step(step, self.masks, self.teacher, LOSS)
        else:
            stage5.gqa_step(step, self.teacher, LOSS)

    def train(self, heldout: Heldout = NOTHING, before_step=lambda step: None) -> bool:
        """Train to the end of SCHEDULE. Returns False if a signal stopped it."""
        for step in steps(self.job, SCHEDULE, SAMPLES):
            before_step(step)
            self.take(step)
            heldout.measure(step, self.teacher)
        return not self.job.stopped


def in_training(ranks, directory: Path, execution: Execution, trainee, optimizer, masks=None) -> Student:
    """A student that starts in this directory, beside which its teacher is."""
    directory.mkdir(exist_ok=True)
    teacher = teacher_of(ranks, directory.parent, execution)
    return Student(Job(trainee, optimizer, str(directory), ranks), teacher, masks)


def gqa_student(ranks, tmp_path, name: str = "train", execution: Execution = IN_FLOAT32) -> Student:
    """A student with two kv heads. Its checkpoint has dropout, which no training takes over."""
    source = saved(tmp_path / "student", num_key_value_heads=2, attention_dropout=0.5)
    student = built(source, ranks, execution)
    optimizer = students.student_optimizer(student, RATES, masks.KEY_VALUE)
    return in_training(ranks, tmp_path / name, execution, student, optimizer)


def half_masked_student(ranks, tmp_path, name: str = "train", execution: Execution = IN_FLOAT32) -> Student:
    """A student whose masks are partly open."""
    aligned = saved(tmp_path / "aligned")
    merged = saved(tmp_path / "merged", seed=2, num_key_value_heads=2)
    log_alpha = torch.linspace(-4, 4, 24).view(3, 8)
    student = build(load_config(aligned), ranks, execution, students.start_of_masked(aligned, merged),
                    lambda model: masks.patch(model, 2), {"log_alpha": log_alpha})
    optimizer = students.masked_optimizer(student, RATES, "l0", mask_lr=1.0)
    trained = Masks(student.replicated, STEPS, seed=0)
    masks.set_masks(student.net, trained.noiseless())
    return in_training(ranks, tmp_path / name, execution, student, optimizer, trained)
