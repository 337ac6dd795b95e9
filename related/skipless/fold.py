"""Remove Q and P (or K, or V, or P alone) from a skipless checkpoint: the same function with fewer weights.

Reads   a skipless checkpoint (related/skipless/train.py writes one), a text for the equivalence check
Writes  MODEL-without-q/   a checkpoint of the same kind, whose config names the removed projections

    python -m related.skipless.fold --remove q                      # from runs/skipless/serial
    python -m related.skipless.fold --model runs/skipless/parallel --remove v --dtype bfloat16

The work is done in float64. Before anything is written the logits are checked to be unchanged on text, to
1e-9 of the largest. Then the weights are rounded to --dtype; the effect on the logits is printed too.

After Graef: two linear maps with nothing nonlinear in between can be multiplied into one. So any invertible T
can be inserted at a block's input: what writes that input is followed by T, and what reads it is preceded by
T^-1. T = Q turns Q into the identity; for row vectors (y = x W), with M = (gate_proj, up_proj), or up_proj
alone where the FFN is not gated, O = down_proj and P = o_proj:

    O*[i-1] = O[i-1] Q[i], K* = Q^-1 K, V* = Q^-1 V, where O[-1] is the embedding
    serial:    M* = P M, as only the FFN reads what P writes
    parallel:  M* = Q^-1 M and P*[i-1] = P[i-1] Q[i], as the FFN reads the block's input and P writes its
               output: P stays, as one T cannot be both Q and P^-1

T = K or T = V works the same way where they are square, which is for MHA. --remove p removes P alone: from
serial blocks without an inverse, from parallel ones by T = P^-1: O* = O P^-1, and P moves into what reads the
next block's input, or into the head. RoPE, key norms, windows and the softmax see the same vectors as before.
Biases are carried along, as all maps are affine. A norm or a skip connection would let no T through.
"""

import copy
import os

import torch

from common.data.demo import DEMO
from common.data.documents import EVALUATION, EXPECTED
from common.data.text import load_tokens, sequence_length
from common.models import sidecars
from common.models.equivalence import max_difference, require_close
from common.models.load import describe, load_config, load_model, load_tokenizer, weight_dtype
from common.run.artifact import begin_stage, write_directory, write_record
from common.run.errors import UserError, run_stage
from common.run.flags import positive, stage_parser
from related.skipless.modeling import SkiplessConfig, SkiplessForCausalLM

STAGE = "related/skipless/fold.py"
PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "p": "o_proj"}
MAX_CONDITION = 1e5  # of an inverted matrix: with this in every layer logits still agree to 1e-9
LOGIT_TOLERANCE = 1e-9  # of a fold, relative to the largest logit
CHECKED = 4  # sequences whose logits are compared


@torch.no_grad()
def condition_numbers(attention) -> dict[str, float]:
    """Letter -> largest over smallest singular value, in float64, of the square ones among Q, K, V and P."""
    conditions = {}
    for letter, name in PROJECTIONS.items():
        weight = getattr(getattr(attention, name), "weight", None)  # a removed projection has none
        if weight is not None and weight.shape[0] == weight.shape[1]:
            conditions[letter] = float(torch.linalg.cond(weight.double()))
    return conditions


def conditions(model) -> list[dict[str, float]]:
    """condition_numbers of each layer."""
    return [condition_numbers(layer.self_attn) for layer in model.model.layers]


def removed_by(remove: str, parallel: bool) -> str:
    """Letters of the attention projections that a fold of this letter removes."""
    return remove if parallel or remove == "p" else remove + "p"


def inverts(remove: str, parallel: bool) -> bool:
    """Whether the fold inverts a matrix. All do, except that P of serial blocks is just multiplied into M."""
    return remove != "p" or parallel


def check(model, remove: str) -> None:
    """Raise UserError unless the removed matrices are square and those to invert are well conditioned."""
    config = model.config
    if config.removed:
        raise UserError(f"expected a model with all its projections, found one without "
                        f"{', '.join(config.removed)}")
    for letter in removed_by(remove, config.parallel):
        check_square(config, letter)
    if not inverts(remove, config.parallel):
        return
    numbers = [layer[remove] for layer in conditions(model)]
    worst = max(numbers)
    if not worst <= MAX_CONDITION:  # also true of NaN
        raise UserError(f"layer {numbers.index(worst)}: expected {remove.upper()} of condition number "
                        f"at most {MAX_CONDITION:.0e}, found {worst:.1e}")


