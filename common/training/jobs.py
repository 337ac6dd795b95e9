"""The students of stage 5, masked and GQA, with their AdamW; that of the teacher's SFT, too."""

from dataclasses import dataclass

import torch

from common.method import masks
from common.models import load_config
from common.training import checkpoints
from common.training.distill import MASKED, Settings
from common.training.engine import Job, make_optimizer
from common.training.inputs import Pair
from common.training.sharding import Execution, Ranks, build

UNDECAYED = r"norm\.|\.bias$"  # parameters without weight decay, as in the authors' code
# A mask's first gradients are sigmoid'(START) / (layers * heads), about 1e-7, not negligible next to Adam's
# default eps of 1e-8. While z is exactly 1 they come from Eq. 29 alone and are that small again: with
# beta2 = 0.999, which remembers 1000 steps, a mask that the loss once kept open would never close.
MASK_ADAM = {"betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.0}
# The authors' code trains log_alpha / 1000 with an eps of 1e-8: gradients are 1000 times these.
RELEASED_MASK_ADAM = {"betas": (0.9, 0.95), "eps": 1e-11, "weight_decay": 0.0}


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
    """Initial replicated parameters of a masked student: log_alpha [layers, source kv heads], masks open.

    The masks of the authors' code have their mean size besides, a scalar that is not trained.
    """
    size = {"mask_size": torch.ones(())} if name == "l0-released" else {}
    return {"log_alpha": MASKED[name].distribution.start((layers, source_kv_heads), seed), **size}


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
    if "mask_size" in student.replicated:
        student.replicated["mask_size"].requires_grad_(False)
    job = Job(student, masked_optimizer(student, settings), setup.directory, setup.ranks)
    if saved:
        checkpoints.load(job, saved)
    return job


def gqa_job(pair: Pair, settings: Settings, setup: Setup, saved: str | None, switched: bool) -> Job:
    """The student as a GQA model, from merged/ or from the checkpoint `saved`.

    switched: `saved` is the masked student's last checkpoint, of which only the merged projections and the
    parameters that no mask blends are read.
    """
    student = build(load_config(pair.merged), setup.ranks, setup.execution,
                    sources=None if saved else lambda name: (pair.merged, name))
    freeze(student, settings.train)
    job = Job(student, gqa_optimizer(student, settings, pair.blended), setup.directory, setup.ranks)
    if saved:
        stored_name = (lambda name: masks.blended_name(name, pair.blended)) if switched else lambda name: name
        checkpoints.load(job, saved, stored_name)
    return job
