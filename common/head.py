"""A model's head: from hidden states behind the final norm to logits."""

from dataclasses import dataclass

import torch
from torch import nn

from common.method.losses import product


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
    """The head of a causal language model; common/proof.py proves that nothing else happens to its logits."""
    config = net.config
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return Head(net.lm_head, scale, getattr(config, "final_logit_softcapping", None))
