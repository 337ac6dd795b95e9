"""The students of stage 5, masked and GQA, with their AdamW; that of the teacher's SFT, too."""

import os
from dataclasses import dataclass, field

import torch

from common.artifacts import check_input, input_digests, read_record, verify_files
from common.families import merged_modules
from common.method import masks
from common.models import load_config, source_model
from common.training.distill import MASKS
from common.training.engine import make_optimizer
from common.training.sharding import Execution, Ranks, Trainee, build

UNDECAYED = r"norm\.|\.bias$"  # without weight decay; in the authors' code the student's norms decay
REST = r"^net\.(?!.*\.self_attn\.)"  # parameters of the model outside attention


@dataclass(frozen=True)
class Pair:
    """aligned/ and merged/: the same model and grouping before and after merging."""

    aligned: str
    merged: str
    model: dict  # description of the source model
    kv_heads: int
    merge: str  # "mean", "first" or "closed-form"
    blended: tuple[str, ...]  # projections that merging changed
    exported: str | None = None  # a student of stage 6 to start from instead of merged/
    inputs: dict[str, str] = field(default_factory=dict)  # for a student's record: digests of what was read

    @property
    def title(self) -> str:
        return f"{self.model['kv_heads']} -> {self.kv_heads} kv heads"


def read_pair(run: str, ranks, exported: str | None = None) -> Pair:
    """The pair in a run directory. exported: a student of stage 6 to start from instead of merged/.

    Raises UserError unless all are intact and belong together, and the source model is unchanged since
    stage 1.
    """
    aligned, merged = (os.path.join(run, name) for name in ("aligned", "merged"))
    inputs = input_digests(run, list(filter(None, (aligned, merged, exported))))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    check_input(merged_record, aligned)
    if ranks.first:  # hash the weights once, not on every rank
        verify_files(aligned, aligned_record)
        verify_files(merged, merged_record)
    if exported:
        record = read_record(exported, "06_export.py", aligned_record["model"])
        check_input(record, merged if record["arguments"]["untrained"] else aligned)
        if ranks.first:
            verify_files(exported, record)
    summary = aligned_record["summary"]
    whole_head = summary["merge"] == "closed-form" or summary["refit"]  # merging changed W_Q and W_O too
    blended = merged_modules(load_config(aligned), bool(whole_head))
    model, kv_heads = source_model(aligned_record, run), summary["kv_heads"]
    return Pair(aligned, merged, model, kv_heads, summary["merge"], blended, exported, inputs)


def start_of_masked(aligned: str, merged: str):
    """The `sources` of build() for a masked student.

    X.k_proj.original.Y comes from X.k_proj.Y in aligned/, X.k_proj.merged.Y from X.k_proj.Y in merged/, and
    everything else from aligned/ under its own name. masks.blended_name is the inverse, for the switch.
    """

    def source(name: str) -> tuple[str, str]:
        directory = merged if ".merged." in name else aligned
        return directory, name.replace(".original.", ".").replace(".merged.", ".")

    return source


def masked_student(pair: Pair, ranks: Ranks, execution: Execution, kind: str, seed: int,
                   fresh: bool = True, train: str = "all") -> Trainee:
    """The student that masks blend, from aligned/ and merged/ with every mask open.

    kind: of its masks, a key of MASKS. Unless fresh, the weights are left to checkpoints.load. train: what of
    the model, as freeze.
    """
    shape = pair.model["layers"], pair.model["kv_heads"]

    config = load_config(pair.aligned)
    stored = config.dtype  # which build() changes

    def prepare(model) -> None:
        masks.patch(model, pair.kv_heads, pair.blended)
        freeze(model, train, stored)

    student = build(
        config, ranks, execution,
        sources=start_of_masked(pair.aligned, pair.merged) if fresh else None,
        prepare=prepare,
        replicated=MASKS[kind].start(shape, seed),
    )
    for name, parameter in student.replicated.items():
        parameter.requires_grad_(name == "log_alpha")
    return student


def gqa_student(pair: Pair, ranks: Ranks, execution: Execution, fresh: bool = True,
                train: str = "all") -> Trainee:
    """The student as a GQA model, from merged/ or pair.exported; unless fresh, left to checkpoints.load."""
    config = load_config(pair.merged)
    stored = config.dtype  # which build() changes
    sources = (lambda name: (pair.exported or pair.merged, name)) if fresh else None
    return build(config, ranks, execution, sources, lambda model: freeze(model, train, stored))


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


def teacher_optimizer(teacher: Trainee, rates: Rates):
    """AdamW for SFT."""
    return make_optimizer(teacher, rates.adam(decay=True), {UNDECAYED: rates.adam()})


def student_optimizer(student: Trainee, rates: Rates, shared: str, special: dict | None = None):
    """AdamW for the student. shared: pattern of the shared projections' names. special: as make_optimizer."""
    factor, rest = rates.rest_lr_factor, {}
    if factor != 1:
        rest = {rf"{REST}.*({UNDECAYED})": rates.adam(factor), REST: rates.adam(factor, decay=True)}
    return make_optimizer(student, rates.adam(decay=True), {
        shared: rates.adam(rates.merged_lr_factor), **rest, UNDECAYED: rates.adam(), **(special or {}),
    })


def masked_optimizer(student: Trainee, rates: Rates, kind: str, mask_lr: float):
    """AdamW with separate learning rates for the weights, the shared projections and the masks."""
    masks_alone = {"initial_lr": mask_lr, **MASKS[kind].ADAM}
    return student_optimizer(student, rates, r"\.merged\.", {r"^replicated\.log_alpha$": masks_alone})


def gqa_optimizer(student: Trainee, rates: Rates, blended: tuple[str, ...]):
    """AdamW after the switch: the shared projections (named in `blended`) keep their learning rate."""
    return student_optimizer(student, rates, rf"\.({'|'.join(blended)})\.")
