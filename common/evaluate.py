"""Measuring a checkpoint: perplexity, the eight tasks by generation and by likelihood, cache bytes, speed; and the
averages and standard errors of what was measured."""

import math
import os
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from common.artifacts import write_text


@torch.no_grad()
def all_logits(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of each row of tokens [n, T] in turn: n tensors [T, vocab], on the CPU."""
    return [model(input_ids=row[None].to(model.device), use_cache=False).logits[0].float().cpu() for row in tokens]


def mean_nll(logits: list[torch.Tensor], tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood (nats) of each next token."""
    losses = [F.cross_entropy(rows[:-1].double(), row[1:]) for rows, row in zip(logits, tokens, strict=True)]
    return float(torch.stack(losses).mean())


def mean_kl(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Mean over tokens of KL(first || second), nats."""
    parts = []
    for a, b in zip(first, second, strict=True):
        log_a, log_b = a.double().log_softmax(-1), b.double().log_softmax(-1)
        parts.append((log_a.exp() * (log_a - log_b)).sum(-1).mean())
    return float(torch.stack(parts).mean())


def max_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    """Largest absolute difference of two lists of logits."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


@torch.no_grad()
def perplexity(model, tokens: torch.Tensor) -> float:
    """exp of the mean next-token loss over tokens [n, T], one row at a time."""
    total = 0.0
    for row in tqdm(tokens, desc="perplexity", unit="seq", leave=False):
        total += mean_nll(all_logits(model, row[None]), row[None])
    return math.exp(total / len(tokens))


def left_padded(prompts: list, pad: int, device) -> dict[str, torch.Tensor]:
    """Prompts of different lengths as one batch, padded on the left, with its attention mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    return {"input_ids": ids, "attention_mask": mask}


def batches_by_length(items: list, length, batch: int):
    """Lists of indices into items, similar lengths together, so that little is padding."""
    order = sorted(range(len(items)), key=lambda i: (length(items[i]), i))
    return [order[start : start + batch] for start in range(0, len(order), batch)]


@torch.no_grad()
def generate_answers(model, tokenizer, samples: list, batch: int, bar) -> list[str]:
    """Greedy continuation of each sample's prompt, stripped. samples: tokenized examples (common/data/tasks.py).

    Generation stops at end-of-sequence, or where the longest right answer of the batch plus end-of-sequence would
    have ended: anything longer is wrong by exact match whatever follows.
    """
    answers = [""] * len(samples)
    end = tokenizer.eos_token_id
    for indices in batches_by_length(samples, lambda s: len(s.prompt), batch):
        inputs = left_padded([samples[i].prompt for i in indices], end, model.device)
        output = model.generate(**inputs, do_sample=False, repetition_penalty=1.0, pad_token_id=end, eos_token_id=end,
                                max_new_tokens=max(len(samples[i].answer) for i in indices))
        for i, row in zip(indices, output[:, inputs["input_ids"].shape[1] :], strict=True):
            answers[i] = tokenizer.decode(row, skip_special_tokens=True).strip()
        bar.update(len(indices))
    return answers


@torch.no_grad()
def choice_likelihoods(model, samples: list[list], batch: int, bar) -> list[list[float]]:
    """Sum of log-probabilities of each choice's tokens (without end-of-sequence) after the prompt.

    samples: per question a list of tokenized choices sharing the prompt. Returns the same shape of floats.
    """
    flat = [(q, c, sample) for q, choices in enumerate(samples) for c, sample in enumerate(choices)]
    scores = [[0.0] * len(choices) for choices in samples]
    for indices in batches_by_length(flat, lambda item: len(item[2]), batch):
        rows = [(*flat[i][2].prompt, *flat[i][2].answer[:-1]) for i in indices]
        inputs = left_padded(rows, 0, model.device)
        answer = max(len(flat[i][2].answer) - 1 for i in indices)
        logits = model(**inputs, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0), use_cache=False,
                       logits_to_keep=answer + 1).logits
        log_probs = logits[:, :-1].float().log_softmax(-1)
        picked = log_probs.gather(-1, inputs["input_ids"][:, -answer:, None])[..., 0]
        for row, i in zip(picked, indices, strict=True):
            q, c, sample = flat[i]
            scores[q][c] = float(row[-(len(sample.answer) - 1) :].sum())
        bar.update(len(indices))
    return scores


@torch.no_grad()
def cache_bytes_per_token(model, tokens: torch.Tensor) -> float:
    """Bytes of key and value tensors that the cache really holds after one forward pass, per token. tokens: [T]."""
    cache = model(input_ids=tokens[None].to(model.device), use_cache=True).past_key_values
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    return held / len(tokens)


@torch.no_grad()
def speed(model, tokens: torch.Tensor, new_tokens: int = 32) -> dict[str, float]:
    """Tokens per second of prefill and of greedy decoding after it, one sequence, best of three. tokens: [T]."""
    inputs = tokens[None].to(model.device)
    synchronize = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    prefill, decode = [], []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        output = model(input_ids=inputs, use_cache=True, logits_to_keep=1)
        synchronize()
        prefill.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(new_tokens):
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        synchronize()
        decode.append(time.perf_counter() - start)
    return {"prefill_tokens_per_s": len(tokens) / min(prefill), "decode_tokens_per_s": new_tokens / min(decode)}


def rate(right: list[bool]) -> tuple[float, float]:
    """Share of right answers and its standard error, sqrt(p (1 - p) / n)."""
    share = sum(right) / len(right)
    return share, math.sqrt(share * (1 - share) / len(right))


def averages(tasks: dict[str, dict]) -> dict[str, float]:
    """Macro (every task counts alike) and micro (every question does) averages of the tasks' rates, with standard errors.

    tasks: per task "questions", "chance", and "exact_match" and "likelihood", each with a "_stderr". The macro average of k
    tasks errs by the root of their errors' sum of squares, over k; the micro average is one rate of all questions.
    """
    found = {}
    questions = sum(task["questions"] for task in tasks.values())
    for kind in ("exact_match", "likelihood", "chance"):
        found[f"macro_{kind}"] = sum(task[kind] for task in tasks.values()) / len(tasks)
        found[f"micro_{kind}"] = share = sum(task[kind] * task["questions"] for task in tasks.values()) / questions
        if kind != "chance":
            found[f"macro_{kind}_stderr"] = math.hypot(*(task[f"{kind}_stderr"] for task in tasks.values())) / len(tasks)
            found[f"micro_{kind}_stderr"] = math.sqrt(share * (1 - share) / questions)
    return found


def write_scores(directory: str, scores: str) -> bool:
    """Put scores (Markdown) where a checkpoint's README.md has room for them: between <!-- scores --> and <!-- /scores -->.

    Returns whether it had; a card without the two markers stays as it is.
    """
    path = os.path.join(directory, "README.md")
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as file:
        before, opening, rest = file.read().partition("<!-- scores -->")
    closing, after = rest.partition("<!-- /scores -->")[1:]
    if closing:
        write_text(path, f"{before}{opening}\n{scores}\n{closing}{after}")
    return bool(closing)
