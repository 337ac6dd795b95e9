"""Checkpoints as people use them: by the snippet of their card, and by stage 7.

Programs: test_harness.py (lm_eval), test_gguf.py (llama.cpp), test_clients_table.py (beside the source).
"""

import textwrap

import pytest

from models import byte_tokenizer, tiny_model
from related.dha.modeling import DhaConfig, DhaForCausalLM
from runs import read, run

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def test_the_model_card_of_a_run(finished_run):
    """It has its scores, and its snippet runs."""
    card = (finished_run / "gqa" / "README.md").read_text()
    scores = card.partition("<!-- scores -->")[2].partition("<!-- /scores -->")[0]
    assert "| winogrande" in scores and "teacher" in scores and "Not evaluated yet" not in card
    snippet = textwrap.dedent(card.partition("## Use\n\n")[2].partition("\n\nIn vLLM")[0])
    printed: list[str] = []
    exec(snippet.replace("PATH", str(finished_run / "gqa")), {"print": printed.append})
    assert printed[0].startswith("Question: Which is a metal?\nChoices: ['wood', 'iron']\nAnswer:")


@pytest.mark.slow
def test_stage_7_evaluates_a_class_of_a_module_that_is_registered(inputs, tmp_path):
    """Decoupled heads, of which a layer has more for values than for keys."""
    shape = {name: value for name, value in tiny_model().config.to_dict().items() if name in SHAPE}
    key_groups, value_groups = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2], [1, 3, 4], [5, 6, 7]]
    groups = {"key_groups": [key_groups] * 3, "value_groups": [value_groups] * 3}
    dha = DhaConfig(**shape, num_key_value_heads=2, **groups)
    DhaForCausalLM(dha).save_pretrained(tmp_path / "dha")
    byte_tokenizer().save_pretrained(tmp_path / "dha")
    run("07_eval.py", "--run", tmp_path, "--model", tmp_path / "dha", "--register", "related.dha.modeling",
        "--tasks", inputs["tasks"], "--only", "piqa", "--text", "none")
    results = read(tmp_path / "eval/stage.json")["results"]
    # layers, key and value heads, head_dim, bytes of a float32
    assert results["dha"]["cache_bytes_per_token"] == 3 * (2 + 3) * 8 * 4
