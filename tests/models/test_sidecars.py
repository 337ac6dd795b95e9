"""The files beside a checkpoint's weights: what the source wrote, and what older programs read."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from common.models import sidecars
from common.models.load import load_config
from models import byte_tokenizer, save_tiny, tiny_model
from runs import read

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR, DEFAULT = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "default"}
THETA, HALF = {"rope_theta": 700.0}, {"partial_rotary_factor": 0.5}
OLMO3 = {"sliding_attention": DEFAULT | THETA, "full_attention": YARN | THETA}
GEMMA3 = {"sliding_attention": DEFAULT | {"rope_theta": 90.0}, "full_attention": LINEAR | THETA}
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ORIGINAL = {"original_max_position_embeddings": 16}  # a sixteenth of the tiny models' positions
FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 2.1, 2.2]}
LONGROPE = FACTORS | ORIGINAL | {"rope_type": "longrope"}
PHI3 = ORIGINAL | {"model_type": "phi3", "head_dim": 6}


def written(tmp_path, **changes) -> dict:
    """config.json as made from the checkpoint in tmp_path / "source", with these changes of its config."""
    config = load_config(str(tmp_path / "source"))
    for name, value in changes.items():
        setattr(config, name, value)
    (tmp_path / "made").mkdir()
    sidecars.write(str(tmp_path / "made"), config, str(tmp_path / "source"))
    return read(tmp_path / "made/config.json")


def test_the_config_is_the_sources_but_for_the_heads(tmp_path):
    """A config as hub checkpoints of Llama have it, with a key that transformers does not know."""
    save_tiny(tmp_path / "source", rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    source = read(tmp_path / "source/config.json")
    rope = source.pop("rope_parameters")
    source |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": source.pop("dtype"),
               "transformers_version": "4.40.0", "mine": [1.5, None], "output_attentions": True}
    code = {"auto_map": {"AutoConfig": "configuration_mine.Config"}}  # not copied, so not named
    (tmp_path / "source" / "config.json").write_text(json.dumps(source | code))
    made = written(tmp_path, num_key_value_heads=2)
    assert made == source | {"num_key_value_heads": 2, "dtype": "float32"}
    assert list(made)[: len(source)] == list(source)


@pytest.mark.parametrize("changes, rope, older", [
    ({}, LLAMA3, {"rope_scaling": LLAMA3}),
    ({"model_type": "glm"}, DEFAULT | HALF, HALF | {"rope_scaling": None}),
    (PHI3, LONGROPE, {"rope_scaling": {"type": "longrope"} | FACTORS, "partial_rotary_factor": 1.0}),
    (PHI3, LONGROPE | {"attention_factor": 1.0},
     {"rope_scaling": LONGROPE | {"attention_factor": 1.0}, "partial_rotary_factor": 1.0}),
    ({"head_dim": 6}, LONGROPE | {"factor": 4.0},  # less than the ratio that transformers 4 prefers to it
     ORIGINAL | {"rope_scaling": LONGROPE | {"factor": 4.0, "attention_factor": math.sqrt(1.5)}}),
    ({"model_type": "olmo2"}, LINEAR, {"rope_scaling": {"type": "linear", "factor": 8.0}}),
    (LAYERS | {"model_type": "olmo3"}, OLMO3, {"rope_scaling": YARN}),
    (LAYERS | {"model_type": "gemma3_text"}, GEMMA3, {"rope_scaling": LINEAR, "rope_local_base_freq": 90.0}),
], ids=["scaled", "glm", "phi3", "phi3, not expressible", "longrope", "olmo2", "olmo3", "gemma3"])
def test_keys_of_older_releases_stand_beside_the_new_ones(tmp_path, changes, rope, older):
    """They say the same, also to the release that reads both, within the original positions and beyond."""
    rope = rope if "full_attention" in rope else rope | THETA
    save_tiny(tmp_path / "source", rope_parameters=rope, **changes)
    source, made = read(tmp_path / "source/config.json"), written(tmp_path, dtype="bfloat16")
    assert made == source | THETA | older | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    ours, theirs = (AutoConfig.from_pretrained(tmp_path / name) for name in ("made", "source"))
    assert str(ours.dtype) == "torch.bfloat16"
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "source", config=config, dtype=torch.float32)
              for config in (ours, theirs)]
    for length in (8, 40):
        tokens = torch.arange(length)[None]
        assert torch.equal(*(model(tokens).logits for model in models))


def test_a_model_of_another_class_keeps_its_own_config(tmp_path):
    """As related/ writes it: the source's tokenizer and generation config, and the older keys."""
    save_tiny(tmp_path / "source")
    generation = b'{"eos_token_id": [256, 7], "mine": 1}'
    (tmp_path / "source" / sidecars.GENERATION).write_bytes(generation)
    model = tiny_model(model_type="mistral", sliding_window=9)
    sidecars.save(model, str(tmp_path / "made"), str(tmp_path / "source"))
    made = read(tmp_path / "made/config.json")
    assert (made["model_type"], made["sliding_window"], made["rope_theta"]) == ("mistral", 9, 10000.0)
    assert made["torch_dtype"] == made["dtype"] == "float32"
    assert (tmp_path / "made" / sidecars.GENERATION).read_bytes() == generation
    assert AutoTokenizer.from_pretrained(tmp_path / "made").eos_token == "<eos>"


def test_a_tokenizer_made_here_is_named_as_older_releases_know_it(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    tokenizer.save_pretrained(tmp_path)
    sidecars.loadable_by_older_releases(str(tmp_path))
    settings = read(tmp_path / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<a>", "<b>"] and "extra_special_tokens" not in settings
    assert AutoTokenizer.from_pretrained(tmp_path)("a <b>é") == tokenizer("a <b>é")
