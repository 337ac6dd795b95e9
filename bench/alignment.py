"""Alignment of groups of heads until it has settled: ours over Algorithm 1 as printed.

    python -m bench.alignment runs/demo runs/smollm2     # the layers of runs after stage 3; a minute

Both run in float64 on all groups of all layers at once: ours on the Grams of stage 1, the printed update
(paper.py) on vectors with these Grams. It stops at 500 rounds or when a round gains no more than 1e-10 of the
objective sum_n |sum_i Q_i v_i|^2, ours as stage 4 does. The objective is compared group by group: ours over
the printed update's, minus one. The last line is JSON. bench/transform.py times the same on one layer of 7B
proportions.
"""

import argparse
import json

import torch

import paper
from bench.machine import machine, timed
from common.artifacts import read_calibration, read_layer, read_record
from common.method.procrustes import align_keys, align_values, key_overlap, value_overlap
from common.method.stats import CRITERIA, LayerGrams, group_blocks

ROUNDS, GAIN = 500, 1e-10  # of the printed update


def vectors_of(gram: torch.Tensor) -> list[torch.Tensor]:
    """X_i of each of D heads [..., D d, d] whose Gram is C [..., D, D, d, d].

    Of keys, whose Gram is c [..., D, D, d/2]: the RoPE pairs of each, X_i [..., d/2, D, 2].
    """
    size = 1 if gram.is_complex() else gram.shape[-1]
    moment = gram.movedim(-1, -3) if size == 1 else gram.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.clamp(min=0).sqrt()[..., None, :]).mH  # its square is the moment
    heads = root.split(size, dim=-1)
    return [torch.view_as_real(head[..., 0].resolve_conj()) for head in heads] if size == 1 else list(heads)


def printed_alignment(gram: torch.Tensor) -> list[torch.Tensor]:
    """Algorithm 1 as printed, but for the transpose in its update, on vectors with this Gram."""
    rotation = paper.rotation_2d if gram.is_complex() else paper.minimizer
    return paper.algorithm_1(vectors_of(gram), rotation, ROUNDS, GAIN)


def objective_gain(gram: torch.Tensor, ours: torch.Tensor, printed: list[torch.Tensor]) -> torch.Tensor:
    """[G] objective of our rotations over that of the printed update's Y_i, minus one; values or keys."""
    overlap = key_overlap if gram.is_complex() else value_overlap
    reached = sum(printed).square().flatten(1).sum(1)
    return overlap(gram, ours).sum((-2, -1)) / reached - 1


def run_grams(run: str, kind: str) -> dict[str, torch.Tensor]:
    """The groups' "values" C [layers * G, D, D, d, d] and "keys" c [layers * G, D, D, d/2] of a run."""
    calibration = read_calibration(f"{run}/calibration")
    model = calibration["model"]
    groups = torch.tensor(read_record(f"{run}/groups.json", "03_group.py", model)["groups"])
    parts = {"values": [], "keys": []}
    for index, layer_groups in enumerate(groups):
        grams = LayerGrams(read_layer(f"{run}/calibration", index), model["kv_heads"])
        if not grams.free.all():
            raise SystemExit(f"{run}: the printed update cannot align keys that may only be flipped")
        parts["values"].append(group_blocks(grams.value(kind), layer_groups))
        parts["keys"].append(group_blocks(grams.key(kind), layer_groups))
    return {name: torch.cat(blocks) for name, blocks in parts.items()}


def compare(run: str, criterion: str) -> list[dict]:
    """A row for values and one for keys."""
    rows = []
    ways = {"values": align_values, "keys": align_keys}
    for name, gram in run_grams(run, CRITERIA[criterion]).items():
        (ours, seconds), (printed, printed_seconds) = (timed("cpu", way, gram)
                                                       for way in (ways[name], printed_alignment))
        gain = objective_gain(gram, ours, printed)
        rows.append({"run": run, "criterion": criterion, "of": name,
                     "groups": len(gram), "heads": gram.shape[1], "seconds": round(seconds, 3),
                     "printed_seconds": round(printed_seconds, 3), "worst_gain": float(gain.min()),
                     "mean_gain": float(gain.mean())})
    return rows


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories with the results of stage 3")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for run in args.runs for criterion in CRITERIA for row in compare(run, criterion)]
    print("run | criterion | of | groups of heads | seconds: printed, ours | objective: worst, mean gain")
    for row in rows:
        print(f"{row['run']} | {row['criterion']} | {row['of']} | {row['groups']} of {row['heads']} | "
              f"{row['printed_seconds']:.2f}, {row['seconds']:.2f} | "
              f"{row['worst_gain']:+.1e}, {row['mean_gain']:+.1e}")
    print(json.dumps({"alignments": rows, "machine": machine("cpu")}))


if __name__ == "__main__":
    main()
