"""Remove Q and P (or K, or V, or P alone) from a skipless checkpoint: the same function with fewer weights.

Reads   a skipless checkpoint (related/skipless/train.py writes one), a text for the proof
Writes  MODEL-without-q/   a checkpoint of the same kind; its config names the projections that are gone, and none of them is stored

    python -m related.skipless.fold --remove q                                      # of runs/skipless/serial
    python -m related.skipless.fold --model runs/skipless/parallel --remove v --dtype bfloat16

The work is done in float64, and before anything is written the logits are proved unchanged on text, to 1e-9 of the largest. Then
the weights are rounded to --dtype; what that does to the logits is printed beside. --remove

  q  serial: Q and P, for MHA, GQA and MQA. parallel: Q alone
  k  serial: K and P; v: V and P. parallel: K or V alone. MHA only: with fewer key/value heads they are not square
  p  P alone. serial: it is multiplied into the FFN, nothing is inverted. parallel: it is inverted, and moves to the next block

In parallel blocks Q and P cannot both go: between two blocks there is one matrix to choose, and it cannot be Q and P^-1 at once.
"""

import copy
import os

import torch

from common.artifacts import RECORD, record, refuse_overwrite, write_directory, write_json
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.text import load_tokens
from common.evaluate import max_difference
from common.models import DEMO, describe, load_config, load_model, load_tokenizer
from related.skipless.algebra import MAX_CONDITION, PROJECTIONS, fold
from related.skipless.modeling import SkiplessConfig

TOLERANCE = 1e-9  # of the largest logit


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=None, metavar="DIR", help="skipless checkpoint (default: RUN/serial)")
    parser.add_argument("--remove", choices=tuple(PROJECTIONS), default="q", help="what goes; see above")
    parser.add_argument("--out", default=None, metavar="DIR", help="where to (default: MODEL-without-LETTER)")
    parser.add_argument("--dtype", choices=("source", "float64", "float32", "bfloat16"), default="source", help="of the weights written")
    parser.add_argument("--max-condition", type=float, default=MAX_CONDITION, help="largest condition number of a matrix that is inverted")
    parser.section("the proof that the function is unchanged")
    parser.add_argument("--text", default=DEMO, help="c4, demo (its held-out part), a .txt, .jsonl or .json.gz file")
    parser.add_argument("--sequences", type=positive, default=4)
    parser.add_argument("--length", type=positive, default=128, help="tokens per sequence")
    return parser.parse_args()


@torch.no_grad()
def exact_logits(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits in the model's own dtype, a [T, vocab] for each row of tokens [n, T]."""
    return [model(input_ids=row[None], use_cache=False).logits[0] for row in tokens]


def relative_difference(reference: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference of two models' logits, over the largest of the first's."""
    return max_difference(reference, found) / max(float(logits.abs().max()) for logits in reference)


def rounded(model, dtype: torch.dtype):
    """A copy whose weights have been stored in dtype; it still computes in float64, so that the rounding alone is seen."""
    return copy.deepcopy(model).to(dtype).double()


def main():
    args, clock = parse(), Clock()
    source = args.model or os.path.join(args.run, "serial")
    output = args.out or f"{os.path.normpath(source)}-without-{args.remove}"
    refuse_overwrite(output, args.force)
    config = load_config(source)
    if config.model_type != SkiplessConfig.model_type:
        raise UserError(f"{source}: expected model_type {SkiplessConfig.model_type!r}, found {config.model_type!r}: "
                        "between its matrices stand norms and skip connections")
    dtype = (config.dtype or torch.float32) if args.dtype == "source" else getattr(torch, args.dtype)
    tokenizer = load_tokenizer(source)
    tokens, said = load_tokens(args.text, tokenizer, args.sequences, args.length, split="heldout")
    print(f"reads   {source}; {said}, for the proof")
    model = load_model(source, torch.float64)
    try:
        folded = fold(model, args.remove, args.max_condition)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    before, after = model.num_parameters(), folded.num_parameters()
    if after >= before:
        raise UserError(f"{source}: expected fewer weights, found {before} -> {after}: the tied embedding has to be stored twice")

    reference = exact_logits(model, tokens)
    difference = relative_difference(reference, exact_logits(folded, tokens))
    stored = relative_difference(reference, exact_logits(rounded(folded, dtype), tokens))
    print(f"proof   max |logit difference| / max |logit| {difference:.1e} in float64 (allowed {TOLERANCE:.0e}); {tokens.numel()} tokens")
    if not difference <= TOLERANCE:  # also true of NaN
        raise UserError(f"the folded model is not {source}: expected a difference of at most {TOLERANCE:.0e}, found {difference:.1e}; nothing was written")
    print(f"stored  as {dtype}: {stored:.1e}")
    summary = {"removed": folded.config.removed, "parameters_before": before, "parameters_after": after, "max_relative_difference": difference,
               "max_relative_difference_stored": stored, "dtype": str(dtype)}
    with write_directory(output) as aside:
        folded.to(dtype).save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(os.path.join(aside, RECORD), record("related/skipless/fold.py", args, describe(source), [], summary, clock()))
    print(f"wrote   {output}")
    print(f"fold: {', '.join(folded.config.removed)} removed, {before:,} -> {after:,} weights ({1 - after / before:.1%} fewer) in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
