"""What the three phases share: the text as packed samples, the language-model loss, operators and their multiplier beside the
weights, the learning rates, and a directory that is gone on with where it was left. The loop is common/training/engine.py's."""


import torch

from common.cli import UserError
from common.data.tasks import Sample
from common.data.text import load_tokens
from common.evaluate import all_logits, max_difference
from common.method.losses import chunked, cross_entropy
from common.models import load_config, load_model
from common.training import checkpoints, engine
from common.training.engine import Job, Phase, Plan, train
from common.training.packing import build_row
from common.training.sharding import Execution, build
from related.dha.fusion import fusion_loss, margin, patch, set_operators, with_operators

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
OPERATOR_ADAM = ADAM | {"eps": 1e-15}  # the gradient of a mean over all factors of all layers is small, Adam's eps must be smaller
FINAL_SHARE = 0.1  # of its peak that a learning rate falls to
MULTIPLIER = "multiplier"  # lambda of Eq. 8, among the replicated parameters
CHUNK = 512  # tokens whose logits exist at a time
UNCHANGED = 1e-5  # of the logits, or of the largest if that is above 1


def load_data(data: dict, tokenizer, ranks) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out text of a run, as samples of data["length"] tokens."""
    split = []
    for name, source, count in (("train", data["text"], data["sequences"]), ("heldout", data["heldout"], data["heldout_sequences"])):
        tokens, said = load_tokens(source, tokenizer, count, data["length"], name)
        split.append([Sample(tuple(row[:-1]), (row[-1],)) for row in tokens.tolist()])
        ranks.say(f"reads   {said}")
    return split[0], split[1]


def as_tokens(samples: list[Sample]) -> torch.Tensor:
    """[samples, length] token ids."""
    return torch.tensor([(*sample.prompt, *sample.answer) for sample in samples])


def make_plan(data: dict, steps: int, warmup: float, print_every: int) -> Plan:
    """A phase of the batches that all phases and baselines share. warmup: share of the steps."""
    return Plan(steps=steps, batch=data["batch"], warmup=max(1, round(warmup * steps)), clip=1.0, seed=data["seed"],
                tokens_per_microbatch=data["tokens_per_microbatch"], save_steps=None, save_minutes=20, print_every=print_every, final_share=FINAL_SHARE)


class LanguageModel(Phase):
    """Next-token cross-entropy, and every `every` steps that of held-out text."""

    def __init__(self, job: Job, plan: Plan, heldout: list[Sample], every: int):
        self.trainee, self.every = job.trainee, every
        size = max(1, plan.tokens_per_microbatch // len(heldout[0]))
        self.heldout = [build_row(heldout[start : start + size], len(heldout)).to(job.ranks.device) for start in range(0, len(heldout), size)]

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Mean next-token loss of the held-out text, nats."""

        def loss(row) -> torch.Tensor:
            def head_loss(hidden, lm_head):
                pieces = torch.arange(len(hidden), device=hidden.device).split(CHUNK)
                return sum((cross_entropy(lm_head(hidden[at]).float(), row.targets[at]) * row.all_weight[at]).sum() for at in pieces)

            return self.trainee(row, head_loss)

        self.trainee.eval()
        total = sum(float(loss(row)) for row in self.heldout)
        self.trainee.train()
        self.trainee.reshard()  # a forward pass without a backward pass leaves the root's weights gathered
        return total

    def begin_step(self, step: int) -> None:
        self.measured = {"heldout": self.heldout_loss()} if step % self.every == 0 else {}

    def row_loss(self, row):
        def loss(kind, at, logits):
            return (cross_entropy(logits.float(), row.targets[at]) * row.all_weight[at]).sum()

        pieces = [("next token", at) for at in row.all_weight.nonzero()[:, 0].split(CHUNK)]
        return self.trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), {}

    def end_step(self, step: int) -> dict:
        return self.measured


class Operating(LanguageModel):
    """Search: the language-model loss trains weights and operators; the fusion loss is watched, not trained."""

    def __init__(self, *what, groups: dict[str, list]):
        super().__init__(*what)
        self.groups = groups

    def begin_step(self, step: int) -> None:
        # as leaves: a parameter set on a module would become one of the model's
        self.used = {name: operator.detach().requires_grad_() for name, operator in operators_of(self.trainee).items()}
        set_operators(self.trainee.net, self.used, self.groups)
        super().begin_step(step)

    def leaves(self, trainee) -> list[torch.Tensor]:
        return list(self.used.values())

    def end_step(self, step: int) -> dict:
        """Pass the operators' gradient, summed over ranks, on to them."""
        for name, leaf in self.used.items():
            self.trainee.replicated[name].grad = leaf.grad
        with torch.no_grad():
            return super().end_step(step) | {"fusion_loss": float(fusion_loss(operators_of(self.trainee)))}


