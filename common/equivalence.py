"""Logits of two models, or of a model and a text, compared; logits are a list of [T, V], one a sequence."""

import math

import torch
import torch.nn.functional as F

from common.errors import UserError
from common.method.losses import kl

LARGEST_LOSS = 700  # nats per token: beyond it perplexity overflows


def mean_nll(logits, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood (nats) of the next token. logits: of each row of tokens in turn."""
    losses = [F.cross_entropy(rows[:-1].double(), row[1:].to(rows.device))
              for rows, row in zip(logits, tokens, strict=True)]
    return float(torch.stack(losses).mean())  # the host waits for a device here alone


def perplexity_of(logits, tokens: torch.Tensor) -> float:
    """exp of the mean next-token loss of these logits. Raises UserError if that overflows or is NaN."""
    loss = mean_nll(logits, tokens)
    if not loss <= LARGEST_LOSS:
        raise UserError(f"perplexity: expected a loss of at most {LARGEST_LOSS} nats, found {loss:.3g}")
    return math.exp(loss)


def mean_kl(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Mean over tokens of KL(first || second), nats."""
    parts = [kl(b.double(), a.double()).mean() for a, b in zip(first, second, strict=True)]
    return float(torch.stack(parts).mean())


def max_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Largest absolute difference between two lists of logits; NaN if either contains NaN."""
    return float(torch.stack([(a - b).abs().max() for a, b in zip(first, second, strict=True)]).max())


def require_close(claim: str, difference: float, allowed: float) -> None:
    """Raise UserError with this claim if logits differ by more than is allowed, or if any is NaN."""
    if not difference <= allowed:  # NaN is not > allowed either
        raise UserError(f"{claim}: max |logit difference| expected <= {allowed:.0e}, found {difference:.2e}; "
                        "nothing was written")
