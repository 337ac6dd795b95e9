"""The phases of stage 5 and their settings: SFT of the teacher, distillation (Eq. 30), distillation with
masks (Eq. 31).
"""

import math
from dataclasses import dataclass, replace

import torch

from common.cli import UserError
from common.method import masks
from common.method.losses import bild, chunked, cross_entropy, kl
from common.models import load_config
from common.training import budget, checkpoints
from common.training.engine import Job, Phase, make_optimizer
from common.training.inputs import Pair
from common.training.sharding import Execution, Ranks, Trainee, build

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # the paper names none: the usual ones
# A mask's first gradients are sigmoid'(START) / (layers * heads), ~1e-7, so Adam's usual eps of 1e-8 would
# show. While z is exactly 1 they come from Eq. 29 alone and are as small again; with the usual memory of
# 1000 steps a mask that the loss once held open would then never close.
MASK_ADAM = {"betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.0}
SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)
EPOCHS = {2: 5, 4: 10, 8: 15}  # source kv heads per group -> passes over the training sets (Appendix A)
TEACHER_EPOCHS = 2
PUBLISHED_SETTINGS = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32,
                      "teacher_lr": 1e-5, "teacher_batch": 128, "teacher_warmup": 16}
# The demo model's masks have hundreds of steps to close in, not ten thousand: a larger rate and weight.
DEMO_SETTINGS = {"lr": 2e-3, "mask_lr": 0.5, "l0_weight": 30.0, "batch": 16, "warmup": 20,
                 "teacher_lr": 1e-3, "teacher_batch": 32, "teacher_warmup": 20}
DEMO_STEPS, DEMO_TEACHER_STEPS = 350, 100


@dataclass(frozen=True)
class Settings:
    """What Eq. 30 and 31 leave open, and how fast each kind of parameter learns."""

    lr: float  # peak learning rate of the student's weights
    merged_lr_factor: float = 1.0  # of the shared projections, times lr (the authors' code: 2)
    mask_lr: float = 1e-2  # of log alpha
    l0_weight: float = 1.0  # of Eq. 29 in Eq. 31
    kl_on: str = "prompt"  # tokens of the KL term: "prompt", as the authors' code; "all", as Eq. 30 reads
    loss_chunk: int = 512  # tokens whose logits exist at a time
    seed: int = 0  # of the mask noise


def published_epochs(group_size: int) -> int:
    """Pruning passes over the training sets. Raises UserError for a group size that the paper does not
    have.
    """
    if group_size not in EPOCHS:
        raise UserError(f"--epochs: none is published for groups of {group_size} kv heads (published: groups "
                        f"of {', '.join(map(str, EPOCHS))}); give --epochs or --steps")
    return EPOCHS[group_size]


def epochs_to_steps(epochs: float, samples: int, batch: int) -> int:
    """Steps of `batch` samples that make this many passes over the training sets; at least 1."""
    return max(1, math.ceil(epochs * samples / batch))


def switch_step(steps: int) -> int:
    """The step after which the student trains on as a GQA model."""
    return max(1, int(SWITCH * steps))


def row_flops(config, row, predicted: int) -> float:
    """Floating-point operations of one forward pass; a token attends to those of its sample up to itself."""
    return budget.forward_flops(config, row.input_ids.numel(), int((row.position_ids + 1).sum()), predicted)


class Sft(Phase):
    """Supervised fine-tuning: cross-entropy on answer tokens, averaged per sample, then over the batch."""

    def __init__(self, trainee, chunk: int):
        self.trainee, self.chunk = trainee, chunk

    def row_loss(self, row):
        """The row's share of the batch's cross-entropy."""

        def loss(kind, at, logits):
            return (cross_entropy(logits.float(), row.targets[at]) * row.answer_weight[at]).sum()

        pieces = [("answer", at) for at in row.answer_at.split(self.chunk)]
        return self.trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), {}

    def flops(self, row):
        return 3 * row_flops(self.trainee.net.config, row, len(row.answer_at))


class Distillation(Phase):
    """Eq. 30: L = KL(teacher || student) on prompt tokens + BiLD(student, teacher) on answer tokens.

    Either is a mean over a sample's tokens, then over the batch: the rows' weights.
    """

    def __init__(self, student, teacher, settings: Settings):
        self.student, self.teacher, self.settings = student, teacher, settings

    def row_loss(self, row):
        """The row's share of Eq. 30, and of its two terms."""
        with torch.no_grad():
            teacher_hidden = self.teacher(row)
        teacher_head, kl_on_all = self.teacher.net.lm_head, self.settings.kl_on == "all"
        kl_weight = row.all_weight if kl_on_all else row.prompt_weight
        parts = {name: torch.zeros((), device=row.targets.device) for name in ("kl", "bild")}

        def loss(part, at, student):  # student: logits [c, V] of the tokens `at`, all prompt or all answer
            with torch.no_grad():
                teacher = teacher_head(teacher_hidden[at]).float()
            student = student.float()
            terms = {}
            if part == "prompt" or kl_on_all:
                terms["kl"] = (kl(student, teacher) * kl_weight[at]).sum()
            if part == "answer":
                terms["bild"] = (bild(student, teacher) * row.answer_weight[at]).sum()
            for name, term in terms.items():
                parts[name] += term.detach()
            return sum(terms.values())

        chunk = self.settings.loss_chunk
        pieces = [("prompt", at) for at in row.prompt_at.split(chunk)]
        pieces += [("answer", at) for at in row.answer_at.split(chunk)]
        return self.student(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), parts

    def flops(self, row):
        predicted = len(row.prompt_at) + len(row.answer_at)
        student = row_flops(self.student.net.config, row, predicted)
        return 3 * student + row_flops(self.teacher.net.config, row, predicted)


