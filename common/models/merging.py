"""Scores of pairs of heads, and merges of layers of every kind: where the paper and the closed form meet."""

from functools import partial

import numpy as np
import torch

from common.closed_form.layer import before_norms, closed_form_layer, merging_loss, with_energies
from common.method.grouping import combine
from common.method.merge import mean_merge
from common.method.procrustes import layer_similarity
from common.run.errors import UserError
from common.run.kinds import MERGES


def score_pairs(layers, context: int | None) -> dict[str, torch.Tensor]:
    """How alike two heads are, by name, of each layer's LayerGrams: layer_similarity's matrices and, for a
    context in tokens, "energy", minus merging_loss; each [layers, H, H] on the CPU.
    """
    scores = []
    for grams in layers:
        matrices = layer_similarity(grams)
        if context:
            matrices["energy"] = -merging_loss(grams, context)  # more is more similar, as elsewhere
        scores.append({name: matrix.cpu() for name, matrix in matrices.items()})
    return {name: torch.stack([matrices[name] for matrices in scores]) for name in scores[0]}


def similarity_by(tensors: dict, path: str, by: str, criterion: str) -> np.ndarray:
    """The similarity to maximize, [layers, H, H], of the tensors in stage 2's file at `path`.

    Raises UserError if there are no energy scores and `by` asks for them.
    """
    if by == "energy" and "energy" not in tensors:
        raise UserError(f"{path}: expected energy scores, found none; run 02_similarity.py --energy --force")
    if by == "energy":
        return tensors["energy"].numpy()
    # after: heads are merged as stage 4 turns them
    key, value = (tensors[f"{head}.{criterion}.after"].numpy() for head in ("key", "value"))
    both = combine(key, value)
    return {"key": key, "value": value, "both": both, "none": both}[by]  # for none it only gives the scores


def choose_merges(kind: str, grams_of, groups: torch.Tensor, rotations: list, context: int | None):
    """Yield each layer's Merge of a kind of MERGES.

    grams_of: a layer's index -> its LayerGrams. groups: [layers, G, D]. rotations: Q and u of each layer.
    context: tokens, for closed-form.
    """
    whole_head = MERGES[kind].whole_head
    merge_of = {"mean": mean_merge, "closed-form": partial(closed_form_layer, context=context)}[kind]
    for index, (layer_groups, rotation) in enumerate(zip(groups, rotations, strict=True)):
        grams = grams_of(index)
        merge = merge_of(grams, layer_groups, *rotation)
        if grams.joint_norm:
            merge = with_energies(merge, grams, layer_groups, rotation[1], whole_head)
        elif grams.head_norms and whole_head:
            merge = before_norms(merge, grams, layer_groups, rotation[1])
        yield merge
