"""Calibration: statistics of a model's heads on text, and the directory of stage 1: a file of them per layer,
and the tokens.
"""

import os

import torch
from safetensors.torch import save_file

from common.method.stats import LayerGrams, LayerStats, output_gram
from common.models import families
from common.models.families import free_pairs
from common.models.forward import run_layer
from common.models.layers import Layers
from common.run.artifact import read_record, read_tensors, verify_files
from common.run.errors import UserError
from common.run.progress import Progress

BATCH = 4  # sequences per forward pass: other batches sum in another order
SEQUENCES, LENGTH = 128, 2048  # of the paper's calibration, and tokens in each
SAMPLED = 256  # tokens whose raw head vectors are kept
TOKENS = "tokens.safetensors"  # what was read


def layer_file(index: int) -> str:
    """File name of a layer in a calibration directory."""
    return f"layer-{index:05d}.safetensors"


class Collector:
    """Forward hooks on one layer that accumulate sums over its queries, keys and values, and samples."""

    def __init__(self, layer, name: str, shape: families.Geometry, sampled: torch.Tensor, device: str):
        self.attention, self.name, self.shape = layer.self_attn, name, shape
        self.sampled = sampled  # positions of the sampled tokens in the entire text
        self.head_norms = families.norm_kind(self.attention) == "head"
        self.stats = LayerStats(shape.kv_heads, shape.head_dim, device, self.head_norms)
        self.updates = {"q": self.stats.update_queries, "k": self.stats.update_keys,
                        "v": self.stats.update_values}
        self.samples = {"k": [], "v": []}  # per batch [n, heads, d]
        # before RoPE, which turns pair p of every head by the same angle: conj(z_i[p]) z_j[p] stays the same
        self.hooks = families.watch_heads(self.attention, self._collect)

    def begin(self, start: int, end: int) -> None:
        """Set the position of the next forward pass: tokens start to end - 1 of the entire text."""
        inside = (self.sampled >= start) & (self.sampled < end)
        self.sampled_rows = self.sampled[inside] - start

    def _collect(self, letter: str, vectors: torch.Tensor) -> None:
        heads = vectors.detach().flatten(0, -3)
        if not torch.isfinite(heads.sum(dtype=torch.float32)):
            raise UserError(f"NaN or Inf in the output of {self.name}.self_attn.{letter}_proj")
        if self.head_norms and letter == "k":
            self.stats.update_normed_keys(heads, families.normed(self.attention, "k", heads))
        elif self.head_norms and letter == "q":
            heads = families.normed(self.attention, "q", heads)
        self.updates[letter](heads)
        if letter in self.samples:
            self.samples[letter].append(heads[self.sampled_rows].float().cpu())

    def finish(self) -> dict[str, torch.Tensor]:
        """Remove the hooks and return the tensors of this layer's file."""
        for hook in self.hooks:
            hook.remove()
        tensors = self.stats.tensors()
        tensors |= {f"sample.{kind}": torch.cat(self.samples[kind[0]]) for kind in ("key", "value")}
        tensors["key.free"] = free_pairs(self.attention)
        tensors["key.joint_norm"] = torch.tensor(families.norm_kind(self.attention) == "joint")
        weight = families.output_projection(self.attention).weight
        tensors["output.gram"] = output_gram(weight, self.shape.kv_heads, self.shape.head_dim).cpu()
        scale = self.attention.rope_pairs.scale
        return tensors if scale is None else tensors | {"rope.scale": scale}


def collect(layers: Layers, tokens: torch.Tensor, batch: int, samples: int, directory: str | None):
    """Run the text, tokens [sequences, length], through the model once and yield each layer's tensors.

    batch: sequences per forward pass. samples: tokens whose raw vectors are kept, evenly spaced. directory:
    as for Layers.embed.
    """
    shape, batches, length = families.geometry(layers.config), tokens.split(batch), tokens.shape[1]
    sampled = torch.linspace(0, tokens.numel() - 1, min(samples, tokens.numel())).long().unique()
    hidden = layers.embed(batches, directory)
    with Progress(total=shape.layers * len(batches), desc="calibrating", unit="batch") as bar:
        for index in range(shape.layers):
            with layers.layer(index) as layer:
                collector = Collector(layer, f"model.layers.{index}", shape, sampled, layers.device)
                for number, rows in enumerate(batches):
                    start = number * batch * length
                    collector.begin(start, start + rows.numel())
                    hidden[number] = run_layer(layers.model, layer, hidden[number])
                    bar.update()
                tensors = collector.finish()
                tensors["rope.frequencies"] = families.rope_frequencies(layers.model, layer.self_attn)
            yield tensors


def write_layer(directory: str, index: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write one layer's file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, os.path.join(directory, layer_file(index)))


def write_tokens(directory: str, tokens: torch.Tensor) -> None:
    """Write the tokens that are read, [sequences, length]."""
    save_file({"tokens": tokens.int()}, os.path.join(directory, TOKENS))


class Calibration:
    """A calibration directory. One of its files that was replaced is refused whenever it is read."""

    def __init__(self, path: str):
        """Verify the files. Raises UserError."""
        self.path, self.record = path, read_record(path, "01_calibrate.py")
        verify_files(path, self.record)
        self.model, self.summary, self.arguments = (
            self.record[part] for part in ("model", "summary", "arguments"))

    def tokens(self) -> torch.Tensor:
        """The tokens that were read, int64 [sequences, length]."""
        return read_tensors(self.path, TOKENS, self.record)["tokens"].long()

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """A layer's tensors, by name ("value.raw", "key.raw", "sample.key", ...)."""
        return read_tensors(self.path, layer_file(index), self.record)

    def grams(self, device: str, index: int) -> LayerGrams:
        """A layer's Grams, on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.layer(index).items()}
        return LayerGrams(tensors, self.model["kv_heads"])
