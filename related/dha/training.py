"""Shared by search, fusion and continued pre-training: data, the steps of training, and resuming.

The operators and the multiplier lambda are replicated parameters of the trainee: every rank holds them
unsharded. The training loop is common/training/engine.py's.
"""

from dataclasses import dataclass

import torch

from common.data.documents import EVALUATION, TRAIN
from common.data.pool import samples_digest
from common.data.rows import Sample
from common.data.text import load_tokens
from common.models.equivalence import max_difference, require_close
from common.models.load import load_config
from common.run.artifact import begin_stage
from common.run.errors import UserError
from common.run.flags import positive, probability
from common.training import checkpoints, engine
from common.training.chunked import next_token_loss
from common.training.engine import STOPPED, Job, Schedule, Step, steps
from common.training.packing import build_row
from common.training.sharding import Execution, build, joined_ranks, sum_over_ranks
from related.dha.fusion import fusion_loss, margin, starting_operators, with_operators

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
OPERATOR_ADAM = ADAM | {"eps": 1e-15}  # a mean over all factors of all layers has tiny gradients
FINAL_SHARE = 0.1  # of the peak learning rate, at the end of the cosine
MULTIPLIER = "multiplier"  # lambda of Eq. 8, by its name among the replicated parameters
FUSED = 1e-3  # L_fusion below which fusion ends
CHUNK = 512  # tokens whose logits are in memory at a time
LOGIT_TOLERANCE = 1e-5  # of logits that should be equal, relative to the largest one where that exceeds 1


def add_logging_flags(parser, warmup: float, print_every: int) -> None:
    """The flags that every phase has; warmup and print_every: its defaults."""
    parser.add_argument("--warmup", type=probability, default=warmup,
                        help="share of the steps with a rising learning rate")
    parser.add_argument("--heldout-every", type=positive, default=20, help="steps between held-out losses")
    parser.add_argument("--print-every", type=positive, default=print_every,
                        help="steps between printed lines; metrics.jsonl has every step")


def run_phase(stage: str, args, output: str, phase, inputs: dict, lock: str = "") -> int:
    """The exit code of a command: phase(args, started, ranks) is false if a signal stopped it."""
    started = begin_stage(stage, args, output, inputs=inputs, lock=lock)
    with joined_ranks() as ranks:
        return 0 if phase(args, started, ranks) else STOPPED


def load_data(data: dict, tokenizer, ranks) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples of data["length"] tokens each.

    Adds their digest to `data` as "tokens_sha256". Raises UserError if a digest is there already and differs,
    because a text file has changed since search.
    """
    splits, wanted = [], {TRAIN: ("text", "sequences"), EVALUATION: ("heldout", "heldout_sequences")}
    for split, (text, count) in wanted.items():
        tokens, description = load_tokens(data[text], tokenizer, data[count], data["length"], split)
        splits.append([Sample(row[:-1], row[-1:]) for row in tokens.tolist()])
        ranks.say(f"reads   {description}")
    samples, heldout = splits
    digest = samples_digest([*samples, *heldout])
    expected = data.setdefault("tokens_sha256", digest)
    if expected != digest:
        raise UserError(f"{data['text']}, {data['heldout']}: expected the tokens that search read "
                        f"({expected[:12]}), found others ({digest[:12]})")
    return samples, heldout


def as_tokens(samples: list[Sample]) -> torch.Tensor:
    """Token ids [samples, length], int64."""
    return torch.tensor([(*sample.prompt, *sample.answer) for sample in samples])


@dataclass(frozen=True)
class DecaySchedule(Schedule):
    """A schedule whose cosine ends at FINAL_SHARE of the peak."""

    heldout_every: int = 20  # steps between held-out losses
    margin_steps: int = 0  # of fusion: steps over which t of Eq. 8 falls to 0
    check_steps: int | None = None  # of fusion: steps between comparisons of L_fusion with FUSED

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return super().rate(step)
        return FINAL_SHARE + (1 - FINAL_SHARE) * super().rate(step)


def make_schedule(data: dict, steps: int, args, **of_fusion) -> DecaySchedule:
    """A phase of `steps` steps on the batches that all rows share. args.warmup: share of the steps."""
    return DecaySchedule(
        steps=steps, batch=data["batch"], warmup=max(1, round(args.warmup * steps)), clip=1.0,
        seed=data["seed"], tokens_per_microbatch=data["tokens_per_microbatch"], save_steps=None,
        save_minutes=20, print_every=args.print_every, heldout_every=args.heldout_every, **of_fusion,
    )


def language_model_loss(trainee, row) -> torch.Tensor:
    """The row's share of the batch's mean cross-entropy of every next token, a scalar."""
    return next_token_loss(trainee, row, row.all_weight.nonzero()[:, 0], row.all_weight, CHUNK)


@torch.no_grad()
def heldout_loss(job: Job, schedule: DecaySchedule, samples: list[Sample]) -> float:
    """The mean next-token loss on samples of the same length, in nats."""
    trainee, size, total = job.trainee, max(1, schedule.tokens_per_microbatch // len(samples[0])), 0.0
    for first in range(0, len(samples), size):
        row = build_row(samples[first : first + size], len(samples)).to(job.ranks.device)
        total += float(language_model_loss(trainee, row))
    trainee.reshard()  # a forward pass without a backward pass leaves the root's weights gathered
    return total


def take_step(step: Step, heldout: list[Sample]) -> None:
    """A step on the language-model loss; with a multiplier on L_lm + lambda max(L_fusion - t, 0), Eq. 8."""
    metrics, trainee, schedule = {}, step.job.trainee, step.schedule
    if step.number % schedule.heldout_every == 0:
        metrics["heldout"] = heldout_loss(step.job, schedule, heldout)
    for row in step.rows:
        step.backward(language_model_loss(trainee, row))
    sum_over_ranks(trainee.replicated.values())
    if trainee.replicated:
        loss = fusion_loss(operators_in(trainee))
        metrics["fusion_loss"] = float(loss.detach())
    if MULTIPLIER in trainee.replicated:
        allowed = margin(step.number, schedule.margin_steps)
        multiplier = trainee.replicated[MULTIPLIER]  # its optimizer ascends
        (multiplier * (loss - allowed).clamp(min=0)).sum().backward()
        metrics |= {"margin": allowed, "lambda": float(multiplier.detach())}
    step.update(**metrics)


def is_fused(trainee) -> bool:
    """Whether the fusion loss is below FUSED, where there is one to bring down."""
    return MULTIPLIER in trainee.replicated and float(fusion_loss(operators_in(trainee)).detach()) < FUSED


def train(job: Job, schedule: DecaySchedule, samples: list[Sample], heldout: list[Sample]) -> bool:
    """Train to the end of the schedule, or of fusion, with a checkpoint wherever it asks for the latter.

    False if a signal stopped it.
    """
    every = schedule.check_steps or schedule.steps
    while job.step < schedule.steps and not job.stopped and not is_fused(job.trainee):
        until = min(job.step + every - job.step % every, schedule.steps)
        for step in steps(job, schedule, samples, until):
            take_step(step, heldout)
    return not job.stopped


def operators_in(trainee) -> dict[str, torch.Tensor]:
    """The operators among a trainee's replicated parameters."""
    return {name: parameter for name, parameter in trainee.replicated.items() if name != MULTIPLIER}


