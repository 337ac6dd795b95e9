"""Models of the hub: files that are read arrive, once, or are in the cache; a refusal says what to do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub import constants, hf_hub_download, list_repo_files

from common import hub
from common.errors import UserError
from common.files import files_in
from common.layers import Layers
from common.models import config_file, load_config, load_model, load_tokenizer, local_model
from helpers import byte_tokenizer, save_tiny, tiny_model

NAME, COMMIT = "acme/tiny", "a" * 40
READ = ["README.md", "added_tokens.json", "additional_chat_templates/tools.jinja", "chat_template.jinja",
        "config.json", "generation_config.json", "merges.txt", "qwen.tiktoken", "spiece.model",
        "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
        "vocab.json", "vocab.txt"]
NOT_READ = ["LICENSE", "flax_model.msgpack", "model_bf16.safetensors", "onnx/model.bin",
            "original/model.safetensors", "original/tokenizer.model", "training_args.bin", "processor.json"]


class Repository(ThreadingHTTPServer):
    """A hub on this machine with one repository, a directory. downloaded: names of the files it has sent."""

    def __init__(self, directory):
        self.directory, self.downloaded = directory, []
        self.refusal = None  # of every request: status, error code, message
        super().__init__(("127.0.0.1", 0), Answer)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        files = {name: self.server.directory / name for name in files_in(self.server.directory)}
        name = self.path.partition("?")[0].removeprefix(f"/{NAME}/resolve/").partition("/")[2]
        if self.server.refusal:
            status, code, message = self.server.refusal
            self.answer(status, b"", **{"X-Error-Code": code, "X-Error-Message": message})
        elif self.path.startswith("/api/models/"):
            listed = [{"type": "file", "oid": "0", "size": path.stat().st_size, "path": name}
                      for name, path in files.items()]
            self.answer(200, json.dumps(listed).encode())
        elif name in files:
            self.server.downloaded += [name] * (self.command == "GET")
            self.answer(200, files[name].read_bytes(), ETag=f'"{name.replace("/", "-")}"')
        else:
            self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def answer(self, status, body, **headers):
        self.send_response(status)
        for key, value in ({"X-Repo-Commit": COMMIT, "Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def repository(tmp_path, monkeypatch):
    home = tmp_path / "repository"
    save_tiny(home)
    for name in (*READ, *NOT_READ):
        (home / name).parent.mkdir(exist_ok=True)
        if not (home / name).exists():
            (home / name).write_bytes(b"{}")
    torch.save(tiny_model().state_dict(), home / "pytorch_model.bin")
    with Repository(home) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(list_repo_files.__self__, "endpoint", url)
        yield server
        server.shutdown()


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


@pytest.mark.parametrize("kind", ["whole", "bin", "shards"])
def test_every_file_that_is_read_arrives_once_and_no_other(repository, kind):
    weights = store(repository.directory, kind)
    path = local_model(NAME)
    assert files_in(path) == sorted(READ + weights) == sorted(repository.downloaded)
    assert local_model(NAME) == path and len(repository.downloaded) == len(files_in(path))
    assert load_tokenizer(path)("a b")["input_ids"] == byte_tokenizer()("a b")["input_ids"]
    loaded, layers = load_model(path).state_dict(), Layers(path, torch.float32, "cpu", layerwise=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tiny_model().state_dict().items())
    with layers.layer(1) as layer:
        assert torch.equal(layer.mlp.up_proj.weight, loaded["model.layers.1.mlp.up_proj.weight"])


def test_of_a_model_to_plan_for_only_the_config_arrives(repository):
    path = config_file(NAME)
    assert repository.downloaded == ["config.json"] and load_config(path).hidden_size == 48
    home = str(repository.directory)
    assert config_file(path) == path and config_file(home) == f"{home}/config.json"
    repository.refusal = 401, "GatedRepo", "Access to acme/other is restricted."
    with pytest.raises(UserError, match="model acme/other: neither .* is restricted.*; for a gated"):
        config_file("acme/other")


def test_a_cache_that_another_program_has_filled_is_enough_without_a_network(repository, monkeypatch):
    """It has neither the list of the repository's files nor those that transformers does not read."""
    weights = store(repository.directory, "shards")
    cached = ["config.json", "tokenizer.json", "tokenizer_config.json", *weights]
    for missing in (cached[1:], cached[-1:]):  # all weights, or a shard
        for name in cached[: -len(missing)]:
            hf_hub_download(NAME, name)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UserError, match="hub repository that can be read .*offline mode is enabled"):
            local_model(NAME)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hf_hub_download(NAME, cached[-1])
    for offline in (True, False):  # or the hub does not answer
        repository.refusal = (403, "", "Forbidden.")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        assert files_in(local_model(NAME)) == sorted(cached)


RESTRICTED = "Access to model acme/tiny is restricted"
LOGIN = "accept its license on its page and log in with `hf auth login`"


@pytest.mark.parametrize(("refusal", "texts"), [
    ((403, "GatedRepo", f"{RESTRICTED} and you are not in the authorized list."), [RESTRICTED, LOGIN]),
    ((401, "GatedRepo", f"{RESTRICTED}. You must be authenticated."), [RESTRICTED, LOGIN]),
    ((401, "RepoNotFound", "Invalid username or password."), ["Repository Not Found", LOGIN]),
    ((404, "EntryNotFound", ""), ["Entry Not Found", "config.json"]),
    ((403, "", "Forbidden here."), ["Forbidden here."]),
])
def test_a_refusal_gives_the_hubs_reason_and_what_to_do(repository, refusal, texts):
    repository.refusal = refusal
    with pytest.raises(UserError) as refused:
        local_model(NAME)
    message = str(refused.value)
    assert message.startswith(f"model {NAME}: neither a directory nor a hub repository that can be read (")
    assert all(text in message for text in texts) and "\n" not in message
    assert (LOGIN in message) == (LOGIN in texts)


def test_the_reason_for_a_data_set_is_the_same():
    reason = hub.reason(DatasetNotFoundError("Dataset 'x' is a gated dataset on the Hub."))
    assert reason.startswith("Dataset 'x' is a gated dataset on the Hub.;") and LOGIN in reason
