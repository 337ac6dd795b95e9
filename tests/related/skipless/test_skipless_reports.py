"""The fold and its report: differences, condition numbers, counts of weights; what the commands refuse."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from common.models.load import load_config
from models import save_tiny, tiny_model
from related.skipless import compare, fold
from related.skipless.fold import LOGIT_TOLERANCE, MAX_CONDITION
from runs import run
from skipless_models import COMPARE, FOLD, TRAIN, matrices, model_of
from torchrun import ROOT

pytestmark = pytest.mark.slow
SHORT = ["--steps", 3, "--batch", 2, "--warmup", 1]


def test_the_last_line_counts_invertible_matrices():
    """Invertible in float64, if worse conditioned than what a fold inverts by default."""
    conditions = [{"q": 5.0, "p": 2.0}, {"q": 100 * MAX_CONDITION, "p": float("inf")}]
    expected = "3 of 4 square attention matrices of m invertible, worst condition number inf, P of layer 1"
    assert compare.closing_line("m", conditions, None) == expected


@pytest.mark.parametrize(("name", "counts", "saved"), [
    ("mistral-7b", (33_554_432, 8_388_608, 176_160_768, 262_144_000), "| 15%, 1.17x | 15%, 1.17x |"),
    ("pythia-6.9b", (33_554_432, 33_554_432, 134_217_728, 413_138_944), "| 16%, 1.19x | 8%, 1.08x |"),
])  # the paper's Pythia has 32 tokens less
def test_weights_of_the_papers_table(name, counts, saved):
    counted = compare.count(load_config(str(ROOT / "related" / "skipless" / "configs" / f"{name}.json")))
    assert (counted["q"] + counted["p"], counted["kv"], counted["ffn"], counted["embeddings"]) == counts
    assert saved in " ".join(compare.weights_table({name: counted}).split())
    assert counted["without_q_p"] == counted["total"] - 32 * 2 * 4096**2


def test_counted_weights_are_those_of_the_model():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    neox = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=30, **shape))
    for stock in (tiny_model(num_key_value_heads=2), tiny_model(model_type="qwen3"), neox):
        assert compare.count(stock.config)["total"] == matrices(stock)
    assert compare.count(tiny_model(num_key_value_heads=1).config)["attention"] == "MQA"
    for kind in ({}, {"parallel": True}, {"tie_word_embeddings": True}, {"gated": False}):
        model = model_of(**kind)
        counted = compare.count(model.config)
        assert counted["total"] == matrices(model)
        assert counted["folded"] == matrices(fold.fold(model, "q"))


def test_random_real_and_trained_models_are_folded_and_reported(inputs, tmp_path):
    home, model = tmp_path / "run", save_tiny(tmp_path / "model", head_dim=6)
    text = ["--run", home, "--text", inputs["text"], "--length", 32]
    for kind in ([], ["--parallel"]):
        run(TRAIN, *text, "--model", model, "--heldout", inputs["text"], *SHORT, *kind)
    assert "40 folds exact" in run(COMPARE, *text, "--model", model).stdout
    lines = json.loads((home / "compare" / "stage.json").read_text())["exactness"]
    refused = [line["remove"] for line in lines if "refused" in line]
    assert len(refused) == 8 and {*refused} == {"k", "v"}  # of models with fewer key/value heads
    assert max(line["float64"] for line in lines if "float64" in line) < LOGIT_TOLERANCE

    run(FOLD, *text, "--remove", "v", "--dtype", "bfloat16")
    source, folded = (AutoModelForCausalLM.from_pretrained(home / name)
                      for name in ("serial", "serial-without-v"))
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() < source.num_parameters()
