"""Checkpoints: read as transformers reads them, whole or layer by layer, and refused in one line where they
are damaged."""

import filecmp
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models import load as models
from common.models.families import key_context
from common.models.layers import Layers
from common.models.load import describe, load_config, load_model, load_tokenizer, source_model
from common.models.weights import fingerprint, weight_files
from common.run import artifact
from common.run.errors import UserError
from common.run.files import files_in
from models import byte_tokenizer, save_tiny, tiny_model
from runs import read

WEIGHTS, PICKLE, TEMPLATE = "model.safetensors", "pytorch_model.bin", "chat_template.jinja"
UP = "model.layers.1.mlp.up_proj.weight"
ONE_INFINITY = torch.ones(64, 48).index_fill(0, torch.tensor([5]), torch.inf)


@pytest.fixture
def path(tmp_path) -> Path:
    """The checkpoint of a tiny model."""
    return Path(save_tiny(tmp_path / "model [ö]*"))  # not a pattern


def edit_config(path: Path, name: str = "config.json", **changes) -> None:
    settings = read(path / name)
    (path / name).write_text(json.dumps(settings | changes))


def store(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(load_file(path / WEIGHTS) | tensors, path / WEIGHTS, metadata={"format": "pt"})


def refusal(action, *arguments) -> str:
    with pytest.raises(UserError) as refused:
        action(*arguments)
    return " ".join(str(refused.value).split())


def test_settings_of_outputs_and_attention_are_overruled(path):
    """Layer by layer no mask is passed, which is causal for sdpa alone."""
    edit_config(path, output_attentions=True, _attn_implementation="flash_attention_2")
    tokens = torch.arange(40)[None] % 26
    expected = tiny_model()(tokens).logits[0]
    for layerwise in (False, True):
        (logits,) = Layers(str(path), torch.float32, "cpu", layerwise).logits(tokens)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("device", "filled", "expected"), [
    ("cuda", 0.72, True), ("cuda", 0.68, False), ("cuda:1", 2, False), ("cpu", 2, False)])
def test_a_model_that_leaves_one_gpu_no_room_needs_several(path, monkeypatch, device, filled, expected):
    """filled: share of the GPU's free memory that the float32 weights would take."""
    weights = sum(parameter.nbytes for parameter in tiny_model().parameters())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights / filled, 0))
    assert models.needs_several_gpus(str(path), torch.float32, device) is expected


def test_the_fingerprint_follows_every_file_that_is_read(path):
    os.remove(path / WEIGHTS)
    tiny_model().save_pretrained(path, max_shard_size="20KB")
    (path / TEMPLATE).touch()
    before = fingerprint(str(path))
    for name in ("config.json", "generation_config.json", TEMPLATE, *weight_files(str(path))):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content + b" ")
        assert fingerprint(str(path)) != before, name
        (path / name).write_bytes(content)
    for other in ("model_bf16.safetensors", "model-00001-of-00099.safetensors"):
        (path / other).write_bytes(b"of another program")
    assert fingerprint(str(path)) == before


