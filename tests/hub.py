"""A hub on this machine that answers in the hub's schema, for models and data sets."""

import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
from huggingface_hub import constants, list_repo_files

from common.data import data_sets

LISTED = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/[^/]+/?(.*)")
DESCRIBED = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/[^/]+)?")
FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)")


class LocalHub(ThreadingHTTPServer):
    """directories: "models/NAME" or "datasets/NAME" -> the files of that repository, at every commit.

    downloaded: names of the files it has sent; revisions: of which commits. refusal: of every file, its
    status, error code and message.
    """

    def __init__(self, directories: dict):
        self.directories, self.commit, self.refusal = directories, "a" * 40, None
        self.downloaded, self.revisions = [], set()
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        listed, described, file = (form.fullmatch(path) for form in (LISTED, DESCRIBED, FILE))
        if self.server.refusal and file:
            status, code, message = self.server.refusal
            self.answer(status, b"", **{"X-Error-Code": code, "X-Error-Message": message})
        elif listed and (directory := self.repository(*listed.groups()[:2])):
            self.answer_json(self.entries(directory, listed[3]))
        elif described and self.repository(*described.groups()):
            self.answer_json({"id": described[2], "sha": self.server.commit})
        elif file and (directory := self.repository(file[1] or "models", file[2])):
            self.answer_file(directory, file[3], file[4])
        else:
            self.answer(404, b"", **{"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def repository(self, kind, name):
        return self.server.directories.get(f"{kind}/{name}")

    def entries(self, directory, folder) -> list[dict]:
        """The files and folders in a folder, or all below it."""
        every = "recursive=true" in self.path.lower()
        return [{"type": "file" if path.is_file() else "directory", "oid": "0", "size": path.stat().st_size,
                 "path": str(path.relative_to(directory))}
                for path in (directory / folder).glob("**/*" if every else "*")]

    def answer_json(self, content):
        self.answer(200, json.dumps(content).encode(), **{"Content-Type": "application/json"})

    def answer_file(self, directory, revision, name):
        if not (directory / name).is_file():
            self.answer(404, b"", **{"X-Error-Code": "EntryNotFound"})
            return
        self.server.revisions.add(revision)
        self.server.downloaded += [name] * (self.command == "GET")
        content, headers = (directory / name).read_bytes(), {"ETag": f'"{name.replace("/", "-")}"'}
        if revision != "main":
            headers["X-Repo-Commit"] = revision
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            part = slice(int(asked[1]), int(asked[2]) + 1)
            headers["Content-Range"] = f"bytes {asked[1]}-{asked[2]}/{len(content)}"
            self.answer(206, content[part], **headers)
        else:
            self.answer(200, content, **headers)

    def answer(self, status, body, **headers):
        self.send_response(status)
        common = {"X-Repo-Commit": self.server.commit, "Content-Length": str(len(body))}
        for key, value in (common | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(home, monkeypatch, **directories):
    """A LocalHub in place of the hub, for this process and those that it starts, with a cache in `home`.

    directories: models or datasets = {NAME: directory}.
    """
    named = {f"{kind}/{name}": path for kind, each in directories.items() for name, path in each.items()}
    with LocalHub(named) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module, name, value in (
            (constants, "ENDPOINT", server.url), (constants, "HUGGINGFACE_CO_URL_TEMPLATE", template),
            (constants, "HF_HUB_CACHE", str(home / "cache")), (constants, "HF_HUB_OFFLINE", False),
            (list_repo_files.__self__, "endpoint", server.url), (datasets.config, "HF_ENDPOINT", server.url),
            (datasets.config, "HF_DATASETS_CACHE", home / "datasets"),
            (datasets.config, "HF_HUB_OFFLINE", False), (datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False),
        ):
            monkeypatch.setattr(module, name, value)
        for name, value in (("HF_ENDPOINT", server.url), ("HF_HOME", str(home)), ("HF_HUB_OFFLINE", "0"),
                            ("HF_UPDATE_DOWNLOAD_COUNTS", "0")):
            monkeypatch.setenv(name, value)
        data_sets.COMMITS.clear()
        yield server
        server.shutdown()
        data_sets.COMMITS.clear()


README = """---
configs:
- {config_name: text, data_files: [{split: train, path: text/*.parquet}]}
- {config_name: chats, data_files: [{split: train, path: chats/*.parquet}, {split: test, path: t/*.parquet}]}
---
"""


def save_data_set(home, documents: list[str], chats: list[list[dict]]):
    """A data set's repository of two configs, "text" and "chats", the former in two files."""
    half = len(documents) // 2
    rows = {"text/0": {"text": documents[:half]}, "text/1": {"text": documents[half:]},
            "chats/0": {"messages": chats}, "t/0": {"messages": chats[:1]}}
    for name, columns in rows.items():
        datasets.Dataset.from_dict(columns).to_parquet(home / f"{name}.parquet")
    (home / "README.md").write_text(README)
    return home
