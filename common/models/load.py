"""Models: finding, describing and loading checkpoints and tokenizers, with clear errors."""

import contextlib
import copy
import functools
import os
import shutil
from dataclasses import asdict

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from common.models import hub
from common.models.families import geometry, needs_eager
from common.models.weights import (
    check_finite,
    check_names,
    fingerprint,
    first_line,
    open_checkpoint,
    tokenizer_files,
)
from common.run.artifact import remember_inputs
from common.run.errors import UserError
from common.run.files import read_json, write_json
from common.run.flags import suggest

logging.set_verbosity_error()  # the stages print what they load
logging.disable_progress_bar()

WEIGHT_SHARE = 0.7  # of a GPU's free memory; the rest is for the cache and the logits of a batch
# hub names of the models in the paper's experiments
PUBLISHED_MODELS = ("meta-llama/Llama-2-7b-hf", "princeton-nlp/Sheared-LLaMA-1.3B")
TOKENIZER_CONFIG, AUTO_MAP = "tokenizer_config.json", "auto_map"  # its key for code of the checkpoint's own


def local_model(name: str) -> str:
    """The directory of a model: `name` itself, or the download of the hub repository of that name.

    Raises UserError if it is neither.
    """
    return name if os.path.isdir(name) else from_hub(name, hub.download)


def config_file(name: str) -> str:
    """The config.json of a model: `name` itself, in the directory of that name, or of the hub repository, of
    which nothing else is downloaded. Raises UserError if there is none.
    """
    if os.path.isdir(name):
        return os.path.join(name, "config.json")
    return name if os.path.exists(name) else from_hub(name, hub.download_config)


def from_hub(name: str, download) -> str:
    """download(name), a path, of the hub repository of this name. Raises UserError if it cannot be read."""
    try:
        return download(name)
    except Exception as error:  # bad names, network and permissions raise different classes
        known = ("demo", *PUBLISHED_MODELS)
        raise UserError(f"model {name}: neither a directory nor a hub repository that can be read "
                        f"({hub.reason(error)}){suggest(name, known)}; known: {', '.join(known)}") from error


def is_hub_name(name: str) -> bool:
    """Whether a model's name is a hub name OWNER/MODEL rather than a directory."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name and not os.path.exists(name)


def load_config(path: str):
    """The config in a checkpoint directory or file. Raises UserError if it cannot be read."""
    options = {"output_attentions": False, "return_dict": True}  # of all models, whatever a config says
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    except Exception as error:  # the exception class depends on the damage
        raise UserError(f"{path}: expected a model config, found none that transformers can read: "
                        f"{error}") from error
    # whatever it says: without a mask sdpa alone is causal, and an eager function has one
    config._attn_implementation = "eager" if needs_eager(config) else "sdpa"
    return config


def describe(path: str, name: str | None = None) -> dict:
    """The description of a model in records: its name as given, path, fingerprint and geometry."""
    if not os.path.isdir(path):  # transformers would try it as a hub name
        raise UserError(f"{path}: expected a checkpoint directory, found none")
    config = load_config(path)
    return {"name": name or path, "path": path, "fingerprint": fingerprint(path)} | asdict(geometry(config))


def source_model(record: dict, run: str) -> dict:
    """The source model in an artifact's record. run: its run directory, with which it may have moved.

    Raises UserError if it is missing or has changed.
    """
    recorded, path = record["model"], record["model"]["path"]
    remember_inputs(run)
    if not os.path.isdir(path):
        path = os.path.normpath(os.path.join(run, record.get("model_from_run", path)))
    if not os.path.isdir(path):
        raise UserError(f"model {path}: expected the directory that 01_calibrate.py read, found none")
    model = describe(path, recorded["name"])
    if model["fingerprint"] != recorded["fingerprint"]:
        raise UserError(f"model {path}: changed since 01_calibrate.py read it "
                        f"(expected {recorded['fingerprint'][:12]}, found {model['fingerprint'][:12]})")
    return model


@contextlib.contextmanager
def parameters_on_meta():
    """Context manager: modules are made without memory for their parameters, but with their buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:  # a tied one stays the same
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(module, device) -> None:
    """Give a module memory for its parameters on a device, or none on "meta"; its buffers stay as they are,
    and move to the device.
    """
    buffers = [(part._buffers, name, buffer) for part in module.modules()
               for name, buffer in part._buffers.items() if buffer is not None]
    module.to_empty(device=device)
    for of_part, name, buffer in buffers:
        of_part[name] = buffer if device == "meta" else buffer.to(device)