class MaskedDistillation(Distillation):
    """Eq. 31: Eq. 30 for a student whose heads are blended by masks z, + the L0 term that moves the masks
    from 1 to 0.

    z is drawn from log_alpha once a step, the same on every rank, and is a leaf: the rows of all ranks add
    up dL/dz, and end_step hands it on to log_alpha.
    """

    def __init__(self, student, teacher, steps: int, settings: Settings):
        super().__init__(student, teacher, settings)
        self.steps, self.log_alpha = steps, student.replicated["log_alpha"]

    def begin_step(self, step: int) -> None:
        """Draw this step's masks."""
        self.drawn = masks.draw(self.log_alpha, self.settings.seed, step)
        self.z = self.drawn.detach().requires_grad_()
        masks.set_masks(self.student.net, self.z)

    def leaves(self, trainee) -> list[torch.Tensor]:
        return [self.z]

    def end_step(self, step: int) -> dict:
        """d/dlog_alpha of Eq. 31: that of Eq. 30 through z, and that of Eq. 29."""
        goal = masks.target(step, self.steps)
        l0 = masks.l0_loss(self.log_alpha, goal)
        torch.autograd.backward([self.drawn, self.settings.l0_weight * l0], [self.z.grad, None])
        expected = masks.expected(self.log_alpha.detach())
        per_layer = [round(mean, 5) for mean in expected.mean(1).tolist()]
        return {"l0": float(l0.detach()), "mask_target": goal, "mask_expected": float(expected.mean()),
                "mask_mean": float(self.z.detach().mean()), "mask_per_layer": per_layer}

    def after_update(self, step: int) -> None:
        masks.clamp(self.log_alpha)


def teacher_optimizer(trainee, lr: float) -> torch.optim.AdamW:
    """AdamW for SFT: one learning rate."""
    return make_optimizer(trainee, {"initial_lr": lr, **ADAM})


def masked_optimizer(student, settings: Settings) -> torch.optim.AdamW:
    """AdamW for masked distillation: the weights, the shared projections and the masks, each at its own
    rate.
    """
    return make_optimizer(student, {"initial_lr": settings.lr, **ADAM}, {
        r"\.merged\.": {"initial_lr": settings.lr * settings.merged_lr_factor, **ADAM},
        r"^replicated\.log_alpha$": {"initial_lr": settings.mask_lr, **MASK_ADAM},
    })


def gqa_optimizer(student, settings: Settings, blended: tuple[str, ...]) -> torch.optim.AdamW:
    """AdamW after the switch: what was a shared projection (the `blended` ones) keeps its rate."""
    return make_optimizer(student, {"initial_lr": settings.lr, **ADAM}, {
        rf"\.({'|'.join(blended)})\.": {"initial_lr": settings.lr * settings.merged_lr_factor, **ADAM},
    })


def start_of_masked(aligned: str, merged: str):
    """sources of `build` for a masked student: X.k_proj.original.Y is X.k_proj.Y of aligned/,
    X.k_proj.merged.Y that of merged/, and every other name is its own in aligned/. masks.blended_name is
    the way back, after the switch.
    """

    def source(name: str) -> tuple[str, str]:
        directory = merged if ".merged." in name else aligned
        return directory, name.replace(".original.", ".").replace(".merged.", ".")

    return source


def start_masks(layers: int, source_kv_heads: int) -> dict[str, torch.Tensor]:
    """The replicated parameter of a masked student: log_alpha [layers, source kv heads], every mask open."""
    return {"log_alpha": torch.full((layers, source_kv_heads), masks.START)}


@dataclass(frozen=True)
class Setup:
    """Where and how a student is trained."""

    directory: str  # of its checkpoints
    ranks: Ranks
    execution: Execution


def masked_job(pair: Pair, settings: Settings, setup: Setup, saved: str | None = None) -> Job:
    """The masked student: the aligned model, every blended projection about to move to that of merged/, all
    masks open; or as the checkpoint `saved` has it.
    """
    student = build(
        load_config(pair.aligned), setup.ranks, setup.execution,
        sources=None if saved else start_of_masked(pair.aligned, pair.merged),
        prepare=lambda model: masks.patch(model, pair.kv_heads, pair.blended),
        replicated=start_masks(pair.model["layers"], pair.model["kv_heads"]),
    )
    job = Job(student, masked_optimizer(student, settings), setup.directory, setup.ranks)
    if saved:
        checkpoints.load(job, saved)
    return job


def gqa_job(pair: Pair, settings: Settings, setup: Setup, saved: str | None, switched: bool) -> Job:
    """The student as a GQA model, which it is with every mask at 0: as merged/ or the checkpoint `saved`
    has it.

    switched: `saved` is the masked student's last checkpoint. What masks needed is then neither read nor
    kept.
    """
    student = build(load_config(pair.merged), setup.ranks, setup.execution,
                    sources=None if saved else lambda name: (pair.merged, name))
    job = Job(student, gqa_optimizer(student, settings, pair.blended), setup.directory, setup.ranks)
    if saved:
        stored_name = (lambda name: masks.blended_name(name, pair.blended)) if switched else lambda name: name
        checkpoints.load(job, saved, stored_name)
    return job


def frozen(path: str, ranks: Ranks, execution: Execution) -> Trainee:
    """The teacher: sharded, without gradients, its weights in the dtype of the computation."""
    execution = replace(execution, weights=execution.compute, recompute=False)
    teacher = build(load_config(path), ranks, execution, lambda name: (path, name))
    return teacher.eval().requires_grad_(False)
