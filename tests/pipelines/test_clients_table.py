"""pipelines/clients.sh: when a client does worse on an export; before a release, that none does.

The other tests of the programs that people run models with: test_gguf.py and test_harness.py.
"""

import re

import numpy as np
import pytest

from pipelines.clients import TOLERANCE, Result, compare, worse
from runs import recipe

GOOD = Result("", 1e-6, (6, 6), (3, 3))


def test_answers_are_compared():
    """Logits relative to the largest; tokens up to the first that differs; a chat may be missing."""
    expected = {"logits": np.array([[3.0, -4.0]]), "greedy": [[1, 2], [2, 2]], "tokenized": [[5, 6], [7]]}
    found = {"logits": np.array([[2.0, -4.0]]), "greedy": [[0, 2], [2]], "tokenized": [[5, 6]]}
    assert compare(expected, found) == Result("", 1 / 4, (1, 4), (1, 2))


@pytest.mark.parametrize(("source", "export", "expected"), [
    (GOOD, Result("", TOLERANCE / 2, (6, 6), (3, 3)), False),
    (GOOD, Result("", TOLERANCE * 2, (6, 6), (3, 3)), True),
    (GOOD, Result("", 1e-6, (5, 6), (3, 3)), True),
    (GOOD, Result("refused"), True),
    (Result("refused"), Result("", 1.0, (0, 6), (0, 3)), False),
    # a client that is wrong on the source: how wrong it is on the export says nothing, but for the texts
    (Result("", 0.5, (2, 6), (2, 3)), Result("", 0.9, (1, 6), (2, 3)), False),
    (Result("", 0.5, (2, 6), (2, 3)), Result("", 0.5, (2, 6), (1, 3)), True),
])
def test_what_is_worse(source, export, expected):
    assert worse(source, export) is expected


@pytest.mark.release
def test_no_client_does_worse_on_the_export(tmp_path):
    """The clients that install in minutes; each runs the sources that are Llamas or Qwen2, but CTranslate2
    Llama 3's. Exit code 1: a client does worse.
    """
    clients = ["transformers-4", "llama.cpp", "mlx-lm", "CTranslate2", "onnxruntime-genai"]
    done = recipe("clients.sh", "--run", tmp_path, "--clients", *clients)
    table = (tmp_path / "clients.md").read_text()
    assert done.returncode == 0, table + done.stderr
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    rows = [row for row in rows if row[1].strip() in ("llama", "llama3", "qwen2", "sentencepiece")]
    assert len(rows) == 4 * len(clients)
    wrong = {(client.strip("| "), kind.strip()) for client, kind, source, _ in rows
             if not re.search(r"^ *(\S+e-0[4-9]|0e)", source)}
    assert wrong == {("ctranslate2 4.8.5", "llama3")}
