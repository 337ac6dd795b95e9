"""Muon head by head, against singular value decompositions and torch's own Muon."""

import numpy as np
import pytest
import torch

from common.method.refit import STEP, HeadMuon, orthogonalized


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 8, 40), (3, 40, 8), (3, 16, 16)])
def test_singular_values_become_one_and_directions_stay(shape):
    """Of heads of any size, each by itself."""
    heads = normal(*shape) * torch.tensor([1e-4, 1.0, 1e4]).view(3, 1, 1)
    for head, result in zip(heads.numpy(), orthogonalized(heads).numpy(), strict=True):
        U, S, Vt = np.linalg.svd(head, full_matrices=False)
        middle = U.T @ result @ Vt.T
        values = np.diagonal(middle)[S > 0.01 * S[0]]
        assert 0.65 < values.min() and values.max() < 1.25
        np.testing.assert_allclose(middle, np.diag(np.diagonal(middle)), atol=1e-4)
        np.testing.assert_allclose(U @ middle @ Vt, result, atol=1e-4)  # nothing outside of its spaces


def test_a_head_without_a_gradient_stays():
    assert torch.equal(orthogonalized(torch.zeros(2, 4, 6)), torch.zeros(2, 4, 6))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("shape", [(24, 40), (160, 5)])
def test_each_head_takes_the_step_of_torchs_muon(shape, columns):
    """Twenty steps, head by head; torch's multiplies in bfloat16, which loses 2^-8 a product."""
    weight = torch.nn.Parameter(normal(*(shape[::-1] if columns else shape)))
    start = weight.detach().clone()
    heads = [torch.nn.Parameter(head.detach().clone()) for head in weight.split(8, dim=int(columns))]
    group = {"params": [weight], "lr": 0.1} | ({"columns": True} if columns else {})  # rows, if not said
    ours = HeadMuon([group], head_dim=8)
    torchs = torch.optim.Muon(heads, lr=0.1, momentum=0.9, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    for step in range(20):
        weight.grad = normal(*weight.shape, seed=step + 1)
        for head, gradient in zip(heads, weight.grad.split(8, dim=int(columns)), strict=True):
            head.grad = gradient.clone()
        ours.step()
        torchs.step()
    expected = torch.cat(list(heads), dim=int(columns)).detach()
    assert float((weight.detach() - expected).norm()) < 0.02 * float((expected - start).norm())


def test_a_steps_elements_have_their_size():
    """STEP at a rate of 1, if all singular values are 1; they are 0.7 to 1.2."""
    weight = torch.nn.Parameter(torch.zeros(200, 64))
    weight.grad = normal(200, 64)
    HeadMuon([{"params": [weight], "lr": 1.0}], head_dim=2).step()
    assert 0.7 * STEP < float(weight.detach().square().mean().sqrt()) < 1.2 * STEP
