"""The basis of keys and values in which a four-bit cache loses least, while the model's function stays.

Keys: RoPE commutes with any complex factor f[p] per pair, so k[p] <- f[p] k[p], q[p] <- q[p] / conj(f[p])
changes no score. |f| decides how the pairs share the levels of a block, the phase how the two channels of a
slow pair do. Values: any invertible M, v <- M v, W_O <- W_O M^-1. Norms on the way allow less: a norm over
all heads real f, norms of single heads real f that the heads of a layer share.

The error of scores is sum_c E[q_c^2] E[e_c^2] over channels, with e what rounding to a step of 1/8 of the
block's largest channel leaves: the lower of step^2 / 12 and x^2 (below half a step it is x^2, but a loss with
that jump ends higher), and 0 of the largest channel, which is -8 steps. It is lowered from f = 1 by gradient
descent. For values, with noise spread evenly over channels, the error tr(M C M^T) tr(M^-T W_O^T W_O M^-1) is
least for M^T M = C^-1 # W_O^T W_O, the geometric mean, C = E[v v^T]; a random rotation in front spreads it. A
head's basis stays unless q4_0 itself then loses less in it.

Notation: N tokens, G kv heads of size d, P = d/2.
"""

import math
from dataclasses import dataclass

import torch

from common.method.rope import rotate_pairs, to_complex, to_real
from common.method.stats import output_gram
from common.models.edits import head_columns, head_rows
from common.models.families import (
    as_stored,
    head_parameters,
    norm_kind,
    output_projection,
    query_heads_per_kv_head,
)
from common.models.quantized_cache import BLOCK, as_cached, read_back

STEPS, RATE = 200, 0.05  # of Adam, with a rate that falls to 0; 60 of 0.1 end a percent higher
SAMPLED = 512  # tokens whose keys and values are quantized for the fit: a guess, not studied
RIDGE = 1e-3  # relative to the mean diagonal of C and W_O^T W_O, so that M can be inverted: not studied


