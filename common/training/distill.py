"""The losses of stage 5 on one packed row, its masks over the steps, and the FLOPs of both."""

from collections.abc import Callable, Mapping

import torch

from common.method import masks, released_masks
from common.method.losses import bild, chunked, cross_entropy, kl, product
from common.training import plan as budget

SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)


def switch_step(steps: int) -> int:
    """The number of steps with masks, after which the student becomes a GQA model."""
    return max(1, int(SWITCH * steps))


def next_token_loss(
    trainee,
    row,
    at: torch.Tensor,  # [n] positions that predict a token
    weight: torch.Tensor,  # [T] float32, of each position in the batch
    chunk: int,  # tokens whose logits are in memory at a time
) -> torch.Tensor:
    """The row's share of the batch's mean cross-entropy, a scalar.

    SFT counts answer tokens: row.answer_at and row.answer_weight.
    """

    def loss(kind, at, logits):
        return (cross_entropy(logits, row.targets[at]) * weight[at]).sum()

    pieces = [("next token", part) for part in at.split(chunk)]
    return trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight))


def distillation_loss(
    student,
    row,
    teacher_hidden: torch.Tensor,  # [T, hidden], the teacher's for this row
    teacher_head,  # its lm_head
    kl_on: str,  # tokens of the KL term: "prompt", as in the authors' code, or "all"
    temperature: float,  # of the KL term
    chunk: int,  # tokens whose logits are in memory at a time
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eq. 30: L = KL(teacher || student) on prompt tokens + BiLD(student, teacher) on answer tokens.

    Each term is a mean over a sample's tokens, then over the batch, by the weights in the row; this is the
    row's share. A text has no answer, so all its tokens get the KL. Returns three scalars: L, differentiable,
    and its terms KL and BiLD, detached.
    """
    kl_weight = row.all_weight if kl_on == "all" else row.prompt_weight
    parts = {name: torch.zeros((), device=row.targets.device) for name in ("kl", "bild")}

    def loss(part, at, student_logits):  # [c, V], of the tokens `at`: all prompt or all answer
        with torch.no_grad():
            teacher_logits = product(teacher_hidden[at], teacher_head.weight.T)
        terms = {}
        if part == "prompt" or kl_on == "all":
            terms["kl"] = (kl(student_logits, teacher_logits, temperature) * kl_weight[at]).sum()
        if part == "answer":
            terms["bild"] = (bild(student_logits, teacher_logits) * row.answer_weight[at]).sum()
        for name, term in terms.items():
            parts[name] += term.detach()
        return sum(terms.values())

    pieces = [("prompt", at) for at in row.prompt_at.split(chunk)]
    pieces += [("answer", at) for at in row.answer_at.split(chunk)]
    total = student(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight))
    return total, parts["kl"], parts["bild"]


class Masks:
    """The masks of a training run: log_alpha [layers, kv heads], hard concrete as printed (Eq. 27-29)."""

    # The first gradients, of 1024 masks' expected size in Eq. 29, are about 1e-7, not negligible next to
    # Adam's default eps of 1e-8. While z is exactly 1 they come from Eq. 29 alone and are that small again:
    # with beta2 = 0.999, which remembers 1000 steps, a mask that the loss once kept open would never close.
    ADAM = {"betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.0}
    kind = masks  # start, draw, deterministic and expected

    def __init__(self, replicated: Mapping[str, torch.Tensor], steps: int, seed: int):
        self.log_alpha = self.current = replicated["log_alpha"]
        self.steps, self.seed = steps, seed

    @classmethod
    def start(cls, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
        """Initial values of a student's replicated parameters, for masks of this shape, all open."""
        return {"log_alpha": cls.kind.start(shape, seed)}

    def target(self, step: int) -> float:
        """T of Eq. 29."""
        return masks.target(step, self.steps)

    def draw(self, step: int) -> torch.Tensor:
        """This step's z in [0, 1], the same on every rank; differentiable."""
        return self.kind.draw(self.current, self.seed, step)

    def expected(self) -> torch.Tensor:
        """The size of each mask in Eq. 29; differentiable."""
        return self.kind.expected(self.current)

    @torch.no_grad()
    def noiseless(self) -> torch.Tensor:
        """z without noise: of the model that the masks stand for now, not of a random one near it."""
        return self.kind.deterministic(self.log_alpha)

    @torch.no_grad()
    def settle(self, step: int) -> None:
        """After the update of a step: keep log_alpha within its bounds."""
        self.log_alpha.clamp_(-masks.LIMIT, masks.LIMIT)


class ReleasedMasks(Masks):
    """The masks of the authors' code: drawn from a copy of log_alpha that is pulled towards T."""

    # That code trains log_alpha / 1000 with an eps of 1e-8: gradients are 1000 times these.
    ADAM = {"betas": (0.9, 0.95), "eps": 1e-11, "weight_decay": 0.0}
    kind = released_masks

    def __init__(self, replicated: Mapping[str, torch.Tensor], steps: int, seed: int):
        super().__init__(replicated, steps, seed)
        self.size = replicated["mask_size"]

    @classmethod
    def start(cls, shape: tuple[int, int], seed: int) -> dict[str, torch.Tensor]:
        """Masks besides their mean size, a scalar that is not trained but saved."""
        return super().start(shape, seed) | {"mask_size": torch.ones(())}

    def draw(self, step: int) -> torch.Tensor:
        """Pull the copy, then sample from it."""
        self.current = released_masks.pulled(self.log_alpha, self.size, *self.place(step))
        return super().draw(step)

    @torch.no_grad()
    def settle(self, step: int) -> None:
        """After the update of a step: average log_alpha with the copy."""
        self.size.copy_(released_masks.settle(self.log_alpha, self.current, *self.place(step + 1)))

    def place(self, step: int) -> tuple[float, float]:
        """T at a step, and the share of the masked steps before it."""
        return self.target(step), step / switch_step(self.steps)


MASKS = {"l0": Masks, "l0-released": ReleasedMasks}  # by the value of --masks


def mask_figures(expected: torch.Tensor, z: torch.Tensor) -> dict[str, torch.Tensor]:
    """The size and the sampled masks [layers, kv heads] for metrics.jsonl: means, also of each layer."""
    expected, z = expected.detach(), z.detach()
    layers = {"mask_per_layer": expected, "mask_mean_per_layer": z}
    return {"mask_expected": expected.mean(), "mask_mean": z.mean()} | {
        name: values.mean(1).double().round(decimals=5) for name, values in layers.items()}


def row_size(row, predicted: int) -> tuple[int, int, int]:
    """Tokens, (query, key) pairs and predicted tokens of a row, for budget's FLOPs."""
    pairs = sum(length * (length + 1) // 2 for length in row.lengths)
    return row.input_ids.numel(), pairs, predicted


def sft_flops(trainee) -> Callable:
    """A row's FLOPs in fine-tuning, forward and backward, without recomputation."""
    return lambda row: budget.training_flops(trainee.net.config, *row_size(row, len(row.answer_at)))


def distillation_flops(student, teacher, train: str) -> Callable:
    """A row's FLOPs in distillation: the student's, forward and backward, and the teacher's forward pass."""

    def flops(row) -> float:
        size = row_size(row, len(row.prompt_at) + len(row.answer_at))
        teaching = budget.forward_flops(teacher.net.config, *size)
        return budget.training_flops(student.net.config, *size, train) + teaching

    return flops
