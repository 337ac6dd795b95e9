"""Removing Q and P (or K, or V) from a skipless transformer without changing its function, after Graef.

Two linear maps with nothing nonlinear in between can be multiplied into one. So any invertible T can be
inserted at a block's input: what writes that input is followed by T, and what reads it is preceded by T^-1.
T = Q turns Q into the identity:

    O*[i-1] = O[i-1] Q[i], K* = Q^-1 K, V* = Q^-1 V, where O[-1] is the embedding
    serial:    M* = P M, as only the FFN reads what P writes
    parallel:  M* = Q^-1 M and P*[i-1] = P[i-1] Q[i], as the FFN reads the block's input and P writes its
               output; or T = P^-1, which turns P into the identity: O* = O P^-1, and P moves into what reads
               the next block's input, or into the head

T = K or T = V works the same way where they are square, which is for MHA.

RoPE, key norms, windows and the softmax come after Q and K and see the same vectors as before. Biases are
carried along, as all maps are affine. A norm or a skip connection in between would let no T through.

Letters are the paper's, for row vectors (y = x W): M is (gate_proj, up_proj), or up_proj alone where
the FFN is not gated, O is down_proj, P is o_proj.
"""

import copy

import torch

from common.cli import UserError
from related.skipless.modeling import SkiplessForCausalLM

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "p": "o_proj"}
MAX_CONDITION = 1e5  # of an inverted matrix: with this in every layer logits still agree to 1e-9 (compare.py)
SINGULAR = 1e16  # condition number at which float64 has no digit left


@torch.no_grad()
def condition_numbers(attention) -> dict[str, float]:
    """Letter -> largest over smallest singular value, in float64, of the square ones among Q, K, V and P."""
    conditions = {}
    for letter, name in PROJECTIONS.items():
        weight = getattr(getattr(attention, name), "weight", None)  # a removed projection has none
        if weight is not None and weight.shape[0] == weight.shape[1]:
            conditions[letter] = float(torch.linalg.cond(weight.double()))
    return conditions


def removed_by(remove: str, parallel: bool) -> list[str]:
    """Names of the attention projections that a fold of this letter removes."""
    if parallel or remove == "p":
        return [PROJECTIONS[remove]]
    return [PROJECTIONS[remove], PROJECTIONS["p"]]


def inverts(remove: str, parallel: bool) -> bool:
    """Whether the fold inverts a matrix. All do, except that P of serial blocks is just multiplied into M."""
    return remove != "p" or parallel


def check(model, remove: str, max_condition: float) -> None:
    """Raise UserError unless the removed matrices are square and those to invert are well conditioned."""
    config = model.config
    if config.removed:
        raise UserError(f"expected a model with all its projections, "
                        f"found one without {', '.join(config.removed)}")
    for name in removed_by(remove, config.parallel):
        check_square(model, name)
    if not inverts(remove, config.parallel):
        return
    conditions = [condition_numbers(layer.self_attn)[remove] for layer in model.model.layers]
    worst = max(conditions)
    if not worst <= max_condition:  # also true of NaN
        singular = "" if worst < SINGULAR else " (singular in float64)"
        raise UserError(f"layer {conditions.index(worst)}: expected {remove.upper()} of condition number "
                        f"at most {max_condition:.0e}, found {worst:.1e}{singular}")


def check_square(model, name: str) -> None:
    """Raise UserError unless this projection maps the model's width to itself."""
    config = model.config
    out_size, in_size = getattr(model.model.layers[0].self_attn, name).weight.shape
    if in_size == out_size:
        return
    letter = {value: key for key, value in PROJECTIONS.items()}[name].upper()
    if letter in "KV":
        reason = f"{config.num_key_value_heads} key/value heads of {config.num_attention_heads}"
    else:
        reason = f"{config.num_attention_heads} heads of {config.head_dim}"
    raise UserError(f"expected a square {letter} to remove, found {in_size} x {out_size} ({reason})")


