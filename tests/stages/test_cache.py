"""Quantized caches through the stages: an export in another basis, and what stage 7 measures of both."""

import pytest

from common.models.quantized_cache import LAYOUTS
from models import save_tiny
from runs import align, copy_run, digests, evaluate_arguments, read, run

pytestmark = pytest.mark.slow


def test_an_export_in_another_basis_is_the_model_and_loses_less(inputs, tmp_path):
    """Of a model whose heads consist of blocks."""
    model = save_tiny(tmp_path / "model", head_dim=64, num_key_value_heads=4)
    home = align(tmp_path / "run", inputs | {"model": model})
    run("06_export.py", "--run", home, "--untrained", "--cache-basis", "halves")
    errors = read(home / "gqa/stage.json")["summary"]["cache_basis"]
    assert errors.pop("layout") == "halves" and errors.keys() == {"keys", "values"}
    assert len(errors["keys"]) == 3 and max(*errors["keys"], *errors["values"]) < 1

    caches = ["--cache", "q8_0", "q8_0/q4_0", "q4_0", "fp8"]
    run("07_eval.py", "--run", home, "--model", f"merged={home}/merged", f"gqa={home}/gqa",
        *evaluate_arguments(inputs | {"tasks": "none"}), *caches)
    results = read(home / "eval/stage.json")["results"]
    assert results["gqa"]["kl"] < 1e-6
    plain, ours = (results[name]["caches"] for name in ("merged", "gqa"))
    assert plain["q4_0"]["pairs"] != plain["q4_0"]["halves"]
    assert ours["q4_0"]["halves"]["kl"] < 0.9 * plain["q4_0"]["halves"]["kl"]
    for name, bits in (("q8_0", 17), ("q8_0/q4_0", 13), ("q4_0", 9)):
        assert plain[name]["bytes_per_token"] == 3 * 2 * 64 * bits / 8 and plain[name].keys() >= {*LAYOUTS}
    card = " ".join((home / "gqa/README.md").read_text().split())
    assert "so that a four-bit cache loses less in the layout halves: " in card


def test_heads_without_blocks_keep_their_basis(aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    done = run("06_export.py", "--run", home, "--untrained", "--cache-basis", "rotated")
    assert "note    --cache-basis: heads have no blocks of 32 channels; the basis stays" in done.stdout
    assert digests(home / "gqa") == digests(home / "merged")
    done = run("07_eval.py", "--run", home, "--model", home / "merged",
               *evaluate_arguments(inputs | {"tasks": "none"}), "--cache", "q4_0")
    assert "merged have no blocks of 32 channels; formats in blocks are not measured" in done.stdout
