"""Output refit: re-solve each merged layer's W_O by least squares against the original layer's output.

Layers are refitted in order, on text: h are the merged layer's head outputs (the input of o_proj) given the
merged and refitted layers before it, y the output of the original layer's o_proj for the same tokens.
W_O <- argmin_W sum |y - W h|^2 + ridge |W - W_O|^2. The ridge strength is chosen by the error on held-out
sequences; keeping W_O is one of the candidates.
"""

from dataclasses import dataclass

import torch

RIDGE_STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # relative to the mean diagonal of sum h h^T
HELD_OUT_EVERY = 4  # one in so many sequences is held out to choose the ridge strength


class Tap:
    """Forward hook that keeps the input and output of a module's last call."""

    def __init__(self, module):
        self.handle = module.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output) -> None:
        self.input, self.output = inputs[0].detach(), output.detach()


@dataclass
class Moments:
    """Sufficient statistics of the least squares: sums over tokens, float64."""

    inputs: torch.Tensor  # sum h h^T [heads * d, heads * d]
    cross: torch.Tensor  # sum y h^T [hidden, heads * d]
    energy: float = 0.0  # sum |y|^2

    @classmethod
    def zeros(cls, out: int, width: int) -> "Moments":
        """Empty sums for y of size out and h of size width."""
        inputs = torch.zeros(width, width, dtype=torch.float64)
        return cls(inputs, torch.zeros(out, width, dtype=torch.float64))

    def add(self, h: torch.Tensor, y: torch.Tensor) -> None:
        """Add n tokens: h [n, heads * d], y [n, hidden]; products in float32."""
        h, y = h.float(), y.float()
        self.inputs += (h.T @ h).double().cpu()
        self.cross += (y.T @ h).double().cpu()
        self.energy += float(y.double().square().sum())

    def error(self, weight: torch.Tensor) -> float:
        """Relative error sum |y - W h|^2 / sum |y|^2 of W [hidden, heads * d]; 0 if y is zero."""
        if self.energy == 0:
            return 0.0
        residual = self.energy - 2 * (weight * self.cross).sum() + (weight @ self.inputs * weight).sum()
        return float(residual / self.energy)


class Refit:
    """Runs text through an original and a merged model side by side, refitting one layer after another.

    run(layer, hidden): applies a decoder layer of either model to hidden states. targets, inputs, unrefitted:
    sequences of batches [n, T, hidden] before the first layer, replaced in place: for the original model, the
    refitted one, and the merged one without a refit. figures: per layer the chosen ridge strength (None: W_O
    kept) and the relative error on held-out sequences before and after.
    """

    def __init__(self, run, targets, inputs, unrefitted=()):
        self.run, self.targets, self.inputs, self.unrefitted = run, targets, inputs, unrefitted
        self.figures: list[dict] = []
        sizes = [len(targets[number]) for number in range(len(targets))]
        held_out = torch.arange(sum(sizes)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        held_out[-1] |= not held_out.any()
        self.held_out = held_out.split(sizes)

    @torch.no_grad()
    def layer(self, original, merged) -> dict:
        """Refit o_proj of the decoder layer `merged` in place, advance the texts, and return the figures.

        original: the decoder layer to approximate, with any number of kv heads.
        """
        self._advance(merged, self.unrefitted)
        projection = merged.self_attn.o_proj
        fit, judge = self._moments(original, merged)
        weight, ridge, before, after = best_fit(projection.weight.double().cpu(), fit, judge)
        projection.weight.copy_(weight.to(projection.weight.dtype))
        self._advance(merged, self.inputs)
        self.figures.append({"ridge": ridge, "before": before, "after": after})
        return self.figures[-1]

    def _advance(self, layer, batches) -> None:
        for number in range(len(batches)):
            batches[number] = self.run(layer, batches[number])

    def _moments(self, original, merged) -> tuple[Moments, Moments]:
        """One layer's statistics for fitting and for held-out evaluation; advances the original's text."""
        source, approximation = Tap(original.self_attn.o_proj), Tap(merged.self_attn.o_proj)
        bias, shape = original.self_attn.o_proj.bias, merged.self_attn.o_proj.weight.shape
        fit, judge = Moments.zeros(*shape), Moments.zeros(*shape)
        for number, held_out in enumerate(self.held_out):
            self.targets[number] = self.run(original, self.targets[number])
            self.run(merged, self.inputs[number])
            h, y = approximation.input, source.output - (0 if bias is None else bias)
            held_out = held_out.to(h.device)
            fit.add(h[~held_out].flatten(0, 1), y[~held_out].flatten(0, 1))
            judge.add(h[held_out].flatten(0, 1), y[held_out].flatten(0, 1))
        source.handle.remove()
        approximation.handle.remove()
        return fit, judge


def best_fit(
    weight: torch.Tensor, fit: Moments, judge: Moments
) -> tuple[torch.Tensor, float | None, float, float]:
    """The best on `judge` of W [hidden, heads * d] and its ridge regressions on `fit`.

    Returns the weight, its ridge strength (None: W itself), the error of W, and its error. W is kept if h is
    zero.
    """
    best, best_ridge = weight, None
    before = least = judge.error(weight)
    unit = float(fit.inputs.diagonal().mean())
    if unit == 0:
        return best, best_ridge, before, least
    for ridge in RIDGE_STRENGTHS:
        damped = fit.inputs + ridge * unit * torch.eye(len(fit.inputs), dtype=torch.float64)
        candidate = torch.linalg.solve(damped, (fit.cross + ridge * unit * weight).T).T
        error = judge.error(candidate)
        if error < least:
            best, best_ridge, least = candidate, ridge, error
    return best, best_ridge, before, least
