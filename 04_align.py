"""Stage 4: rotate the heads of each group onto each other without changing the model, and merge them.

Reads   the model that stage 1 read, RUN/calibration.safetensors, RUN/groups.json
Writes  RUN/aligned/   an ordinary MHA checkpoint of the same function: heads rotated, groups consecutive
        RUN/merged/    a stock GQA checkpoint: each group's heads merged, no training

    python 04_align.py --run runs/llama2-7b --rotate dist
    python 04_align.py --run runs/llama2-7b --merge closed-form --refit
    python 04_align.py                           # seconds on a CPU for the embedded model

Generalized Procrustes (Algorithm 1) on each group's Gram matrices in float64, fused into W_Q, W_K, W_V, W_O
(Eq. 12-17). Before anything is written the function is proved unchanged on text; --rotate none with groups of
03_group.py --by none makes merged/ the mean-pool baseline.

--merge mean averages each group's keys and values (Eq. 25, 26). --merge closed-form keeps the best shared value head that is
linear in the group's and the best shared key with one complex factor per head and RoPE pair (common/closed_form.py): it starts
nearer to the source, and suits groups of 03_group.py --by energy. --refit then solves each layer's W_O anew on calibration text.
"""

import math
import os

import torch
from tqdm import tqdm

from common.artifacts import (
    RECORD,
    check_same_model,
    read_record,
    read_tensors,
    record,
    refuse_overwrite,
    write_directory,
    write_json,
)
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.closed_form import closed_form, key_weights
from common.evaluate import all_logits, max_difference, mean_kl, mean_nll
from common.fuse import Merge, fuse_layer, merge_model
from common.models import load_config, load_model, load_tokenizer, pick_device, source_model
from common.procrustes import align_keys, align_values, aligned_key_overlap, aligned_value_overlap, pair_mean
from common.refit import refit
from common.stats import CRITERIA, Grams
from common.text import load_tokens

TOLERANCE = 1e-4, 1e-5  # of the logits: absolute, or of the largest if that is more; float32 rounding through all layers


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--calibration", default=None, metavar="FILE", help="default: RUN/calibration.safetensors")
    parser.add_argument("--groups", default=None, metavar="FILE", help="default: RUN/groups.json")
    parser.add_argument("--rotate", choices=("none", "cos", "dist"), default="dist", help="align length-1 (cos) or raw (dist) vectors, or only reorder")
    # what merged/ holds
    parser.add_argument("--merge", choices=("mean", "closed-form"), default="mean", help="mean: as the paper; closed-form: the best shared heads")
    parser.add_argument("--refit", action="store_true", help="least squares of each merged layer's W_O on the calibration text")
    parser.add_argument("--refit-sequences", type=positive, default=128, help="of that text, at the calibration's length; one in four judges the ridge")
    # the proof that the function is unchanged
    parser.add_argument("--text", default=None, help="text of the proof, as in 01_calibrate.py (default: what was calibrated on; its held-out part for demo)")
    parser.add_argument("--sequences", type=positive, default=4, help="sequences of that text")
    parser.add_argument("--length", type=positive, default=None, help="tokens per sequence (default: 512, or the calibration's if lower)")
    # how it runs
    parser.add_argument("--dtype", choices=("source", "float32"), default="source", help="of the checkpoints written; the work is done in float32 and float64")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser.parse_args()


