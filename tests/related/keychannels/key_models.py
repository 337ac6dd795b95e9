"""Models, texts and attention states for the tests of key channels."""

import torch

from related.keychannels import measure

MODELS = {
    "mha": {},
    "gqa": {"num_key_value_heads": 2, "bias": True},
    "key norms": {"num_key_value_heads": 4, "model_type": "qwen3"},
}


def draw(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed + row)).tolist()
            for row, length in enumerate(lengths)]


def states(model, tokens: torch.Tensor) -> list[list]:
    """What the attention of each layer without a sliding window gets and gives, in float64, and its scale."""
    seen = []
    measure.watch_attention(model, tokens, lambda *layer: seen.append(
        [*(tensor.double() for tensor in layer[:-1]), layer[-1]]))
    return seen
