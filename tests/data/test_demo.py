"""The demo: its model, text and tasks, and the paper's first claims on them."""

import hashlib
import json
from pathlib import Path

import pytest

from common.data import demo
from runs import recipe


def digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_demo_is_the_same_bytes_everywhere(tmp_path):
    """Figures in the docs are those of this model, this text and these tasks."""
    demo.build_demo(tmp_path)
    model = digests(tmp_path / "model")
    assert model.items() <= digests(demo.SHIPPED).items()
    assert len(model) == 6 and f"`{model['model.safetensors']}`" in (demo.SHIPPED / "README.md").read_text()
    assert len({path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}) == 1
    digest = hashlib.sha256()
    for part in ("text", "tasks"):
        for name, content in digests(tmp_path / part).items():
            digest.update(f"{part}/{name} {content}\n".encode())
    assert digest.hexdigest() == "0b59706e516666779b4c669238d3975edeae1221f9639c34ee2cae8aa72581f9"


@pytest.mark.release
def test_whole_demo(tmp_path):
    """`make demo` without its set-up: the teacher learns every task, and alignment beats mean-pooling."""
    done = recipe("demo.sh", RUN=tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "run" / "eval" / "stage.json").read_text())["results"]
    for task in results["teacher"]["tasks"].values():
        assert task["exact_match"] >= task["chance"] + 0.25
    assert results["aligned"]["macro_exact_match"] > results["mean-pool"]["macro_exact_match"]
    assert results["aligned-untrained"]["perplexity"] < results["mean-pool-untrained"]["perplexity"]
    assert results["aligned"]["cache_bytes_per_token"] * 4 == results["teacher"]["cache_bytes_per_token"]