def check_square(config, letter: str) -> None:
    """Raise UserError unless this projection maps the model's width to itself."""
    heads = config.num_key_value_heads if letter in "kv" else config.num_attention_heads
    if heads * config.head_dim != config.hidden_size:
        raise UserError(f"expected a square {letter.upper()} to remove, found {heads} heads of "
                        f"{config.head_dim} for a width of {config.hidden_size}")


@torch.no_grad()
def fold(model, remove: str):
    """The same function in float64 without the projections named by removed_by.

    model: a SkiplessForCausalLM of any dtype, left unchanged. Raises UserError where the fold does not apply
    (see `check`).
    """
    check(model, remove)
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
    config.removed = [PROJECTIONS[letter] for letter in removed_by(remove, config.parallel)]
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
    if not inverts(remove, parallel):
        return [identity] * (len(maps) + 1), [identity] * (len(maps) + 1)
    inserted = [block[PROJECTIONS[remove]].clone() for block in maps]
    if remove != "p":
        return [*inserted, identity], [*map(torch.linalg.inv, inserted), identity]
    for matrix in inserted:
        matrix[:-1, -1] = 0  # the bias of P stays in place: the head has none to take it
    return [identity, *map(torch.linalg.inv, inserted)], [identity, *inserted]


@torch.no_grad()
def exact_logits(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits in the model's own dtype: a [T, vocab] tensor for each row of tokens [n, T]."""
    return [model(input_ids=row[None], use_cache=False).logits[0] for row in tokens]


def relative_difference(reference: list[torch.Tensor], logits: list[torch.Tensor]) -> float:
    """The largest absolute difference over the largest logit of the reference."""
    return max_difference(reference, logits) / max(float(row.abs().max()) for row in reference)


def rounded_difference(reference: list, model, tokens: torch.Tensor, dtype: torch.dtype) -> float:
    """relative_difference of a model rounded to dtype, also RoPE's frequencies. It computes in float64."""
    rounded = copy.deepcopy(model).to(dtype).double()
    return relative_difference(reference, exact_logits(rounded, tokens))


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", metavar="DIR", help="skipless checkpoint (default: RUN/serial)")
    parser.add_argument("--remove", choices=tuple(PROJECTIONS), default="q", help="what to remove; see above")
    parser.add_argument("--dtype", choices=("source", "float64", "float32", "bfloat16"), default="source",
                        help="dtype of the weights written")
    parser.section("equivalence check")
    parser.add_argument("--text", default=DEMO, help=f"{EXPECTED}; of demo, its held-out part")
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence")
    return parser.parse_args()


def compare_models(model, folded, tokens: torch.Tensor, dtype: torch.dtype) -> dict:
    """Logit differences of a folded model in float64 and with weights of `dtype`.

    Raises UserError if it is another function.
    """
    reference = exact_logits(model, tokens)
    difference, stored = (rounded_difference(reference, folded, tokens, kind)
                          for kind in (torch.float64, dtype))
    print(f"check   max |logit difference| / max |logit| {difference:.1e} in float64, {stored:.1e} with "
          f"weights in {dtype}; {tokens.numel()} tokens")
    require_close("logits over the largest one", difference, LOGIT_TOLERANCE)
    return {"max_relative_difference": difference, "max_relative_difference_stored": stored,
            "dtype": str(dtype)}


def main():
    args = parse()
    source = args.model or os.path.join(args.run, "serial")
    output = f"{os.path.normpath(source)}-without-{args.remove}"
    config = load_config(source)
    if config.model_type != SkiplessConfig.model_type:
        raise UserError(f"{source}: expected model_type {SkiplessConfig.model_type!r}, found "
                        f"{config.model_type!r}, whose matrices are separated by norms and skip connections")
    sequence_length(args.length, args.length, config.max_position_embeddings)
    started = begin_stage(STAGE, args, output)
    tokenizer = load_tokenizer(source)
    tokens, description = load_tokens(args.text, tokenizer, CHECKED, args.length, EVALUATION)
    print(f"reads   {source}; {description}, for the equivalence check")
    model, dtype = load_model(source, torch.float64), weight_dtype(args.dtype, config)
    folded = fold(model, args.remove)
    summary = compare_models(model, folded, tokens, dtype)
    removed, before, after = folded.config.removed, model.num_parameters(), folded.num_parameters()
    summary |= {"removed": removed, "parameters_before": before, "parameters_after": after}
    with write_directory(output) as aside:
        sidecars.save(folded.to(dtype), aside, source)
        write_record(aside, started.record(describe(source), summary))
    print(f"wrote   {output}\nfold: {', '.join(removed)} removed, {before:,} -> {after:,} weights "
          f"({1 - after / before:.1%} fewer) in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
