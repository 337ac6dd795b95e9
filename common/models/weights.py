"""The weights of a checkpoint directory: finding their files, reading single tensors, validating them."""

import glob
import hashlib
import os
import re
from collections import Counter

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from common.run.artifact import load_record
from common.run.errors import UserError
from common.run.files import read_json, remember, stamp

WEIGHT_FILES = (  # where transformers looks for weights, in order
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
                   "chat_template*", "*.model", "*.tiktoken", "additional_chat_templates/*")
# of weights, by their names in safetensors files
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
POINTER = b"version https://git-lfs.github.com/spec/"  # how the pointers of Git LFS begin
# stored by older releases, but computed from the config
IGNORED_TENSORS = re.compile(r".*rotary_emb\.inv_freq")


def weight_files(directory: str) -> list[str]:
    """Names of the files from which transformers reads a checkpoint's weights; an index, if any, comes first.

    Raises UserError if one is missing, if an index names none, and for an adapter next to them.
    """
    adapter = os.path.join(directory, "adapter_config.json")
    if os.path.exists(adapter):  # transformers would apply it to the weights next to it
        raise UserError(f"{adapter}: expected a model without an adapter; merge it first (peft's "
                        "merge_and_unload), or move the file away")
    found = present_files(directory, WEIGHT_FILES)
    if not found:
        raise UserError(f"{directory}: expected weights (one of {', '.join(WEIGHT_FILES)}), found none")
    shards = index_shards(os.path.join(directory, found[0]))
    missing = set(shards).difference(present_files(directory, shards))
    if missing:
        raise UserError(f"{directory}: expected the weights {min(missing)}, found none")
    return [found[0], *shards]


def index_shards(path: str) -> list[str]:
    """Names of the files that an index of weights names; none for a file of weights. Raises UserError."""
    if not path.endswith(".index.json"):
        return []
    try:
        return sorted(set(read_json(path)["weight_map"].values()))
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: expected a weight_map, found none") from error


def present_files(directory: str, names) -> list[str]:
    """Those of the names that are files of a directory. Raises UserError for one without its content."""
    found = [name for name in names if os.path.isfile(os.path.join(directory, name))]
    for path in (os.path.join(directory, name) for name in found):
        with open(path, "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise UserError(f"{path}: expected the file itself, found its Git LFS pointer; run git lfs "
                                "install and git lfs pull in its repository")
    return found


def files_of(path: str) -> list[str]:
    """The files of a checkpoint that count: the configs, the weights and the files of the tokenizer."""
    names = {"config.json", "generation_config.json", *weight_files(path), *tokenizer_files(path)}
    return [os.path.join(path, name) for name in present_files(path, sorted(names))]


def fingerprint(path: str) -> str:
    """A sha256 over those of the files that count; of an artifact's as in its record, unless they changed."""
    recorded = (load_record(path) or {}).get("files", {})
    remember({os.path.join(path, name): known for name, known in recorded.items()})
    digests = [f"{os.path.relpath(file, path)} {stamp(file)['sha256']}\n" for file in files_of(path)]
    return hashlib.sha256("".join(digests).encode(errors="surrogateescape")).hexdigest()


def tokenizer_files(path: str) -> list[str]:
    """Names of the files that a checkpoint's tokenizer may be read from, relative to its directory."""
    found = {name for pattern in TOKENIZER_FILES for name in glob.glob(pattern, root_dir=path)}
    return present_files(path, sorted(found))


def open_checkpoint(directory: str) -> dict:
    """Tensor name -> a handle that reads rows when sliced, for each tensor that transformers would load.

    Raises UserError for files that are damaged or contain anything but tensors.
    """
    tensors = {}
    for name in weight_files(directory):
        path = os.path.join(directory, name)
        try:
            if name.endswith(".safetensors"):
                file = safe_open(path, framework="pt")
                tensors |= {key: file.get_slice(key) for key in file.keys()}
            elif name.endswith(".bin"):  # older format; weights_only refuses pickles that run code
                tensors |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # the exception class depends on the damage
            raise UserError(f"{path}: expected a file of tensors, found none that can be read: "
                            f"{first_line(error)}") from error
    return tensors


