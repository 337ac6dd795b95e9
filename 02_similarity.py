"""Stage 2: measure how similar each pair of heads in a layer is, before and after optimal alignment.

Reads   RUN/calibration/
Writes  RUN/similarity/: similarity.safetensors, {key,value}.{cos,dist}.{before,after}, each [layers, H, H]
        over the source's H key/value heads; with --energy also energy: minus what merging the pair in closed
        form loses of the squared outputs W_O v and of the variance of scores, each as a share of the layer's
        (for 03_group.py --by energy); similarity.png: the cosine matrices as heatmaps (the paper's Figure
        2); pairs.png: the cosines of all pairs of heads in every layer (Figure 2 of the paper's version 1)

    python 02_similarity.py --run runs/llama2-7b --energy
    python 02_similarity.py                       # a second on a CPU for the demo model

cos is the mean cosine (Eq. 2, 3, 18, 19). dist is minus the mean *squared* distance (Eq. 22 has the norm, the
authors' code squares it). Values are aligned by any orthogonal map, keys by one rotation per RoPE pair (in
Qwen3 by a sign flip where q_norm and k_norm do not commute with a rotation; in OLMo 2 and 3 by quarters).
"""

import common.run.openmp  # noqa: F401 - before torch
import os

import torch
from safetensors.torch import save_file

from common.method.procrustes import pair_mean
from common.models.calibration import Calibration
from common.models.families import key_context
from common.models.load import pick_device
from common.models.merging import score_pairs
from common.reporting import plots
from common.run.artifact import begin_stage, input_digests, write_directory, write_record
from common.run.errors import run_stage
from common.run.flags import device, stage_parser
from common.run.progress import Progress

TENSORS, PICTURES = "similarity.safetensors", ("similarity.png", "pairs.png")
COLUMNS = ("key.cos", "value.cos", "key.dist", "value.dist")


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--calibration", metavar="DIR", help="default: RUN/calibration")
    parser.add_argument("--energy", action="store_true",
                        help="also score what closed-form merging loses, over as many tokens as 04_align.py "
                             "merges keys for by default (slow with many heads)")
    parser.add_argument("--device", type=device, default="auto", help="auto, cpu or cuda")
    return parser.parse_args()


def print_means(means: dict[str, torch.Tensor], layers: int) -> None:
    """Print one line per layer. means: name -> [layers], averaged over all pairs of heads."""
    print("mean over all pairs of heads in a layer, before -> after alignment")
    print("layer | " + " | ".join(f"{name.replace('.', ' '):^20s}" for name in COLUMNS))
    for layer in range(layers):
        cells = []
        for name in COLUMNS:
            before, after = means[f"{name}.before"][layer], means[f"{name}.after"][layer]
            cells.append(f"{before:8.4f} -> {after:8.4f}")
        print(f"{layer:5d} | " + " | ".join(cells))
    if "energy" in means:
        print(f"energy lost by merging a pair, values plus keys, as a share of the layer's: mean "
              f"{-float(means['energy'].mean()):.4f}")


def draw_similarity(directory: str, similarity: dict[str, torch.Tensor]) -> None:
    """similarity.png, of evenly spaced layers, and pairs.png, of all."""
    rows, cosines = {}, {"keys": {}, "values": {}}
    drawn = plots.spaced_layers(len(similarity[f"{COLUMNS[0]}.after"]))
    for head in ("key", "value"):
        for when in ("before", "after"):
            matrices = similarity[f"{head}.cos.{when}"]
            first, second = torch.triu_indices(*matrices.shape[1:], 1)
            cosines[f"{head}s"][f"{when} alignment"] = matrices[:, first, second].tolist()
            rows[f"{head}s {when}"] = [matrices[layer].numpy() for layer in drawn]
    title = "Similarity of heads before and after alignment"
    heatmaps, pairs = (os.path.join(directory, name) for name in PICTURES)
    plots.heatmaps(heatmaps, rows, drawn, title)
    plots.pairs(pairs, cosines, "Similarity of all pairs of heads of each layer")


def main():
    args = parse()
    source = args.calibration or os.path.join(args.run, "calibration")
    output = os.path.join(args.run, "similarity")
    inputs = input_digests(args.run, [source])
    started = begin_stage("02_similarity.py", args, output, inputs=inputs)
    calibration = Calibration(source)
    model = calibration.model
    context = key_context(None, calibration.summary["positions"])
    compute_device = pick_device(args.device)
    print(f"reads   {source}: {model['path']}, {calibration.summary['tokens']} tokens")

    indices = Progress(range(model["layers"]), desc="similarity", unit="layer")
    layers = (calibration.grams(compute_device, index) for index in indices)
    similarity = score_pairs(layers, context if args.energy else None)

    means = {name: pair_mean(matrix) for name, matrix in similarity.items()}
    print_means(means, model["layers"])
    summary = {name: round(float(mean.mean()), 6) for name, mean in means.items()}
    with write_directory(output) as aside:
        save_file(similarity, os.path.join(aside, TENSORS))
        draw_similarity(aside, similarity)
        write_record(aside, started.record(model, summary))
    print(f"wrote   {output}")
    print(f"02_similarity: mean cosine between heads, "
          f"keys {summary['key.cos.before']:.3f} -> {summary['key.cos.after']:.3f}, "
          f"values {summary['value.cos.before']:.3f} -> {summary['value.cos.after']:.3f} in "
          f"{started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
