"""Stages 1 to 4 on a transformers model in memory; docs/METHOD.md has an example that runs.

It calls what the stages call, with their defaults, and the result has the tensors of their merged/, bit for
bit. All statistics (7 GiB for a 7B model) and a float32 copy of the model are in memory. The proof of stage 1
is made here, too; stage 4's check, that the rotated model equals its source, is not.
"""

import common.run.openmp  # noqa: F401 - before torch
import copy
import tempfile

import torch
from torch import nn

from common.method.grouping import ITERATIONS, RESTARTS, anneal, default_groups
from common.method.procrustes import align_layer
from common.method.stats import LayerGrams
from common.models import proof
from common.models.calibration import BATCH, collect
from common.models.edits import fuse_groups, merge_layer, merged_config
from common.models.families import check_kv_heads, geometry, key_context
from common.models.layers import Layers
from common.models.load import empty_model, load_config, materialize
from common.models.merging import choose_merges, score_pairs, similarity_by
from common.models.refit import Refit
from common.run.errors import UserError
from common.run.kinds import BY, MERGES, REFITS

CRITERION, SEED = "dist", 0  # as in stages 3 and 4 by default


@torch.no_grad()
def convert(model, token_ids: torch.Tensor, kv_heads: int, by: str = "energy", merge: str = "closed-form",
            refit: str | None = None):
    """A model of the same class with kv_heads key/value heads, untrained. The model itself does not change.

    token_ids: [sequences, length], to calibrate and refit on. by: as in 03_group.py; merge, refit: as in
    04_align.py. Raises UserError for a model that cannot be converted, and for arguments out of range.
    """
    for name, value, kinds in (("by", by, BY), ("merge", merge, MERGES), ("refit", refit, (None, *REFITS))):
        if value not in kinds:
            raise UserError(f"{name}: expected one of {', '.join(map(str, kinds))}, found {value}")
    layers, dtype = open_model(model), model.dtype
    check_kv_heads(geometry(layers.config).kv_heads, kv_heads)
    if token_ids.ndim != 2 or len(token_ids) < (2 if refit else 1):
        raise UserError(f"token_ids: expected [sequences, length], with a refit two or more, found "
                        f"{list(token_ids.shape)}")
    calibration = [LayerGrams({name: tensor.to(layers.device) for name, tensor in tensors.items()},
                              geometry(layers.config).kv_heads)
                   for tensors in collect(layers, token_ids, BATCH, 0, None)]
    context = key_context(None, layers.config.max_position_embeddings)
    groups = find_groups(calibration, layers.config, kv_heads, by, context)
    rotations = [align_layer(*layer, CRITERION) for layer in zip(calibration, groups, strict=True)]
    fuse_layers(layers, groups, rotations, dtype)
    context = context if MERGES[merge].whole_head else None
    merges = choose_merges(merge, calibration.__getitem__, groups, rotations, context)
    refitting = None
    if refit:
        batches = [layers.embed(token_ids.split(1), None) for _ in range(2)]
        refitting = Refit(layers.model, *batches, attention=refit == "attention", context=context)
    config, merged = merged_config(layers.config, kv_heads), []
    for index, (layer, how) in enumerate(zip(layers.decoder_layers(), merges, strict=True)):
        merged.append(merge_layer(layer, index, config, how))
        if refitting:
            refitting.layer(layer, merged[-1])
    layers.model.model.layers = nn.ModuleList(merged)
    return with_weights(layers.model, merged_config(model.config, kv_heads), dtype, layers.device)


def fuse_layers(layers: Layers, groups: torch.Tensor, rotations: list, dtype: torch.dtype) -> None:
    """Rotate and order the heads of all layers, rounded to the dtype of aligned/."""
    for layer, members, rotation in zip(layers.decoder_layers(), groups, rotations, strict=True):
        fuse_groups(layer.self_attn, members, *rotation)
        for parameter in layer.parameters():
            parameter.data = parameter.to(dtype).float()


def open_model(model) -> Layers:
    """A float32 copy of a model. Raises UserError, with the reason, for one that cannot be converted."""
    name, device = model.name_or_path or "the model", str(model.device)
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        config = load_config(directory)  # with the attention function and outputs that stages run
    expected = proof.require_convertible(name, config)
    if type(model).__name__ != expected:
        raise UserError(f"{name}: expected a {expected}, found a {type(model).__name__}")
    own = with_weights(model, config, torch.float32, device)
    return Layers(name, torch.float32, device, model=own)


def with_weights(model, config, dtype: torch.dtype, device: str):
    """A model of this config with the weights of another."""
    copied = empty_model("the model", config, dtype, device)
    materialize(copied, device)
    copied.load_state_dict(model.state_dict())
    copied.tie_weights()
    copied.generation_config = copy.deepcopy(model.generation_config)
    return copied


def find_groups(calibration: list, config, kv_heads: int, by: str, context: int) -> torch.Tensor:
    """Heads that will share, as stages 2 and 3 choose them: [layers, G, D]."""
    shape = geometry(config)
    if by == "none":
        return torch.from_numpy(default_groups(shape.layers, shape.kv_heads, kv_heads))
    similarity = score_pairs(calibration, context if by == "energy" else None)
    chosen = similarity_by(similarity, "similarity", by, CRITERION)
    return torch.from_numpy(anneal(chosen, kv_heads, RESTARTS, ITERATIONS, SEED))
