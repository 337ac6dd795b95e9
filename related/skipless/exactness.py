"""How exact folds are: largest logit differences in float64, and with weights stored in fewer bits.

Folds are tried on random models, on models made of a real checkpoint's matrices, on trained models, and on a
model whose Q matrices are given ever larger condition numbers.
"""

import copy
import math

import torch
from transformers import AutoModelForCausalLM

from common.cli import UserError
from common.evaluate import max_difference
from related.skipless.algebra import PROJECTIONS, condition_numbers, fold, inverts
from related.skipless.modeling import SkiplessConfig
from related.skipless.training import skipless_config

LOGIT_TOLERANCE = 1e-9  # relative to the largest logit
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PRECISIONS = ("float64", *STORED)
SWEEP = [10.0**power for power in range(0, 13, 2)]  # condition numbers


@torch.no_grad()
def exact_logits(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits in the model's own dtype: a [T, vocab] tensor for each row of tokens [n, T]."""
    return [model(input_ids=row[None], use_cache=False).logits[0] for row in tokens]


def relative_difference(reference: list[torch.Tensor], logits: list[torch.Tensor]) -> float:
    """The largest absolute difference over the largest logit of the reference."""
    return max_difference(reference, logits) / max(float(row.abs().max()) for row in reference)


def rounded(model, dtype: torch.dtype):
    """A copy with its weights rounded to dtype. It still computes in float64, so only the rounding shows."""
    return copy.deepcopy(model).to(dtype).double()


def differences(reference: list[torch.Tensor], model, tokens: torch.Tensor) -> dict[str, float]:
    """Relative differences between a float64 model and the reference, in each of PRECISIONS."""
    models = {"float64": model} | {name: rounded(model, dtype) for name, dtype in STORED.items()}
    logits = {name: exact_logits(stored, tokens) for name, stored in models.items()}
    return {name: relative_difference(reference, rows) for name, rows in logits.items()}


def random_model(config: SkiplessConfig, seed: int):
    """A float64 model with Gaussian weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, trust_remote_code=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            std = 1.0 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.normal_(std=std, generator=generator)
    return model


def transplanted(source, parallel: bool):
    """A float64 skipless model with a stock model's matrices.

    It does not compute the stock model's function: it shows folds of matrices as real training leaves them.
    """
    state = source.state_dict()
    bias = "model.layers.0.self_attn.q_proj.bias" in state
    config = skipless_config(source.config, parallel, attention_bias=bias)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, trust_remote_code=False).eval()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: state.get(name, zero) for name, zero in zeros.items()})
    return model


def every_fold(name: str, model, tokens: torch.Tensor, max_condition: float) -> list[dict]:
    """Differences of a float64 model from itself and of each of its folds, or why a fold was refused.

    A fold's line also has the number of parameters left and the condition number of the worst inverted
    matrix.
    """
    reference, parallel = exact_logits(model, tokens), model.config.parallel
    shape = {"model": name, "parallel": parallel, "kv_heads": model.config.num_key_value_heads}
    itself = differences(reference, model, tokens)
    lines = [shape | {"remove": None, "parameters": model.num_parameters()} | itself]
    for letter in PROJECTIONS:
        try:
            folded = fold(model, letter, max_condition)
            line = differences(reference, folded, tokens)
            if not line["float64"] <= LOGIT_TOLERANCE:
                raise UserError(f"expected logits without {letter.upper()} to differ by at most "
                                f"{LOGIT_TOLERANCE:.0e}, found {line['float64']:.1e}")
        except UserError as error:
            lines.append(shape | {"remove": letter, "refused": str(error)})
            continue
        worst = None
        if inverts(letter, parallel):
            worst = max(condition_numbers(layer.self_attn)[letter] for layer in model.model.layers)
        removed = {"remove": letter, "gone": folded.config.removed, "parameters": folded.num_parameters()}
        lines.append(shape | removed | {"condition": worst} | line)
    return lines


@torch.no_grad()
def sweep(model, tokens: torch.Tensor) -> list[dict]:
    """For each condition number of SWEEP: give it to every Q of the model, fold Q out, compare logits."""
    lines = []
    for condition in SWEEP:
        ill_conditioned = copy.deepcopy(model)
        for layer in ill_conditioned.model.layers:
            weight = layer.self_attn.q_proj.weight
            left, values, right = torch.linalg.svd(weight)
            spread = torch.logspace(0, -math.log10(condition), len(values), dtype=weight.dtype)
            weight.copy_(left * (spread * values.norm() / spread.norm()) @ right)
        folded = fold(ill_conditioned, "q", math.inf)
        reference = exact_logits(ill_conditioned, tokens)
        lines.append({"condition": condition} | differences(reference, folded, tokens))
    return lines
