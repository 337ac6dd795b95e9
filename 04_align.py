"""Stage 4: rotate the heads of each group onto each other without changing the model, and merge them.

Reads   the model that stage 1 read, RUN/calibration/, RUN/groups.json
Writes  RUN/aligned/   an ordinary checkpoint of the same function: heads rotated, groups consecutive
        RUN/merged/    a stock GQA checkpoint: each group's heads merged, no training

    python 04_align.py --run runs/llama2-7b --rotate dist
    python 04_align.py --run runs/llama2-7b --merge closed-form --refit
    python 04_align.py --run runs/llama2-7b --layerwise      # 7B in 6 GiB of memory
    python 04_align.py                           # seconds on a CPU for the embedded model

Generalized Procrustes (Algorithm 1) on each group's Gram matrices in float64, fused into W_Q, W_K, W_V, W_O
(Eq. 12-17). Before anything is written the function is proved unchanged on text; --rotate none with groups of
03_group.py --by none makes merged/ the mean-pool baseline.

--merge mean averages each group's keys and values (Eq. 25, 26). --merge closed-form keeps the best shared value head that is
linear in the group's and the best shared key with one complex factor per head and RoPE pair (common/method/closed_form.py): it starts
nearer to the source, and suits groups of 03_group.py --by energy. --refit then solves each layer's W_O anew on calibration text.
"""

import os

import torch
from tqdm import tqdm

from common.artifacts import (
    claim,
    digest,
    read_calibration,
    read_groups,
    read_layer,
    record,
    write_directory,
    write_record,
)
from common.cli import Clock, UserError, peak_memory, positive, run_stage, stage_parser
from common.data.text import load_tokens
from common.evaluate import max_difference, mean_kl, mean_nll
from common.layers import CheckpointWriter, Layers
from common.method.align import align_layer, no_rotation, within_group_cosine
from common.method.closed_form import closed_form_layer
from common.method.fuse import fuse_layer, mean_merge, merge_layer, merged_config
from common.method.refit import Refit
from common.method.rope import norms_heads
from common.method.stats import LayerGrams
from common.models import load_config, load_tokenizer, pick_device, source_model

TOLERANCE = 1e-4, 1e-5  # of the logits: absolute, or of the largest if that is more; float32 rounding through all layers


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--calibration", default=None, metavar="DIR", help="default: RUN/calibration")
    parser.add_argument("--groups", default=None, metavar="FILE", help="default: RUN/groups.json")
    parser.add_argument("--rotate", choices=("none", "cos", "dist"), default="dist", help="align length-1 (cos) or raw (dist) vectors, or only reorder")
    parser.section("what merged/ holds")
    parser.add_argument("--merge", choices=("mean", "closed-form"), default="mean", help="mean: as the paper; closed-form: the best shared heads")
    parser.add_argument("--refit", action="store_true", help="least squares of each merged layer's W_O on the calibration text")
    parser.add_argument("--refit-sequences", type=positive, default=128, help="of that text, at the calibration's length; one in four judges the ridge")
    parser.section("the proof that the function is unchanged")
    parser.add_argument("--text", default=None, help="text of the proof, as in 01_calibrate.py (default: what was calibrated on; its held-out part for demo)")
    parser.add_argument("--sequences", type=positive, default=4, help="sequences of that text")
    parser.add_argument("--length", type=positive, default=None, help="tokens per sequence (default: 512, or the calibration's if lower)")
    parser.section("how it runs")
    parser.add_argument("--dtype", choices=("source", "float32"), default="source", help="of the checkpoints written; the work is done in float32 and float64")
    parser.add_argument("--layerwise", action="store_true", help="hold one decoder layer in memory at a time")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser.parse_args()


