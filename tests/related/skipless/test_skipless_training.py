"""Training skipless models: where it starts, its loss, stopped and resumed, its variants."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from scipy.stats import sem
from transformers import AutoModelForCausalLM

from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.models.load import load_config, load_model, load_tokenizer
from common.training.engine import STOPPED
from common.training.packing import batch_indices
from models import save_tiny, tiny_model
from related.skipless import fold, train
from related.skipless.train import initialise, skipless_config
from runs import expect_error, interrupt, read, run

pytestmark = pytest.mark.slow
TRAIN = "related/skipless/train.py"


@torch.no_grad()
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("without", [None, "q_proj", "k_proj", "v_proj"])
def test_training_starts_near_the_identity(without, parallel):
    """Sharp attention reads the token itself, and the open gate passes it on: what is left is x V P.

    Sharp is q k = SHARPNESS^2 |x|^2 for a token and itself, in the subspace of each head.
    """
    removed = [without, "o_proj"] if without else []
    source = tiny_model(num_attention_heads=4, num_key_value_heads=4, head_dim=12).config
    config = skipless_config(source, parallel, mlp_bias=True, removed=removed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    initialise(model, tokens, seed=0)
    states = model(tokens, output_hidden_states=True).hidden_states
    for before, after, layer in zip(states, states[1:], model.model.layers, strict=False):
        attention = layer.self_attn
        assert max(fold.condition_numbers(attention).values()) < 1.001
        scores = attention.q_proj(before) * attention.k_proj(before)
        expected = train.SHARPNESS**2 * before.square().sum(-1)
        torch.testing.assert_close(scores.sum(-1), expected, rtol=1e-4, atol=1e-4)
        if not parallel:
            assert float(after.square().mean()) == pytest.approx(1, rel=1e-3)
            rotated = attention.o_proj(attention.v_proj(before))
            similarity = torch.nn.functional.cosine_similarity(rotated.flatten(), after.flatten(), dim=0)
            assert similarity > 0.7  # in random directions it is 0


def flags(run_directory, inputs, *changes) -> list:
    """Three steps of two sequences of 16 tokens."""
    return ["--run", run_directory, "--model", inputs["model"], "--text", inputs["text"], "--heldout",
            inputs["text"], "--steps", 3, "--batch", 2, "--length", 16, "--warmup", 1, *changes]


def test_training_learns_every_next_token(inputs, tmp_path):
    """The first loss is the cross-entropy of all next tokens of the batch, before any step."""
    heldout = shutil.copy(shutil.__file__, tmp_path / "heldout.txt")
    run(TRAIN, *flags(tmp_path, inputs, "--heldout", heldout))
    tokenizer = load_tokenizer(inputs["model"])
    ids, _ = load_tokens(inputs["text"], tokenizer, 6, 16)
    config = skipless_config(load_config(inputs["model"]), False, mlp_bias=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    initialise(model, ids[:2], seed=0)
    batch = ids[batch_indices(0, 2, 6, 0)]
    first = json.loads((tmp_path / "serial" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(model(batch, labels=batch).loss.detach()), rel=1e-6)
    batch, _ = load_tokens(str(heldout), tokenizer, 32, 16, EVALUATION)
    loss = load_model(str(tmp_path / "serial"))(batch, labels=batch).loss.detach()
    summary = read(tmp_path / "serial" / "stage.json")["summary"]
    assert summary["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)


def test_a_stopped_training_resumes_to_the_same_weights_with_the_same_settings_alone(inputs, tmp_path):
    run(TRAIN, *flags(tmp_path / "whole", inputs))
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, 1)
        run(TRAIN, *flags(tmp_path / "run", inputs), code=STOPPED)
    expect_error("lr 0.001 -> 0.01", TRAIN, *flags(tmp_path / "run", inputs, "--lr", 0.01))
    assert "after step 2" in run(TRAIN, *flags(tmp_path / "run", inputs)).stdout
    whole, resumed = (load_model(str(tmp_path / name / "serial")) for name in ("whole", "run"))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["serial"]


def test_all_variants_are_trained_and_compared_seed_by_seed(inputs, tmp_path):
    """In the table, by the mean distance from the full model of each seed, and its standard error."""
    model, home = save_tiny(tmp_path / "model", head_dim=6), tmp_path / "run"
    run(TRAIN, *flags(home, inputs, "--model", model, "--variants", 2))
    summary = read(home / "variants" / "stage.json")["summary"]
    *_, full, _, _, without_v = (home / "variants" / "variants.md").read_text().splitlines()
    for letter, title in train.VARIANTS.items():
        removed = {fold.PROJECTIONS[letter], "o_proj"} if letter else set()
        for seed in (0, 1):
            path = train.model_path(home / f"seed-{seed}", False, letter)
            trained = AutoModelForCausalLM.from_pretrained(path)
            assert set(trained.config.removed) == removed
            assert trained.num_parameters() == summary["parameters"][title]
            perplexity = read(Path(path, "stage.json"))["summary"]["perplexity"]
            assert summary["losses"][title][seed] == pytest.approx(math.log(perplexity))
        assert len(set(summary["losses"][title])) == 2  # another seed is another training
    losses = torch.tensor(list(summary["losses"].values()), dtype=torch.float64)
    apart = losses[-1] - losses[0]
    assert "+" not in full and f"| {apart.mean():+.3f} ± {sem(apart):.3f} |" in without_v
