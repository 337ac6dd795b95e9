"""Output refit: each merged layer's W_O anew, by least squares against what the original layer put out.

Layer by layer from the first, on text: h are the merged layer's head outputs (the input of o_proj) with the merged and refitted
layers before it in place, y what the original layer's o_proj gave for the same tokens. W_O <- argmin sum |y - W h|^2 +
ridge |W - W_O|^2. The ridge is chosen by the error on sequences held out of the fit; keeping W_O is among the choices.
"""

import torch

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # times the mean of the diagonal of sum h h^T
HELD_OUT = 4  # one sequence in so many judges the ridge


class Tap:
    """What goes into a module and what comes out of it, of the last call."""

    def __init__(self, module):
        self.handle = module.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output) -> None:
        self.seen = inputs[0].detach(), output.detach()


class Refit:
    """Text on its way through an original model and a merged one, layer by layer from the first.

    wanted, ours: its hidden states before the first layer, [n, T, hidden] a batch, for the original and the merged model.
    run(layer, hidden): a decoder layer of either applied to them, attention by sdpa.
    """

    def __init__(self, run, wanted, ours):
        self.run, self.wanted, self.ours = run, wanted, ours
        sizes = [len(wanted[number]) for number in range(len(wanted))]
        held_out = torch.arange(sum(sizes)) % HELD_OUT == HELD_OUT - 1
        held_out[-1] |= not held_out.any()
        self.held_out = held_out.split(sizes)

    @torch.no_grad()
    def layer(self, original, merged) -> dict:
        """Refit o_proj of the decoder layer `merged` in place, and move on. Returns the ridge chosen (None: W_O kept) and the error on
        held-out sequences before and after, as shares of |y|^2.

        original: the layer of the function wanted, whatever its number of kv heads.
        """
        taps = [Tap(layer.self_attn.o_proj) for layer in (original, merged)]
        bias, projection = original.self_attn.o_proj.bias, merged.self_attn.o_proj
        width, out = projection.in_features, projection.out_features
        sums = {part: [torch.zeros(width, width, dtype=torch.float64), torch.zeros(out, width, dtype=torch.float64), 0.0] for part in ("fit", "judge")}
        for number, held in enumerate(self.held_out):
            self.wanted[number] = self.run(original, self.wanted[number])
            self.run(merged, self.ours[number])
            target = taps[0].seen[1] - (0 if bias is None else bias)
            for part, chosen in (("fit", ~held), ("judge", held)):
                h, y = (states[chosen.to(states.device)].flatten(0, 1).float() for states in (taps[1].seen[0], target))
                sums[part][0] += (h.T @ h).double().cpu()
                sums[part][1] += (y.T @ h).double().cpu()
                sums[part][2] += float(y.double().square().sum())
        for tap in taps:
            tap.handle.remove()
        weight, ridge, before, after = best_fit(projection.weight.double().cpu(), sums["fit"], sums["judge"])
        projection.weight.copy_(weight.to(projection.weight.dtype))
        for number in range(len(self.ours)):
            self.ours[number] = self.run(merged, self.ours[number])
        return {"ridge": ridge, "before": before, "after": after}


def best_fit(weight: torch.Tensor, fit: list, judge: list) -> tuple[torch.Tensor, float | None, float, float]:
    """Of W and its ridge regressions, the one with the least held-out error; its ridge, and that error of W and of it.

    fit, judge: (sum h h^T, sum y h^T, sum |y|^2) of the two parts of the text, float64.
    """

    def error(candidate):
        moment, cross, total = judge
        return float((total - 2 * (candidate * cross).sum() + (candidate @ moment * candidate).sum()) / total)

    moment, cross, _ = fit
    unit = float(moment.diagonal().mean())
    best = weight, None, error(weight)
    before = best[2]
    for ridge in RIDGES:
        damped = moment + ridge * unit * torch.eye(len(moment), dtype=torch.float64)
        candidate = torch.linalg.solve(damped, (cross + ridge * unit * weight).T).T
        if error(candidate) < best[2]:
            best = candidate, ridge, error(candidate)
    return best[0], best[1], before, best[2]
