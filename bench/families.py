"""Which of transformers' causal language models can be converted: the tables of docs/FAMILIES.md.

    python -m bench.families           # half a minute: writes them
    python -m bench.families --check   # exits with 1 if the file has others

Every model type that transformers can build small, from its default config, is given to models/proof.py;
tests/models/test_families.py takes those that pass through all stages.
"""

import collections
import copy
import os
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from common.models import proof
from common.models.families import is_fused, needs_eager, norm_kind
from common.models.forward import windows
from common.models.load import empty_model
from common.run.errors import UserError, run_stage
from common.run.flags import Parser

DOCUMENT = os.path.join(os.path.dirname(__file__), os.pardir, "docs", "FAMILIES.md")
BEGIN, END = "<!-- python -m bench.families -->\n", "<!-- end -->\n"
SIZES = {
    "vocab_size": 260, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "max_position_embeddings": 256,
    "eos_token_id": 256, "pad_token_id": 256, "initializer_range": 0.2,
}
# where a default config has one of these; experts, their width, windows
SMALLER = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts",
                     "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
                     "prefix_dense_intermediate_size"), 32),
    "sliding_window": 12,
}
TOO_LARGE = 10**9  # parameters that are left where sizes have other names: such a class is not tried


def small_config(model_type: str, **changes):
    """The default config of a model type, with small sizes and these changes."""
    default = AutoConfig.for_model(model_type)
    sizes = SIZES | {name: value for name, value in SMALLER.items() if getattr(default, name, None)}
    config = AutoConfig.for_model(model_type, **(sizes | {"bos_token_id": 256} | changes))
    config._attn_implementation = "eager" if needs_eager(config) else "sdpa"
    return config


def buildable() -> dict[str, object]:
    """Model type -> its small config, of all causal language models that can be built from it."""
    configs = {}
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = small_config(model_type)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False)
        except Exception:  # packages that are missing, sizes that do not fit each other
            continue
        if sum(parameter.numel() for parameter in model.parameters()) < TOO_LARGE:
            configs[model_type] = config
    return configs


def verdict(config) -> str | None:
    """Why a config's model cannot be converted; None if it can."""
    try:
        proof.require_convertible("", config)
    except UserError as error:
        return str(error).partition("cannot be converted: ")[2] or str(error).removeprefix(": ")
    return None


def features(config) -> list[str]:
    """What the heads and layers of a convertible model have that those of a Llama have not."""
    model = empty_model("", config, torch.float32)
    proof.attach_pairs(model)
    attentions = [layer.self_attn for layer in model.model.layers]
    turning = [each.rope_pairs for each in attentions if each.rope_pairs.angles.any()]
    last, order, half = attentions[-1], turning[0].order, len(turning[0].angles)
    turned = int((turning[0].angles != 0).sum())
    found = {
        "pairs (2p, 2p + 1)": order is not None and turned > 1 and order[half] == order[0] + 1,
        f"RoPE on {turned} of {half} pairs": turned < half,
        "layers without RoPE": len(turning) < len(attentions),
        "a norm of each head": norm_kind(last) == "head",
        "norms over all heads": norm_kind(last) == "joint",
        "q, k and v in one matrix": is_fused(last),
        "sinks": hasattr(last, "sinks"),
        "capped scores": needs_eager(config) and not hasattr(last, "sinks"),
        "windows": any(windows(config)),
        "experts": any(parameter.ndim == 3 for parameter in model.model.layers.parameters()),
    }
    return [name for name, has in found.items() if has]


def rows(header: str, named: dict[str, list[str]]) -> list[str]:
    """A table's lines, the longest lists first. named: the first cell -> the model types of the second."""
    ordered = sorted(named.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [f"| {header} | `model_type` |", "| --- | --- |",
            *(f"| {cell} | {', '.join(names)} |" for cell, names in ordered)]


def tables() -> str:
    """The part of docs/FAMILIES.md between its marks."""
    refused, convertible = collections.defaultdict(list), collections.defaultdict(list)
    for model_type, config in buildable().items():
        reason = verdict(config)
        if reason is None:
            convertible[", ".join(features(config)) or "nothing"].append(f"`{model_type}`")
        else:
            refused[reason].append(f"`{model_type}`")
    taken, counted = (sum(map(len, found.values())) for found in (convertible, refused))
    return "\n".join([
        f"Of the {taken + counted} causal language models of transformers {transformers.__version__} that "
        f"can be built small, {taken} are convertible:\n",
        *rows("in which they differ from a Llama", convertible),
        f"\nThe other {counted} are refused:\n",
        *rows("because", refused), ""])


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with open(DOCUMENT, encoding="utf-8") as file:
        before, rest = file.read().split(BEGIN)
    written, after = rest.split(END)
    found = tables()
    if args.check:
        print("the tables are as written" if found == written else "other tables were found")
        return int(found != written)
    with open(DOCUMENT, "w", encoding="utf-8") as file:
        file.write(before + BEGIN + found + END + after)
    print(found.partition("\n")[0])
    return 0


if __name__ == "__main__":
    run_stage(main)
