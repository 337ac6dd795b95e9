"""The phases of stage 5: SFT of the teacher, distillation (Eq. 30), masked distillation (Eq. 31)."""

from dataclasses import dataclass

import torch

from common.method import masks, released_masks
from common.method.losses import bild, chunked, cross_entropy, kl
from common.training import budget
from common.training.engine import Phase

SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of Eq. 30 and 31, and the learning rate of each kind of parameter."""

    lr: float  # peak learning rate of the student's weights
    masks: str = "l0"  # "l0": as printed; "l0-released": as in the authors' code; "off": none
    merged_lr_factor: float = 1.0  # factor on lr for the shared projections (the authors' code: 2)
    mask_lr: float = 1e-2  # peak learning rate of log alpha
    l0_weight: float = 1.0  # weight of Eq. 29 in Eq. 31
    beta2: float = 0.999  # of AdamW, for all but the masks
    weight_decay: float = 0.0  # of AdamW; none for norms, biases, the shared projections and the masks
    kl_on: str = "prompt"  # tokens of the KL term: "prompt", as in the authors' code; "all": Eq. 30
    temperature: float = 1.0  # of the KL term; the gradient is scaled back by its square
    train: str = "all"  # the student's weights to train: "all" or "attention"
    loss_chunk: int = 512  # tokens whose logits are in memory at a time
    seed: int = 0  # random seed for the mask noise


def switch_step(steps: int) -> int:
    """The number of steps with masks, after which the student becomes a GQA model."""
    return max(1, int(SWITCH * steps))


def row_size(row, predicted: int) -> tuple[int, int, int]:
    """Tokens, (query, key) pairs and predicted tokens of a row, for budget's FLOPs."""
    pairs = sum(length * (length + 1) // 2 for length in row.lengths)
    return row.input_ids.numel(), pairs, predicted


class Sft(Phase):
    """Supervised fine-tuning: cross-entropy on answer tokens, averaged per sample, then over the batch."""

    def __init__(self, trainee, chunk: int):
        self.trainee, self.chunk = trainee, chunk

    def row_loss(self, row):
        """The row's share of the batch's mean cross-entropy."""

        def loss(kind, at, logits):
            return (cross_entropy(logits.float(), row.targets[at]) * row.answer_weight[at]).sum()

        pieces = [("answer", at) for at in row.answer_at.split(self.chunk)]
        return self.trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), {}

    def flops(self, row):
        return budget.training_flops(self.trainee.net.config, *row_size(row, len(row.answer_at)))


def distillation_loss(student, row, teacher_hidden, teacher_head, kl_on: str, temperature: float, chunk: int):
    """Eq. 30 of one row: the loss, differentiable, and its two terms, KL and BiLD, detached.

    student: a Trainee; teacher_hidden: the teacher's [T, hidden]; teacher_head: its lm_head module; kl_on:
    "prompt" or "all" tokens; chunk: tokens whose logits are in memory at a time. Weighted as the row says.
    """
    kl_weight = row.all_weight if kl_on == "all" else row.prompt_weight
    parts = {name: torch.zeros((), device=row.targets.device) for name in ("kl", "bild")}

    def loss(part, at, student):  # student: logits [c, V] of the tokens `at`, all prompt or all answer
        with torch.no_grad():
            teacher = teacher_head(teacher_hidden[at]).float()
        student = student.float()
        terms = {}
        if part == "prompt" or kl_on == "all":
            terms["kl"] = (kl(student, teacher, temperature) * kl_weight[at]).sum()
        if part == "answer":
            terms["bild"] = (bild(student, teacher) * row.answer_weight[at]).sum()
        for name, term in terms.items():
            parts[name] += term.detach()
        return sum(terms.values())

    pieces = [("prompt", at) for at in row.prompt_at.split(chunk)]
    pieces += [("answer", at) for at in row.answer_at.split(chunk)]
    total = student(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight))
    return total, parts["kl"], parts["bild"]


