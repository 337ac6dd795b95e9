"""Refit a merged model to its source, layer by layer, on text.

Layers are refitted in order: A(x) is the attention output (of o_proj) of the merged layer, given the merged
and refitted layers before it. Its target y is that of the source's layer for the same tokens, plus DRIFT of
the difference by which the merged model's residual stream has already drifted from the source's: what is
added to the stream here can take back what was lost before. The error is sum |y - A(x)|^2 / sum |y|^2 on
held-out text.

Output refit: W_O by least squares. With h the input of o_proj, W_O <- argmin_W sum |y - W h|^2 + ridge |W -
W_O|^2. The ridge strength is chosen by the error; keeping W_O is one of the candidates.

Distances: keys may be merged for a context longer than the sequences are. Both models then read every other
sequence of those that fit, and of those held out, at positions with two gaps (PoSE, Zhu et al., arXiv
2309.10400): distances occur that the text has not.

Attention refit: then W_Q, W_K, W_V, W_O, the biases of q, k and v, and the norms of q and k are trained to
reduce the error of one batch a step. The weights of the epoch with the least held-out error are kept; those
of the output refit are one of the candidates. W_O is solved for once more at the end. Muon, head by head,
trains the matrices, AdamW the rest. Learning rates are relative to each tensor's root mean square, because
the scale of merged keys and values is arbitrary.

Muon (Jordan et al., 2024): a head's gradient, averaged over steps, is replaced by the nearest matrix with
singular values of about 1, so that no direction waits for its turn. Head by head it is cheaper than for the
complete matrix, and gets further (docs/LOG.md). float32, unlike torch.optim.Muon: without instructions for
bfloat16 a layer's refit takes over ten times as long.
"""

from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from common.models.families import merged_parameters, output_name, output_projection
from common.models.forward import attention_factor, run_attention, run_layer

RIDGE_STRENGTHS = tuple(10 ** (half / 2) for half in range(-8, 3))  # of the mean diagonal of sum h h^T
HELD_OUT_EVERY = 8  # one in so many batches is held out
EPOCHS = 4  # of training; the error still falls after eight, at a cost in proportion
RATE = 0.03  # initial learning rate, relative to a tensor's root mean square; a cosine takes it to 0
DRIFT = 0.5  # of the difference between residual streams; 0 leaves a KL 8 to 10 % higher (docs/LOG.md)
FARTHEST = 4  # lengths of a sequence in the longest context with gaps: a longer one only loses (docs/LOG.md)
ERRORS = "merged", "output", "attention"  # names in the metrics of a layer
NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # x <- a x + b x^3 + c x^5 takes singular values in (0, 1] to about 1
ITERATIONS = 5
MOMENTUM = 0.9
STEP = 0.2  # root mean square of a step's elements at a learning rate of 1: about that of AdamW's


class IORecorder:
    """Forward hook that keeps the input and output of a module's last call."""

    def __init__(self, module):
        self.handle = module.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output) -> None:
        self.input, self.output = inputs[0].detach(), output.detach()


@dataclass
class Moments:
    """Sufficient statistics of the least squares: sums over tokens, float64, on the weights' device."""

    inputs: torch.Tensor  # sum h h^T [heads * d, heads * d]
    cross: torch.Tensor  # sum y h^T [hidden, heads * d]
    energy: torch.Tensor | float = 0.0  # sum |y|^2

    def add(self, h: torch.Tensor, y: torch.Tensor) -> None:
        """Add tokens: h [..., heads * d], y [..., hidden]; products in float32."""
        h, y = h.flatten(0, -2).float(), y.flatten(0, -2).float()
        self.inputs += (h.T @ h).double()
        self.cross += (y.T @ h).double()
        self.energy = self.energy + y.double().square().sum()

    def error(self, weight: torch.Tensor) -> float:
        """Relative error sum |y - W h|^2 / sum |y|^2 of W [hidden, heads * d]; 0 if y is zero."""
        if self.energy == 0:
            return 0.0
        residual = self.energy - 2 * (weight * self.cross).sum() + (weight @ self.inputs * weight).sum()
        return max(float(residual / self.energy), 0.0)  # negative only by rounding


