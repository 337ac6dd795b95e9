"""The models that stage 5 trains: students, masked and GQA, and the teacher; their masks and their AdamW."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from common.artifacts import Claim, check_input, input_digests, read_record, verify_files, write_record
from common.data.corpus import Pool
from common.errors import UserError
from common.families import merged_modules
from common.files import write_directory
from common.layers import CheckpointWriter, Layers
from common.method import masks, released_masks
from common.method.losses import next_token_loss
from common.method.merge import MERGES
from common.models import load_config, source_model
from common.records import SOURCE
from common.training import checkpoints
from common.training.attention import Trainee
from common.training.engine import Job, Schedule, make_optimizer, steps
from common.training.heldout import Heldout
from common.training.metrics import METRICS, read_metrics, summarize
from common.training.plan import sft_flops
from common.training.sharding import Execution, Ranks, build

STAGE = "05_prune_train.py"
ROUNDING = ("tokens_per_microbatch", "reduce", "dtype", "attention")  # settings that only round a result
UNDECAYED = r"norm\.|\.bias$"  # without weight decay; in the authors' code the student's norms decay
REST = r"^net\.(?!.*\.self_attn\.)"  # parameters of the model outside attention
SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)


def switch_step(steps: int) -> int:
    """The number of steps with masks, after which the student becomes a GQA model."""
    return max(1, int(SWITCH * steps))


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
        """z without noise: of the model that the masks stand for now, not of a random one close to it."""
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


@dataclass(frozen=True)
class Pair:
    """aligned/ and merged/: the same model and grouping before and after merging."""

    aligned: str
    merged: str
    model: dict  # description of the source model
    kv_heads: int
    merge: str  # a key of MERGES
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
    whole_head = MERGES[summary["merge"]].whole_head or summary["refit"]  # it changed W_Q and W_O, too
    blended = merged_modules(load_config(aligned), bool(whole_head))
    model, kv_heads = source_model(aligned_record, run), summary["kv_heads"]
    return Pair(aligned, merged, model, kv_heads, summary["merge"], blended, exported, inputs)


@dataclass(frozen=True)
class Run:
    """A call of stage 5: its directories, what was read, and how it is computed."""

    directory: str
    teacher: str  # the teacher's checkpoint
    pair: Pair
    pool: Pool
    heldout: Heldout
    ranks: Ranks
    execution: Execution
    chunk: int  # tokens whose logits are in memory at a time
    started: Claim

    @property
    def computation(self) -> dict:
        """What must match on resume because it changes the metrics."""
        return {"dtype": str(self.execution.compute), "attention": self.execution.attention}


def start_of_masked(aligned: str, merged: str):
    """The `sources` of build() for a masked student.

    X.k_proj.original.Y comes from X.k_proj.Y in aligned/, X.k_proj.merged.Y from X.k_proj.Y in merged/, and
    everything else from aligned/ under its own name. masks.blended_name is the inverse, for the switch.
    """

    def source(name: str) -> tuple[str, str]:
        directory = merged if ".merged." in name else aligned
        return directory, name.replace(".original.", ".").replace(".merged.", ".")

    return source


def masked_student(pair: Pair, ranks: Ranks, execution: Execution, kind: str, seed: int, fresh: bool,
                   train: str = "all") -> Trainee:
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


def gqa_student(pair: Pair, ranks: Ranks, execution: Execution, fresh: bool, train: str = "all") -> Trainee:
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


def frozen(path: str, ranks: Ranks, execution: Execution) -> Trainee:
    """The teacher: sharded, without gradients, its weights in the compute dtype."""
    execution = replace(execution, weights=execution.compute, recompute=False)
    teacher = build(load_config(path), ranks, execution, lambda name: (path, name))
    return teacher.eval().requires_grad_(False)


def find_teacher(run: Run, given: str | None, force: bool) -> bool:
    """Whether there is a teacher, the source or a fine-tune of it; False if one is to be trained.

    given: --teacher, which --force leaves alone. Raises UserError for one that is damaged or of
    another model, and if there are no answers to train one on.
    """
    for path in (run.directory, run.teacher):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise UserError(f"{path}: expected nothing or a directory, found a file; remove it first")
    if given == SOURCE:
        return True
    if os.path.realpath(run.teacher) == os.path.realpath(run.directory):
        raise UserError(f"--teacher: expected another directory than the student's, found {run.teacher}")
    if os.path.lexists(run.teacher) and (given or not force):
        teacher_record = read_record(run.teacher, STAGE, run.pair.model)
        if run.ranks.first:
            verify_files(run.teacher, teacher_record)
        return True
    if not run.pool.answered:
        raise UserError(f"--teacher {run.teacher}: expected one that exists, or source, as text has no "
                        "answers to fine-tune one on")
    return False


def teacher_settings(run: Run, schedule: Schedule, rates: Rates) -> dict:
    """Everything that must match to resume the teacher's training, or to take a teacher for its result."""
    settings = schedule.to_resume() | run.computation | Pool(run.pool.answered).description()
    return settings | {"source": run.pair.model["fingerprint"], "lr": rates.lr, "beta2": rates.beta2,
                       "weight_decay": rates.weight_decay}


