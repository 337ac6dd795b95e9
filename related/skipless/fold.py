"""Remove Q and P (or K, or V, or P alone) from a skipless checkpoint: the same function with fewer weights.

Reads   a skipless checkpoint (related/skipless/train.py writes one), a text for the equivalence check
Writes  MODEL-without-q/   a checkpoint of the same kind, whose config names the removed projections

    python -m related.skipless.fold --remove q                      # from runs/skipless/serial
    python -m related.skipless.fold --model runs/skipless/parallel --remove v --dtype bfloat16

The work is done in float64. Before anything is written the logits are checked to be unchanged on text, to
1e-9 of the largest. Then the weights are rounded to --dtype; the effect on the logits is printed too.
--remove

  q  serial: Q and P, for MHA, GQA and MQA. parallel: Q alone
  k  serial: K and P; parallel: K alone. MHA only: with fewer key/value heads K is not square
  v  serial: V and P; parallel: V alone. MHA only, too
  p  P alone. serial: multiplied into the FFN, nothing is inverted; parallel: inverted and moved to the next
     block

In parallel blocks Q and P cannot both go: between two blocks there is one matrix to choose, and it cannot be
both Q and P^-1.
"""

import os

import torch

from common import companions
from common.artifacts import claim, make_record, read_record, write_record
from common.cli import Clock, UserError, positive, positive_float, run_stage, stage_parser
from common.data.demo import DEMO
from common.data.text import load_tokens
from common.files import write_directory
from common.models import describe, load_config, load_model, load_tokenizer, weight_dtype
from related.skipless.algebra import MAX_CONDITION, PROJECTIONS, fold
from related.skipless.exactness import LOGIT_TOLERANCE, exact_logits, relative_difference, rounded
from related.skipless.modeling import SkiplessConfig

STAGE = "related/skipless/fold.py"


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=None, metavar="DIR",
                        help="skipless checkpoint (default: RUN/serial)")
    parser.add_argument("--remove", choices=tuple(PROJECTIONS), default="q", help="what to remove; see above")
    parser.add_argument("--out", default=None, metavar="DIR", help="output (default: MODEL-without-LETTER)")
    parser.add_argument("--dtype", choices=("source", "float64", "float32", "bfloat16"), default="source",
                        help="dtype of the weights written")
    parser.add_argument("--max-condition", type=positive_float, default=MAX_CONDITION,
                        help="largest condition number of a matrix that is inverted")
    parser.section("equivalence check")
    parser.add_argument("--text", default=DEMO, 
                        help="c4, demo (its held-out part), a .txt, .jsonl, .json.gz or .parquet file")
    parser.add_argument("--sequences", type=positive, default=4)
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence")
    return parser.parse_args()


def load_config_to_fold(source: str, length: int):
    """The config of a skipless checkpoint. Raises UserError for any other, or when `length` is too long."""
    config = load_config(source)
    if config.model_type != SkiplessConfig.model_type:
        raise UserError(f"{source}: expected model_type {SkiplessConfig.model_type!r}, found "
                        f"{config.model_type!r}, whose matrices are separated by norms and skip connections")
    if length > config.max_position_embeddings:
        raise UserError(f"--length: expected at most {config.max_position_embeddings}, the positions of "
                        f"{source}, found {length}")
    return config


def folded_model(source: str, model, args):
    """The model with args.remove folded away. Raises UserError where that is impossible or saves nothing."""
    try:
        folded = fold(model, args.remove, args.max_condition)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    before, after = model.num_parameters(), folded.num_parameters()
    if after >= before:
        raise UserError(f"{source}: expected fewer weights, found {before} -> {after}: "
                        "the tied embedding must be stored twice")
    return folded


def check_equivalence(model, folded, tokens: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Logit differences in float64, and after rounding to dtype. Raises UserError if not equivalent."""
    reference = exact_logits(model, tokens)
    difference = relative_difference(reference, exact_logits(folded, tokens))
    stored = relative_difference(reference, exact_logits(rounded(folded, dtype), tokens))
    print(f"check   max |logit difference| / max |logit| {difference:.1e} in float64 "
          f"(allowed {LOGIT_TOLERANCE:.0e}), {stored:.1e} with weights in {dtype}; {tokens.numel()} tokens")
    if not difference <= LOGIT_TOLERANCE:  # also true of NaN
        raise UserError(f"equivalence check: expected logits to differ by at most {LOGIT_TOLERANCE:.0e}, "
                        f"found {difference:.1e}; nothing was written")
    return {"max_relative_difference": difference, "max_relative_difference_stored": stored}


def main():
    args, clock = parse(), Clock()
    source = args.model or os.path.join(args.run, "serial")
    output = args.out or f"{os.path.normpath(source)}-without-{args.remove}"
    config = load_config_to_fold(source, args.length)
    claim(STAGE, args, output)
    if os.path.exists(output):  # --force replaces an earlier fold and nothing else
        read_record(output, STAGE)
    dtype = weight_dtype(args.dtype, config)
    tokenizer = load_tokenizer(source)
    tokens, description = load_tokens(args.text, tokenizer, args.sequences, args.length, split="heldout")
    print(f"reads   {source}; {description}, for the equivalence check")
    model = load_model(source, torch.float64)
    folded = folded_model(source, model, args)
    before, after, removed = model.num_parameters(), folded.num_parameters(), folded.config.removed
    summary = {"removed": removed, "parameters_before": before, "parameters_after": after}
    summary |= check_equivalence(model, folded, tokens, dtype) | {"dtype": str(dtype)}
    with write_directory(output) as aside:
        companions.save(folded.to(dtype), aside, source)
        write_record(aside, make_record(STAGE, args, describe(source), {}, summary, clock()))
    print(f"wrote   {output}\nfold: {', '.join(removed)} removed, {before:,} -> {after:,} weights "
          f"({1 - after / before:.1%} fewer) in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