class Refit:
    """Runs text through an original and a merged model side by side, refitting one layer after another.

    model: either, whose masks and positions those of both are. targets, inputs: lists of batches
    [n, T, hidden] before the first layer, replaced in place: for the original model and the refitted one.
    attention: do the attention refit, too. context: tokens that keys are merged for; None: no gaps between
    positions. store: makes a list of batches. metrics: per layer the ridge
    strength of the output refit (None: W_O kept) and the held-out error, "merged", after the "output" and,
    where asked for, the "attention" refit.
    """

    def __init__(self, model, targets, inputs, attention: bool = False, context: int | None = None,
                 store=list):
        self.model, self.attention, self.store = model, attention, store
        self.targets, self.inputs = targets, inputs
        self.metrics: list[dict] = []
        every = min(HELD_OUT_EVERY, len(targets))
        self.held_out = range(every - 1, len(targets), every)
        self.fitted = [number for number in range(len(targets)) if number not in self.held_out]
        gapped = {*self.fitted[1::2], *self.held_out[1::2]}  # half of each, so that both kinds are judged
        self.positions = [gapped_positions(number, targets[0].shape[1], context) if number in gapped else None
                          for number in range(len(targets))]

    @torch.no_grad()
    def layer(self, original, merged) -> dict:
        """Refit the decoder layer `merged` in place, advance the texts, and return the metrics.

        original: the decoder layer to approximate, with any number of kv heads.
        """
        outputs = self.store(self._outputs(original))
        ridge, before, after = self._fit(merged, outputs)
        metrics = {"ridge": ridge, "merged": before, "output": after}
        if self.attention:
            self._train(merged, outputs, after)
            metrics["attention"] = self._fit(merged, outputs)[2]
        self._advance(merged, self.inputs)
        self.metrics.append(metrics)
        return metrics

    @torch.no_grad()
    def pass_by(self, original, merged, parameters: dict[str, torch.Tensor], metrics: dict) -> None:
        """As layer(), where these parameters and metrics are what it has led to before."""
        self._advance(original, self.targets)
        for name, parameter in merged_parameters(merged.self_attn).items():
            parameter.copy_(parameters[name])
        self._advance(merged, self.inputs)
        self.metrics.append(metrics)

    def _advance(self, layer, batches) -> None:
        for number, positions in enumerate(self.positions):
            batches[number] = run_layer(self.model, layer, batches[number], positions)

    def _outputs(self, original):
        """Yield the target of the attention output for each batch, and advance the original's text."""
        tap = IORecorder(output_projection(original.self_attn))
        factor = attention_factor(self.model, original)
        for number in range(len(self.targets)):
            before = self.targets[number]
            drift = before - self.inputs[number]
            self.targets[number] = run_layer(self.model, original, before, self.positions[number])
            yield tap.output + DRIFT * drift / factor if factor else tap.output
        tap.handle.remove()

    def _attend(self, merged, number: int) -> torch.Tensor:
        """The merged layer's attention output for one batch."""
        return run_attention(self.model, merged, self.inputs[number], self.positions[number])

    def _fit(self, merged, outputs) -> tuple[float | None, float, float]:
        """Refit W_O in place. Returns the ridge strength, and the held-out error before and after."""
        projection = output_projection(merged.self_attn)
        fit, judge = (self._moments(merged, outputs, numbers) for numbers in (self.fitted, self.held_out))
        weight, ridge, before, after = best_fit(projection.weight.double(), fit, judge)
        projection.weight.copy_(weight.to(projection.weight.dtype))
        return ridge, before, after

    def _moments(self, merged, outputs, numbers) -> Moments:
        """The statistics of W_O over some batches; its bias is not W_O's to fit."""
        projection = output_projection(merged.self_attn)
        tap, bias = IORecorder(projection), 0 if projection.bias is None else projection.bias
        cross = torch.zeros_like(projection.weight, dtype=torch.float64)
        moments = Moments(cross.new_zeros(cross.shape[1], cross.shape[1]), cross)
        for number in numbers:
            self._attend(merged, number)
            moments.add(tap.input, outputs[number] - bias)
        tap.handle.remove()
        return moments

    def _train(self, merged, outputs, error: float) -> None:
        """Train the projections of `merged`, whose held-out error is `error`, in place; keep the best."""
        parameters = list(merged_parameters(merged.self_attn).values())
        best = [parameter.detach().clone() for parameter in parameters]
        steps = EPOCHS * len(self.fitted)
        schedules = [CosineAnnealingLR(optimizer, steps) for optimizer in optimizers(merged.self_attn)]
        order = torch.Generator().manual_seed(0)
        for _ in range(EPOCHS):
            for position in torch.randperm(len(self.fitted), generator=order).tolist():
                with torch.enable_grad():
                    self._error(merged, outputs, [self.fitted[position]]).backward(inputs=parameters)
                for schedule in schedules:
                    schedule.optimizer.step()
                    schedule.optimizer.zero_grad()
                    schedule.step()
            after = float(self._error(merged, outputs, self.held_out))
            if after < error:
                best, error = [parameter.detach().clone() for parameter in parameters], after
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)

    def _error(self, merged, outputs, numbers) -> torch.Tensor:
        """The relative error over some batches, float32; differentiable."""
        residual = sum((self._attend(merged, number) - outputs[number]).square().sum() for number in numbers)
        return residual / sum(outputs[number].square().sum() for number in numbers)