class Distillation(Phase):
    """Eq. 30: L = KL(teacher || student) on prompt tokens + BiLD(student, teacher) on answer tokens.

    Each term is a mean over a sample's tokens, then over the batch, by the weights in the rows. A text has no
    answer, so all its tokens get the KL.
    """

    def __init__(self, student, teacher, settings: Settings):
        self.student, self.teacher, self.settings = student, teacher, settings

    def row_loss(self, row):
        """The row's share of Eq. 30 and of its two terms, "kl" and "bild"."""
        with torch.no_grad():
            teacher_hidden = self.teacher(row)
        settings = self.settings
        loss, kl_part, bild_part = distillation_loss(
            self.student, row, teacher_hidden, self.teacher.net.lm_head, settings.kl_on, settings.temperature,
            settings.loss_chunk)
        return loss, {"kl": kl_part, "bild": bild_part}

    def flops(self, row):
        size = row_size(row, len(row.prompt_at) + len(row.answer_at))
        student = budget.training_flops(self.student.net.config, *size, self.settings.train)
        return student + budget.forward_flops(self.teacher.net.config, *size)

    def begin_measurement(self) -> None:
        """Called before held-out rows."""


class MaskedDistillation(Distillation):
    """Eq. 31: Eq. 30 for a student blended by masks z, plus the L0 term that moves the masks from 1 to 0.

    z is sampled from log_alpha once per step, identically on every rank, and is a leaf: the rows of all ranks
    accumulate dL/dz, which end_step backpropagates to log_alpha.
    """

    distribution = masks  # the module that defines draw, deterministic and expected

    def __init__(self, student, teacher, steps: int, settings: Settings):
        super().__init__(student, teacher, settings)
        self.steps, self.log_alpha = steps, student.replicated["log_alpha"]

    def begin_step(self, step: int) -> None:
        """Sample this step's masks."""
        self.drawn = self.distribution.draw(self.log_alpha, self.settings.seed, step)
        self.z = self.drawn.detach().requires_grad_()
        masks.set_masks(self.student.net, self.z)

    def begin_measurement(self) -> None:
        """Set masks without noise: the model that the masks stand for now, not a random one near it.

        The next step samples masks of its own.
        """
        masks.set_masks(self.student.net, self.distribution.deterministic(self.log_alpha))

    @torch.no_grad()
    def mean_mask(self) -> float:
        """Mean of the masks without noise."""
        return float(self.distribution.deterministic(self.log_alpha).mean())

    def leaves(self, trainee) -> list[torch.Tensor]:
        return [self.z]

    def end_step(self, step: int) -> dict:
        """Accumulate the gradient of Eq. 31 in log_alpha: that of Eq. 30 through z, plus that of Eq. 29."""
        goal = masks.target(step, self.steps)
        expected = self.distribution.expected(self.log_alpha)
        l0 = masks.l0_loss(expected.mean(), goal)
        torch.autograd.backward([self.drawn, self.settings.l0_weight * l0], [self.z.grad, None])
        expected, z = expected.detach(), self.z.detach()
        return {"l0": l0.detach(), "mask_target": goal, "mask_expected": expected.mean(),
                "mask_mean": z.mean(), "mask_per_layer": rounded(expected.mean(1)),
                "mask_mean_per_layer": rounded(z.mean(1))}

    def after_update(self, step: int) -> None:
        """Keep log_alpha within its bounds."""
        masks.clamp(self.log_alpha)


class ReleasedMaskedDistillation(MaskedDistillation):
    """Eq. 31 with the masks of the authors' code, which are moved towards T before and after a step."""

    distribution = released_masks

    def begin_step(self, step: int) -> None:
        """Pull the masks towards T, then sample them."""
        released_masks.constrain(self.log_alpha, *self.progress(step))
        self.before = self.log_alpha.detach().clone()
        super().begin_step(step)

    def after_update(self, step: int) -> None:
        """Average log_alpha with what it was before the step."""
        released_masks.settle(self.log_alpha, self.before, *self.progress(step + 1))

    def progress(self, step: int) -> tuple[float, float]:
        """T of Eq. 29 at a step, and the share of the masked steps before it."""
        return masks.target(step, self.steps), step / switch_step(self.steps)


MASKED = {"l0": MaskedDistillation, "l0-released": ReleasedMaskedDistillation}  # --masks -> phase


def rounded(values: torch.Tensor) -> torch.Tensor:
    """For metrics.jsonl."""
    return values.double().round(decimals=5)
