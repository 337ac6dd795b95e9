"""The files next to a checkpoint's weights, as its source has them: config, generation config, tokenizer.

A conversion changes the number of key/value heads and perhaps the dtype. All else stays as the source wrote
it, so that any program that loads the source can load the result. Keys that releases of transformers before 5
and programs built on them read are added where the source has only the newer ones.
"""

import json
import os
import shutil

from transformers import GenerationConfig

from common.errors import UserError
from common.files import read_json
from common.models import save_tokenizer
from common.weights import first_line, require_content

GENERATION = "generation_config.json"
SCALED_LAYERS = "full_attention"  # of OLMo 3, whose older releases scale the RoPE of these layers alone


def write(directory: str, config, source: str) -> None:
    """Write the files next to the weights of a model that was made from the checkpoint `source`.

    config: the model's, of the source's class. Raises UserError for a generation config that cannot be read.
    """
    settings = read_json(os.path.join(source, "config.json"))
    dtype = str(config.dtype).removeprefix("torch.")
    settings |= {"architectures": config.architectures, "num_key_value_heads": config.num_key_value_heads,
                 "dtype": dtype, "torch_dtype": dtype}
    settings.pop("auto_map", None)  # names code that is not copied; the class is transformers' own
    write_settings(directory, settings)
    copy_rest(directory, source)


def save(model, directory: str, source: str) -> None:
    """Write a model in memory that is no longer of the class of the checkpoint it was made from."""
    model.save_pretrained(directory)
    write_settings(directory, read_json(os.path.join(directory, "config.json")))
    copy_rest(directory, source)


def copy_rest(directory: str, source: str) -> None:
    """Copy tokenizer and generation config. Raises UserError for one of the latter that cannot be read."""
    save_tokenizer(source, directory)
    path = os.path.join(source, GENERATION)
    if not os.path.exists(path) or os.path.realpath(directory) == os.path.realpath(source):
        return
    require_content(path)
    try:
        GenerationConfig.from_pretrained(source)
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{source}: cannot read {GENERATION}: {first_line(error)}") from error
    shutil.copyfile(path, os.path.join(directory, GENERATION))


def write_settings(directory: str, settings: dict) -> None:
    """Write config.json with the keys that older releases read."""
    older = {name: value for name, value in older_keys(settings).items() if name not in settings}
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(settings | older, indent=2) + "\n")


def older_keys(settings: dict) -> dict:
    """The keys in which transformers 4 and programs built on it read what rope_parameters and dtype say."""
    older, rope = {}, settings.get("rope_parameters") or {}
    if settings.get("dtype"):
        older["torch_dtype"] = settings["dtype"]
    per_layer, rope = SCALED_LAYERS in rope, dict(rope.get(SCALED_LAYERS) or rope)
    if "rope_theta" in rope:
        older["rope_theta"] = rope.pop("rope_theta")
        scaled = rope.get("rope_type", "default") != "default"
        if scaled or not per_layer:
            older["rope_scaling"] = rope if scaled else None
    return older


def loadable_by_older_releases(directory: str) -> None:
    """Name a tokenizer that transformers 5 has made as older releases know it, too."""
    path = os.path.join(directory, "tokenizer_config.json")
    settings = read_json(path)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for name in ("backend", "is_local", "local_files_only"):  # how it was made
        settings.pop(name, None)
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
