"""Stage 3: choose which key/value heads of each layer to merge. In a GQA source, query heads move with them.

Reads   RUN/similarity/
Writes  RUN/groups/: stage.json has each layer's source key/value heads split into kv_heads groups, which may
        be edited, and their scores; groups.png: heads by group, and the scores that they were grouped by
        (--by none: their cosines)

    python 03_group.py --run runs/llama2-7b --kv-heads 8 --by value --criterion dist
    python 03_group.py --kv-heads 4              # seconds on a CPU for the demo model

The score of a grouping is the sum of similarities (after alignment) over all pairs within its groups (Eq. 23,
24). The search is Algorithm 2 as published, by random initial groupings and random swaps, of which only
improvements are kept. --by none groups adjacent heads; --by energy (minus the energy lost by merging a pair)
is meant for 04_align.py --merge closed-form.
"""

import common.run.openmp  # noqa: F401 - before torch
import os

import numpy as np

from common.method.grouping import ITERATIONS, RESTARTS, anneal, default_groups, score
from common.models.families import check_kv_heads
from common.models.merging import similarity_by
from common.reporting import plots
from common.run.artifact import (
    begin_stage,
    input_digests,
    read_record,
    read_tensors,
    write_directory,
    write_record,
)
from common.run.errors import run_stage
from common.run.flags import positive, seed, stage_parser
from common.run.kinds import BY, CRITERION

PICTURE = "groups.png"


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--similarity", metavar="DIR", help="default: RUN/similarity")
    parser.section("grouping")
    parser.add_argument("--kv-heads", type=positive,
                        help="kv heads to keep per layer (default: a quarter of the source's)")
    parser.add_argument("--by", choices=tuple(BY), default="value",
                        help="similarity to maximize; both: keys plus values, each divided by its standard "
                             "deviation over a layer's pairs; energy: least loss in closed-form merging")
    parser.add_argument("--criterion", choices=CRITERION, default="dist",
                        help="cosine or squared distance; not used by energy")
    parser.section("search")
    parser.add_argument("--restarts", type=positive, default=RESTARTS,
                        help="random initial groupings (the paper's epoch)")
    parser.add_argument("--iterations", type=positive, default=ITERATIONS,
                        help="swaps proposed per initial grouping (the paper's maxIter)")
    parser.add_argument("--seed", type=seed, default=0, help="random seed for the search")
    return parser.parse_args()


def draw_groups(path: str, scores: dict[str, np.ndarray], kind: str, groups: np.ndarray) -> None:
    """The PNG file. scores: row -> [layers, H, H]; kind: theirs, of plots.SCORES; groups: [layers, G, D]."""
    drawn = plots.spaced_layers(len(groups))
    rows = {label: list(matrices[drawn]) for label, matrices in scores.items()}
    title = f"Groups of heads that will share one kv head: {groups.shape[1]} per layer"
    plots.heatmaps(path, rows, drawn, title, groups[drawn].tolist(), kind)


def main():
    args = parse()
    source = args.similarity or os.path.join(args.run, "similarity")
    output = os.path.join(args.run, "groups")
    started = begin_stage("03_group.py", args, output, inputs=input_digests(args.run, [source]))
    measured = read_record(source, "02_similarity.py")
    tensors = read_tensors(source, "similarity.safetensors", measured)
    model = measured["model"]
    similarity = similarity_by(tensors, source, args.by, args.criterion)
    layers, source_kv_heads = model["layers"], model["kv_heads"]
    kv_heads = args.kv_heads or max(source_kv_heads // 4, 1)
    check_kv_heads(source_kv_heads, kv_heads)
    print(f"reads   {source}: {model['path']}, {layers} layers, "
          f"{source_kv_heads} key/value heads -> {kv_heads}")

    adjacent = default_groups(layers, source_kv_heads, kv_heads)
    groups = adjacent
    if args.by != "none":
        groups = anneal(similarity, kv_heads, args.restarts, args.iterations, args.seed)
    scores = {"default": score(similarity, adjacent), "found": score(similarity, groups)}

    print("score per layer | " + " | ".join(f"{name:>12s}" for name in scores) + " | groups")
    for layer in range(layers):
        cells = " | ".join(f"{values[layer]:12.5f}" for values in scores.values())
        print(f"{layer:15d} | {cells} | {' '.join(str(group.tolist()) for group in groups[layer])}")
    criterion = args.criterion if BY[args.by].compared else None
    summary = {"kv_heads": kv_heads, "by": args.by, "criterion": criterion}
    summary |= {f"score_{name}": np.round(values, 9).tolist() for name, values in scores.items()}
    calibration = next(iter(measured["inputs"].values()), None)  # the one that stage 2 read
    record = started.record(model, summary, groups=groups.tolist(), calibration=calibration)
    drawn = {f"by {args.by}": similarity}
    if args.by == "none":
        drawn = {f"{head}s after": tensors[f"{head}.cos.after"].numpy() for head in ("key", "value")}
    kind = args.by if args.by in plots.SCORES else criterion or "cos"
    with write_directory(output) as aside:
        draw_groups(os.path.join(aside, PICTURE), drawn, kind, groups)
        write_record(aside, record)
    print(f"wrote   {output}")
    print(f"03_group: mean score per layer {scores['found'].mean():.5f}, adjacent heads "
          f"{scores['default'].mean():.5f} in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