def make_optimizer(trainee, settings: dict):
    """AdamW: descent on the weights and the operators, ascent on lambda, as far as the trainee has them."""
    ascent = {"initial_lr": settings.get("lambda_lr"), "maximize": True, **OPERATOR_ADAM}
    descent = {"initial_lr": settings.get("operator_lr"), **OPERATOR_ADAM}
    special = {rf"^replicated\.{MULTIPLIER}$": ascent, r"^replicated\.": descent}
    return engine.make_optimizer(trainee, {"initial_lr": settings["lr"], **ADAM}, special)


def begin(directory: str, settings: dict, source: str, ranks, groups=None, force=False) -> Job:
    """A phase at its first step or, if its directory has checkpoints, resumed from the newest one.

    settings: those that must match on resume, with the learning rate "lr" of the weights and, as far as the
    phase trains them, those of the operators and of lambda. source: the checkpoint to start from. groups:
    those of the operators. force: move an earlier training aside.
    Raises UserError if the directory was started with other settings.
    """
    if force:
        checkpoints.start_anew([directory], ranks)
    checkpoints.begin(directory, settings, ranks)
    saved, cuda = checkpoints.newest(directory, ranks), ranks.device.type == "cuda"
    config = load_config(source)
    replicated = starting_operators(groups, config.head_dim) if groups else {}
    if "lambda_lr" in settings:
        replicated[MULTIPLIER] = torch.zeros(1)
    execution = Execution(compute=torch.bfloat16 if cuda else torch.float32, recompute=cuda)
    sources = None if saved else lambda name: (source, name)
    trainee = build(config, ranks, execution, sources, replicated=replicated)
    if groups:
        with_operators(trainee.net, operators_in(trainee), groups)
    job = Job(trainee, make_optimizer(trainee, settings), directory, ranks)
    checkpoints.load(job, saved)
    return job


def heldout_curve(lines: list[dict], tokens_before: int, tokens_per_step: int) -> list[list[float]]:
    """[tokens since the source model, held-out loss] points from metrics.jsonl."""
    return [[tokens_before + (line["step"] - 1) * tokens_per_step, line["heldout"]]
            for line in lines if "heldout" in line]


def last_weights(directory: str) -> tuple[dict, dict, float, int]:
    """Model weights, operators, lambda (0 if there is none) and step of a phase's last checkpoint."""
    path = checkpoints.saved_checkpoints(directory)[-1]
    operators = checkpoints.whole_weights(path, "replicated")
    multiplier = float(operators.pop(MULTIPLIER, 0))
    return checkpoints.whole_weights(path), operators, multiplier, checkpoints.step_of(path)


def relative_difference(expected: list[torch.Tensor], actual: list[torch.Tensor], name: str) -> float:
    """The largest difference of logits, relative to the largest logit where that exceeds 1.

    Raises UserError if it exceeds LOGIT_TOLERANCE. name: of what has the actual logits.
    """
    largest = max(float(logits.abs().max()) for logits in expected)
    difference = max_difference(expected, actual) / max(1.0, largest)
    require_close(name, difference, LOGIT_TOLERANCE)
    return difference


@torch.no_grad()
def all_logits(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each row of tokens [n, T], one at a time: n tensors [T, vocab]."""
    return [model(input_ids=row[None], use_cache=False).logits[0] for row in tokens]
