"""The files next to a checkpoint's weights, as its source has them: config, generation config, tokenizer.

A conversion changes the number of key/value heads and perhaps the dtype. All else stays as the source wrote
it, so that any program that loads the source can load the result. Keys that releases of transformers before 5
and programs built on them read are added where the source has only the newer ones.
"""

import json
import math
import os
import shutil

from common.models.load import save_tokenizer
from common.run.files import read_json

GENERATION = "generation_config.json"
SCALED_LAYERS = "full_attention"  # of PER_LAYER's models, whose older releases scale the RoPE of these alone
PER_LAYER = ("gemma3_text", "olmo3")
COUNTED = {  # in transformers 4, their rope_scaling must have "type" and these keys, and no other
    "phi3": ["long_factor", "short_factor"], "olmo": ["factor"], "olmo2": ["factor"],
}
ORIGINAL = "original_max_position_embeddings"


def write(directory: str, config, source: str) -> None:
    """Write the files next to the weights of a model that was made from the checkpoint `source`.

    config: the model's, of the source's class.
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
    """Copy the files of the tokenizer and the generation config."""
    save_tokenizer(source, directory)
    path = os.path.join(source, GENERATION)
    if os.path.exists(path) and os.path.realpath(directory) != os.path.realpath(source):
        shutil.copyfile(path, os.path.join(directory, GENERATION))


def write_settings(directory: str, settings: dict) -> None:
    """Write config.json with the keys that older releases read."""
    older = {name: value for name, value in older_keys(settings).items() if name not in settings}
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(settings | older, indent=2) + "\n")


def older_keys(settings: dict) -> dict:
    """The keys in which transformers 4 and programs built on it read what rope_parameters and dtype say.

    This release reads the same RoPE from a config with both. What a class of transformers 4 cannot express
    stays in rope_scaling, so that the class refuses it: without it, it would compute another function.
    """
    older, parameters, model = {}, settings.get("rope_parameters") or {}, settings.get("model_type")
    if settings.get("dtype"):
        older["torch_dtype"] = settings["dtype"]
    per_layer, rope = SCALED_LAYERS in parameters, dict(parameters.get(SCALED_LAYERS) or parameters)
    if "rope_theta" in rope:
        older["rope_theta"] = rope.pop("rope_theta")
    if "rope_theta" not in older or per_layer and model not in PER_LAYER:
        return older
    sliding = parameters.get("sliding_attention") or {}
    if model == "gemma3_text" and "rope_theta" in sliding:
        older["rope_local_base_freq"] = sliding["rope_theta"]
    if "partial_rotary_factor" in rope and not per_layer:
        older["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind, implied = rope.get("rope_type", rope.get("type", "default")), {"rope_type", "type"}
    original, longest = settings.get(ORIGINAL, rope.get(ORIGINAL)), settings.get("max_position_embeddings")
    if kind == "longrope" and original and longest:
        older[ORIGINAL], ratio = original, longest / original
        factor = rope.get("attention_factor") or attention_factor(rope.get("factor") or ratio, original)
        if math.isclose(factor, attention_factor(ratio, original)):  # transformers 4 takes no other ratio
            implied |= {ORIGINAL, "attention_factor", "factor"}
        else:
            rope["attention_factor"] = factor
    if sorted(rope.keys() - implied) == COUNTED.get(model):
        rope = {"type": kind} | {name: rope[name] for name in COUNTED[model]}
    if kind != "default" or not per_layer:
        older["rope_scaling"] = rope if kind != "default" else None
    return older


def attention_factor(ratio: float, original: int) -> float:
    """LongRoPE's factor of cosines and sines, for `ratio` times as many positions as the original ones."""
    return math.sqrt(1 + math.log(max(ratio, 1)) / math.log(original))


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