class Command:
    """An object whose unpickling runs a command."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_code(path: Path) -> None:
    torch.save(load_file(path / WEIGHTS) | {UP: Command(path / "executed")}, path / PICKLE)
    os.remove(path / WEIGHTS)


DAMAGES = {  # name -> what is done to a checkpoint, what the message must contain
    "tensors are missing": (lambda path: edit_config(path, num_hidden_layers=4),
                            "expected a tensor model.layers.3.input_layernorm.weight, found none"),
    "tensors are left": (lambda path: edit_config(path, num_hidden_layers=2), "found also 'model.layers.2."),
    "another shape": (lambda path: store(path, {UP: torch.zeros(63, 48)}), UP),
    "infinity": (lambda path: store(path, {UP: ONE_INFINITY}), f"NaN or Inf in {UP}"),
    "code": (write_code, PICKLE),
    "a file is cut": (lambda path: os.truncate(path / WEIGHTS, 20000), f"{WEIGHTS}: expected a file of"),
    "no weights": (lambda path: os.remove(path / WEIGHTS), f"expected weights (one of {WEIGHTS}"),
}


def use_everything(path: Path) -> None:
    layers = Layers(str(path), torch.float32, "cpu", layerwise=True)
    layers.logits(torch.zeros(1, 1, dtype=torch.long))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_refused_whole_and_layer_by_layer(path, damage):
    action, expected = DAMAGES[damage]
    action(path)
    for use in (load_model, use_everything):
        message = refusal(use, path)
        assert expected in message and str(path) in message and not (path / "executed").exists()


def test_a_head_that_is_tied_by_the_config_only_is_refused(path):
    """transformers would use it, and what is written from the config would lose it."""
    edit_config(path, tie_word_embeddings=True)
    assert "expected lm_head.weight equal to model.embed_tokens.weight" in refusal(use_everything, path)


def test_frequencies_that_older_releases_store_are_no_extra_tensors(path):
    store(path, {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)})
    use_everything(path)
    load_model(str(path))


def test_a_config_that_names_code_is_refused(path):
    (path / "strange.py").write_text(f"open({str(path / 'ran')!r}, 'w')\n")
    edit_config(path, model_type="strange", auto_map={"AutoConfig": "strange.Config"})
    message = refusal(load_config, str(path))
    assert f"{path}: " in message and "custom code" in message and not (path / "ran").exists()


def test_a_source_model_is_as_recorded_and_moves_together_with_the_run(path, tmp_path):
    """One that stage 1 made lies in RUN, and a copy of RUN has its own."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(path, old / "source")
    record = artifact.within(str(old), {"model": describe(str(old / "source"), "name")})
    shutil.copytree(old, new)
    record = artifact.resolved(str(new), record)
    assert source_model(record, str(new))["path"] == str(new / "source")
    store(new / "source", {UP: torch.zeros(64, 48)})
    assert "changed since 01_calibrate.py read it" in refusal(source_model, record, str(new))
    shutil.rmtree(new / "source")
    assert "that 01_calibrate.py read, found none" in refusal(source_model, record, str(new))


def test_a_tokenizer_is_copied_byte_for_byte(path, tmp_path):
    """All files that some program reads it from, whether or not this one does, and no others."""
    target, others = tmp_path / "target", ["tokenizer.model", "merges.txt", TEMPLATE]
    for name in others:
        (path / name).write_bytes(name.encode() + b"\r\n\xff")
    target.mkdir()
    models.save_tokenizer(str(path), str(target))
    copied = sorted([*others, "tokenizer.json", "tokenizer_config.json"])
    assert files_in(str(target)) == copied
    assert filecmp.cmpfiles(path, target, copied, shallow=False)[0] == copied


def test_the_name_of_a_tokenizers_own_code_stays_behind(path, tmp_path):
    """A tokenizer.json does without the code, which is not copied; without one the model is refused."""
    source, target = path, tmp_path / "target"
    target.mkdir()
    edit_config(source, "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    settings = read(source / "tokenizer_config.json")
    edit_config(source, "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.OwnTokenizer", None]})
    models.save_tokenizer(str(source), str(target))
    expected = settings | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert read(target / "tokenizer_config.json") == expected
    shutil.copy(source / "config.json", target)
    for each in (source, target):
        assert load_tokenizer(str(each))("a b é").input_ids == byte_tokenizer()("a b é").input_ids
    (source / "tokenizer.json").unlink()
    message = refusal(load_tokenizer, str(source))
    assert f"{source}: expected a tokenizer.json" in message and "names code (auto_map)" in message


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: edit_config(path, vocab_size=256),
     "expected token ids below the model's vocab_size 256, found 256 in the tokenizer"),
    (lambda path: edit_config(path, "tokenizer_config.json", eos_token=None),
     "end-of-sequence token, found none"),
    (lambda path: (path / "tokenizer.json").write_text("{"), "cannot load a tokenizer"),
])
def test_a_tokenizer_fits_the_vocabulary_and_ends_sequences(path, damage, message):
    edit_config(path, vocab_size=257)
    assert load_tokenizer(str(path)).eos_token_id == 256
    damage(path)
    assert message in refusal(load_tokenizer, str(path))


def test_pointers_of_git_lfs_are_named(path):
    (path / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    message = refusal(load_model, str(path))
    assert f"{path / WEIGHTS}: expected" in message
    assert "Git LFS pointer; run git lfs install and git lfs pull" in message


def test_the_context_of_keys_is_the_models_positions_at_most_4096():
    assert key_context(None, 2048) == 2048 and key_context(None, 131072) == 4096
    assert key_context(512, 2048) == 512 and key_context(8192, 131072) == 8192
    with pytest.raises(UserError, match="at most the model's 2048 positions, found 2049"):
        key_context(2049, 2048)
