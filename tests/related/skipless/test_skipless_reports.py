"""The fold and its report: differences, condition numbers, counts of weights; what the commands refuse."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

from common.models.load import load_config
from models import save_tiny, tiny_model
from related.skipless import compare, fold
from related.skipless.fold import LOGIT_TOLERANCE, MAX_CONDITION
from runs import expect_error, run
from skipless_models import COMPARE, FOLD, TRAIN, cells, matrices, model_of, tokens
from torchrun import ROOT

pytestmark = pytest.mark.slow
SHORT = ["--length", 32, "--steps", 3, "--batch", 2, "--warmup", 1]


def test_transplanted_model_has_the_matrices_of_the_stock_one():
    stock = tiny_model(head_dim=6, bias=True, model_type="qwen2").double()
    model = compare.transplanted(stock, parallel=True)
    source, state = stock.state_dict(), model.state_dict()
    assert model.config.parallel and len(state) == 3 * 11 + 2
    for name, tensor in state.items():  # Qwen2 has no bias of P
        assert torch.equal(tensor, source.get(name, torch.zeros_like(tensor)))


def test_every_fold_has_a_line_with_its_differences_or_a_reason(monkeypatch):
    model = model_of(kv_heads=2)
    lines = compare.every_fold("tiny", model, tokens(), MAX_CONDITION)
    assert [line["remove"] for line in lines] == [None, "q", "k", "v", "p"]
    itself, q, k, v, p = lines
    assert itself["float64"] == 0 < itself["float32"] < itself["bfloat16"]
    assert q["gone"] == ["q_proj", "o_proj"] and p["gone"] == ["o_proj"] and p["condition"] is None
    assert q["condition"] == max(layer["q"] for layer in fold.conditions(model))
    assert 0 < q["float64"] < LOGIT_TOLERANCE < q["float32"] < q["bfloat16"]
    assert "square K" in k["refused"] and "square V" in v["refused"]
    monkeypatch.setattr(fold, "fold", lambda *arguments: model_of(seed=1))  # a wrong one
    for line in compare.every_fold("tiny", model, tokens(), MAX_CONDITION)[1:]:
        assert "expected logits without" in line["refused"]


def test_the_last_line_counts_invertible_matrices():
    """Invertible in float64, if worse conditioned than what a fold inverts by default."""
    conditions = [{"q": 5.0, "p": 2.0}, {"q": 100 * MAX_CONDITION, "p": float("inf")}]
    expected = "3 of 4 square attention matrices of m invertible, worst condition number inf, P of layer 1"
    assert compare.closing_line("m", conditions, None) == expected


@pytest.mark.parametrize(("name", "counts", "row"), [
    ("mistral-7b", (33_554_432, 8_388_608, 176_160_768, 262_144_000),
     ["serial", "GQA", "15%, 1.17x", "15%, 1.17x"]),
    ("pythia-6.9b", (33_554_432, 33_554_432, 134_217_728, 413_138_944),  # the paper's has 32 tokens less
     ["parallel", "MHA", "16%, 1.19x", "8%, 1.08x"]),
])
def test_weights_of_the_papers_table(name, counts, row):
    counted = compare.count(load_config(str(ROOT / "related" / "skipless" / "configs" / f"{name}.json")))
    assert (counted["q"] + counted["p"], counted["kv"], counted["ffn"], counted["embeddings"]) == counts
    shown = cells(compare.weights_table({name: counted}).splitlines()[-1])
    assert [*shown[1:3], *shown[-2:]] == row
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


@pytest.fixture(scope="module")
def compared(inputs, tmp_path_factory):
    """A run directory with two trained models and their report, what it printed, and the shape's model."""
    home = tmp_path_factory.mktemp("skipless")
    model = save_tiny(home / "model", head_dim=6)
    text = ["--run", home / "run", "--model", model, "--text", inputs["text"]]
    for kind in ([], ["--parallel"]):
        run(TRAIN, *text, "--heldout", inputs["text"], *SHORT, *kind)
    return home / "run", run(COMPARE, *text, "--length", 32).stdout, model


def test_the_report_folds_random_real_and_trained_models(compared):
    home, printed, model = compared
    results = json.loads((home / "compare.json").read_text())
    lines = [line for line in results["exactness"] if line["remove"]]
    assert "40 folds exact" in printed
    assert len(lines) == 12 * 4 and sum("refused" in line for line in lines) == 8
    assert max(line["float64"] for line in lines if "float64" in line) < LOGIT_TOLERANCE
    assert len(results["conditions"]) == 3 and set(results["conditions"][0]) == set("qkvp")
    assert results["trained"]["serial"]["before"] != results["trained"]["serial"]["after"]
    assert [line["condition"] for line in results["sweep"]] == compare.SWEEP
    report = (home / "compare.md").read_text()
    assert "trained parallel" in report
    assert (home / "compare.png").exists()


def test_fold_writes_a_checkpoint_and_replaces_only_its_own(compared, inputs):
    home, _, _ = compared
    flags = ["--run", home, "--text", inputs["text"], "--length", 32]
    done = run(FOLD, *flags, "--remove", "v", "--dtype", "bfloat16")
    assert "v_proj, o_proj removed" in done.stdout
    source = AutoModelForCausalLM.from_pretrained(home / "serial")
    folded = AutoModelForCausalLM.from_pretrained(home / "serial-without-v")
    summary = json.loads((home / "serial-without-v" / "stage.json").read_text())["summary"]
    assert folded.dtype == torch.bfloat16 and folded.num_parameters() == summary["parameters_after"]
    assert summary["parameters_after"] < summary["parameters_before"] == source.num_parameters()
    stored = summary["max_relative_difference_stored"]
    assert summary["max_relative_difference"] < LOGIT_TOLERANCE < stored < 0.1
    expect_error("expected nothing or what related/skipless/fold.py wrote", FOLD, *flags, "--out",
                 home / "serial", "--force")
    assert AutoModelForCausalLM.from_pretrained(home / "serial").num_parameters() == source.num_parameters()
