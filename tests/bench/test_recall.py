"""What models recall: easy questions, which answers count as right, and pass keys hidden in text."""


import pytest
import torch

from bench import retrieval
from models import save_tiny, tiny_model
from runs import last_line, run

pytestmark = pytest.mark.slow
def test_a_key_is_recalled_if_greedy_decoding_writes_it():
    model, prompt = tiny_model(), torch.arange(20) * 3
    written = model.generate(prompt[None], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    row = written[0].tolist()
    assert len(row) == 25 and retrieval.recalls(model, row, 5)
    for place in (-5, -3, -1):
        wrong = list(row)
        wrong[place] += 1
        assert not retrieval.recalls(model, wrong, 5)


def test_retrieval_bench(inputs, tmp_path):
    out, model = tmp_path / "out", save_tiny(tmp_path / "model", max_position_embeddings=600)
    figures = last_line(run("bench/retrieval.py", "--source", model, "--models", f"same={model}", "--text",
                            inputs["text"], "--samples", 2, "--out", out))
    recalled = figures["recalled"]
    assert list(recalled["source, 1"]) == ["512"]  # the lengths that the model has positions for
    assert recalled["source, 8"] == recalled["same, 8"]