class StoredWeights:
    """The weights of a checkpoint directory, read a few tensors at a time by their names in a model.

    What transformers stores otherwise than a model holds it, each expert of a mixture by itself, is converted
    by transformers when it is read. Raises UserError for files that are damaged.
    """

    def __init__(self, path: str, model):
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        renamings, self.converters = ([transform for transform in transforms if isinstance(transform, kind)]
                                      for kind in (WeightRenaming, WeightConverter))
        ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        self.path, self.model = path, model
        self.parts: dict[str, list] = {}  # name in the model -> stored names, each with a converter's pattern
        for key in sorted(open_checkpoint(path), key=dot_natural_key):  # experts in their order
            if not any(pattern.search(key) for pattern in ignored):
                name, pattern = rename_source_key(key, renamings, self.converters)
                self.parts.setdefault(name, []).append((key, pattern))

    def names(self) -> set[str]:
        """Names of the stored tensors in the model."""
        return {*self.parts}

    def open(self) -> dict:
        """open_checkpoint by the names in the model.

        The files are reopened each time, because pages read from an open one stay in memory.
        """
        stored, tensors = open_checkpoint(self.path), {}
        for name, parts in self.parts.items():
            (key, pattern), *_ = parts
            tensors[name] = stored[key] if pattern is None else Converted(self, name, stored)
        return tensors

    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors by name. Raises UserError for one that is missing or has another shape."""
        stored = self.open()
        for name, tensor in tensors.items():
            check_names(self.path, {name} - stored.keys(), ())
            content = stored[name][...]
            if content.shape != tensor.shape:
                raise UserError(f"{self.path}: expected {name} of shape {list(tensor.shape)}, "
                                f"found {list(content.shape)}")
            tensor.copy_(content)


class Converted:
    """A handle for a tensor that a converter makes of several stored ones, as those of open_checkpoint."""

    def __init__(self, weights: StoredWeights, name: str, stored: dict):
        self.weights, self.name, self.stored = weights, name, stored

    def make(self, read) -> torch.Tensor:
        """The tensor that is made of what read(handle) gives for each stored one. Raises UserError."""
        parts, model = self.weights.parts[self.name], self.weights.model
        converter = next(each for each in self.weights.converters if parts[0][1] in each.source_patterns)
        for key, pattern in parts:
            converter.add_tensor(self.name, key, pattern, read(self.stored[key]))
        try:
            made = converter.convert(self.name, model=model, config=model.config)[self.name]
        except Exception as error:  # one is missing, or has another shape
            raise UserError(f"{self.weights.path}: expected tensors that make {self.name}, found others: "
                            f"{first_line(error)}") from error
        return made[0] if isinstance(made, list) else made

    @property
    def shape(self) -> torch.Size:
        return self.make(empty_of).shape

    @property
    def dtype(self) -> torch.dtype:
        return self.make(empty_of).dtype

    def __getitem__(self, rows) -> torch.Tensor:
        return self.make(lambda stored: stored[...])[rows]


def shape_of(stored) -> tuple[int, ...]:
    """The shape of a tensor or of a handle."""
    return tuple(stored.get_shape() if hasattr(stored, "get_shape") else stored.shape)


def empty_of(stored) -> torch.Tensor:
    """A tensor without data, of a tensor's or a handle's shape and dtype; uint8 for a handle of integers."""
    dtype = DTYPES.get(stored.get_dtype(), torch.uint8) if hasattr(stored, "get_dtype") else stored.dtype
    return torch.empty(shape_of(stored), dtype=dtype, device="meta")


def wider_dtypes(model, directory: str) -> dict[str, torch.dtype]:
    """Tensor name in a model -> its dtype in a checkpoint, for tensors stored wider than most elements are.

    There are none in a directory without weights. Raises UserError as StoredWeights does.
    """
    if not present_files(directory, WEIGHT_FILES):
        return {}
    tensors = {name: empty_of(stored) for name, stored in StoredWeights(directory, model).open().items()}
    elements = Counter()
    for tensor in tensors.values():
        elements[tensor.dtype] += tensor.numel()
    most = max(elements, key=elements.get)
    return {name: tensor.dtype for name, tensor in tensors.items() if tensor.itemsize > most.itemsize}


def check_names(path: str, missing, unexpected) -> None:
    """Raise UserError naming the first missing tensor of a checkpoint, or the first unexpected one."""
    if missing:
        raise UserError(f"{path}: expected a tensor {min(missing)}, found none")
    unexpected = [name for name in unexpected if not IGNORED_TENSORS.fullmatch(name)]
    if unexpected:
        raise UserError(f"{path}: expected only the tensors of its config, "
                        f"found also {min(unexpected)!r}")


def check_tied(path: str) -> None:
    """Raise UserError where an output head is stored that differs from the embedding it is tied to.

    transformers would use that head; a checkpoint written from the config would lose it.
    """
    stored, names = open_checkpoint(path), ("model.embed_tokens.weight", "lm_head.weight")
    if stored.keys() >= set(names) and not torch.equal(*(stored[name][...] for name in names)):
        raise UserError(f"{path}: expected {names[1]} equal to {names[0]} (tie_word_embeddings in its "
                        "config), found another")


def check_finite(tensors, where: str) -> None:
    """Raise UserError naming the first tensor with a NaN or Inf. tensors: (name, tensor) pairs."""
    for name, tensor in tensors:
        if not torch.isfinite(tensor).all():
            raise UserError(f"{where}: NaN or Inf in {name}")


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