@torch.no_grad()
def fold(model, remove: str, max_condition: float = MAX_CONDITION):
    """The same function in float64 without the projections named by removed_by.

    model: a SkiplessForCausalLM of any dtype, left unchanged. Raises UserError where the fold does not apply
    (see `check`).
    """
    check(model, remove, max_condition)
    parallel, size = model.config.parallel, model.config.hidden_size
    folded = SkiplessForCausalLM(folded_config(model.config, remove)).double().eval()
    maps = [block_maps(layer) for layer in model.model.layers]
    before, after = changes(maps, remove, parallel)
    for index, block in enumerate(maps):
        multiply_out(block, after[index], before[index + 1], parallel)
        for name, linear in linears(folded.model.layers[index]).items():
            linear.weight.copy_(block[name][:-1, :-1])
            if linear.bias is not None:
                linear.bias.copy_(block[name][:-1, -1])
    embedding = model.model.embed_tokens.weight.double()
    folded.model.embed_tokens.weight.copy_(embedding @ before[0][:size, :size].T + before[0][:size, -1])
    folded.lm_head.weight.copy_(model.lm_head.weight.double() @ after[-1][:size, :size])
    return folded


def folded_config(config, remove: str):
    """The config of the folded model."""
    config = copy.deepcopy(config)
    config.removed, config.dtype = removed_by(remove, config.parallel), torch.float64
    if inverts(remove, config.parallel):
        config.tie_word_embeddings = False  # T goes into one of embedding and head, not into both
    config.mlp_bias = config.mlp_bias or config.attention_bias  # the FFN takes the biases of Q, K, V and P
    return config


def multiply_out(block: dict[str, torch.Tensor], enter, leave, parallel: bool) -> None:
    """Change a block's maps in place. enter: T^-1 of its input; leave: T of the next block's input."""
    size = len(leave) - 1
    for name in ("q_proj", "k_proj", "v_proj"):
        block[name] = block[name] @ enter
    for name in {"gate_proj", "up_proj"} & block.keys():
        block[name] = block[name] @ (enter if parallel else block["o_proj"])
    if parallel:  # attention and FFN both write the output: the FFN takes P's bias, and T's
        block["down_proj"][:size, -1] += block["o_proj"][:size, -1]
        block["o_proj"][:size, -1] = 0
        block["o_proj"][:size] = leave[:size, :size] @ block["o_proj"][:size]
    block["down_proj"] = leave @ block["down_proj"]


def linears(layer) -> dict:
    """Name -> module of a block's projections, without the removed ones."""
    modules = [*layer.self_attn.named_children(), *layer.mlp.named_children()]
    return {name: module for name, module in modules if hasattr(module, "weight")}


def block_maps(layer) -> dict[str, torch.Tensor]:
    """Each projection of a block, W [out, in] and b, as one float64 matrix [[W, b], [0, 1]]."""
    maps = {}
    for name, linear in linears(layer).items():
        out_size, in_size = linear.weight.shape
        maps[name] = torch.zeros(out_size + 1, in_size + 1, dtype=torch.float64)
        maps[name][:-1, :-1], maps[name][-1, -1] = linear.weight, 1
        if linear.bias is not None:
            maps[name][:-1, -1] = linear.bias
    return maps


def changes(maps: list[dict], remove: str, parallel: bool) -> tuple[list, list]:
    """(T, T^-1) at the input of every block and then of the head: layers + 1 matrices like block_maps'."""
    identity = torch.eye(len(maps[0]["down_proj"]), dtype=torch.float64)
    if remove != "p":
        inserted = [block[PROJECTIONS[remove]] for block in maps]
        return [*inserted, identity], [*map(torch.linalg.inv, inserted), identity]
    if not inverts(remove, parallel):
        return [identity] * (len(maps) + 1), [identity] * (len(maps) + 1)
    inserted = []
    for block in maps:
        weight = block["o_proj"].clone()
        weight[:-1, -1] = 0  # the bias of P stays in place: the head has none to take it
        inserted.append(weight)
    return [identity, *map(torch.linalg.inv, inserted)], [identity, *inserted]
