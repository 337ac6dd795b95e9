"""Shared by search, fusion and continued pre-training: data, language-model loss, operators and resuming.

The operators and the multiplier lambda are replicated parameters of the trainee: every rank holds them whole.
The training loop is common/training/engine.py's.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from common.cli import UserError, positive, probability
from common.data.rows import Sample
from common.data.text import load_tokens
from common.evaluate import max_difference
from common.models import load_config, load_model
from common.training import checkpoints, engine
from common.training.distill import next_token_loss
from common.training.engine import Job, Schedule, Step, steps
from common.training.packing import build_row
from common.training.pool import samples_digest
from common.training.sharding import Execution, build, sum_over_ranks
from related.dha.fusion import fusion_loss, margin, patch, with_operators

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
OPERATOR_ADAM = ADAM | {"eps": 1e-15}  # a mean over all factors of all layers has tiny gradients
FINAL_SHARE = 0.1  # of the peak learning rate, at the end of the cosine
MULTIPLIER = "multiplier"  # lambda of Eq. 8, by its name among the replicated parameters
CHUNK = 512  # tokens whose logits are in memory at a time
LOGIT_TOLERANCE = 1e-5  # of logits that should be equal, relative to the largest one where that exceeds 1


def add_logging_flags(parser, warmup: float, print_every: int) -> None:
    """The flags that every phase has; warmup and print_every: its defaults."""
    parser.add_argument(
        "--warmup", type=probability, default=warmup, help="share of the steps with a rising learning rate"
    )
    parser.add_argument("--heldout-every", type=positive, default=20, help="steps between held-out losses")
    parser.add_argument(
        "--print-every",
        type=positive,
        default=print_every,
        help="steps between printed lines; metrics.jsonl has every step",
    )


def load_data(data: dict, tokenizer, ranks) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples of data["length"] tokens each.

    Adds their digest to `data` as "tokens_sha256". Raises UserError if a digest is there already and differs,
    because a text file has changed since search.
    """
    splits = []
    for split, source, count in (
        ("train", data["text"], data["sequences"]),
        ("heldout", data["heldout"], data["heldout_sequences"]),
    ):
        tokens, description = load_tokens(source, tokenizer, count, data["length"], split)
        splits.append([Sample(row[:-1], row[-1:]) for row in tokens.tolist()])
        ranks.say(f"reads   {description}")
    samples, heldout = splits
    digest = samples_digest([*samples, *heldout])
    expected = data.setdefault("tokens_sha256", digest)
    if expected != digest:
        raise UserError(
            f"{data['text']}, {data['heldout']}: expected the tokens that search read ({expected[:12]}), "
            f"found others ({digest[:12]})"
        )
    return samples, heldout


def as_tokens(samples: list[Sample]) -> torch.Tensor:
    """Token ids [samples, length], int64."""
    return torch.tensor([(*sample.prompt, *sample.answer) for sample in samples])


@dataclass(frozen=True)
class DecaySchedule(Schedule):
    """A schedule whose cosine ends at FINAL_SHARE of the peak."""

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return super().rate(step)
        return FINAL_SHARE + (1 - FINAL_SHARE) * super().rate(step)


def make_schedule(data: dict, steps: int, warmup: float, print_every: int) -> Schedule:
    """A phase of `steps` steps on the batches that all rows share. warmup: share of the steps."""
    return DecaySchedule(
        steps=steps,
        batch=data["batch"],
        warmup=max(1, round(warmup * steps)),
        clip=1.0,
        seed=data["seed"],
        tokens_per_microbatch=data["tokens_per_microbatch"],
        save_steps=None,
        save_minutes=20,
        print_every=print_every,
    )


