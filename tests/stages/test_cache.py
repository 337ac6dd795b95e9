"""Quantized caches through the stages: an export in another basis, and what stage 7 measures of both."""

import pytest

from common.models.quantized_cache import LAYOUTS
from models import save_tiny
from runs import align, digests, evaluate_arguments, read, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wide_run(inputs, tmp_path_factory):
    """A run directory with merged/ of a model whose heads consist of blocks."""
    home = tmp_path_factory.mktemp("wide") / "run"
    model = save_tiny(home.parent / "model", head_dim=64, num_key_value_heads=4)
    return align(home, inputs | {"model": model})


def test_an_export_in_another_basis_is_the_model_and_loses_less(wide_run, inputs):
    printed = run("06_export.py", "--run", wide_run, "--untrained", "--name", "plain").stdout
    assert "export, loaded back as torch.float32: max |logit difference| 0.00e+00" in printed
    run("06_export.py", "--run", wide_run, "--untrained", "--cache-basis", "halves")
    errors = read(wide_run / "gqa/stage.json")["summary"]["cache_basis"]
    assert errors.pop("layout") == "halves" and errors.keys() == {"keys", "values"}
    assert len(errors["keys"]) == 3 and max(*errors["keys"], *errors["values"]) < 1

    models = [f"{name}={wide_run / path}" for name, path in
              (("merged", "merged"), ("plain", "gqa-plain"), ("gqa", "gqa"))]
    caches = ["--cache", "q8_0", "q8_0/q4_0", "q4_0", "fp8"]
    arguments = [*evaluate_arguments(inputs | {"tasks": "none"}), *caches]
    run("07_eval.py", "--run", wide_run, "--model", *models, *arguments)
    results = read(wide_run / "eval/stage.json")["results"]
    assert results["gqa"]["kl"] < 1e-6 and results["plain"]["kl"] == 0
    merged, plain, ours = (results[name]["caches"] for name in ("merged", "plain", "gqa"))
    assert merged == plain and plain["q4_0"]["pairs"] != plain["q4_0"]["halves"]
    assert ours["q4_0"]["halves"]["kl"] < 0.9 * plain["q4_0"]["halves"]["kl"]
    for name, bits in (("q8_0", 17), ("q8_0/q4_0", 13), ("q4_0", 9)):
        assert plain[name]["bytes_per_token"] == 3 * 2 * 64 * bits / 8 and plain[name].keys() >= {*LAYOUTS}
    card = " ".join((wide_run / "gqa/README.md").read_text().split())
    assert "so that a four-bit cache loses less in the layout halves: " in card


def test_heads_without_blocks_keep_their_basis(aligned_run, inputs, tmp_path):
    plain, other = (["--run", aligned_run, "--untrained", "--name", name] for name in ("a", "b"))
    run("06_export.py", *plain)
    done = run("06_export.py", *other, "--cache-basis", "rotated")
    assert "note    --cache-basis: heads have no blocks of 32 channels; the basis stays" in done.stdout
    assert digests(aligned_run / "gqa-a") == digests(aligned_run / "gqa-b")
    done = run("07_eval.py", "--run", tmp_path, "--model", aligned_run / "merged",
               *evaluate_arguments(inputs | {"tasks": "none"}), "--cache", "q4_0")
    assert "merged have no blocks of 32 channels; formats in blocks are not measured" in done.stdout
    assert [*read(tmp_path / "eval/stage.json")["results"]["merged"]["caches"]] == ["f16"]