class CacheSamples:
    """What a cache holds of one layer: pass `watch` to attention_with. All float32."""

    def __init__(self):
        self.keys, self.values, self.energies = [], [], []

    def watch(self, module, query, key, value):
        size = query.shape[-1]
        energy = query.float().square().transpose(0, 1).reshape(key.shape[1], -1, size).mean(1)
        self.energies.append((energy[:, : size // 2] + energy[:, size // 2 :]) / 2)
        self.keys.append(key.float().transpose(1, 2).flatten(0, 1))
        self.values.append(value.float().transpose(1, 2).flatten(0, 1))
        return key, value

    def sampled(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """SAMPLED of the tokens, evenly spaced: [N, G, d]."""
        tokens = torch.cat(parts)
        return tokens[:: math.ceil(len(tokens) / SAMPLED)]


@dataclass
class Basis:
    """factor: f [G, P] complex; value_map: M [G, d, d] float64; the error that q4_0 leaves, per head, over
    the one without this basis: of scores and of the values' part of the output, [G]."""

    factor: torch.Tensor
    value_map: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@torch.no_grad()
def fit_basis(attention, samples: CacheSamples, layout: str) -> Basis:
    """The basis for one layer and a layout of common/models/quantized_cache.py."""
    keys, energy = samples.sampled(samples.keys), torch.stack(samples.energies).mean(0)
    norm = norm_kind(attention)
    factor = fit_keys(to_complex(keys), energy, layout, norm)
    errors = [score_error(keys, energy, given, layout) for given in (torch.ones_like(factor), factor)]
    if norm == "head":
        errors = [error.sum(0, keepdim=True).expand_as(error) for error in errors]
    factor = factor.where((errors[1] < errors[0])[:, None], 1)

    values, every = samples.sampled(samples.values), torch.cat(samples.values).double()
    output = output_gram(output_projection(attention).weight, *keys.shape[1:])
    value_map = fit_values(torch.einsum("nga,ngb->gab", every, every) / len(every), output)
    plain = torch.eye(keys.shape[-1], dtype=torch.float64, device=keys.device).expand_as(value_map)
    lost = [output_error(values, output, given, layout) for given in (plain, value_map)]
    value_map = value_map.where((lost[1] < lost[0])[:, None, None], plain)
    return Basis(factor, value_map, relative(errors), relative(lost))


def relative(errors: list[torch.Tensor]) -> torch.Tensor:
    """The lower of two errors over the first; 1 where that is 0."""
    first, second = errors
    return torch.where(first > 0, torch.minimum(first, second) / first, 1)


def fit_keys(keys: torch.Tensor, energy: torch.Tensor, layout: str, norm: str = "") -> torch.Tensor:
    """f [G, P] from keys [N, G, P] complex and E|q[p]|^2 / 2 [G, P]; norm: families.norm_kind."""
    shape = (1, *energy.shape[1:]) if norm == "head" else energy.shape
    scale, phase = (torch.zeros(shape, device=energy.device, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([scale] if norm else [scale, phase], lr=RATE)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    tiny = torch.finfo(energy.dtype).tiny
    with torch.enable_grad():
        for _ in range(STEPS):
            factor = torch.polar(scale.exp(), phase).expand_as(energy)
            loss = expected_error(keys, energy, factor, layout).clamp(min=tiny).log().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
    scale = scale - scale.mean(-1, keepdim=True)  # the scale of all pairs changes nothing
    return torch.polar(scale.exp(), phase).expand_as(energy).detach()


def expected_error(keys: torch.Tensor, energy: torch.Tensor, factor: torch.Tensor,
                   layout: str) -> torch.Tensor:
    """The error of scores with f, differentiable: [G]. Arguments: as for fit_keys."""
    weights = (energy / factor.abs().square()).repeat(1, 2)
    blocks = as_cached(to_real(keys * factor), layout, keys=True).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    noise = torch.minimum((largest / 8).square() / 12, blocks.square()) * (blocks.abs() < largest)
    spread = as_cached(torch.eye(weights.shape[-1], device=weights.device), layout, keys=True).square()
    taken_back = noise.flatten(-2).mean(0) @ spread.mT  # from the channels of the cache to those of keys
    return (taken_back * weights).sum(-1)


def score_error(keys: torch.Tensor, energy: torch.Tensor, factor: torch.Tensor, layout: str) -> torch.Tensor:
    """The error of scores that q4_0 itself leaves with f, [G]; keys [N, G, d]."""
    turned = to_real(to_complex(keys) * factor)
    error = (turned - read_back(turned, "q4_0", layout, keys=True)).square().mean(0)
    return (error * (energy / factor.abs().square()).repeat(1, 2)).sum(-1)


def fit_values(moment: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """M [G, d, d] from C and W_O^T W_O, [G, d, d] float64."""
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    moment, output = (matrix + RIDGE * (matrix.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * eye)
                      + torch.finfo(torch.float32).tiny * eye for matrix in (moment, output))
    half, inverse = power(moment, 0.5), power(moment, -0.5)
    mean = inverse @ power(half @ output @ half, 0.5) @ inverse
    draws = torch.randn(eye.shape, generator=torch.Generator().manual_seed(0), dtype=eye.dtype)
    root = power(mean, 0.5)
    root = root / root.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]  # its scale changes nothing
    return torch.linalg.qr(draws).Q.to(eye.device) @ root


def power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of symmetric positive matrices [..., d, d]."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=torch.finfo(torch.float32).tiny)[..., None, :] ** exponent @ vectors.mT


def output_error(values: torch.Tensor, output: torch.Tensor, value_map: torch.Tensor,
                 layout: str) -> torch.Tensor:
    """The squared error of W_O v that q4_0 itself leaves with M, [G]; values [N, G, d]."""
    mapped = torch.einsum("gab,ngb->nga", value_map, values.double()).float()
    error = torch.einsum("gab,ngb->nga", torch.linalg.inv(value_map),
                         (mapped - read_back(mapped, "q4_0", layout, keys=False)).double())
    return torch.einsum("nga,gab,ngb->g", error, output, error) / len(values)


@torch.no_grad()
def change_basis(attention, basis: Basis) -> None:
    """Change the parameters of an attention layer, in place; its output is unchanged."""
    size, repeats = basis.value_map.shape[-1], query_heads_per_kv_head(attention)
    factors = {"k": basis.factor, "q": (1 / basis.factor.conj()).repeat_interleave(repeats, 0)}
    inverse = torch.linalg.inv(basis.value_map).repeat_interleave(repeats, 0)
    norm = norm_kind(attention)
    changed = head_parameters(attention)
    for name, parameter in changed.items():
        if name == "o_proj.weight":
            blocks = torch.einsum("ohb,hba->oha", head_columns(parameter, size), inverse)
        elif name.startswith("v_proj."):
            blocks = basis.value_map @ head_rows(parameter, size)
        elif bool(norm) == ("_norm." in name):  # behind a norm, its weights take the factor
            rows = head_rows(parameter, size)
            blocks = rotate_pairs(rows, factors[name[0]][: len(rows)].to(torch.complex128))
        else:
            continue
        changed[name] = blocks.reshape(parameter.shape).to(parameter.dtype)
    for name, tensor in as_stored(attention, changed).items():
        attention.get_parameter(name).copy_(tensor)
