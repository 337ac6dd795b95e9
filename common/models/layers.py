"""Running a model layer by layer: all sequences pass through one decoder layer before the next.

Parts are loaded when they are needed and freed again, with hidden states on disk: a 7B model then needs the
memory of one layer. A model in memory is the case that keeps all of them. Both give the same bytes.
CheckpointWriter writes a model one part at a time.
"""

import contextlib
import ctypes
import functools
import json
import os
import tempfile

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.core_model_loading import revert_weight_conversion

from common.models import families, proof, sidecars
from common.models.forward import embedded, logits_of, run_layer
from common.models.load import empty_model, kept_tensors, load_config, materialize
from common.models.weights import DTYPES, StoredWeights, check_finite, check_names, check_tied, wider_dtypes

SHARD_SIZE = "5GB"  # the most a weight file holds
STORED_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


class Layers:
    """A checkpoint's embedding, decoder layers and head, in `dtype` on `device`. config: the model's.
    model: one in memory, of that dtype and on that device, in place of the checkpoint's.

    layerwise: a module is loaded when its `with` block begins and freed when it ends. config and weights (as
    StoredWeights) then replace those of the checkpoint; `path` is only their name. Raises UserError for
    missing, unexpected, mis-shaped or non-finite weights.
    """

    def __init__(self, path: str, dtype: torch.dtype, device: str, layerwise: bool = False, config=None,
                 weights=None, model=None):
        self.path, self.device, self.layerwise = path, device, layerwise
        self.edits = []  # functions to apply to each decoder layer after loading it
        self.model = model or empty_model(path, config or load_config(path), dtype, device)
        self.config = self.model.config
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}
        if model is None:
            self.weights = weights or StoredWeights(path, self.model)
            expected, stored = self.model.state_dict().keys(), self.weights.names()
            check_names(path, expected - stored - self.tied.keys(), stored - expected)
            if self.tied and weights is None:
                check_tied(path)
            if not layerwise:
                self._load("")
        proof.attach_pairs(self.model)

    def _load(self, name: str):
        """Load the module of this name in the model, "" for all of it, and return it."""
        module = self.model.get_submodule(name)
        materialize(module, self.device)
        if module is self.model:
            module.tie_weights()
        state = module.state_dict(prefix=f"{name}." if name else "")
        tensors = {self.tied.get(key, key): tensor for key, tensor in state.items()}
        self.weights.read(tensors)
        check_finite(tensors.items(), self.path)
        return module

    @contextlib.contextmanager
    def part(self, name: str):
        """Context manager: a module by name, as "model.embed_tokens", "model.layers.0" or "lm_head"."""
        if not self.layerwise:
            yield self.model.get_submodule(name)
            return
        module = self._load(name)
        yield module
        materialize(module, "meta")
        return_freed_memory()

    @contextlib.contextmanager
    def layer(self, index: int):
        """Context manager: decoder layer `index`, edited."""
        with self.part(f"model.layers.{index}") as layer:
            for function in self.edits:
                function(index, layer)
            yield layer

    def decoder_layers(self):
        """Yield each decoder layer in turn; if layerwise, only the current one is in memory."""
        for index in range(self.config.num_hidden_layers):
            with self.layer(index) as layer:
                yield layer

    def edit(self, function) -> None:
        """Apply function(index, layer) to every decoder layer: now or, if layerwise, when it is loaded."""
        if self.layerwise:
            self.edits.append(function)
            return
        for index, layer in enumerate(self.decoder_layers()):
            function(index, layer)

    def embed(self, batches, directory: str | None):
        """Hidden states before the first layer, from batches of token ids [n, T].

        If layerwise, they are kept in a temporary file in `directory`.
        """
        with self.part("model.embed_tokens"):
            return self.store((embedded(self.model, batch.to(self.device)) for batch in batches), directory)

    def store(self, batches, directory: str | None):
        """A list of batches: in memory or, if layerwise, in a temporary file in `directory`."""
        return Spool(batches, directory) if self.layerwise and directory else list(batches)

    def advance(self, layer, hidden) -> None:
        """Replace every batch of hidden states by the decoder layer's output."""
        for number in range(len(hidden)):
            hidden[number] = run_layer(self.model, layer, hidden[number])

    @contextlib.contextmanager
    def streamed(self):
        """Context manager: the model itself, to call; if layerwise, each part is loaded when it runs."""
        loaded, hooks = contextlib.ExitStack(), []
        parts = {name: functools.partial(self.part, name) for name in families.outside(self.model)}
        parts |= {f"model.layers.{index}": functools.partial(self.layer, index)
                  for index in range(self.config.num_hidden_layers)}
        for name, part in parts.items():
            module = self.model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(
                lambda *_, part=part: loaded.enter_context(part()) and None))
            hooks.append(module.register_forward_hook(lambda *_: loaded.close()))
        try:
            yield self.model
        finally:
            loaded.close()
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Token ids [n, T] -> n tensors of logits [T, vocab], float32 on the CPU: what transformers computes.

        All n sequences are computed at once.
        """
        with self.streamed() as model:
            output = model(input_ids=tokens.to(self.device), use_cache=False)
        return list(output.logits.float().cpu())

    def logits_of(self, hidden):
        """Hidden states after the last layer, in batches of one -> logits [T, vocab], float32 on the CPU.

        Yields them one at a time.
        """
        _, *last = families.outside(self.model)
        with contextlib.ExitStack() as stack:
            for name in last:
                stack.enter_context(self.part(name))
            for number in range(len(hidden)):
                yield logits_of(self.model, hidden[number])[0].float().cpu()


def return_freed_memory() -> None:
    """Make glibc return the memory of freed tensors, which the next layer can seldom reuse, to the system."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Spool:
    """A list of batches of hidden states in an unnamed temporary file in `directory`."""

    def __init__(self, batches, directory: str):
        self.file = tempfile.TemporaryFile(dir=directory)
        self.batches, self.offsets = [], [0]  # dtype, shape and device of each batch
        for number, batch in enumerate(batches):
            self.batches.append(None)
            self.offsets.append(self.offsets[-1] + batch.nbytes)
            self[number] = batch

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> torch.Tensor:
        dtype, shape, device = self.batches[number]
        self.file.seek(self.offsets[number])
        content = bytearray(self.file.read(self.offsets[number + 1] - self.offsets[number]))
        return torch.frombuffer(content, dtype=dtype).view(shape).to(device)

    def __setitem__(self, number: int, batch: torch.Tensor) -> None:
        """Replace a batch by one of the same size in bytes."""
        self.batches[number] = batch.dtype, batch.shape, batch.device
        self.file.seek(self.offsets[number])
        self.file.write(raw_bytes(batch))


