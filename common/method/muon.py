"""Muon (Jordan et al., 2024) for attention weights: the step of each head is orthogonalized by itself.

A head's gradient, averaged over steps, is replaced by the nearest matrix with singular values of about 1, so
that no direction waits for its turn. Head by head that costs a fraction of what it does for the whole matrix,
whose products with itself cost more than the layer, and gets further (docs/LOG.md). float32, unlike
torch.optim.Muon, which multiplies in bfloat16: without instructions for it a layer's refit takes over ten
times as long.
"""

import torch

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # x <- a x + b x^3 + c x^5 takes singular values in (0, 1] to about 1
ITERATIONS = 5
MOMENTUM = 0.9
STEP = 0.2  # root mean square of a step's elements at a learning rate of 1: about that of AdamW's


def orthogonalized(heads: torch.Tensor) -> torch.Tensor:
    """U f(S) V^T of each U S V^T in [heads, rows, columns], with f(S) of 0.7 to 1.2 where S is not tiny."""
    a, b, c = NEWTON_SCHULZ
    x = heads / heads.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class HeadMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and without weight decay.

    groups: dicts of "params", an "lr", and whether "columns", instead of rows, are split into heads, as of
    W_O. head_dim: rows or columns of a head.
    """

    def __init__(self, groups: list[dict], head_dim: int):
        super().__init__(groups, {"columns": False})
        self.head_dim = head_dim

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
                direction = weight.grad.lerp(momentum, MOMENTUM)
                rows = direction.T if group["columns"] else direction
                heads = rows.unflatten(0, (-1, self.head_dim))
                step = STEP * max(heads.shape[1:]) ** 0.5 * orthogonalized(heads).flatten(0, 1)
                weight.sub_(group["lr"] * (step.T if group["columns"] else step))
