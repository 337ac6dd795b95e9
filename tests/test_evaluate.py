"""Evaluation against the direct way: one prompt at a time, no padding, plain sums."""

import math

import pytest
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common import evaluate
from common.tasks import example_from_row, tokenize
from conftest import END, byte_tokenizer, task_rows, tiny_model

TOKENS = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_perplexity_is_transformers_loss(model):
    losses = [model(row[None], labels=row[None]).loss.item() for row in TOKENS]
    assert evaluate.perplexity(model, TOKENS) == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_logit_comparisons():
    first, second = torch.randn(2, 4, 9).unbind(), torch.randn(2, 4, 9).unbind()
    expected = sum(F.kl_div(b.log_softmax(-1), a.softmax(-1), reduction="batchmean") for a, b in zip(first, second, strict=True)) / 2
    assert evaluate.mean_kl(first, second) == pytest.approx(float(expected), abs=1e-6)
    assert evaluate.max_difference(first, second) == max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def examples():
    return [example_from_row(task, row) for task, rows in task_rows(3, 1).items() for row in rows]


def test_batched_generation_equals_one_at_a_time(model):
    tokenizer = byte_tokenizer()
    samples = [tokenize(example, tokenizer) for example in examples()]
    samples = [sample for sample in samples if len(sample.answer) == 4]  # one length: every batch generates as far
    assert len({len(sample.prompt) for sample in samples}) > 3  # padding is needed
    batched = evaluate.generate_answers(model, tokenizer, samples, 7, tqdm(disable=True))
    for sample, answer in zip(samples, batched, strict=True):
        ids = list(sample.prompt)
        with torch.no_grad():
            while len(ids) < len(sample) and END not in ids:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert answer == tokenizer.decode(ids[len(sample.prompt) :], skip_special_tokens=True).strip()


def test_choice_likelihood_is_the_sum_of_token_log_probabilities(model):
    tokenizer = byte_tokenizer()
    prompts = [[tokenize(e, tokenizer) for e in examples()[i : i + 2]] for i in (0, 6, 12)]
    scores = evaluate.choice_likelihoods(model, prompts, batch=4)
    for question, ours in zip(prompts, scores, strict=True):
        for sample, score in zip(question, ours, strict=True):
            ids = torch.tensor([[*sample.prompt, *sample.answer[:-1]]])
            with torch.no_grad():
                log_probs = model(ids).logits[0].log_softmax(-1)
            start = len(sample.prompt)
            direct = sum(float(log_probs[t - 1, ids[0, t]]) for t in range(start, ids.shape[1]))
            assert score == pytest.approx(direct, abs=1e-3)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_cache_bytes_are_those_of_the_kv_heads(kv_heads):
    model = tiny_model(num_key_value_heads=kv_heads)
    assert evaluate.cache_bytes_per_token(model, TOKENS[0]) == 2 * 3 * kv_heads * 8 * 4  # k and v, layers, heads, head_dim, float32