class CheckpointWriter:
    """Context manager that writes a checkpoint part by part: weights as by transformers' save_pretrained.

    Each file begins with a header computed from the config, so a tensor can be written to its place at once:
    nothing is collected in memory. directory: an existing directory to fill. config, dtype: of the model to
    write. source: the checkpoint it is made from, whose other files it keeps (models/sidecars.py), and the
    precision of tensors that it stores wider than most, as routers' biases in float32. Raises RuntimeError if
    tensors are missing when the block ends.
    """

    def __init__(self, directory: str, config, dtype: torch.dtype, source: str):
        self.directory, self.source = directory, source
        self.model = empty_model(source, config, dtype)
        self.config = self.model.config
        self.config.architectures = [type(self.model).__name__]
        kept = kept_tensors(self.model)
        for name, wider in wider_dtypes(self.model, source).items():
            if name in kept:  # not tied to a parameter with another name
                kept[name] = kept[name].to(torch.promote_types(kept[name].dtype, wider))
        self.dtypes = {name: tensor.dtype for name, tensor in kept.items()}  # by name in the model
        self.tensors = revert_weight_conversion(self.model, kept)  # by name in the files
        self.places: dict[str, tuple[str, int]] = {}  # of each tensor that is not written: file, offset

    def __enter__(self):
        sidecars.write(self.directory, self.config, self.source)
        self._write_headers()
        return self

    def _write_headers(self) -> None:
        """Write the header of each safetensors file and, if there are several, the index."""
        split = split_torch_state_dict_into_shards(self.tensors, max_shard_size=SHARD_SIZE,
                                                   filename_pattern="model{suffix}.safetensors")
        for file, names in split.filename_to_tensors.items():
            path, header, end = os.path.join(self.directory, file), {"__metadata__": {"format": "pt"}}, 0
            for name in sorted(names):  # as safetensors does
                tensor = self.tensors[name]
                start, end = end, end + tensor.nbytes
                header[name] = {"dtype": STORED_DTYPES[tensor.dtype], "shape": tensor.shape,
                                "data_offsets": (start, end)}
            content = json.dumps(header, separators=(",", ":")).encode()
            content += b" " * (-len(content) % 8)
            with open(path, "wb") as stream:
                stream.write(len(content).to_bytes(8, "little") + content)
            for name in names:
                self.places[name] = path, 8 + len(content) + header[name]["data_offsets"][0]
        if split.is_sharded:
            parameters = sum(parameter.numel() for parameter in self.model.parameters())
            index = {"metadata": {"total_parameters": parameters} | split.metadata,
                     "weight_map": split.tensor_to_filename}
            with open(os.path.join(self.directory, "model.safetensors.index.json"), "w") as stream:
                stream.write(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def write(self, name: str, module) -> None:
        """Write a module's tensors under `name`, its name in the model ("model.layers.0").

        Tied parameters are written once.
        """
        for key, tensor in revert_weight_conversion(self.model, kept_tensors(module, name)).items():
            if key not in self.tensors:  # tied to a parameter with another name
                continue
            file, offset = self.places.pop(key)
            with open(file, "r+b") as stream:
                stream.seek(offset)
                stream.write(raw_bytes(tensor.to(self.tensors[key].dtype)))

    def write_rest(self, layers: Layers) -> None:
        """Write the embedding, final norm and head of `layers`."""
        for name in families.outside(layers.model):
            with layers.part(name) as module:
                self.write(name, module)

    def __exit__(self, kind, *error):
        if kind is None and self.places:
            raise RuntimeError(f"{self.directory}: {len(self.places)} tensors were not written, "
                               f"among them {min(self.places)}")


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as they are in memory, in order."""
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data