class Fusing(Operating):
    """Eq. 8: min over weights and operators, max over lambda of the language-model loss + lambda max(L_fusion - t, 0)."""

    def __init__(self, *what, groups: dict[str, list], margin_steps: int):
        super().__init__(*what, groups=groups)
        self.margin_steps = margin_steps

    def end_step(self, step: int) -> dict:
        """Add the gradient of the second term, lambda's among them: its optimizer ascends."""
        figures, multiplier, allowed = super().end_step(step), self.trainee.replicated[MULTIPLIER], margin(step, self.margin_steps)
        excess = (fusion_loss(operators_of(self.trainee)) - allowed).clamp(min=0)
        (multiplier * excess).sum().backward()
        return figures | {"margin": allowed, "lambda": float(multiplier.detach())}


def operators_of(trainee) -> dict[str, torch.Tensor]:
    """The operators among a trainee's replicated parameters."""
    return {name: parameter for name, parameter in trainee.replicated.items() if name != MULTIPLIER}


def make_optimizer(trainee, lr: float, operator_lr: float = 0.0, multiplier_lr: float = 0.0) -> torch.optim.AdamW:
    """AdamW over the weights and, where there are some, the operators (descending) and lambda (ascending)."""
    multiplier = {"initial_lr": multiplier_lr, "maximize": True, **OPERATOR_ADAM}
    special = {rf"^replicated\.{MULTIPLIER}$": multiplier, r"^replicated\.": {"initial_lr": operator_lr, **OPERATOR_ADAM}}
    return engine.make_optimizer(trainee, {"initial_lr": lr, **ADAM}, special)


def begin(directory: str, settings: dict, source: str, ranks, rates: tuple, operators: dict | None = None) -> Job:
    """A phase: from the checkpoint `source`, or the newest in its directory where there is one.

    rates: learning rates of weights, operators, lambda, as far as the phase trains them. Raises UserError for a directory that
    was begun with other settings.
    """
    checkpoints.begin(directory, settings, ranks)
    saved, cuda = checkpoints.newest(directory, ranks), ranks.device.type == "cuda"
    replicated = dict(operators or {})
    if len(rates) == 3:
        replicated[MULTIPLIER] = torch.zeros(1)
    execution = Execution(compute=torch.bfloat16 if cuda else torch.float32, recompute=cuda)
    sources = None if saved else lambda name: (source, name)
    trainee = build(load_config(source), ranks, execution, sources, patch if operators else None, replicated)
    job = Job(trainee, make_optimizer(trainee, *rates), directory, ranks)
    if saved:
        checkpoints.load(job, saved)
        ranks.say(f"resumes {directory} after step {job.step}")
    return job


def last_weights(directory: str) -> tuple[dict, dict, float, int]:
    """Of a phase's last checkpoint: the model's weights, the operators, lambda (0 without one), and the step."""
    path = checkpoints.steps_saved(directory)[-1]
    operators = checkpoints.whole_weights(path, "replicated")
    multiplier = float(operators.pop(MULTIPLIER, 0))
    return checkpoints.whole_weights(path), operators, multiplier, checkpoints.step_of(path)


def steps_until(done, job: Job, phase: Phase, samples: list, plan: Plan, every: int) -> bool:
    """The engine's loop, asked every `every` steps whether `done()`; False when a signal stopped it."""
    while job.step < plan.steps and not done():
        if not train(job, phase, samples, plan, min(job.step + every - job.step % every, plan.steps)):
            return False
    return True


def relative_difference(expected: list[torch.Tensor], found: list[torch.Tensor], what: str) -> float:
    """Largest difference of two lists of logits, over the largest logit where that is above 1. Raises UserError above UNCHANGED."""
    difference = max_difference(expected, found) / max(1.0, *(float(logits.abs().max()) for logits in expected))
    if not difference <= UNCHANGED:
        raise UserError(f"{what}: relative logit difference expected <= {UNCHANGED:.0e}, found {difference:.2e}")
    return difference


@torch.no_grad()
def prove_unchanged(path: str, operators: dict, groups: dict, tokens: torch.Tensor) -> float:
    """What giving the model in `path` its operators changes: nothing, up to rounding."""
    model = load_model(path)
    expected = all_logits(model, tokens)
    difference = relative_difference(expected, all_logits(with_operators(model, operators, groups), tokens), f"{path} with operators")
    print(f"proof   {path} with operators that change nothing: relative logit difference {difference:.1e}")
    return difference