def kept_tensors(module, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors that checkpoints keep of a module, by name in the model that has it as `name`: parameters,
    tied ones under their first name, and buffers that are not computed from a config.
    """
    prefix = f"{name}." if name else ""
    parameters = dict(module.named_parameters())
    others = dict(module.named_parameters(remove_duplicate=False)).keys() - parameters
    kept = parameters | {name: tensor for name, tensor in module.state_dict().items()
                         if name not in parameters and name not in others}
    return {prefix + name: tensor.detach() for name, tensor in kept.items()}


def empty_model(path: str, config, dtype: torch.dtype, device: str = "cpu", attention: str | None = None):
    """The model of a copy of a config, without memory for its parameters.

    path: of the config, for errors; without it the config's own. device: of the buffers. attention:
    transformers' name of another function than the config's. Raises UserError for a config of no model.
    """
    try:
        with parameters_on_meta():
            config = copy.deepcopy(config)  # which gets this dtype
            if dtype == torch.float64:  # which grouped products do not take
                config._experts_implementation = "eager"
            options = {"attn_implementation": attention} if attention else {}
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False, **options).eval()
    except Exception as error:  # whatever a value means to transformers that it cannot use
        raise UserError(f"{path or config.name_or_path}: cannot build the model of its config: "
                        f"{type(error).__name__}: {first_line(error)}") from error
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def by_config(function):
    """Decorator: cache a function of a config by the config's content, because building a model of 80 layers
    takes a third of a second.
    """
    known = {}

    @functools.wraps(function)
    def kept(config, *others):
        key = config.to_json_string(), *others
        if key not in known:
            known[key] = function(config, *others)
        return known[key]

    return kept


def needs_several_gpus(path: str, dtype: torch.dtype, device: str) -> bool:
    """Whether the model is too large for the first of several GPUs. Always false for a device but "cuda"."""
    if device != "cuda" or torch.cuda.device_count() < 2:
        return False
    parameters = empty_model(path, load_config(path), dtype).parameters()
    free, _ = torch.cuda.mem_get_info(0)
    return sum(parameter.nbytes for parameter in parameters) > WEIGHT_SHARE * free


def load_model(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu", spread: bool = False):
    """The causal language model in eval mode.

    spread: over all GPUs, layer by layer, by accelerate; its device is then the first layer's. Raises
    UserError for missing, unexpected, mis-shaped or non-finite weights, or if the GPUs are too small.
    """
    config = load_config(path)
    open_checkpoint(path)  # whose errors name the file
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, device_map="auto" if spread else None,
            ignore_mismatched_sizes=True, output_loading_info=True, trust_remote_code=False,
        )
    except Exception as error:  # the exception class depends on the damage
        raise UserError(f"{path}: cannot load the weights: {type(error).__name__}: "
                        f"{first_line(error)}") from error
    check_loaded(path, report)
    placed = getattr(model, "hf_device_map", {}).values()
    if spread and not {"cpu", "disk"}.isdisjoint(placed):
        raise UserError(f"{path}: expected GPUs that hold the model, found {torch.cuda.device_count()} that "
                        "are too small")
    check_finite(model.named_parameters(), path)
    return model.eval() if spread else model.to(device).eval()


def check_loaded(path: str, report: dict) -> None:
    """Raise UserError for the first missing, unexpected or mis-shaped tensor of transformers' report."""
    check_names(path, report["missing_keys"], report["unexpected_keys"])
    for name, actual, expected in sorted(report["mismatched_keys"]):
        raise UserError(f"{path}: expected {name} of shape {list(expected)}, found {list(actual)}")


def load_tokenizer(path: str, bos: bool | None = None):
    """The tokenizer of a checkpoint; one with code of its own is what its tokenizer.json says.

    bos: whether texts and prompts begin with its begin-of-sequence token, kept for bos_prefix.
    Raises UserError if it has only code, unless its ids fit the model's vocabulary, and unless it has an
    end-of-sequence token.
    """
    names, settings = tokenizer_files(path), tokenizer_settings(path)
    if "tokenizer.json" not in names and AUTO_MAP in settings:
        raise UserError(f"{path}: expected a tokenizer.json, found a tokenizer_config.json that names code "
                        f"({AUTO_MAP}), which is never run")
    try:
        if AUTO_MAP in settings:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each tokenizer backend raises its own class
        reason = first_line(error)
        if "tokenizer.model" in names and "tokenizer.json" not in names:
            reason = "expected the packages that read tokenizer.model; pip install sentencepiece protobuf"
        raise UserError(f"{path}: cannot load a tokenizer: {reason}") from error
    largest, rows = max(tokenizer.get_vocab().values()), load_config(path).vocab_size
    if largest >= rows:
        raise UserError(f"{path}: expected token ids below the model's vocab_size {rows}, "
                        f"found {largest} in the tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"{path}: expected a tokenizer with an end-of-sequence token, found none")
    tokenizer.bos = bos
    return tokenizer


def bos_prefix(tokenizer) -> list[int]:
    """What every text and prompt begins with: the begin-of-sequence token or nothing.

    As load_tokenizer was told; else as the tokenizer itself does where it encodes a plain text. Raises
    UserError if the token is asked for and the tokenizer has none.
    """
    begin, bos = tokenizer.bos_token_id, getattr(tokenizer, "bos", None)
    if bos is None:
        bos = tokenizer("a")["input_ids"][:1] == [begin]
    if bos and begin is None:
        raise UserError(f"--bos: expected a tokenizer with a begin-of-sequence token, found none in "
                        f"{tokenizer.name_or_path}")
    return [begin] if bos else []


def end_tokens(tokenizer, *listed) -> list[int]:
    """Sorted ids of the tokens that end an answer: the tokenizer's and the listed ones.

    listed: the eos_token_id of the config and of the generation config, an id, a list of ids or None each.
    """
    lists = (ids if isinstance(ids, list) else [ids] for ids in (tokenizer.eos_token_id, *listed))
    return sorted({token for ids in lists for token in ids if isinstance(token, int)})


def save_tokenizer(path: str, directory: str) -> None:
    """Copy the files of a checkpoint's tokenizer to another directory, byte for byte.

    But for the name of code of its own, which is not copied: the copy is what load_tokenizer makes of it.
    """
    if os.path.realpath(path) == os.path.realpath(directory):
        return
    for name in tokenizer_files(path):
        target = os.path.join(directory, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(os.path.join(path, name), target)
    settings = tokenizer_settings(path)
    if AUTO_MAP in settings:
        del settings[AUTO_MAP]
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # as older releases know it, too
        write_json(os.path.join(directory, TOKENIZER_CONFIG), settings)


def tokenizer_settings(path: str) -> dict:
    """What is in a checkpoint's tokenizer_config.json; {} if it has none that can be read."""
    return read_json(os.path.join(path, TOKENIZER_CONFIG)) or {}


def weight_dtype(name: str, config) -> torch.dtype:
    """The dtype of this name; "source": that of the config, float32 if it has none."""
    return (config.dtype or torch.float32) if name == "source" else getattr(torch, name)


def pick_device(name: str) -> str:
    """"auto" -> cuda if available, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