class Heldout:
    """Held-out samples on which the next-token loss is measured before every `every`-th step."""

    def __init__(self, samples: list[Sample], every: int, tokens_per_microbatch: int, device):
        self.every = every
        size = max(1, tokens_per_microbatch // len(samples[0]))
        starts = range(0, len(samples), size)
        self.rows = [build_row(samples[i : i + size], len(samples)).to(device) for i in starts]

    @torch.no_grad()
    def loss(self, trainee) -> float:
        """The mean, in nats."""
        trainee.eval()
        total = sum(float(language_model_loss(trainee, row)) for row in self.rows)
        trainee.train()
        trainee.reshard()  # a forward pass without a backward pass leaves the root's weights gathered
        return total

    def figures(self, step: Step) -> dict[str, float]:
        """For the step's line of metrics.jsonl: the loss before it, if it is due."""
        return {"heldout": self.loss(step.job.trainee)} if step.number % self.every == 0 else {}


def language_model_loss(trainee, row) -> torch.Tensor:
    """The row's share of the batch's mean cross-entropy of every next token, a scalar."""
    return next_token_loss(trainee, row, row.all_weight.nonzero()[:, 0], row.all_weight, CHUNK)


def accumulate(step: Step) -> None:
    """The gradients of the language-model loss in the weights, operators and lambda."""
    trainee = step.job.trainee
    for row in step.rows:
        step.backward(language_model_loss(trainee, row))
    sum_over_ranks(trainee.replicated.values())


def pretrain_step(step: Step, heldout: Heldout) -> None:
    """Continued pre-training, by the language-model loss alone."""
    figures = heldout.figures(step)
    accumulate(step)
    step.update(**figures)


def search_step(step: Step, heldout: Heldout) -> None:
    """Search: the language-model loss trains weights and operators; the fusion loss is only measured."""
    figures = heldout.figures(step)
    accumulate(step)
    with torch.no_grad():
        figures["fusion_loss"] = float(fusion_loss(operators_in(step.job.trainee)))
    step.update(**figures)


def fuse_step(step: Step, heldout: Heldout, margin_steps: int) -> None:
    """Eq. 8: min over weights and operators, max over lambda of L_lm + lambda max(L_fusion - t, 0)."""
    figures, trainee = heldout.figures(step), step.job.trainee
    accumulate(step)
    loss, allowed = fusion_loss(operators_in(trainee)), margin(step.number, margin_steps)
    multiplier = trainee.replicated[MULTIPLIER]  # its optimizer ascends
    (multiplier * (loss - allowed).clamp(min=0)).sum().backward()
    figures |= {"fusion_loss": float(loss.detach()), "margin": allowed, "lambda": float(multiplier.detach())}
    step.update(**figures)


def steps_until(done, job: Job, schedule: Schedule, samples: list, every: int) -> Iterator[Step]:
    """engine.steps to done() or the schedule's end; it asks, and saves, every `every` steps."""
    while job.step < schedule.steps and not job.stopped and not done():
        following = job.step + every - job.step % every
        yield from steps(job, schedule, samples, min(following, schedule.steps))


def operators_in(trainee) -> dict[str, torch.Tensor]:
    """The operators among a trainee's replicated parameters."""
    return {name: parameter for name, parameter in trainee.replicated.items() if name != MULTIPLIER}


def make_optimizer(trainee, lr: float, operator_lr: float = 0.0, multiplier_lr: float = 0.0):
    """AdamW: descent on the weights and the operators, ascent on lambda, as far as the trainee has them."""
    ascent = {"initial_lr": multiplier_lr, "maximize": True, **OPERATOR_ADAM}
    descent = {"initial_lr": operator_lr, **OPERATOR_ADAM}
    special = {rf"^replicated\.{MULTIPLIER}$": ascent, r"^replicated\.": descent}
    return engine.make_optimizer(trainee, {"initial_lr": lr, **ADAM}, special)


def begin(
    directory: str,
    settings: dict,  # settings that must match on resume
    source: str,  # checkpoint that the phase starts from
    ranks,
    rates: tuple,  # learning rates of the weights, the operators and lambda, as far as the phase trains them
    operators: dict | None = None,  # their initial values
) -> Job:
    """A phase at its first step or, if its directory has checkpoints, resumed from the newest one.

    Raises UserError if the directory was started with other settings.
    """
    checkpoints.begin(directory, settings, ranks)
    saved, cuda = checkpoints.newest(directory, ranks), ranks.device.type == "cuda"
    replicated = dict(operators or {})
    if len(rates) == 3:
        replicated[MULTIPLIER] = torch.zeros(1)
    execution = Execution(compute=torch.bfloat16 if cuda else torch.float32, recompute=cuda)
    sources = None if saved else lambda name: (source, name)
    prepare = patch if operators else None
    trainee = build(load_config(source), ranks, execution, sources, prepare, replicated)
    job = Job(trainee, make_optimizer(trainee, *rates), directory, ranks)
    if saved:
        checkpoints.load(job, saved)
        ranks.say(f"resumes {directory} after step {job.step}")
    return job


def open_directory(directory: str, force: bool, ranks) -> None:
    """Make a phase's training directory; with force, start over."""
    if ranks.first:
        if force:
            shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory, exist_ok=True)
    dist.barrier()


def heldout_curve(lines: list[dict], tokens_before: int, tokens_per_step: int) -> list[list[float]]:
    """[tokens since the source model, held-out loss] points from metrics.jsonl."""
    points = []
    for line in lines:
        if "heldout" in line:
            points.append([tokens_before + (line["step"] - 1) * tokens_per_step, line["heldout"]])
    return points


def last_weights(directory: str) -> tuple[dict, dict, float, int]:
    """Model weights, operators, lambda (0 if there is none) and step of a phase's last checkpoint."""
    path = checkpoints.saved_checkpoints(directory)[-1]
    operators = checkpoints.whole_weights(path, "replicated")
    multiplier = float(operators.pop(MULTIPLIER, 0))
    return checkpoints.whole_weights(path), operators, multiplier, checkpoints.step_of(path)


def relative_difference(expected: list[torch.Tensor], actual: list[torch.Tensor], name: str) -> float:
    """Largest difference between two lists of logits, relative to the largest logit where that exceeds 1.

    Raises UserError if it exceeds LOGIT_TOLERANCE. name: of what has the actual logits.
    """
    largest = max(float(logits.abs().max()) for logits in expected)
    difference = max_difference(expected, actual) / max(1.0, largest)
    if not difference <= LOGIT_TOLERANCE:
        raise UserError(
            f"{name}: expected a relative logit difference <= {LOGIT_TOLERANCE:.0e}, found {difference:.2e}"
        )
    return difference


@torch.no_grad()
def all_logits(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each row of tokens [n, T], one at a time: n tensors [T, vocab], float32 on the CPU."""
    rows = (row[None].to(model.device) for row in tokens)
    return [model(input_ids=row, use_cache=False).logits[0].float().cpu() for row in rows]


@torch.no_grad()
def check_unchanged(path: str, operators: dict, groups: dict, tokens: torch.Tensor) -> float:
    """Check that starting operators change nothing in the model at `path`; returns the logit difference."""
    model = load_model(path)
    expected = all_logits(model, tokens)
    actual = all_logits(with_operators(model, operators, groups), tokens)
    difference = relative_difference(expected, actual, f"{path} with operators")
    print(f"checked {path} with identity operators: relative logit difference {difference:.1e}")
    return difference
