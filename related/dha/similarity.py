"""How alike the heads of a model are: linear CKA, redundancy and heatmaps (Appendix B.1)."""

import torch

from common.reporting import plots


def cka(heads: torch.Tensor) -> torch.Tensor:
    """Linear CKA of every pair of heads, uncentred as Appendix B.1 prints it: [H, d, n] -> [H, H] float64."""
    heads = heads.double()
    overlap = torch.einsum("adn,ben->abde", heads, heads).square().sum((2, 3))  # |W_a W_b^T|_F^2
    self_overlap = overlap.diagonal()
    return overlap / (self_overlap[:, None] * self_overlap).sqrt()


def redundancy(similarity: torch.Tensor) -> float:
    """Mean of [H, H] similarities over the pairs of different heads, 0 for a single head."""
    if len(similarity) == 1:
        return 0.0
    first, second = torch.triu_indices(*similarity.shape, 1)
    return float(similarity[first, second].mean())


@torch.no_grad()
def head_similarity(model, head_dim: int) -> tuple[dict, dict]:
    """CKA matrices [H, H] of every layer's "query", "key" and "value" heads, and their redundancies."""
    similarity, redundancies = {}, {}
    for kind in ("query", "key", "value"):
        weights = [getattr(layer.self_attn, f"{kind[0]}_proj").weight for layer in model.model.layers]
        matrices = [cka(weight.view(-1, head_dim, weight.shape[1])) for weight in weights]
        similarity[kind] = matrices
        redundancies[kind] = [round(redundancy(matrix), 5) for matrix in matrices]
    return similarity, redundancies


@plots.drawing
def cka_heatmaps(plt, similarity: dict[str, list], redundancies: dict[str, list], title: str):
    """A row of [H, H] heatmaps per kind of head, a column per layer, with the redundancy as title."""
    kinds, layers = len(similarity), len(similarity["key"])
    figure, axes = plt.subplots(
        kinds, layers, squeeze=False, layout="constrained", figsize=(1.7 * layers + 1.4, 1.9 * kinds + 0.5)
    )
    for row, (kind, matrices) in zip(axes, similarity.items(), strict=True):
        for layer, (axis, matrix) in enumerate(zip(row, matrices, strict=True)):
            image = axis.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"layer {layer}: {redundancies[kind][layer]:.3f}", fontsize=8)
        row[0].set_ylabel(kind)
    figure.colorbar(image, ax=axes, shrink=0.6, label="linear CKA of two heads' weights")
    figure.suptitle(title)
    return figure
