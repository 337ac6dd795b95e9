"""A model one layer at a time: the bytes safetensors itself would write, clear refusals, and memory that a
layer sets, not the model."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from common.models.layers import SHARD_SIZE, CheckpointWriter, Layers, Spool
from common.run.errors import UserError
from models import FAMILIES, byte_tokenizer, save_tiny, tiny_model
from runs import digests, read, run

TOKENS = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))
LAYERS = [f"model.layers.{index}" for index in range(3)]


def write(path, model, config, dtype, source: str) -> None:
    """Write a model part by part, as a checkpoint made from source."""
    path.mkdir()
    with CheckpointWriter(str(path), config, dtype, source) as writer:
        for name in ("model.norm", *LAYERS, "model.embed_tokens", "lm_head"):
            writer.write(name, model.get_submodule(name))


@pytest.mark.parametrize(("tied", "dtype", "size"), [
    (False, torch.float32, SHARD_SIZE), (True, torch.bfloat16, SHARD_SIZE), (True, torch.float32, "20KB")])
def test_written_part_by_part_a_checkpoint_is_the_model(tmp_path, monkeypatch, tied, dtype, size):
    """The files are those that transformers writes itself, byte for byte: one up to its shard size, several
    and an index beyond."""
    source = save_tiny(tmp_path / "source", tie_word_embeddings=tied)
    model = tiny_model(tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    monkeypatch.setattr("common.models.layers.SHARD_SIZE", size)
    config = LlamaConfig.from_pretrained(source, dtype=None, architectures=None)
    write(tmp_path / "ours", model, config, dtype, source)
    ours, theirs = ({path.name: path.read_bytes() for path in (tmp_path / name).glob("model*")}
                    for name in ("ours", "theirs"))
    assert ours == theirs
    assert len(ours) > 3 if size == "20KB" else list(ours) == ["model.safetensors"]


@pytest.mark.parametrize(("name", "dtype"), [
    ("gpt_oss", torch.float32), ("glm4_moe", torch.bfloat16),
    pytest.param("olmoe", torch.bfloat16, marks=pytest.mark.slow)])
def test_experts_are_stored_as_transformers_stores_them(tmp_path, name, dtype):
    """Each by itself, though a model holds them together; what a router adds to its choice in float32, in
    16-bit checkpoints, too. Read back layer by layer they are the model's."""
    source, model = save_tiny(tmp_path / "source", **FAMILIES[name]), tiny_model(**FAMILIES[name])
    for layer in model.model.layers:
        for buffer in layer.buffers():
            buffer.copy_(torch.linspace(1, 1 + 1e-4, buffer.numel()))
    model.save_pretrained(tmp_path / "theirs")
    write(tmp_path / "ours", model, model.config, dtype, source)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        kept = key.endswith("e_score_correction_bias")
        assert torch.equal(ours[key], tensor if kept else tensor.to(dtype)), key
    layers = Layers(str(tmp_path / "theirs"), torch.float32, "cpu", layerwise=True)
    for index, layer in enumerate(layers.decoder_layers()):
        for key, tensor in model.model.layers[index].state_dict().items():
            assert torch.equal(layer.state_dict()[key], tensor), key


def test_a_checkpoint_without_an_expert_is_refused(tmp_path):
    source = save_tiny(tmp_path, **FAMILIES["olmoe"])
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="expected tensors that make model.layers.1.mlp.experts.gate_up_proj"):
        Layers(source, torch.float32, "cpu", layerwise=True).logits(TOKENS)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_layers_are_the_model(tmp_path, layerwise, tied):
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="40KB")  # several files
    files = set(tmp_path.iterdir())
    layers = Layers(str(tmp_path), torch.float32, "cpu", layerwise)
    hidden = layers.embed(TOKENS.split(1), str(tmp_path))
    assert isinstance(hidden, Spool if layerwise else list)
    for index in range(3):
        with layers.layer(index) as layer:
            layers.advance(layer, hidden)
    logits = torch.stack(list(layers.logits_of(hidden)))
    torch.testing.assert_close(logits, model(TOKENS).logits, rtol=0, atol=1e-4)
    assert set(tmp_path.iterdir()) == files  # that of the Spool has no name: nothing is left of it
    torch.testing.assert_close(torch.stack(layers.logits(TOKENS)), model(TOKENS).logits, rtol=0, atol=1e-5)
    devices = {parameter.device.type for parameter in layers.model.parameters()}
    assert devices == ({"meta"} if layerwise else {"cpu"})


@torch.no_grad()
def test_one_part_at_a_time_is_in_memory_in_a_whole_forward_pass(tmp_path):
    layers, held = Layers(save_tiny(tmp_path), torch.float32, "cpu", layerwise=True), []
    layers.edit(lambda *_: held.append({name.split(".self_attn")[0]
                                        for name, parameter in layers.model.named_parameters()
                                        if not parameter.is_meta and ".self_attn." in name}))
    layers.logits(TOKENS)
    assert held == [{name} for name in LAYERS]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in layers.model.modules())


@pytest.mark.release
def test_memory_is_that_of_a_layer(tmp_path):
    """A model of 3.3 GiB in float32, in bfloat16 on the disk: its stages 1 and 4 hold less than half of that
    one layer at a time, all of it otherwise; and write the same bytes."""
    config = LlamaConfig(vocab_size=260, hidden_size=1024, intermediate_size=4096, num_hidden_layers=52,
                         num_attention_heads=16, num_key_value_heads=16, eos_token_id=256)
    model, text = tmp_path / "model", tmp_path / "text.txt"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model, max_shard_size="500MB")
    byte_tokenizer().save_pretrained(model)
    text.write_text("All work and no play makes Jack a dull boy. " * 100)
    calibrate = ["--model", model, "--text", text, "--sequences", 4, "--length", 128]
    align = ["--rotate", "none"]  # rotating takes minutes, not memory
    peaks = {}
    for name, options in (("whole", []), ("layerwise", ["--layerwise"])):
        home = tmp_path / name
        # in processes of their own: the peak is a process's
        run("01_calibrate.py", "--run", home, *calibrate, *options, fresh=True)
        run("02_similarity.py", "--run", home)
        run("03_group.py", "--run", home, "--restarts", 2, "--iterations", 10)
        run("04_align.py", "--run", home, *align, *options, fresh=True)
        peaks[name] = [read(home / part / "stage.json")["summary"]["peak_memory_gib"]
                       for part in ("calibration", "aligned")]
    whole = sum(os.path.getsize(file) for file in model.glob("*.safetensors")) * 2 / 2**30
    assert whole > 3 and max(peaks["layerwise"]) < whole / 2 and min(peaks["whole"]) > whole, peaks
    for part in ("calibration", "aligned", "merged"):
        assert digests(tmp_path / "whole" / part) == digests(tmp_path / "layerwise" / part)
