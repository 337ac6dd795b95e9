"""Output refit: each merged layer's W_O anew, by least squares against what the original layer put out.

Layer by layer from the first, on text: h are the merged layer's head outputs (the input of o_proj) with the merged and refitted
layers before it in place, y what the original layer's o_proj gave for the same tokens. W_O <- argmin sum |y - W h|^2 +
ridge |W - W_O|^2. The ridge is chosen by the error on sequences held out of the fit; keeping W_O is among the choices.
"""

import torch
from tqdm import tqdm

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # times the mean of the diagonal of sum h h^T
HELD_OUT = 4  # one sequence in so many judges the ridge


class Tap:
    """What goes into a module and what comes out of it, of the last call."""

    def __init__(self, module):
        self.handle = module.register_forward_hook(self._keep)

    def _keep(self, module, inputs, output) -> None:
        self.seen = inputs[0].detach(), output.detach()


def run_layer(model, index: int, hidden: torch.Tensor) -> torch.Tensor:
    """One decoder layer over hidden states [n, T, hidden] of plain sequences; causal, positions from 0."""
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    angles = model.model.rotary_emb(hidden, position_ids=positions)
    output = model.model.layers[index](hidden, attention_mask=None, position_ids=positions, position_embeddings=angles)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def refit(original, merged, tokens: torch.Tensor, batch: int = 4) -> list[dict]:
    """Refit every o_proj of `merged` in place. tokens: [n, T], n >= 2. Returns per layer the ridge chosen (None: W_O kept) and the
    error on held-out sequences before and after, as shares of |y|^2.

    original: a model of the function wanted, whatever its number of kv heads. Both need attn_implementation "sdpa".
    """
    ids = [part.to(merged.device) for part in tokens.split(batch)]
    wanted, ours = ([model.model.embed_tokens(part).cpu() for part in ids] for model in (original, merged))
    held_out = torch.arange(len(tokens)) % HELD_OUT == HELD_OUT - 1
    held_out[-1] |= not held_out.any()
    figures = []
    for index in tqdm(range(len(merged.model.layers)), desc="refitting", unit="layer"):
        attentions = [model.model.layers[index].self_attn for model in (original, merged)]
        taps = [Tap(attention.o_proj) for attention in attentions]
        projection = attentions[1].o_proj
        width, out = projection.in_features, projection.out_features
        sums = {part: [torch.zeros(width, width, dtype=torch.float64), torch.zeros(out, width, dtype=torch.float64), 0.0] for part in ("fit", "judge")}
        for number, held in enumerate(held_out.split(batch)):
            wanted[number] = run_layer(original, index, wanted[number].to(merged.device)).cpu()
            run_layer(merged, index, ours[number].to(merged.device))
            target = taps[0].seen[1] - (0 if attentions[0].o_proj.bias is None else attentions[0].o_proj.bias)
            for part, chosen in (("fit", ~held), ("judge", held)):
                h, y = (states[chosen.to(states.device)].flatten(0, 1).float() for states in (taps[1].seen[0], target))
                sums[part][0] += (h.T @ h).double().cpu()
                sums[part][1] += (y.T @ h).double().cpu()
                sums[part][2] += float(y.double().square().sum())
        for tap in taps:
            tap.handle.remove()
        weight, ridge, before, after = best_fit(projection.weight.double().cpu(), sums["fit"], sums["judge"])
        projection.weight.copy_(weight.to(projection.weight.dtype))
        figures.append({"ridge": ridge, "before": before, "after": after})
        for number, states in enumerate(ours):
            ours[number] = run_layer(merged, index, states.to(merged.device)).cpu()
    return figures


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