def check_teacher(run: Run, schedule: Schedule, rates: Rates) -> None:
    """Raise UserError if the teacher in RUN was trained with other settings."""
    settings = teacher_settings(run, schedule, rates)
    found = read_record(run.teacher, STAGE, run.pair.model)["summary"]
    changed = [name for name, value in settings.items() if name not in ROUNDING and found.get(name) != value]
    if changed:
        changes = ", ".join(f"{name} {found.get(name)} -> {settings[name]}" for name in changed)
        raise UserError(f"{run.teacher} was trained with other settings ({changes}): pass the same, "
                        f"--teacher {run.teacher} to take it as it is, or --force to start over")


def train_teacher(run: Run, schedule: Schedule, rates: Rates) -> bool:
    """Fine-tune the source model on the samples' answers. Returns False if a signal stopped it."""
    source, directory, samples = run.pair.model["path"], run.teacher + ".train", run.pool.answered
    ranks = run.ranks
    ranks.say(f"teacher {source}: {schedule.steps} steps of {schedule.batch} samples on {ranks}")
    settings = teacher_settings(run, schedule, rates)
    checkpoints.begin(directory, settings, ranks)
    saved = checkpoints.newest(directory, ranks)
    teacher = build(load_config(source), ranks, run.execution, None if saved else lambda name: (source, name))
    job = Job(teacher, student_optimizer(teacher, rates), directory, ranks, sft_flops(teacher))
    if saved:
        checkpoints.load(job, saved)

    for step in steps(job, schedule, samples):
        for row in step.rows:
            step.backward(next_token_loss(teacher, row, row.answer_at, row.answer_weight, run.chunk))
        step.update()
    if job.stopped:
        return False
    if ranks.first:
        write_teacher(run, directory, settings)
    dist.barrier()
    return True


def write_teacher(run: Run, directory: str, settings: dict) -> None:
    """Write teacher/ from the last checkpoint in `directory`, then remove that directory."""
    source = run.pair.model["path"]
    config = load_config(source)
    dtype = config.dtype or torch.float32  # before Layers, which changes the config's
    weights = checkpoints.TrainedWeights(checkpoints.saved_checkpoints(directory)[-1])
    layers = Layers(weights.path, torch.float32, "cpu", layerwise=True, config=config, weights=weights)
    lines = read_metrics(os.path.join(directory, METRICS))
    summary = settings | summarize(lines)
    with write_directory(run.teacher) as aside:
        with CheckpointWriter(aside, config, dtype, source) as writer:
            for index, layer in enumerate(layers.decoder_layers()):
                writer.write(f"model.layers.{index}", layer)
            writer.write_rest(layers)
        shutil.copy(os.path.join(directory, METRICS), aside)
        write_record(aside, run.started.record(run.pair.model, summary))
    checkpoints.remove_training(directory)
    print(f"wrote   {run.teacher}: loss on answers {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
