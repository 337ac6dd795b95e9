"""Stage 6: write the trained student as a stock checkpoint of its family (LlamaForCausalLM, ...) with fewer num_key_value_heads.

Reads   RUN/train/ (finished by stage 5), RUN/aligned/ for config and tokenizer
Writes  RUN/gqa/: config.json, model.safetensors, generation config, tokenizer, and README.md, its model card. Nothing of this
        repository is needed to load it

    python 06_export.py --run runs/llama2-7b
    python 06_export.py                          # seconds on a CPU for the embedded model

Every tensor goes through the table below; one that is not in it stops the export. The checkpoint is loaded back with
plain AutoModelForCausalLM and its logits are compared with the student's own at z = 0.
"""

import copy
import os
import re

import torch
from transformers import AutoModelForCausalLM

from common.artifacts import (
    RECORD,
    check_input,
    check_same_model,
    claim,
    read_record,
    record,
    write_directory,
    write_record,
)
from common.cli import Clock, UserError, run_stage, stage_parser
from common.evaluate import all_logits, max_difference
from common.method import masks
from common.models import check_finite, geometry, load_config, load_tokenizer
from common.reporting import model_card
from common.training.checkpoints import steps_saved, whole_weights

TENSORS = {  # the trained student's name -> the name in a stock checkpoint
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
LAYER_TENSORS = {  # below model.layers.N.
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attn.q_proj.weight": "self_attn.q_proj.weight",
    "self_attn.q_proj.bias": "self_attn.q_proj.bias",
    "self_attn.k_proj.weight": "self_attn.k_proj.weight",
    "self_attn.k_proj.bias": "self_attn.k_proj.bias",
    "self_attn.v_proj.weight": "self_attn.v_proj.weight",
    "self_attn.v_proj.bias": "self_attn.v_proj.bias",
    "self_attn.q_norm.weight": "self_attn.q_norm.weight",
    "self_attn.k_norm.weight": "self_attn.k_norm.weight",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "self_attn.o_proj.bias": "self_attn.o_proj.bias",
    "mlp.gate_proj.weight": "mlp.gate_proj.weight",
    "mlp.gate_proj.bias": "mlp.gate_proj.bias",
    "mlp.up_proj.weight": "mlp.up_proj.weight",
    "mlp.up_proj.bias": "mlp.up_proj.bias",
    "mlp.down_proj.weight": "mlp.down_proj.weight",
    "mlp.down_proj.bias": "mlp.down_proj.bias",
}
TOLERANCE = 1e-5  # of the logits: student and export run the same float32 products, shaped differently


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--dtype", choices=("source", "float32", "bfloat16", "float16"), default="source", help="of the exported weights")
    return parser.parse_args()


def stock_name(name: str) -> str:
    """The exported name of a student's tensor. Raises UserError for an unknown one."""
    layer = re.fullmatch(r"(model\.layers\.\d+\.)(.+)", name)
    prefix, rest, table = (layer[1], layer[2], LAYER_TENSORS) if layer else ("", name, TENSORS)
    if rest not in table:
        raise UserError(f"train/: tensor {name} is not in the table of exported names")
    return prefix + table[rest]


@torch.no_grad()
def student_logits(config, kv_heads: int, weights: dict, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of the student as masked training computes it, with the source's heads and every mask at 0."""
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    masks.patch(student, kv_heads)  # the heads' own projections stay random: at z = 0 they do not count
    blended = {masks.blended_name(name): tensor for name, tensor in weights.items()}
    missing = student.load_state_dict(blended, strict=False)
    if missing.unexpected_keys or any(".original." not in name for name in missing.missing_keys):
        raise UserError(f"train/: expected the tensors of {type(student).__name__}, found others: {missing}")
    masks.set_masks(student, torch.zeros(config.num_hidden_layers, geometry(config).kv_heads))
    return all_logits(student, tokens)


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    training, aligned, output = (os.path.join(args.run, name) for name in ("train", "aligned", "gqa"))
    claim("06_export.py", args, output)
    trained = read_record(training, "05_prune_train.py")
    alignment = read_record(aligned, "04_align.py")
    check_input(trained, aligned)
    check_same_model(training, alignment["model"], trained["model"])
    kv_heads, steps = trained["summary"]["kv_heads"], trained["summary"]["steps"]
    saved = steps_saved(training)
    if not saved or not saved[-1].endswith(f"{steps:08d}"):
        raise UserError(f"{training}: expected the checkpoint of step {steps}, found {saved}")
    weights = whole_weights(saved[-1])
    check_finite(weights.items(), saved[-1])
    source = load_config(aligned)
    print(f"reads   {saved[-1]}: {len(weights)} tensors")

    config = copy.deepcopy(source)
    config.num_key_value_heads = kv_heads
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict({stock_name(name): tensor for name, tensor in weights.items()})
    model.generation_config = AutoModelForCausalLM.from_pretrained(aligned).generation_config
    dtype = (source.dtype or torch.float32) if args.dtype == "source" else getattr(torch, args.dtype)

    tokens = torch.randint(source.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    expected = student_logits(source, kv_heads, weights, tokens)
    difference = max_difference(expected, all_logits(model, tokens))
    allowed = TOLERANCE * max(1.0, *(float(logits.abs().max()) for logits in expected))
    if not difference <= allowed:
        raise UserError(f"the exported model is not the student: max |logit difference| expected <= {allowed:.0e}, "
                        f"found {difference:.2e}; nothing was written")
    with write_directory(output) as aside:
        model.to(dtype).save_pretrained(aside)
        load_tokenizer(aligned).save_pretrained(aside)
        loaded = AutoModelForCausalLM.from_pretrained(aside, dtype=torch.float32).eval()
        stored = max_difference(expected, all_logits(loaded, tokens))
        summary = {"kv_heads": kv_heads, "dtype": str(dtype), "max_logit_difference": difference,
                   "max_logit_difference_stored": stored, "class": type(loaded).__name__}
        inputs = [os.path.join(training, RECORD), os.path.join(aligned, RECORD)]
        written = record("06_export.py", args, trained["model"], inputs, summary, clock())
        write_record(aside, written)
        model_card.write(aside, output, alignment, trained, written)
    print(f"proof   student at z = 0 against export: max |logit difference| {difference:.2e}; "
          f"loaded back from {dtype} by AutoModelForCausalLM: {stored:.2e}")
    print(f"wrote   {output}")
    print(f"06_export: {summary['class']}, {source.num_attention_heads} heads, {kv_heads} kv heads, "
          f"{sum(p.numel() for p in model.parameters())} parameters in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
