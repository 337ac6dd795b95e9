"""Training phases of stage 5: SFT of the teacher, distillation (Eq. 30), masked distillation (Eq. 31)."""

import math
from dataclasses import dataclass, replace

import torch

from common.cli import UserError
from common.method import masks, released_masks
from common.method.losses import bild, chunked, cross_entropy, kl
from common.models import load_config
from common.training import budget, checkpoints
from common.training.engine import Job, Phase, make_optimizer
from common.training.inputs import Pair
from common.training.sharding import Execution, Ranks, Trainee, build

UNDECAYED = r"norm\.|\.bias$"  # parameters without weight decay, as in the authors' code
# A mask's first gradients are sigmoid'(START) / (layers * heads), about 1e-7, not negligible next to Adam's
# default eps of 1e-8. While z is exactly 1 they come from Eq. 29 alone and are that small again: with
# beta2 = 0.999, which remembers 1000 steps, a mask that the loss once kept open would never close.
MASK_ADAM = {"betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.0}
# The authors' code trains log_alpha / 1000 with an eps of 1e-8: gradients are 1000 times these.
RELEASED_MASK_ADAM = {"betas": (0.9, 0.95), "eps": 1e-11, "weight_decay": 0.0}
SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)
EPOCHS = {2: 5, 4: 10, 8: 15}  # source kv heads per group -> passes over the training sets (Table 1)
TEACHER_EPOCHS = 2
PUBLISHED_SETTINGS = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32,
                      "teacher_lr": 1e-5, "teacher_batch": 128, "teacher_warmup": 16,
                      "beta2": 0.95, "weight_decay": 1e-4, "masks": "l0-released"}  # as in the authors' code
# The demo's masks must close within hundreds of steps, not ten thousand: hence the higher rate and weight.
DEMO_SETTINGS = {"lr": 2e-3, "mask_lr": 0.5, "l0_weight": 30.0, "batch": 16, "warmup": 20,
                 "teacher_lr": 1e-3, "teacher_batch": 32, "teacher_warmup": 20,
                 "beta2": 0.999, "weight_decay": 0.0, "masks": "l0"}
DEMO_STEPS, DEMO_TEACHER_STEPS = 350, 100


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of Eq. 30 and 31, and the learning rate of each kind of parameter."""

    lr: float  # peak learning rate of the student's weights
    masks: str = "l0"  # "l0": as printed; "l0-released": as in the authors' code; "off": none
    merged_lr_factor: float = 1.0  # learning rate of the shared projections, times lr (the authors' code: 2)
    mask_lr: float = 1e-2  # peak learning rate of log alpha
    l0_weight: float = 1.0  # weight of Eq. 29 in Eq. 31
    beta2: float = 0.999  # of AdamW, for all but the masks
    weight_decay: float = 0.0  # of AdamW; none for norms, biases, the shared projections and the masks
    kl_on: str = "prompt"  # tokens of the KL term: "prompt", as in the authors' code; "all": Eq. 30
    temperature: float = 1.0  # of the KL term; the gradient is scaled back by its square
    train: str = "all"  # the student's weights to train: "all" or "attention"
    loss_chunk: int = 512  # tokens whose logits are in memory at a time
    seed: int = 0  # random seed for the mask noise


def published_epochs(group_size: int) -> int:
    """The paper's passes over the training sets. Raises UserError for a group size it does not cover."""
    if group_size not in EPOCHS:
        raise UserError(f"--epochs: no published value for groups of {group_size} kv heads (published: "
                        f"groups of {', '.join(map(str, EPOCHS))}); pass --epochs or --steps")
    return EPOCHS[group_size]


def epochs_to_steps(epochs: float, samples: int, batch: int) -> int:
    """Steps of `batch` samples in this many passes over the training sets; at least 1."""
    return max(1, math.ceil(epochs * samples / batch))


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
        teacher_head, kl_on_all = self.teacher.net.lm_head, self.settings.kl_on == "all"
        kl_weight = row.all_weight if kl_on_all else row.prompt_weight
        parts = {name: torch.zeros((), device=row.targets.device) for name in ("kl", "bild")}

        def loss(part, at, student):  # student: logits [c, V] of the tokens `at`, all prompt or all answer
            with torch.no_grad():
                teacher = teacher_head(teacher_hidden[at]).float()
            student = student.float()
            terms = {}
            if part == "prompt" or kl_on_all:
                terms["kl"] = (kl(student, teacher, self.settings.temperature) * kl_weight[at]).sum()
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


