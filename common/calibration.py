"""The calibration directory of stage 1: a file per layer with its statistics, and the tokens they are of."""

import os

import torch
from safetensors.torch import save_file

from common.artifacts import read_record, read_verified, verify_files
from common.errors import UserError
from common.method.stats import LayerGrams
from common.records import TOKENS, layer_file
from common.weights import check_finite

SEQUENCES, LENGTH = 128, 2048  # of the paper's calibration, and tokens in each
SAMPLED = 256  # tokens whose raw head vectors are kept


def write_layer(directory: str, index: int, tensors: dict[str, torch.Tensor]) -> None:
    """Write one layer's file."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, os.path.join(directory, layer_file(index)))


def write_tokens(directory: str, tokens: torch.Tensor) -> None:
    """Write the tokens that are read, [sequences, length]."""
    save_file({"tokens": tokens.int()}, os.path.join(directory, TOKENS))


class Calibration:
    """A calibration directory. Its files are as its record says whenever they are read: one that was replaced
    meanwhile is refused.
    """

    def __init__(self, path: str):
        """Verify the files. Raises UserError."""
        self.path, self.record = path, read_record(path, "01_calibrate.py")
        verify_files(path, self.record)
        self.model, self.summary, self.arguments = (
            self.record[part] for part in ("model", "summary", "arguments"))

    def tokens(self) -> torch.Tensor:
        """The tokens that were read, int64 [sequences, length]."""
        return read_verified(self.path, TOKENS, self.record)["tokens"].long()

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """A layer's tensors, by name ("value.raw", "key.raw", "sample.key", ...)."""
        tensors, name = read_verified(self.path, layer_file(index), self.record), layer_file(index)
        check_finite(tensors.items(), os.path.join(self.path, name))
        kv_heads, size = self.model["kv_heads"], self.model["head_dim"]
        expected, found = [kv_heads * (kv_heads + 1) // 2, size, size], list(tensors["key.raw"].shape)
        if found != expected:
            raise UserError(f"{self.path}: expected key.raw of shape {expected} for the model in its record, "
                            f"found {found}")
        return tensors

    def grams(self, device: str, index: int) -> LayerGrams:
        """A layer's Grams, on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.layer(index).items()}
        return LayerGrams(tensors, self.model["kv_heads"])