def gapped_positions(number: int, length: int, context: int | None) -> torch.Tensor | None:
    """Ascending positions [length] below `context` of sequence `number`; None: from 0, without gaps.

    Two cuts and the gaps there are random, by the number. A context beyond FARTHEST lengths has no gaps.
    """
    room = (context or 0) - length
    if not 0 < room <= (FARTHEST - 1) * length:
        return None
    draw = torch.Generator().manual_seed(number)
    cuts = torch.randperm(length - 1, generator=draw)[:2].sort().values + 1
    shifts = torch.randint(room + 1, (2,), generator=draw).sort().values
    positions = torch.arange(length)
    for cut, shift in zip(cuts, shifts.diff(prepend=shifts.new_zeros(1)), strict=True):
        positions[cut:] += shift
    return positions


def optimizers(attention) -> list[torch.optim.Optimizer]:
    """Muon for the projections of an attention module and AdamW for their biases and norms, if any."""
    matrices, vectors = [], []
    for name, parameter in merged_parameters(attention).items():
        group = {"params": [parameter], "lr": RATE * float(parameter.detach().square().mean().sqrt())}
        if parameter.ndim == 2:
            matrices.append(group | {"columns": name == f"{output_name(attention)}.weight"})
        else:
            vectors.append(group)
    muon = HeadMuon(matrices, attention.head_dim)
    return [muon, torch.optim.AdamW(vectors, weight_decay=0)] if vectors else [muon]


def best_fit(weight: torch.Tensor, fit: Moments,
             judge: Moments) -> tuple[torch.Tensor, float | None, float, float]:
    """The best on `judge` of W [hidden, heads * d] and its ridge regressions on `fit`.

    Returns the best weight, its ridge strength (None: W itself), the error of W, and that of the best weight.
    W is kept if h is zero.
    """
    best, best_ridge = weight, None
    before = least = judge.error(weight)
    unit = float(fit.inputs.diagonal().mean())
    if unit == 0:
        return best, best_ridge, before, least
    for ridge in RIDGE_STRENGTHS:
        damped = fit.inputs + ridge * unit * torch.eye(len(fit.inputs)).to(fit.inputs)
        candidate = torch.linalg.solve(damped, (fit.cross + ridge * unit * weight).T).T
        error = judge.error(candidate)
        if error < least:
            best, best_ridge, least = candidate, ridge, error
    return best, best_ridge, before, least


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
                if group["columns"]:
                    direction = direction.T
                heads = orthogonalized(direction.unflatten(0, (-1, self.head_dim)))
                step = STEP * max(heads.shape[1:]) ** 0.5 * heads.flatten(0, 1)
                weight.sub_(group["lr"] * (step.T if group["columns"] else step))