def group_blocks(gram: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Gram [H, H, ...] -> the blocks within groups, [G, D, D, ...]. groups: [G, D] head numbers."""
    return gram[groups[:, :, None], groups[:, None, :]]


def align_layer(grams: Grams, layer: int, tokens: int, groups: torch.Tensor, rotate: str, device: str):
    """Rotations of one layer, Q [G, D, d, d] and u [G, D, d/2], and the mean within-group cosine before and after."""
    unit_value, unit_key = (group_blocks(gram(layer, "unit").to(device), groups) for gram in (grams.value, grams.key))
    value_rotation = torch.eye(unit_value.shape[-1], dtype=torch.float64, device=device).expand(unit_value[:, :, 0].shape)
    key_rotation = torch.ones_like(unit_key[:, :, 0])
    cosine = {"value_before": aligned_value_overlap(unit_value, value_rotation),
              "key_before": aligned_key_overlap(unit_key, key_rotation)}
    if rotate != "none":
        kind = CRITERIA[rotate]
        value_rotation = align_values(group_blocks(grams.value(layer, kind).to(device), groups))
        key_rotation = align_keys(group_blocks(grams.key(layer, kind).to(device), groups))
    cosine |= {"value_after": aligned_value_overlap(unit_value, value_rotation),
               "key_after": aligned_key_overlap(unit_key, key_rotation)}
    return value_rotation, key_rotation, {name: float(pair_mean(sums).mean()) / tokens for name, sums in cosine.items()}


def closed_form_layer(grams: Grams, layer: int, groups: torch.Tensor, value_rotation, key_rotation, device: str) -> Merge:
    """The closed-form merge of one layer, in the coordinates of its rotated heads."""
    value, key = (group_blocks(gram(layer, "raw").to(device), groups) for gram in (grams.value, grams.key))
    value = torch.einsum("giab,gijbc,gjdc->gijad", value_rotation, value, value_rotation)
    key = torch.einsum("gip,gijp,gjp->gijp", key_rotation.conj(), key, key_rotation)
    output = torch.einsum("giab,gibc,gidc->giad", value_rotation, grams.output(layer).to(device)[groups], value_rotation)
    return closed_form(value, output, key, key_weights(grams.query(layer).to(device))[groups])


def save(path: str, model, tokenizer, dtype: torch.dtype, written: dict) -> None:
    with write_directory(path) as directory:
        model.to(dtype).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        write_json(os.path.join(directory, RECORD), written)
    print(f"wrote   {path}")


def refit_outputs(args, model, merged, calibration: dict, tokenizer, tokens: torch.Tensor) -> dict:
    """Refit merged's W_O on the calibration text, print the gain, and return its figures."""
    clock, was = Clock(), calibration["summary"]
    count = min(args.refit_sequences, was["sequences"])
    text, said = load_tokens(calibration["arguments"]["text"], tokenizer, max(count, 2), was["length"])
    before = math.exp(mean_nll(all_logits(merged, tokens), tokens))
    layers = refit(model, merged, text)
    print(f"reads   {said}; {text.numel()} tokens, for the refit")
    print("layer | ridge | output error before -> after, held-out share")
    for layer, figures in enumerate(layers):
        print(f"{layer:5d} | {'kept' if figures['ridge'] is None else format(figures['ridge'], 'g'):>5s} | {figures['before']:.4f} -> {figures['after']:.4f}")
    after = math.exp(mean_nll(all_logits(merged, tokens), tokens))
    print(f"refit   perplexity of merged {before:.3f} -> {after:.3f} in {clock()} s")
    return {"perplexity_merged_before_refit": before, "refit_layers": layers, "refit_seconds": clock()}


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    calibration_path = args.calibration or os.path.join(args.run, "calibration.safetensors")
    groups_path = args.groups or os.path.join(args.run, "groups.json")
    outputs = {name: os.path.join(args.run, name) for name in ("aligned", "merged")}
    for output in outputs.values():
        refuse_overwrite(output, args.force)
    grouping = read_record(groups_path, "03_group.py")
    file, calibration = read_tensors(calibration_path, "01_calibrate.py")
    check_same_model(groups_path, calibration["model"], grouping["model"])
    described = source_model(calibration)
    path, tokens_seen = described["path"], calibration["summary"]["tokens"]
    device = pick_device(args.device)
    model, tokenizer = load_model(path, torch.float32, device), load_tokenizer(path)
    kv_heads, groups = grouping["kv_heads"], torch.tensor(grouping["groups"])
    print(f"reads   {path}; {calibration_path}; {groups_path} ({kv_heads} groups by {grouping['summary']['by']})")

    if args.merge == "closed-form" and grouping["summary"]["by"] != "energy":
        print(f"note    these are groups by {grouping['summary']['by']}; 03_group.py --by energy is made for --merge closed-form")

    length = args.length or min(512, calibration["summary"]["length"])
    text = args.text or calibration["arguments"]["text"]
    tokens, said = load_tokens(text, tokenizer, args.sequences, length, split="heldout")
    print(f"reads   {said}, for the proof")
    source_logits = all_logits(model, tokens)

    grams, cosines, merges = Grams(file, described["heads"]), [], []
    for layer in tqdm(range(described["layers"]), desc="aligning", unit="layer"):
        value_rotation, key_rotation, cosine = align_layer(grams, layer, tokens_seen, groups[layer], args.rotate, device)
        order = groups[layer].flatten().tolist()
        fuse_layer(model.model.layers[layer].self_attn, order, value_rotation.flatten(0, 1), key_rotation.flatten(0, 1))
        if args.merge == "closed-form":
            merges.append(closed_form_layer(grams, layer, groups[layer], value_rotation, key_rotation, device))
        cosines.append({name: round(number, 6) for name, number in cosine.items()})
    print("mean cosine within groups | keys before -> after | values before -> after")
    for layer, cosine in enumerate(cosines):
        print(f"layer {layer:19d} | {cosine['key_before']:8.4f} -> {cosine['key_after']:8.4f} | "
              f"{cosine['value_before']:8.4f} -> {cosine['value_after']:8.4f}")

    aligned_logits = all_logits(model, tokens)
    merged = merge_model(model, kv_heads, merges)
    proof = refit_outputs(args, model, merged, calibration, tokenizer, tokens) if args.refit else {}
    merged_logits = all_logits(merged, tokens)
    proof |= {"max_logit_difference": max_difference(source_logits, aligned_logits),
             "kl": mean_kl(source_logits, aligned_logits),
             "perplexity_source": math.exp(mean_nll(source_logits, tokens)),
             "perplexity_aligned": math.exp(mean_nll(aligned_logits, tokens)),
             "perplexity_merged": math.exp(mean_nll(merged_logits, tokens))}
    allowed = max(TOLERANCE[0], TOLERANCE[1] * max(float(logits.abs().max()) for logits in source_logits))
    print(f"proof   max |logit difference| {proof['max_logit_difference']:.2e} (allowed {allowed:.0e}), KL {proof['kl']:.2e}, "
          f"perplexity {proof['perplexity_source']:.5f} -> {proof['perplexity_aligned']:.5f}; {tokens.numel()} tokens")
    if not proof["max_logit_difference"] <= allowed:  # also true of NaN
        raise UserError(f"the aligned model is not the source model: max |logit difference| expected <= {allowed:.0e}, "
                        f"found {proof['max_logit_difference']:.2e}; nothing was written")

    dtype = torch.float32 if args.dtype == "float32" else (load_config(path).dtype or torch.float32)
    if dtype != torch.float32:  # storing rotated weights in 16 bits rounds them anew: say by how much
        stored = all_logits(model.to(dtype).float(), tokens)
        proof["perplexity_aligned_stored"] = math.exp(mean_nll(stored, tokens))
        print(f"stored  as {dtype}: perplexity of aligned/ {proof['perplexity_aligned_stored']:.5f}")
    summary = {"kv_heads": kv_heads, "rotate": args.rotate, "merge": args.merge, "refit": args.refit, "calibration_tokens": tokens_seen,
               "within_group_cosine": cosines} | proof
    written = record("04_align.py", args, described, [calibration_path, groups_path], summary, clock())
    save(outputs["aligned"], model, tokenizer, dtype, written)
    save(outputs["merged"], merged, tokenizer, dtype, written)
    print(f"04_align: perplexity source {proof['perplexity_source']:.3f}, aligned {proof['perplexity_aligned']:.3f}, "
          f"merged to {kv_heads} kv heads ({args.merge}{', refitted' if args.refit else ''}) without training {proof['perplexity_merged']:.3f} in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