class Proof:
    """The same text through the source, the aligned and the merged model, layer by layer, and what it says of them in the end."""

    def __init__(self, layers: Layers, tokens: torch.Tensor, names: list[str], run: str):
        self.layers, self.tokens = layers, tokens
        self.hidden = {name: layers.embed(tokens.split(1), run) for name in names}

    def advance(self, name: str, layer) -> None:
        """That model's text through its next layer."""
        self.layers.advance(layer, self.hidden[name])

    def figures(self) -> dict:
        """Largest difference of the source's and the aligned model's logits, KL, the largest logit, each model's perplexity."""
        rows = []
        with self.layers.head() as head:
            for number, ids in enumerate(tqdm(self.tokens, desc="proof", unit="seq", leave=False)):
                logits = {name: [head(hidden[number])[0].float().cpu()] for name, hidden in self.hidden.items()}
                rows.append({"max_logit_difference": max_difference(logits["source"], logits["aligned"]), "kl": mean_kl(logits["source"], logits["aligned"]),
                             "largest": float(logits["source"][0].abs().max())} | {name: mean_nll(found, ids[None]) for name, found in logits.items()})
        of_rows = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
        proof = {key: float(of_rows[key].max()) for key in ("max_logit_difference", "largest")} | {"kl": float(of_rows["kl"].mean())}
        return proof | {f"perplexity_{name}": float(of_rows[name].mean().exp()) for name in self.hidden}