def freeze(student, train: str) -> None:
    """With train "attention", leave only the weights of the attention layers trainable."""
    if train == "attention":
        for name, parameter in student.net.named_parameters():
            parameter.requires_grad_(".self_attn." in name)


def adam(lr: float, beta2: float, weight_decay: float = 0.0) -> dict:
    """AdamW's options for a group of weights."""
    return {"initial_lr": lr, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": weight_decay}


def teacher_optimizer(
    trainee, lr: float, beta2: float = 0.999, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """AdamW for SFT, with one learning rate."""
    return make_optimizer(trainee, adam(lr, beta2, weight_decay), {UNDECAYED: adam(lr, beta2)})


def student_optimizer(student, settings: Settings, shared: str, special: dict) -> torch.optim.AdamW:
    """AdamW for the student. shared: pattern of the shared projections' names. special: as make_optimizer."""
    lr, beta2 = settings.lr, settings.beta2
    return make_optimizer(student, adam(lr, beta2, settings.weight_decay), {
        shared: adam(lr * settings.merged_lr_factor, beta2), UNDECAYED: adam(lr, beta2), **special,
    })


def masked_optimizer(student, settings: Settings) -> torch.optim.AdamW:
    """AdamW with separate learning rates for the weights, the shared projections and the masks."""
    mask_adam = MASK_ADAM if settings.masks == "l0" else RELEASED_MASK_ADAM
    masks_alone = {r"^replicated\.log_alpha$": {"initial_lr": settings.mask_lr, **mask_adam}}
    return student_optimizer(student, settings, r"\.merged\.", masks_alone)


def gqa_optimizer(student, settings: Settings, blended: tuple[str, ...]) -> torch.optim.AdamW:
    """AdamW after the switch: the shared projections (named in `blended`) keep their learning rate."""
    return student_optimizer(student, settings, rf"\.({'|'.join(blended)})\.", {})


def start_of_masked(aligned: str, merged: str):
    """The `sources` of build() for a masked student.

    X.k_proj.original.Y comes from X.k_proj.Y in aligned/, X.k_proj.merged.Y from X.k_proj.Y in merged/, and
    everything else from aligned/ under its own name. masks.blended_name is the inverse, for the switch.
    """

    def source(name: str) -> tuple[str, str]:
        directory = merged if ".merged." in name else aligned
        return directory, name.replace(".original.", ".").replace(".merged.", ".")

    return source


def start_masks(layers: int, source_kv_heads: int, name: str = "l0", seed: int = 0) -> dict:
    """Initial replicated parameters of a masked student: log_alpha [layers, source kv heads], masks open."""
    return {"log_alpha": MASKED[name].distribution.start((layers, source_kv_heads), seed)}


@dataclass(frozen=True)
class Setup:
    """Where and how a student is trained."""

    directory: str  # of its checkpoints
    ranks: Ranks
    execution: Execution


def masked_job(pair: Pair, settings: Settings, setup: Setup, saved: str | None = None) -> Job:
    """The masked student, from aligned/ and merged/ with every mask open, or from the checkpoint `saved`."""
    student = build(
        load_config(pair.aligned), setup.ranks, setup.execution,
        sources=None if saved else start_of_masked(pair.aligned, pair.merged),
        prepare=lambda model: masks.patch(model, pair.kv_heads, pair.blended),
        replicated=start_masks(pair.model["layers"], pair.model["kv_heads"], settings.masks, settings.seed),
    )
    freeze(student, settings.train)
    job = Job(student, masked_optimizer(student, settings), setup.directory, setup.ranks)
    if saved:
        checkpoints.load(job, saved)
    return job


def gqa_job(pair: Pair, settings: Settings, setup: Setup, saved: str | None, switched: bool) -> Job:
    """The student as a GQA model, from merged/ or from the checkpoint `saved`.

    switched: `saved` is the masked student's last checkpoint, of which only the merged projections and the
    shared parameters are read.
    """
    student = build(load_config(pair.merged), setup.ranks, setup.execution,
                    sources=None if saved else lambda name: (pair.merged, name))
    freeze(student, settings.train)
    job = Job(student, gqa_optimizer(student, settings, pair.blended), setup.directory, setup.ranks)
    if saved:
        stored_name = (lambda name: masks.blended_name(name, pair.blended)) if switched else lambda name: name
        checkpoints.load(job, saved, stored_name)
    return job


def frozen(path: str, ranks: Ranks, execution: Execution) -> Trainee:
    """The teacher: sharded, without gradients, its weights in the compute dtype."""
    execution = replace(execution, weights=execution.compute, recompute=False)
    teacher = build(load_config(path), ranks, execution, lambda name: (path, name))
    return teacher.eval().requires_grad_(False)
