"""A model's head: from hidden states behind the final norm to logits."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Head:
    """Logits = c tanh(s (W h + b) / c): lm_head's weight W [V, hidden] and, of a Phi, its bias b; the scale s
    of a Cohere or a Granite; the cap c of a Gemma 2.
    """

    linear: nn.Module
    scale: float = 1.0
    cap: float | None = None

    @property
    def weight(self) -> torch.Tensor:  # FSDP replaces it as it gathers it
        return self.linear.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.linear.bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] -> logits [n, V], float32 from 16-bit factors."""
        return self.finish(product(hidden, self.weight.T), self.bias)

    def finish(self, products: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """W h -> logits, with this bias."""
        logits = products if bias is None else products + bias
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def head_of(net) -> Head:
    """The head of a causal language model; models/proof.py proves that nothing else happens to its logits."""
    config = net.config
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return Head(net.lm_head, scale, getattr(config, "final_logit_softcapping", None))


def product(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """left [n, k] @ right [k, m], in float32 from 16-bit factors; added to `total` in place if that is given.

    Logits in bfloat16 are off by up to 2^-9 of their size, which adds some 4e-4 nats to the KL of models that
    are close to each other.
    """
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != dtype:
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    with exact_products(left.dtype):
        left, right = left.to(dtype), right.to(dtype)
        return left @ right if total is None else total.addmm_(left, right)


@contextlib.contextmanager
def exact_products(dtype: torch.dtype):
    """Within, CPUs multiply float32 matrices by their bfloat16 instructions if `dtype`, which the factors
    came in, is bfloat16: nothing is rounded, sums are float32, and it takes half the time.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16" if dtype == torch.bfloat16 else before
    try:
        yield
    finally:
        matmul.fp32_precision = before
