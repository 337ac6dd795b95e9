"""Stage 2: how alike any two heads of a layer are, and how alike an orthogonal map can make them.

Reads   RUN/calibration/
Writes  RUN/similarity.safetensors (+ .json): {key,value}.{cos,dist}.{before,after}, each [layers, heads, heads] of the
        source's key/value heads, and energy, what merging a pair in closed form would lose
        RUN/similarity.png: the cosine matrices as heatmaps (the paper's Figure 2)

    python 02_similarity.py --run runs/llama2-7b
    python 02_similarity.py                       # a second on a CPU for the embedded model

cos is the mean cosine (Eq. 2, 3, 18, 19). dist is minus the mean *squared* distance (Eq. 22 prints the norm, the
authors' code squares it). Values may be aligned by any orthogonal map, keys by one rotation per RoPE pair (Qwen3: half a turn, where its
key norm allows no other).
"""

import os

import torch
from tqdm import tqdm

from common.artifacts import claim, read_calibration, read_layer, record, write_tensors
from common.cli import Clock, run_stage, stage_parser
from common.method.closed_form import key_loss, key_weights, value_loss
from common.method.procrustes import key_similarity, pair_mean, value_similarity
from common.method.stats import CRITERIA, LayerGrams
from common.models import pick_device
from common.reporting import plots


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--calibration", default=None, metavar="DIR", help="default: RUN/calibration")
    parser.add_argument("--layers-drawn", type=int, nargs="+", default=None, metavar="LAYER", help="layers in the picture (default: four, evenly spaced)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    return parser.parse_args()


def main():
    args, clock = parse(), Clock()
    source = args.calibration or os.path.join(args.run, "calibration")
    output = os.path.join(args.run, "similarity.safetensors")
    claim("02_similarity.py", args, output)
    calibration = read_calibration(source)
    model, tokens = calibration["model"], calibration["summary"]["tokens"]
    device = pick_device(args.device)
    print(f"reads   {source}: {model['path']}, {tokens} tokens")

    found = {}  # "key.cos.before" -> list over layers of [H, H]
    for layer in tqdm(range(model["layers"]), desc="similarity", unit="layer"):
        tensors = {name: tensor.to(device) for name, tensor in read_layer(source, layer).items()}
        grams = LayerGrams(tensors, model["kv_heads"])
        for criterion, kind in CRITERIA.items():
            pairs = {"key": key_similarity(grams.key(kind), tokens, criterion, grams.free),
                     "value": value_similarity(grams.value(kind), tokens, criterion)}
            for head, matrices in pairs.items():
                for when, matrix in zip(("before", "after"), matrices, strict=True):
                    found.setdefault(f"{head}.{criterion}.{when}", []).append(matrix.cpu())
        lost = value_loss(grams.value("raw"), grams.output)
        lost = lost + key_loss(grams.key("raw"), key_weights(grams.query))
        found.setdefault("energy", []).append(-lost.cpu())
    tensors = {name: torch.stack(matrices) for name, matrices in found.items()}

    means = {name: pair_mean(matrix) for name, matrix in tensors.items()}  # [L]: over all pairs of a layer
    print("mean over the pairs of heads of a layer, before -> after alignment")
    print("layer |       key cos       |      value cos      |      key dist       |     value dist")
    for layer in range(model["layers"]):
        cells = [f"{means[f'{name}.before'][layer]:8.4f} -> {means[f'{name}.after'][layer]:8.4f}"
                 for name in ("key.cos", "value.cos", "key.dist", "value.dist")]
        print(f"{layer:5d} | " + " | ".join(f"{cell:19s}" for cell in cells))

    print(f"energy that a merged pair loses, values and keys, as shares of a layer's: mean {-float(means['energy'].mean()):.4f}")
    summary = {name: round(float(mean.mean()), 6) for name, mean in means.items()}
    write_tensors(output, tensors, record("02_similarity.py", args, model, [source], summary, clock()))
    print(f"wrote   {output}")
    drawn = args.layers_drawn or sorted({round(i * (model["layers"] - 1) / 3) for i in range(4)})
    rows = {f"{head}s {when}": [tensors[f"{head}.cos.{when}"][layer].numpy() for layer in drawn]
            for head in ("key", "value") for when in ("before", "after")}
    plots.heatmaps(os.path.join(args.run, "similarity.png"), rows, drawn, "Similarity of heads, before and after alignment")
    print(f"02_similarity: mean cosine of two heads, keys {summary['key.cos.before']:.3f} -> {summary['key.cos.after']:.3f}, "
          f"values {summary['value.cos.before']:.3f} -> {summary['value.cos.after']:.3f} in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
