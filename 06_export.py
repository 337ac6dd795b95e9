"""Stage 6: write the trained student as a stock checkpoint of its family with fewer key/value heads.

Reads   RUN/train/ (completed by stage 5), RUN/aligned/ for config and tokenizer
Writes  RUN/gqa/: config.json, model.safetensors, generation config, tokenizer, and a model card (README.md);
        it loads without this repository

    python 06_export.py --run runs/llama2-7b
    python 06_export.py                          # seconds on a CPU for the demo model

The trained tensors are loaded into the stock model by name; a missing or unexpected one stops the export. The
exported model's logits must equal those of the masked student at z = 0; they are compared once more after
loading the checkpoint back with plain AutoModelForCausalLM.
"""

import copy
import os

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from common.artifacts import (
    check_input,
    check_same_model,
    claim,
    read_record,
    record,
    verify_files,
    write_directory,
    write_record,
)
from common.cli import Clock, UserError, run_stage, stage_parser
from common.evaluate import all_logits, max_difference
from common.method import masks
from common.models import geometry, load_config, load_model, save_tokenizer
from common.reporting import model_card
from common.training.checkpoints import step_of, steps_saved, whole_weights
from common.weights import check_finite

# relative to the largest logit: student and export compute the same float32 products in different shapes
LOGIT_TOLERANCE = 1e-5


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--dtype", choices=("source", "float32", "bfloat16", "float16"), default="source",
                        help="of the exported weights")
    return parser.parse_args()


def read_records(training: str, aligned: str, merged: str) -> tuple[dict, dict]:
    """The records of train/ and aligned/.

    Raises UserError unless both are intact and the student was trained from this aligned/ and merged/.
    """
    trained, alignment = read_record(training, "05_prune_train.py"), read_record(aligned, "04_align.py")
    if "kv_heads" not in trained["summary"]:
        raise UserError(f"{training}: expected a trained student, found a teacher")
    check_same_model(training, alignment["model"], trained["model"])
    check_input(trained, aligned)
    if os.path.isdir(merged):
        check_input(read_record(merged, "04_align.py"), aligned)
        check_input(trained, merged)
    expected, kv_heads = alignment["summary"]["kv_heads"], trained["summary"]["kv_heads"]
    if kv_heads != expected:
        raise UserError(f"{training}: expected {expected} kv heads as in {aligned}, found {kv_heads}")
    verify_files(training, trained)
    verify_files(aligned, alignment)
    return trained, alignment


def last_weights(training: str, steps: int) -> dict[str, torch.Tensor]:
    """The weights after the last step, by name. Raises UserError if they are missing or not finite."""
    saved = steps_saved(training)
    if not saved or step_of(saved[-1]) != steps:
        raise UserError(f"{training}: expected the checkpoint of step {steps}, found {saved}")
    weights = whole_weights(saved[-1])
    check_finite(weights.items(), saved[-1])
    print(f"reads   {saved[-1]}: {len(weights)} tensors")
    return weights


def load_weights(model, weights: dict[str, torch.Tensor], left_out: str | None = None) -> None:
    """Load weights into a model by name; parameters with `left_out` in their name may be missing.

    Raises UserError for any other missing name and for unexpected ones.
    """
    missing, unexpected = model.load_state_dict(weights, strict=False)
    missing = [name for name in missing if left_out is None or left_out not in name]
    if missing or unexpected:
        raise UserError(f"train/: expected the tensors of {type(model).__name__}, "
                        f"found missing {missing[:3]} and unexpected {unexpected[:3]}")


@torch.no_grad()
def student_logits(config, kv_heads: int, weights: dict, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the student as masked training computes them: the source's heads, with every mask at 0."""
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    masks.patch(student, kv_heads)
    blended = {masks.blended_name(name): tensor for name, tensor in weights.items()}
    load_weights(student, blended, left_out=".original.")  # unused at z = 0
    masks.set_masks(student, torch.zeros(config.num_hidden_layers, geometry(config).kv_heads))
    return all_logits(student, tokens)


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    names = ("train", "aligned", "merged", "gqa")
    training, aligned, merged, output = (os.path.join(args.run, name) for name in names)
    claim("06_export.py", args, output)
    trained, alignment = read_records(training, aligned, merged)
    kv_heads = trained["summary"]["kv_heads"]
    weights = last_weights(training, trained["summary"]["steps"])

    source = load_config(aligned)
    config = copy.deepcopy(source)
    config.num_key_value_heads = kv_heads
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    load_weights(model, weights)
    model.generation_config = GenerationConfig.from_pretrained(aligned)
    dtype = (source.dtype or torch.float32) if args.dtype == "source" else getattr(torch, args.dtype)

    tokens = torch.randint(source.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    expected = student_logits(source, kv_heads, weights, tokens)
    difference = max_difference(expected, all_logits(model, tokens))
    allowed = LOGIT_TOLERANCE * max(1.0, *(float(logits.abs().max()) for logits in expected))
    if not difference <= allowed:  # also refuses NaN
        raise UserError("the exported model differs from the student: max |logit difference| "
                        f"expected <= {allowed:.0e}, found {difference:.2e}; nothing was written")

    with write_directory(output) as aside:
        model.to(dtype).save_pretrained(aside)
        save_tokenizer(aligned, aside)
        loaded = load_model(aside)
        stored = max_difference(expected, all_logits(loaded, tokens))
        summary = {
            "kv_heads": kv_heads,
            "dtype": str(dtype),
            "max_logit_difference": difference,
            "max_logit_difference_stored": stored,
            "class": type(loaded).__name__,
        }
        export = record("06_export.py", args, trained["model"], [training, aligned], summary, clock())
        write_record(aside, export)
        # after the record, which must not list it: stage 7 adds the scores
        model_card.write(aside, output, alignment, trained, export)
    print(f"check   student at z = 0 against export: max |logit difference| {difference:.2e}; "
          f"loaded back as {dtype}: {stored:.2e}")
    print(f"wrote   {output}")
    print(f"06_export: {summary['class']}, {source.num_attention_heads} heads, {kv_heads} kv heads, "
          f"{sum(p.numel() for p in model.parameters())} parameters in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
