"""Logits of two models, or of a model and a text, compared; means over tokens and their standard errors.

Logits are a list of [T, V], one a sequence.
"""

import math

import torch
import torch.nn.functional as F

from common.method.losses import cross_entropy, kl
from common.run.errors import UserError

LARGEST_LOSS = 700  # nats per token: beyond it perplexity overflows


# metric, a mean over tokens -> its value at each of n positions, from a model's logits [n, V], those of its
# teacher or reference, and the next tokens [n]
COMPARED = {
    "kl": lambda ours, theirs, targets: kl(ours, theirs),  # KL(theirs || ours) in nats
    "loss": lambda ours, theirs, targets: cross_entropy(ours, targets),
    "teacher_loss": lambda ours, theirs, targets: cross_entropy(theirs, targets),
    "agreement": lambda ours, theirs, targets: ours.argmax(-1) == theirs.argmax(-1),  # on the next token
}


def compare(ours: torch.Tensor, theirs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """What is COMPARED at each of n positions, [n] each."""
    return [value_of(ours, theirs, targets) for value_of in COMPARED.values()]


def ratio(totals: list[float], counts: list[int]) -> tuple[float, float | None]:
    """A mean over tokens from each sequence's total and number of tokens, and its standard error.

    Sequences are drawn independently, the tokens within one are not: the error is that of a ratio estimator,
    sqrt(m / (m - 1) sum (total - mean count)^2) / sum count over m sequences; None for one.
    """
    number, tokens = len(counts), sum(counts)
    mean = sum(totals) / tokens
    if number < 2:
        return mean, None
    squares = sum((total - mean * count) ** 2 for total, count in zip(totals, counts, strict=True))
    return mean, math.sqrt(number / (number - 1) * squares) / tokens


def sequence_losses(logits, tokens: torch.Tensor) -> list[float]:
    """Mean next-token loss (nats) of each row of tokens [n, T]. logits: of each row in turn."""
    losses = [F.cross_entropy(rows[:-1].double(), row[1:].to(rows.device))
              for rows, row in zip(logits, tokens, strict=True)]
    return torch.stack(losses).tolist()  # the host waits for a device here alone


def mean_nll(logits, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood (nats) of the next token. logits: of each row of tokens in turn."""
    losses = sequence_losses(logits, tokens)
    return sum(losses) / len(losses)


def perplexity_of(logits, tokens: torch.Tensor) -> float:
    """exp of the mean next-token loss of these logits. Raises UserError if that overflows or is NaN."""
    return perplexity_from(mean_nll(logits, tokens))


def perplexity_from(loss: float) -> float:
    """exp of a mean loss in nats. Raises UserError if that overflows or is NaN."""
    if not loss <= LARGEST_LOSS:
        raise UserError(f"perplexity: expected a loss of at most {LARGEST_LOSS} nats, found {loss:.3g}")
    return math.exp(loss)


def mean_kl(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Mean of KL(first || second), nats, over all tokens that predict one: each sequence's but its last."""
    parts = [kl(b[:-1].double(), a[:-1].double()).mean() for a, b in zip(first, second, strict=True)]
    return float(torch.stack(parts).mean())


def max_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Largest absolute difference between two lists of logits; NaN if either contains NaN."""
    return float(torch.stack([(a - b).abs().max() for a, b in zip(first, second, strict=True)]).max())


def require_close(claim: str, difference: float, allowed: float) -> None:
    """Raise UserError with this claim if logits differ by more than is allowed, or if any is NaN."""
    if not difference <= allowed:  # NaN is not > allowed either
        raise UserError(f"{claim}: max |logit difference| expected <= {allowed:.0e}, found {difference:.2e}; "
                        "nothing was written")
