"""Exported checkpoints in the programs that people run them with. lm_eval: test_harness.py; llama.cpp: test_gguf.py."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import save_tiny

PROMPTS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))


def greedy(model, steps: int = 20) -> torch.Tensor:
    """Without a cache: the whole sequence anew for each token."""
    ids = PROMPTS
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_transformers_generate(finished_run, cache, attention):
    model = AutoModelForCausalLM.from_pretrained(finished_run / "gqa", attn_implementation=attention)
    found = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=20, do_sample=False, cache_implementation=cache, eos_token_id=None)
    assert torch.equal(found, greedy(model)) and len(set(found[0, 12:].tolist())) > 1


def test_model_card(finished_run):
    card = (finished_run / "gqa" / "README.md").read_text()
    record, groups = (json.loads((finished_run / path).read_text()) for path in ("gqa/stage.json", "groups.json"))
    model = record["model"]
    assert card.startswith("---\nlibrary_name: transformers\n") and "base_model" not in card  # the source is a directory, not a hub name
    assert f"# {model['name'].rsplit('/', 1)[1]} with 2 key/value heads" in card and model["fingerprint"] in card and f"`{model['path']}`" in card
    assert f"takes {2 * 3 * 2 * 8 * 4} bytes per token instead of {2 * 3 * 8 * 8 * 4:,} (25.0%)" in card
    for layer, of_layer in enumerate(groups["groups"]):
        assert f"\n{layer}. {'; '.join(' '.join(map(str, group)) for group in of_layer)}\n" in card
    scores = card.partition("<!-- scores -->")[2].partition("<!-- /scores -->")[0]
    assert "| winogrande" in scores and "teacher" in scores and "Not evaluated yet" not in card
    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer}
    lines = card.partition("## Use\n\n")[2].partition("\n\nIn vLLM")[0].splitlines()
    exec("\n".join(line.strip() for line in lines).replace("print(", "text = ("), names)  # what the card tells people to run
    assert names["text"].startswith("Question: Which is a metal?\nChoices: ['wood', 'iron']\nAnswer:")


def test_vllm_generate(tmp_path):
    """The same tokens as transformers, from token ids. vLLM wants heads of 32 or more."""
    vllm = pytest.importorskip("vllm")
    path = save_tiny(tmp_path / "model", num_key_value_heads=2, head_dim=64, hidden_size=512)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = vllm.LLM(model=path, dtype="float32", enforce_eager=True).generate([{"prompt_token_ids": ids} for ids in PROMPTS.tolist()], sampling)
    expected = greedy(AutoModelForCausalLM.from_pretrained(path))[:, 12:]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected.tolist()
