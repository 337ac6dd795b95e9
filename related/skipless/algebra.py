"""Removing Q and P (or K, or V) from a skipless transformer without changing its function, after Graef.

Whatever is linear between two nonlinearities can be multiplied out. Into a block's input any invertible T can be put, if what writes
that input is followed by T and what reads it is preceded by T^-1. T = Q makes Q itself the identity:

    O*[i-1] = O[i-1] Q[i], K* = Q^-1 K, V* = Q^-1 V;  the embedding is O[-1]          (K or V in the place of Q: MHA, where they are square)
    serial:    M* = P M, as the FFN alone reads what P writes
    parallel:  M* = Q^-1 M and P*[i-1] = P[i-1] Q[i], as the FFN reads, and P writes, what O does;
               or T = P^-1, which makes P the identity: O* = O P^-1, and P goes into what reads the next block's input, or into the head

RoPE, key norms, windows and the softmax stand after Q and K and see the same vectors as before. Biases go along: all maps are affine.
A norm or a skip connection between two of these matrices would not let T through.

Letters are the paper's, for rows (y = x W); M is (gate_proj, up_proj), O is down_proj, and P is what transformers calls o_proj.
"""

import copy

import torch

from common.cli import UserError
from related.skipless.modeling import SkiplessForCausalLM

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "p": "o_proj"}
MAX_CONDITION = 1e5  # of a matrix to be inverted: with it in every layer logits still agree to 1e-9 (compare.py's sweep)


@torch.no_grad()
def condition_numbers(attention) -> dict[str, float]:
    """Largest over smallest singular value, in float64, of each of Q, K, V and P that is there and square, by its letter."""
    modules = {letter: getattr(attention, name) for letter, name in PROJECTIONS.items()}
    weights = {letter: module.weight for letter, module in modules.items() if hasattr(module, "weight")}
    return {letter: float(torch.linalg.cond(weight.double())) for letter, weight in weights.items() if weight.shape[0] == weight.shape[1]}


def removed_by(remove: str, parallel: bool) -> list[str]:
    """Names of the attention projections that a fold with T of this letter takes away."""
    return [PROJECTIONS[remove]] if parallel or remove == "p" else [PROJECTIONS[remove], PROJECTIONS["p"]]


def inverts(remove: str, parallel: bool) -> bool:
    """Whether that fold inverts a matrix: all do but for P of serial blocks, which is multiplied into M."""
    return remove != "p" or parallel


def check(model, remove: str, max_condition: float) -> None:
    """Raise UserError, with the reason, unless the matrices that go are square and those to be inverted well conditioned."""
    config = model.config
    if config.removed:
        raise UserError(f"expected a model with all its projections, found one without {', '.join(config.removed)}")
    for name in removed_by(remove, config.parallel):
        letter = next(key for key, value in PROJECTIONS.items() if value == name).upper()
        out_size, in_size = getattr(model.model.layers[0].self_attn, name).weight.shape
        if in_size != out_size:
            why = f"{config.num_key_value_heads} key/value heads of {config.num_attention_heads}" if letter in "KV" else f"{config.num_attention_heads} heads of {config.head_dim}"
            raise UserError(f"expected a square {letter} to remove, found {in_size} x {out_size} ({why})")
    if not inverts(remove, config.parallel):
        return
    found = [condition_numbers(layer.self_attn)[remove] for layer in model.model.layers]
    worst = max(range(len(found)), key=found.__getitem__)
    if not found[worst] <= max_condition:
        raise UserError(f"layer {worst}: expected {remove.upper()} of condition number at most {max_condition:.0e}, found {found[worst]:.1e}"
                        f"{' (singular to float64)' if not found[worst] < 1e16 else ''}")


@torch.no_grad()
def fold(model, remove: str, max_condition: float = MAX_CONDITION):
    """The same function, float64, without the projections that removed_by names. model: a SkiplessForCausalLM of any dtype, left as it is.

    Raises UserError where the fold does not apply: see `check`.
    """
    check(model, remove, max_condition)
    config = copy.deepcopy(model.config)
    config.removed, config.dtype = removed_by(remove, config.parallel), torch.float64
    config.tie_word_embeddings = config.tie_word_embeddings and not inverts(remove, config.parallel)  # T is in one and not in the other
    config.mlp_bias = config.mlp_bias or config.attention_bias  # what Q, K, V and P add moves into the FFN
    folded = SkiplessForCausalLM(config).double().eval()
    maps = [block_maps(layer) for layer in model.model.layers]
    before, after = changes(maps, remove, config.parallel)
    size = config.hidden_size

    for index, block in enumerate(maps):
        enter, leave = after[index], before[index + 1]  # T^-1 of this block's input, T of the next one's
        for name in ("q_proj", "k_proj", "v_proj"):
            block[name] = block[name] @ enter
        for name in ("gate_proj", "up_proj"):
            block[name] = block[name] @ (enter if config.parallel else block["o_proj"])
        if config.parallel:
            block["down_proj"][:size, -1] += block["o_proj"][:size, -1]  # of two writers one has the bias, and T's
            block["o_proj"][:size, -1] = 0
            block["o_proj"][:size] = leave[:size, :size] @ block["o_proj"][:size]
        block["down_proj"] = leave @ block["down_proj"]
        for name, linear in linears(folded.model.layers[index]).items():
            linear.weight.copy_(block[name][:-1, :-1])
            if linear.bias is not None:
                linear.bias.copy_(block[name][:-1, -1])
    embedding = model.model.embed_tokens.weight.double()
    folded.model.embed_tokens.weight.copy_(embedding @ before[0][:size, :size].T + before[0][:size, -1])
    folded.lm_head.weight.copy_(model.lm_head.weight.double() @ after[-1][:size, :size])
    return folded


def linears(layer) -> dict:
    """Name -> module of a block's projections that are there."""
    found = {name: module for part in (layer.self_attn, layer.mlp) for name, module in part.named_children()}
    return {name: module for name, module in found.items() if hasattr(module, "weight")}


def block_maps(layer) -> dict[str, torch.Tensor]:
    """Each projection of a block, weight [out, in] and bias, as one float64 matrix [[W, b], [0, 1]]: a product is a composition."""
    maps = {}
    for name, linear in linears(layer).items():
        out_size, in_size = linear.weight.shape
        maps[name] = torch.zeros(out_size + 1, in_size + 1, dtype=torch.float64)
        maps[name][:-1, :-1], maps[name][-1, -1] = linear.weight, 1
        if linear.bias is not None:
            maps[name][:-1, -1] = linear.bias
    return maps


def changes(maps: list[dict], remove: str, parallel: bool) -> tuple[list, list]:
    """(T, T^-1) of the input of every block and, last, of the head: two lists of layers + 1 float64 matrices as in block_maps."""
    same = torch.eye(len(maps[0]["down_proj"]), dtype=torch.float64)
    if remove != "p":
        chosen = [block[PROJECTIONS[remove]] for block in maps]
        return [*chosen, same], [*map(torch.linalg.inv, chosen), same]
    if not inverts(remove, parallel):
        return [same] * (len(maps) + 1), [same] * (len(maps) + 1)
    chosen = []
    for block in maps:
        weight = block["o_proj"].clone()
        weight[:-1, -1] = 0  # its bias stays where it is: the head has none to take it
        chosen.append(weight)
    return [same, *map(torch.linalg.inv, chosen)], [same, *chosen]
