"""Shared by search, fusion and continued pre-training: data, language-model loss, operators and resuming.

The operators and the multiplier lambda are replicated parameters of the trainee: every rank holds them whole.
The training loop is common/training/engine.py's.
"""

import os
import shutil

import torch
import torch.distributed as dist

from common.cli import UserError, positive, probability
from common.data.samples import Sample
from common.data.text import load_tokens
from common.evaluate import all_logits, max_difference
from common.method.losses import chunked, cross_entropy
from common.models import load_config, load_model
from common.training import checkpoints, engine
from common.training.engine import Job, Phase, Plan, train
from common.training.inputs import samples_digest
from common.training.packing import build_row
from common.training.sharding import Execution, build
from related.dha.fusion import fusion_loss, margin, patch, set_operators, with_operators

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


def make_plan(data: dict, steps: int, warmup: float, print_every: int) -> Plan:
    """A phase of `steps` steps on the batches that all rows share. warmup: share of the steps."""
    return Plan(
        steps=steps,
        batch=data["batch"],
        warmup=max(1, round(warmup * steps)),
        clip=1.0,
        seed=data["seed"],
        tokens_per_microbatch=data["tokens_per_microbatch"],
        save_steps=None,
        save_minutes=20,
        print_every=print_every,
        final_share=FINAL_SHARE,
    )


class LanguageModel(Phase):
    """Next-token cross-entropy; every `every` steps it is also measured on held-out samples."""

    def __init__(self, job: Job, plan: Plan, heldout: list[Sample], every: int):
        self.trainee, self.every, self.measured = job.trainee, every, {}
        size = max(1, plan.tokens_per_microbatch // len(heldout[0]))
        self.heldout = []
        for start in range(0, len(heldout), size):
            row = build_row(heldout[start : start + size], len(heldout))
            self.heldout.append(row.to(job.ranks.device))

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean next-token loss of the held-out samples, in nats."""
        self.trainee.eval()
        total = sum(float(self.row_loss(row)[0]) for row in self.heldout)
        self.trainee.train()
        self.trainee.reshard()  # a forward pass without a backward pass leaves the root's weights gathered
        return total

    def begin_step(self, step: int) -> None:
        self.measured = {"heldout": self.heldout_loss()} if step % self.every == 0 else {}

    def row_loss(self, row):
        """The row's share of the batch's cross-entropy."""

        def loss(kind, at, logits):
            return (cross_entropy(logits.float(), row.targets[at]) * row.all_weight[at]).sum()

        pieces = [("next token", at) for at in row.all_weight.nonzero()[:, 0].split(CHUNK)]
        return self.trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), {}

    def end_step(self, step: int) -> dict:
        return self.measured


class Searching(LanguageModel):
    """Search: the language-model loss trains weights and operators; the fusion loss is only measured."""

    def __init__(self, job: Job, plan: Plan, heldout: list[Sample], every: int, groups: dict[str, list]):
        super().__init__(job, plan, heldout, every)
        self.operators = operators_in(job.trainee)
        set_operators(job.trainee.net, self.operators, groups)

    @torch.no_grad()
    def end_step(self, step: int) -> dict:
        return super().end_step(step) | {"fusion_loss": float(fusion_loss(self.operators))}


class Fusing(Searching):
    """Eq. 8: min over weights and operators, max over lambda of L_lm + lambda max(L_fusion - t, 0)."""

    def __init__(self, job, plan, heldout, every, groups, margin_steps: int):
        super().__init__(job, plan, heldout, every, groups)
        self.multiplier, self.margin_steps = job.trainee.replicated[MULTIPLIER], margin_steps

    def end_step(self, step: int) -> dict:
        """Add the gradient of the second term to the operators and to lambda, which its optimizer ascends."""
        figures, allowed = super().end_step(step), margin(step, self.margin_steps)
        excess = (fusion_loss(self.operators) - allowed).clamp(min=0)
        (self.multiplier * excess).sum().backward()
        return figures | {"margin": allowed, "lambda": float(self.multiplier.detach())}


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


def train_until(done, job: Job, phase: Phase, samples: list, plan: Plan, every: int) -> bool:
    """Train to done() or the plan's end, asking and saving every `every` steps; False after a signal."""
    while job.step < plan.steps and not done():
        following = job.step + every - job.step % every
        if not train(job, phase, samples, plan, min(following, plan.steps)):
            return False
    return True


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
def check_unchanged(path: str, operators: dict, groups: dict, tokens: torch.Tensor) -> float:
    """Check that starting operators change nothing in the model at `path`; returns the logit difference."""
    model = load_model(path)
    expected = all_logits(model, tokens)
    actual = all_logits(with_operators(model, operators, groups), tokens)
    difference = relative_difference(expected, actual, f"{path} with operators")
    print(f"checked {path} with identity operators: relative logit difference {difference:.1e}")
    return difference
