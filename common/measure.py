"""All figures of one checkpoint, and the inputs they are measured on: answers, perplexity, cache size, speed.

common/evaluate.py computes each. `args` are the flags of stage 7.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from tqdm import tqdm

from common import evaluate
from common.cli import UserError
from common.data.samples import Sample
from common.data.tasks import Example, check_lengths, choice_samples
from common.data.text import load_tokens, sequence_length
from common.layers import Layers
from common.models import (
    SUPPORTED,
    load_config,
    load_model,
    load_tokenizer,
    needs_several_gpus,
    pick_device,
)

LENGTH = 512  # tokens per sequence of text, if the model has that many positions


@dataclass(frozen=True)
class Inputs:
    """The text and questions for one checkpoint, tokenized with its tokenizer."""

    tokenizer: object
    length: int  # tokens per sequence
    tokens: torch.Tensor | None  # [sequences, length]; None for --text none
    text: str  # where the tokens come from, in one line
    samples: dict[str, list[list[Sample]]]  # task -> question -> choice


def prepare(path: str, tasks: dict[str, dict[int, Example]], text: str, args) -> Inputs:
    """Tokenize the text and questions for one checkpoint, and check their lengths against its positions."""
    config = load_config(path)
    if args.layerwise and config.model_type not in SUPPORTED:
        raise UserError(f"{path}: --layerwise: expected model_type in {list(SUPPORTED)}, "
                        f"found {config.model_type!r}")
    tokenizer, positions = load_tokenizer(path), config.max_position_embeddings
    length = sequence_length(args.length, LENGTH, positions, least=2)
    tokens, description = None, ""
    if text != "none":
        tokens, description = load_tokens(text, tokenizer, args.sequences, length, "heldout", args.bos)
    samples = {}
    for task, questions in tasks.items():
        samples[task] = [choice_samples(example, tokenizer, args.bos) for example in questions.values()]
        for index, choices in zip(questions, samples[task], strict=True):
            check_lengths(((index, sample) for sample in choices), positions, f"{path}: {task}.validation")
    return Inputs(tokenizer, length, tokens, description, samples)


def measure(name: str, checkpoint: dict, inputs: Inputs, tasks: dict, args) -> tuple[dict, list[dict]]:
    """All figures of one checkpoint, and one outcome per question. checkpoint: from models.describe."""
    path, dtype, device = checkpoint["path"], getattr(torch, args.dtype), pick_device(args.device)
    spread = needs_several_gpus(path, dtype, device)
    print(f"reads   {path}{', spread over all GPUs' if spread else ''}")
    model = load_model(path, dtype, device, spread)
    figures = {key: checkpoint[key] for key in ("path", "heads", "kv_heads")}
    figures["tasks"], outcomes = measure_tasks(name, model, inputs, tasks, args.batch)
    figures |= evaluate.averages(figures["tasks"])
    if inputs.tokens is not None:
        figures |= perplexity_figures(evaluate.perplexity(model, inputs.tokens), name, model, inputs)
    row = torch.arange(inputs.length) % model.config.vocab_size  # only their number affects the cost
    figures["cache_bytes_per_token"] = evaluate.cache_bytes_per_token(model, row)
    return figures | evaluate.speed(model, row), outcomes


def measure_layerwise(name: str, checkpoint: dict, inputs: Inputs, args) -> dict:
    """Perplexity and cache size of one checkpoint, with one decoder layer in memory at a time."""
    print(f"reads   {checkpoint['path']}, layer by layer")
    layers = Layers(checkpoint["path"], getattr(torch, args.dtype), pick_device(args.device), layerwise=True)
    figures = {key: checkpoint[key] for key in ("path", "heads", "kv_heads")} | {"tasks": {}}
    if inputs.tokens is not None:
        perplexity = evaluate.layerwise_perplexity(layers, inputs.tokens, args.run)
        figures |= perplexity_figures(perplexity, name, layers.model, inputs)
    row = torch.arange(inputs.length) % layers.config.vocab_size
    # the weights are on the meta device, which suffices for sizes
    return figures | {"cache_bytes_per_token": evaluate.cache_bytes_per_token(layers.model, row)}


def perplexity_figures(perplexity: float, name: str, model, inputs: Inputs) -> dict:
    """The perplexity and what it was measured on. Raises UserError unless it is finite."""
    require_finite([perplexity], name, model)
    return {"perplexity": perplexity, "perplexity_text": inputs.text,
            "perplexity_tokens": inputs.tokens.numel()}


def measure_tasks(name: str, model, inputs: Inputs, tasks: dict, batch: int) -> tuple[dict, list[dict]]:
    """Per-task rates with standard errors, and one outcome per question."""
    figures, outcomes, total = {}, [], 0
    for samples in inputs.samples.values():
        total += sum(1 + len(choices) for choices in samples)
    with tqdm(total=total, desc=f"{name}: tasks", unit="seq") as bar:
        for task, questions in tasks.items():
            examples, samples = list(questions.values()), inputs.samples[task]
            right = [choices[example.label] for example, choices in zip(examples, samples, strict=True)]
            answers = evaluate.generate_answers(model, inputs.tokenizer, right, batch, bar)
            scores = evaluate.choice_likelihoods(model, samples, batch, bar)
            require_finite(itertools.chain.from_iterable(scores), name, model)
            verdicts = list(map(evaluate.judge, examples, answers, scores))
            figures[task] = evaluate.rates(examples, verdicts)
            for index, verdict in zip(questions, verdicts, strict=True):
                outcomes.append({"model": name, "task": task, "question": index} | verdict)
    return figures, outcomes


def require_finite(values, name: str, model) -> None:
    """Raise UserError if a value computed by the model is not finite. name: the checkpoint's."""
    if not all(map(math.isfinite, values)):
        raise UserError(f"{name}: expected finite log-probabilities, found NaN or Inf in {model.dtype}; "
                        "try --dtype float32 or bfloat16")
