"""Exported checkpoints in the programs that people run them with: transformers and vLLM.

lm_eval: test_harness.py; llama.cpp: test_gguf.py; beside the source: test_clients_table.py.
"""

import json
import os
import textwrap

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import byte_tokenizer, run, save_tiny, tiny_model
from related.dha.modeling import DhaConfig, DhaForCausalLM
from related.skipless.modeling import SkiplessConfig, SkiplessForCausalLM

SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "head_dim", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
PROMPTS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))


def greedy(model, steps: int = 20) -> torch.Tensor:
    """Greedy decoding of PROMPTS without a cache: the whole sequence again for each token."""
    ids = PROMPTS
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_generate(finished_run, cache, attention):
    model = AutoModelForCausalLM.from_pretrained(finished_run / "gqa", attn_implementation=attention)
    generated = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=20,
                               do_sample=False, cache_implementation=cache, eos_token_id=None)
    assert torch.equal(generated, greedy(model)) and len(set(generated[0, 12:].tolist())) > 1


def test_the_model_card_of_a_run(finished_run):
    """The card agrees with the checkpoint beside it, and its snippet runs."""
    card = (finished_run / "gqa" / "README.md").read_text()
    model = json.loads((finished_run / "gqa" / "stage.json").read_text())["model"]
    groups = json.loads((finished_run / "groups.json").read_text())
    assert f"# {os.path.basename(model['name'])} with 2 key/value heads" in card
    assert model["fingerprint"] in card
    assert "base_model" not in card  # the source is a directory, not a name on the hub
    for layer, layer_groups in enumerate(groups["groups"]):
        assert f"\n{layer}. {'; '.join(' '.join(map(str, group)) for group in layer_groups)}\n" in card
    scores = card.partition("<!-- scores -->")[2].partition("<!-- /scores -->")[0]
    assert "| winogrande" in scores and "teacher" in scores and "Not evaluated yet" not in card
    snippet = textwrap.dedent(card.partition("## Use\n\n")[2].partition("\n\nIn vLLM")[0])
    printed: list[str] = []
    exec(snippet.replace("PATH", str(finished_run / "gqa")), {"print": printed.append})
    assert printed[0].startswith("Question: Which is a metal?\nChoices: ['wood', 'iron']\nAnswer:")


def test_vllm_generate(tmp_path):
    """The same tokens as transformers, from token ids. vLLM wants heads of 32 or more."""
    vllm = pytest.importorskip("vllm")
    path = save_tiny(tmp_path / "model", num_key_value_heads=2, head_dim=64, hidden_size=512)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS.tolist()]
    outputs = vllm.LLM(model=path, dtype="float32", enforce_eager=True).generate(prompts, sampling)
    expected = greedy(AutoModelForCausalLM.from_pretrained(path))[:, 12:]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected.tolist()


def test_stage_7_evaluates_what_the_neighbouring_systems_write(inputs, tmp_path):
    """Decoupled heads, and a skipless model without Q and P."""
    shape = {name: value for name, value in tiny_model().config.to_dict().items() if name in SHAPE}
    key_groups, value_groups = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2], [1, 3, 4], [5, 6, 7]]
    groups = {"key_groups": [key_groups] * 3, "value_groups": [value_groups] * 3}
    dha = DhaConfig(**shape, num_key_value_heads=2, **groups)
    skipless = SkiplessConfig(**shape | {"head_dim": 6}, removed=["q_proj", "o_proj"])
    DhaForCausalLM(dha).save_pretrained(tmp_path / "dha")
    SkiplessForCausalLM(skipless).save_pretrained(tmp_path / "skipless")
    for name in ("dha", "skipless"):
        byte_tokenizer().save_pretrained(tmp_path / name)
    run("07_eval.py", "--run", tmp_path, "--model", tmp_path / "dha", tmp_path / "skipless",
        "--register", "related.dha.modeling", "related.skipless.modeling",
        "--tasks", inputs["tasks"], "--only", "piqa", "--text", "none")
    results = json.loads((tmp_path / "eval.json").read_text())["results"]
    # layers, key and value heads, head_dim, bytes of a float32
    assert results["dha"]["cache_bytes_per_token"] == 3 * (2 + 3) * 8 * 4
    assert results["skipless"]["cache_bytes_per_token"] == 3 * 2 * 8 * 6 * 4
