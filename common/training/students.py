"""The students that stage 5 trains, masked and GQA, and their AdamW."""

from dataclasses import dataclass

import torch

from common.models import blending
from common.models.load import load_config
from common.training.attention import Trainee
from common.training.conversion import Conversion
from common.training.engine import make_optimizer
from common.training.mask_state import MASKS
from common.training.sharding import Execution, Ranks, build

UNDECAYED = r"norm\.|\.bias$"  # without weight decay; in the authors' code the student's norms decay
REST = r"^net\.(?!.*\.self_attn\.)"  # parameters of the model outside attention


def start_of_masked(aligned: str, merged: str):
    """The `sources` of build() for a masked student.

    X.k_proj.original.Y comes from X.k_proj.Y in aligned/, X.k_proj.merged.Y from X.k_proj.Y in merged/, and
    everything else from aligned/ under its own name. blending.blended_name is the inverse, for the switch.
    """

    def source(name: str) -> tuple[str, str]:
        directory = merged if ".merged." in name else aligned
        return directory, name.replace(".original.", ".").replace(".merged.", ".")

    return source


def masked_student(conversion: Conversion, ranks: Ranks, execution: Execution, kind: str, seed: int,
                   fresh: bool, train: str = "all") -> Trainee:
    """The student that masks blend, from aligned/ and merged/ with every mask open.

    kind: of its masks, a key of MASKS. Unless fresh, the weights are left to checkpoints.load. train: what of
    the model, as freeze.
    """
    shape = conversion.model["layers"], conversion.model["kv_heads"]
    config = load_config(conversion.aligned)

    def prepare(model) -> None:
        blending.patch(model, conversion.kv_heads, conversion.blended)
        freeze(model, train, config.dtype)

    student = build(
        config, ranks, execution,
        sources=start_of_masked(conversion.aligned, conversion.merged) if fresh else None,
        prepare=prepare,
        replicated=MASKS[kind].start(shape, seed),
    )
    for name, parameter in student.replicated.items():
        parameter.requires_grad_(name == "log_alpha")
    return student


def gqa_student(conversion: Conversion, ranks: Ranks, execution: Execution, fresh: bool,
                train: str = "all") -> Trainee:
    """The GQA student, from merged/ or from an exported student. fresh, train: as for masked_student."""
    config = load_config(conversion.merged)
    sources = (lambda name: (conversion.exported or conversion.merged, name)) if fresh else None
    return build(config, ranks, execution, sources, lambda model: freeze(model, train, config.dtype))


def freeze(model, train: str, stored: torch.dtype | None) -> None:
    """With train "attention", leave only the weights of the attention layers trainable.

    The others are never updated, so they are kept as they are stored, not in float32.
    """
    if train == "attention":
        for name, parameter in model.named_parameters():
            if ".self_attn." not in name:
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(stored or parameter.dtype)


@dataclass(frozen=True)
class Rates:
    """AdamW's hyperparameters for the weights of a model."""

    lr: float  # peak learning rate
    beta2: float
    weight_decay: float  # none for norms, biases and the shared projections
    merged_lr_factor: float = 1.0  # factor on lr for the shared projections (the authors' code: 2)
    rest_lr_factor: float = 1.0  # factor on lr for all weights outside attention

    def adam(self, factor: float = 1.0, decay: bool = False) -> dict:
        """AdamW's options for a group of weights, at `factor` times the learning rate."""
        return {"initial_lr": self.lr * factor, "betas": (0.9, self.beta2), "eps": 1e-8,
                "weight_decay": self.weight_decay if decay else 0.0}


def student_optimizer(trainee: Trainee, rates: Rates, shared: tuple[str, ...] = (), special=None):
    """AdamW for a model. shared: modules that are shared projections. special: as for make_optimizer."""
    factor, rest = rates.rest_lr_factor, {}
    if factor != 1:
        rest = {rf"{REST}.*({UNDECAYED})": rates.adam(factor), REST: rates.adam(factor, decay=True)}
    pattern = rf"\.({'|'.join(shared)})\."  # without names it matches nothing
    return make_optimizer(trainee, rates.adam(decay=True), {
        pattern: rates.adam(rates.merged_lr_factor), **rest, UNDECAYED: rates.adam(), **(special or {}),
    })


def masked_optimizer(student: Trainee, rates: Rates, kind: str, mask_lr: float):
    """AdamW with separate learning rates for the weights, the shared projections and the masks."""
    masks_alone = {"initial_lr": mask_lr, **MASKS[kind].ADAM}
    return student_optimizer(student, rates, ("merged",), {r"^replicated\.log_alpha$": masks_alone})
