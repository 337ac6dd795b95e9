"""Models of the hub: files that are read arrive, once, or are in the cache; a refusal says what to do."""

import pytest
import torch
from huggingface_hub import constants, hf_hub_download

from common.models.layers import Layers
from common.models.load import config_file, load_config, load_model, load_tokenizer, local_model
from common.run.errors import UserError
from common.run.files import files_in
from hub import serving
from models import byte_tokenizer, save_tiny, tiny_model

NAME = "acme/tiny"
READ = ["README.md", "added_tokens.json", "additional_chat_templates/tools.jinja", "chat_template.jinja",
        "config.json", "generation_config.json", "merges.txt", "qwen.tiktoken", "special_tokens_map.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"]
NOT_READ = ["LICENSE", "model_bf16.safetensors", "original/model.safetensors", "original/tokenizer.model"]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    home = tmp_path / "repository"
    for path in (home / name for name in (*READ, *NOT_READ)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
    save_tiny(home)
    torch.save(tiny_model().state_dict(), home / "pytorch_model.bin")
    with serving(tmp_path, monkeypatch, models={NAME: home}) as server:
        yield server


def store(directory, kind: str) -> list[str]:
    """Leave a repository's weights in one of the ways to store them; names of the files to read."""
    one, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if kind == "whole":
        return [one.name]
    one.unlink()
    if kind == "bin":
        return ["pytorch_model.bin"]
    tiny_model().save_pretrained(directory, max_shard_size="60KB")
    (directory / "parts").mkdir()  # as some repositories have them
    for shard in directory.glob("model-*.safetensors"):
        shard.rename(directory / "parts" / shard.name)
    index.write_text(index.read_text().replace('"model-', '"parts/model-'))
    return [index.name, *(f"parts/{name}" for name in files_in(directory / "parts"))]


@pytest.mark.parametrize("kind", [
    "whole", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bin", "shards"))])
def test_every_file_that_is_read_arrives_once_and_no_other(repository, kind):
    weights = store(repository.directories[f"models/{NAME}"], kind)
    path = local_model(NAME)
    assert files_in(path) == sorted(READ + weights) == sorted(repository.downloaded)
    assert local_model(NAME) == path and len(repository.downloaded) == len(files_in(path))
    assert load_tokenizer(path)("a b")["input_ids"] == byte_tokenizer()("a b")["input_ids"]
    tokens = torch.arange(9)[None]
    assert torch.equal(load_model(path)(tokens).logits, tiny_model()(tokens).logits)
    (logits,) = Layers(path, torch.float32, "cpu", layerwise=True).logits(tokens)
    torch.testing.assert_close(logits, tiny_model()(tokens).logits[0])


def test_of_a_model_to_plan_for_only_the_config_arrives(repository):
    path = config_file(NAME)
    assert repository.downloaded == ["config.json"] and load_config(path).hidden_size == 48


@pytest.mark.slow
def test_a_cache_that_another_program_has_filled_is_enough_without_a_network(repository, monkeypatch):
    """It has neither the list of the repository's files nor those that transformers does not read."""
    weights = store(repository.directories[f"models/{NAME}"], "shards")
    cached = ["config.json", "tokenizer.json", "tokenizer_config.json", *weights]
    for name in cached[:-1]:
        hf_hub_download(NAME, name)
    with monkeypatch.context() as patched:
        patched.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UserError, match="hub repository that can be read .*offline mode is enabled"):
            local_model(NAME)  # a shard is missing
    hf_hub_download(NAME, cached[-1])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert files_in(local_model(NAME)) == sorted(cached)


def test_a_refusal_gives_the_hubs_reason_and_what_to_do(repository):
    repository.refusal = 403, "GatedRepo", "Access to acme is restricted."
    with pytest.raises(UserError) as refused:
        local_model(NAME)
    message = str(refused.value)
    assert message.startswith(f"model {NAME}: neither a directory nor a hub repository that can be read (")
    assert "acme is restricted" in message and "log in with `hf auth login`" in message
