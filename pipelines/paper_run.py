"""A run directory and its layers, as paper_check.py compares them with the printed equations."""

import os

import torch

import paper
from common.artifacts import RECORD, read_layer, read_record, read_tensors
from common.cli import UserError
from common.data.generate import Origin, read_calibrated
from common.method.stats import LayerGrams, LayerStats
from common.models import load_config, source_model
from common.weights import open_checkpoint

CHECKED = ("llama", "mistral", "qwen2", "qwen3")  # of one layout, with Llama's norms
BATCH = 64  # tokens


class Run:
    """A run directory after stage 4 or later."""

    def __init__(self, directory: str):
        self.directory = directory
        self.calibration = read_record(self.path("calibration"), "01_calibrate.py")
        self.model = source_model(self.calibration)
        self.similarity, _ = read_tensors(self.path("similarity.safetensors"), "02_similarity.py")
        self.grouping = read_record(self.path("groups.json"), "03_group.py", self.model)
        self.alignment = read_record(self.path("aligned"), "04_align.py", self.model)
        trained = os.path.exists(os.path.join(self.path("train"), RECORD))
        self.training = read_record(self.path("train"), "05_prune_train.py", self.model) if trained else None
        self.masks = self.training["summary"]["masks"] if trained else "l0"
        self.config = load_config(self.path("source"))
        if self.config.model_type not in CHECKED:
            raise UserError(f"{directory}: expected model_type in {list(CHECKED)}, "
                            f"found {self.config.model_type!r}, to compare with the printed equations")
        self.heads, self.size = self.model["kv_heads"], self.model["head_dim"]
        self.groups = torch.tensor(self.alignment["groups"])  # [layers, G, D]
        self.kv_heads, self.members = self.groups.shape[1:]

    def path(self, name: str) -> str:
        return self.model["path"] if name == "source" else os.path.join(self.directory, name)

    def rounding(self, name: str) -> float:
        """The relative error of a checkpoint's weights, which are rounded to their dtype."""
        return torch.finfo(load_config(self.path(name)).dtype).eps

    def tokens(self) -> torch.Tensor:
        """The calibration's tokens; of C4, the first document's. Raises UserError if there are too few."""
        of_c4 = self.calibration["arguments"]["text"] == "c4"
        sequences = 1 if of_c4 else self.calibration["summary"]["sequences"]
        origin = Origin(self.path("source"), self.directory, "cpu")
        tokens, _ = read_calibrated(self.calibration, origin, sequences)
        if tokens.numel() < BATCH:
            raise UserError(f"expected at least {BATCH} tokens, found {tokens.numel()}")
        return tokens.flatten()

    def attention(self, name: str, layer: int) -> dict[str, list[torch.Tensor]]:
        """W_Q, W_K, W_V [d_H, d] and W_O [d, d_H] of each key/value head by letter, float64.

        A bias is one more column, but for that of W_O, which belongs to no head. Query heads that share a
        key/value head are side by side: W_Q [d_H, 2 d], W_O [2 d, d_H].
        """
        stored, heads = open_checkpoint(self.path(name)), {}
        for letter in "qkvo":
            prefix, axis = f"model.layers.{layer}.self_attn.{letter}_proj.", int(letter == "o")
            weight = stored[prefix + "weight"][:].double()
            if letter != "o" and prefix + "bias" in stored:
                weight = torch.cat((weight, stored[prefix + "bias"][:].double()[:, None]), dim=1)
            parts = weight.split(self.size, axis)
            sharing = self.model["heads"] // self.heads if letter in "qo" else 1
            starts = range(0, len(parts), sharing)
            heads[letter] = [torch.cat(parts[start : start + sharing], 1 - axis) for start in starts]
        return heads


class Layer:
    """A layer's sampled vectors, its heads in the source and in aligned/, and the rotations between them."""

    def __init__(self, run: Run, index: int):
        tensors = read_layer(run.path("calibration"), index)
        self.index, self.groups, self.theta = index, run.groups[index], tensors["rope.frequencies"]
        self.keys, self.values = tensors["sample.key"], tensors["sample.value"]  # [N, H, d_H]
        caches = (vectors.double().flatten(1).T for vectors in (self.keys, self.values))
        self.K, self.V = (paper.eq_1(cache, run.heads) for cache in caches)  # [d_H, N] of each head
        stats = LayerStats(run.heads, run.size)
        stats.update_keys(self.keys)
        stats.update_values(self.values)
        self.sampled = LayerGrams(stats.tensors() | {"key.free": tensors["key.free"]}, run.heads)
        self.whole = LayerGrams(tensors, run.heads)  # of all tokens
        source, self.new = (run.attention(name, index) for name in ("source", "aligned"))
        self.old = {letter: [heads[i] for i in self.groups.flatten()] for letter, heads in source.items()}
        self.Q, self.R = [], []
        for i in range(run.heads):
            old, new = ({letter: heads[letter][i] for letter in "qkvo"} for heads in (self.old, self.new))
            Phi, _, Psi = paper.eq_5(*(torch.cat((head["v"], head["o"].T), dim=1) for head in (old, new)))
            keys_and_queries = (torch.cat((head["k"], head["q"]), dim=1) for head in (new, old))
            self.Q.append(paper.minimizer(Phi, Psi))
            self.R.append(paper.key_rotation(*keys_and_queries))
