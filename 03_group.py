"""Stage 3: decide which heads of each layer will share one key/value head. (Of a source that is GQA already: which of its
key/value heads; each takes its query heads with it.)

Reads   RUN/similarity.safetensors
Writes  RUN/groups.json: per layer, kv_heads groups of head numbers, with their scores

    python 03_group.py --run runs/llama2-7b --kv-heads 8 --by value --criterion dist
    python 03_group.py --kv-heads 4              # seconds on a CPU for the embedded model

The score of a grouping is the sum of similarities (after alignment) over all pairs within its groups (Eq. 23, 24).
Algorithm 2 as published: random starts, random swaps, only improvements kept. For groups of two the exact optimum is
printed beside it, so that one sees how close the search came. --by none takes adjacent heads; --by energy is made for
04_align.py --merge closed-form: minus what it would lose on a pair.
"""

import os

import numpy as np

from common.artifacts import claim, read_tensors, record, write_json
from common.cli import Clock, positive, run_stage, stage_parser
from common.method.grouping import anneal, best_pairs, combine, default_groups, score
from common.models import Geometry, check_kv_heads


def parse():
    parser = stage_parser(__doc__)
    parser.add_argument("--similarity", default=None, metavar="FILE", help="default: RUN/similarity.safetensors")
    parser.section("what is grouped")
    parser.add_argument("--kv-heads", type=positive, default=None, help="groups per layer (default: a quarter of the source's)")
    parser.add_argument("--by", choices=("none", "key", "value", "both", "energy"), default="value", help="whose similarity decides; both = keys and values, each scaled by its spread over a layer's pairs; energy = least loss in closed-form merging")
    parser.add_argument("--criterion", choices=("cos", "dist"), default="dist", help="cosine or squared distance; energy has its own")
    parser.section("the search")
    parser.add_argument("--restarts", type=positive, default=200, help="random starts (the paper's epoch)")
    parser.add_argument("--iterations", type=positive, default=3000, help="swaps proposed per start (the paper's maxIter)")
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    return parser.parse_args()


def main():
    args, clock = parse(), Clock()
    source = args.similarity or os.path.join(args.run, "similarity.safetensors")
    output = os.path.join(args.run, "groups.json")
    claim("03_group.py", args, output)
    file, similarity = read_tensors(source, "02_similarity.py")
    model = similarity["model"]
    layers, heads = model["layers"], model["kv_heads"]
    kv_heads = args.kv_heads or max(heads // 4, 1)
    check_kv_heads(Geometry(layers, model["heads"], heads, model["head_dim"], model["hidden"]), kv_heads)
    print(f"reads   {source}: {model['path']}, {layers} layers, {heads} key/value heads -> {kv_heads}")

    key, value = (file.get_tensor(f"{head}.{args.criterion}.after").numpy() for head in ("key", "value"))
    matrix = {"key": key, "value": value, "energy": file.get_tensor("energy").numpy()}.get(args.by)
    if matrix is None:
        matrix = combine(key, value)
    default = default_groups(layers, heads, kv_heads)
    groups = default if args.by == "none" else anneal(matrix, kv_heads, args.restarts, args.iterations, args.seed)
    scores = {"default": score(matrix, default), "found": score(matrix, groups)}
    if heads == 2 * kv_heads:
        scores["optimum"] = score(matrix, best_pairs(matrix))

    print("score per layer | " + " | ".join(f"{name:>12s}" for name in scores) + " | groups")
    for layer in range(layers):
        cells = " | ".join(f"{values[layer]:12.5f}" for values in scores.values())
        print(f"{layer:15d} | {cells} | {' '.join(str(group.tolist()) for group in groups[layer])}")
    summary = {"kv_heads": kv_heads, "by": args.by, "criterion": args.criterion} | {
        f"score_{name}": np.round(values, 9).tolist() for name, values in scores.items()}
    written = record("03_group.py", args, model, [source], summary, clock())
    write_json(output, written | {"kv_heads": kv_heads, "groups": groups.tolist()})
    print(f"wrote   {output}")
    optimum = f", exact optimum {scores['optimum'].mean():.5f}" if "optimum" in scores else ""
    print(f"03_group: mean score per layer {scores['found'].mean():.5f}, default grouping "
          f"{scores['default'].mean():.5f}{optimum} in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
