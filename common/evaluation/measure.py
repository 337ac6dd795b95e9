"""All metrics of stage 7, checkpoint after checkpoint; those of predictions are against the first one's."""

import torch

from common.data.rows import Sample
from common.evaluation import evaluate
from common.evaluation.compared import ANSWER_TOKENS, Settings, Tokenized
from common.models import proof
from common.models.layers import Layers
from common.models.load import load_model, needs_several_gpus
from common.models.quantized_cache import BLOCK, has_blocks
from common.training.lines import TEXT


def measure_all(described: dict, tokenized: dict[str, Tokenized], comparable: set[str], settings: Settings,
                run: str) -> tuple[dict, list]:
    """The metrics of each checkpoint, by name, and the outcomes of all questions.

    described: name -> models.load.describe; the first is the reference. comparable: from same_tokenizers.
    run: a directory for hidden states, layer by layer.
    """
    results, outcomes, reference = {}, [], None
    for name, checkpoint in described.items():
        if settings.layerwise:
            results[name] = measure_layerwise(checkpoint, tokenized[name], settings, run)
            continue
        ours, first = tokenized[name].sets, next(iter(tokenized.values())).sets
        same = reference and {prefix: predictions for prefix, predictions in reference.items()
                              if name in comparable and ours[prefix][0] == first[prefix][0]}
        results[name], answered, predictions = measure(name, checkpoint, tokenized[name], same, settings)
        reference = predictions if reference is None else reference
        outcomes += answered
    return results, outcomes


def measure(name: str, checkpoint: dict, tokenized: Tokenized, reference: dict | None, settings: Settings):
    """All metrics of one checkpoint, one outcome per question, and its predictions for each of its sets.

    reference: the first checkpoint's predictions, of sets with the same tokens; None for that one.
    """
    path, dtype, device = checkpoint["path"], getattr(torch, settings.dtype), settings.device
    spread = needs_several_gpus(path, dtype, device)
    print(f"reads   {path}{', spread over all GPUs' if spread else ''}")
    model = load_model(path, dtype, device, spread)
    metrics = {key: checkpoint[key] for key in ("path", "heads", "kv_heads")}
    metrics["tasks"], outcomes = evaluate.answer_questions(name, model, tokenized, settings.batch)
    metrics |= evaluate.averages(metrics["tasks"])
    predictions = {}
    for prefix, (samples, source) in tokenized.sets.items():
        against = (reference or {}).get(prefix)
        compared, predictions[prefix] = evaluate.prediction_metrics(model, samples, against)
        metrics |= {f"{prefix}{key}": value for key, value in compared.items()}
        metrics |= measured_on(prefix, samples, source)
    if settings.caches and TEXT in predictions:
        proof.attach_pairs(model)
        caches = [cache for cache in settings.caches if has_blocks(model.config) or not cache.in_blocks]
        if len(caches) < len(settings.caches):
            print(f"note    --cache: heads of {path} have no blocks of {BLOCK} channels; formats in blocks "
                  "are not measured")
        against = predictions[TEXT] if reference is None else reference.get(TEXT)
        metrics["caches"] = evaluate.cache_metrics(model, tokenized.sets[TEXT][0], against, caches)
    if tokenized.prompts:
        metrics["answers"] = evaluate.complete(model, tokenized.tokenizer, tokenized.prompts, ANSWER_TOKENS)
    row = torch.arange(tokenized.length) % model.config.vocab_size  # only their number affects the cost
    metrics["cache_bytes_per_token"] = evaluate.cache_bytes_per_token(model, row)
    return metrics | evaluate.speed(model, row), outcomes, predictions


def measure_layerwise(checkpoint: dict, tokenized: Tokenized, settings: Settings, run: str) -> dict:
    """Perplexity and cache size of one checkpoint, with one decoder layer in memory at a time."""
    path = checkpoint["path"]
    print(f"reads   {path}, layer by layer")
    layers = Layers(path, getattr(torch, settings.dtype), settings.device, layerwise=True)
    metrics = {key: checkpoint[key] for key in ("path", "heads", "kv_heads")} | {"tasks": {}}
    if TEXT in tokenized.sets:
        samples, source = tokenized.sets[TEXT]
        tokens = torch.tensor([sample.prompt for sample in samples])
        metrics |= evaluate.layerwise_perplexity(layers, tokens, run)
        metrics |= measured_on(TEXT, samples, source)
    row = torch.arange(tokenized.length) % layers.config.vocab_size
    # the weights are on the meta device, which suffices for sizes
    return metrics | {"cache_bytes_per_token": evaluate.cache_bytes_per_token(layers.model, row)}


def measured_on(prefix: str, samples: list[Sample], source: str) -> dict:
    """What the metrics with this prefix were measured on: where it comes from, and how many tokens count."""
    tokens = sum(sample.answer_tokens or len(sample) - 1 for sample in samples)
    return {f"{prefix}perplexity_text": source, f"{prefix}perplexity_tokens": tokens}
