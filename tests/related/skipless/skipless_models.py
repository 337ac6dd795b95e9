"""Small skipless models, the commands, and trainings that stop, for the tests of related/skipless."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from related.skipless import training
from related.skipless.modeling import SkiplessConfig

COMPARE, FOLD, TRAIN, VARIANTS = (f"related/skipless/{name}.py"
                                  for name in ("compare", "fold", "train", "variants"))
LAYERS, HEADS, SIZE = 3, 4, 8
WIDTH = HEADS * SIZE


def model_of(parallel=False, kv_heads=HEADS, seed=0, **changes):
    """A float64 model of Gaussian weights and, where it has them, biases."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS,
             "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": SIZE,
             "max_position_embeddings": 64, "parallel": parallel, "bos_token_id": None, "eos_token_id": None,
             "attention_bias": True, "mlp_bias": True}
    model = AutoModelForCausalLM.from_config(SkiplessConfig(**(shape | changes)), dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.0 if parameter.ndim == 1 else 1.5 * parameter.shape[1] ** -0.5)
    return model


def matrices(model) -> int:
    """The number of weights without biases."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)


def tokens(seed=1):
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def contents(directory) -> dict[str, bytes]:
    """Relative path -> bytes of all files below a directory."""
    paths = [path for path in Path(directory).rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def stop_after_two(monkeypatch) -> None:
    """Have every training stop after its second step, as if by a signal."""
    steps = training.steps

    def two_steps(job, schedule, samples):
        yield from steps(job, schedule, samples, until=2)
        job.stopped = True

    monkeypatch.setattr(training, "steps", two_steps)
