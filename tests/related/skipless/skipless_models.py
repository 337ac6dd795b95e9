"""Small skipless models, for the tests of related/skipless."""

import torch

from related.skipless.compare import random_model
from related.skipless.fold import exact_logits, relative_difference
from related.skipless.modeling import SkiplessConfig

LAYERS, HEADS, SIZE = 3, 4, 8
WIDTH = HEADS * SIZE


def model_of(parallel=False, kv_heads=HEADS, seed=0, **changes):
    """A float64 model of Gaussian weights and, where it has them, biases."""
    shape = {"vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": SIZE,
             "max_position_embeddings": 64, "parallel": parallel, "bos_token_id": None, "eos_token_id": None,
             "attention_bias": True, "mlp_bias": True}
    return random_model(SkiplessConfig(**(shape | changes)), seed)


def matrices(model) -> int:
    """The number of weights without biases."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def tokens(seed=1):
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def difference(first, second) -> float:
    return relative_difference(exact_logits(first, tokens()), exact_logits(second, tokens()))