@torch.no_grad()
def main():
    args, clock = parse(), Clock()
    calibration_path = args.calibration or os.path.join(args.run, "calibration")
    groups_path = args.groups or os.path.join(args.run, "groups.json")
    outputs = {name: os.path.join(args.run, name) for name in ("aligned", "merged")}
    claim("04_align.py", args, *outputs.values())
    calibration = read_calibration(calibration_path)
    grouping, groups = read_groups(groups_path, calibration["model"])
    described, was = source_model(calibration), calibration["summary"]
    path, heads = described["path"], described["kv_heads"]
    kv_heads = grouping["kv_heads"]
    print(f"reads   {path}; {calibration_path}; {groups_path} ({kv_heads} groups by {grouping['summary']['by']})")
    if args.merge == "closed-form" and grouping["summary"]["by"] != "energy":
        print(f"note    these are groups by {grouping['summary']['by']}; 03_group.py --by energy is made for --merge closed-form")

    tokenizer = load_tokenizer(path)
    length = args.length or min(512, was["length"])
    tokens, said = load_tokens(args.text or calibration["arguments"]["text"], tokenizer, args.sequences, length, split="heldout")
    print(f"reads   {said}, for the proof")
    device = pick_device(args.device)
    layers = Layers(path, torch.float32, device, one_by_one=args.layerwise)
    if args.merge == "closed-form" and norms_heads(layers.config):
        raise UserError(f"{path}: expected --merge mean, found closed-form: q_norm and k_norm undo the lengths that a query would absorb")
    dtype = torch.float32 if args.dtype == "float32" else (load_config(path).dtype or torch.float32)
    names = ["source", "aligned", "merged", *(["merged_before_refit"] if args.refit else []), *(["aligned_stored"] if dtype != torch.float32 else [])]
    proof, refitted = Proof(layers, tokens, names, args.run), []
    if args.refit:
        text, said = load_tokens(calibration["arguments"]["text"], tokenizer, max(min(args.refit_sequences, was["sequences"]), 2), was["length"])
        print(f"reads   {said}; {text.numel()} tokens, for the refit")
        refit = Refit(layers.run, layers.embed(text.split(4), args.run), layers.embed(text.split(4), args.run))

    cosines, config = [], merged_config(layers.config, kv_heads)
    with write_directory(outputs["merged"]) as merged_directory, write_directory(outputs["aligned"]) as aligned_directory:
        with (CheckpointWriter(aligned_directory, layers.config, dtype, path) as aligned_file,
              CheckpointWriter(merged_directory, config, dtype, path) as merged_file):
            for index in tqdm(range(described["layers"]), desc="aligning", unit="layer"):
                tensors = {name: tensor.to(device) for name, tensor in read_layer(calibration_path, index).items()}
                grams, members = LayerGrams(tensors, heads), groups[index].to(device)
                unchanged = rotations = no_rotation(grams, members)
                if args.rotate != "none":
                    rotations = align_layer(grams, members, args.rotate)
                value_rotation, key_rotation = rotations
                cosine = {f"{name}_{when}": round(number, 6) for when, pair in (("before", unchanged), ("after", rotations))
                          for name, number in within_group_cosine(grams, members, *pair, was["tokens"]).items()}
                cosines.append(cosine)
                merge = mean_merge(heads, kv_heads, described["head_dim"])
                if args.merge == "closed-form":
                    merge = closed_form_layer(grams, members, value_rotation, key_rotation)
                with layers.layer(index) as layer:
                    proof.advance("source", layer)
                    fuse_layer(layer.self_attn, groups[index].flatten().tolist(), value_rotation.flatten(0, 1), key_rotation.flatten(0, 1))
                    proof.advance("aligned", layer)
                    merged = merge_layer(layer, index, config, merge)
                    if args.refit:
                        proof.advance("merged_before_refit", merged)
                        refitted.append(refit.layer(layer, merged))
                    proof.advance("merged", merged)
                    aligned_file.write(f"model.layers.{index}", layer)
                    merged_file.write(f"model.layers.{index}", merged)
                    if dtype != torch.float32:  # storing rotated weights in 16 bits rounds them anew: say by how much
                        proof.advance("aligned_stored", layer.to(dtype).float())
            for name in ("model.embed_tokens", "model.norm", "lm_head"):
                with layers.part(name) as module:
                    aligned_file.write(name, module)
                    merged_file.write(name, module)

        print("mean cosine within groups | keys before -> after | values before -> after")
        for index, cosine in enumerate(cosines):
            print(f"layer {index:19d} | {cosine['key_before']:8.4f} -> {cosine['key_after']:8.4f} | "
                  f"{cosine['value_before']:8.4f} -> {cosine['value_after']:8.4f}")
        found = proof.figures()
        if args.refit:
            print("layer | ridge | output error before -> after, held-out share")
            for index, figures in enumerate(refitted):
                print(f"{index:5d} | {'kept' if figures['ridge'] is None else format(figures['ridge'], 'g'):>5s} | {figures['before']:.4f} -> {figures['after']:.4f}")
            print(f"refit   perplexity of merged {found['perplexity_merged_before_refit']:.3f} -> {found['perplexity_merged']:.3f}")
        allowed = max(TOLERANCE[0], TOLERANCE[1] * found.pop("largest"))
        print(f"proof   max |logit difference| {found['max_logit_difference']:.2e} (allowed {allowed:.0e}), KL {found['kl']:.2e}, "
              f"perplexity {found['perplexity_source']:.5f} -> {found['perplexity_aligned']:.5f}; {tokens.numel()} tokens")
        if not found["max_logit_difference"] <= allowed:  # also true of NaN
            raise UserError(f"the aligned model is not the source model: max |logit difference| expected <= {allowed:.0e}, "
                            f"found {found['max_logit_difference']:.2e}; nothing was written")
        if dtype != torch.float32:
            print(f"stored  as {dtype}: perplexity of aligned/ {found['perplexity_aligned_stored']:.5f}")
        summary = {"kv_heads": kv_heads, "by": grouping["summary"]["by"], "criterion": grouping["summary"]["criterion"], "rotate": args.rotate,
                   "merge": args.merge, "refit": args.refit, "calibration_tokens": was["tokens"], "within_group_cosine": cosines,
                   "refit_layers": refitted, "peak_memory_gib": peak_memory()} | found
        written = record("04_align.py", args, described, [calibration_path, groups_path], summary, clock())
        write_record(aligned_directory, written | {"groups": grouping["groups"]})
        inputs = written["inputs"] | {"aligned": digest(aligned_directory)}
        write_record(merged_directory, written | {"groups": grouping["groups"], "inputs": inputs})
    print(f"wrote   {outputs['aligned']}\nwrote   {outputs['merged']}")
    print(f"04_align: perplexity source {found['perplexity_source']:.3f}, aligned {found['perplexity_aligned']:.3f}, merged to {kv_heads} kv heads "
          f"({args.merge}{', refitted' if args.refit else ''}) without training {found['perplexity_merged']:.3f} in {clock()} s, "
          f"at most {summary['peak_memory_gib']} GiB of host memory")


if __name__ == "__main__":
    run_stage(main)
