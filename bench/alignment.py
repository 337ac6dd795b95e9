"""Alignment of groups of heads until it has settled: ours over Algorithm 1 as printed.

    python -m bench.alignment runs/demo runs/smollm2     # the layers of runs after stage 3; a minute

Both run on the Grams of stage 1, in float64, on all groups of all layers at once. The printed update stops at
500 rounds or when a round gains no more than 1e-10 of the objective sum_n |sum_i Q_i v_i|^2, ours as stage 4
does. The objective is compared group by group: ours over the printed update's, minus one. The last line is
JSON. bench/transform.py times the same on one layer of 7B proportions.
"""

import argparse
import json

import torch

from bench.machine import machine, timed
from common.artifacts import read_calibration, read_groups, read_layer
from common.method.align import key_overlap, value_overlap
from common.method.procrustes import align_keys, align_values, polar
from common.method.rope import unit_phase
from common.method.stats import CRITERIA, LayerGrams, group_blocks

ROUNDS, GAIN = 500, 1e-10  # of the printed update


def printed_values(gram: torch.Tensor, rounds: int = ROUNDS, gain: float = GAIN) -> torch.Tensor:
    """Q [G, D, d, d] by Algorithm 1 as printed, from C [G, D, D, d, d].

    The update of Q_i is the polar factor of sum_n M v_i^T = 1/D sum_j Q_j C[j, i], with the mean shape
    M = 1/D sum_j Q_j v_j; all heads in a round use the same M.
    """
    groups, members, _, size, _ = gram.shape
    rotation = torch.eye(size, dtype=gram.dtype, device=gram.device).expand(groups, members, size, size)
    before = None
    for _ in range(rounds):
        toward_mean = torch.einsum("gjab,gjibc->giac", rotation, gram) / members
        now = torch.einsum("giab,giab->g", rotation, toward_mean)
        if before is not None and (now - before <= gain * now.abs()).all():
            break
        before, rotation = now, polar(toward_mean)
    return rotation


def printed_keys(gram: torch.Tensor, rounds: int = ROUNDS, gain: float = GAIN) -> torch.Tensor:
    """u [G, D, d/2] by Algorithm 1 with rotations of the form of Eq. 14, from c [G, D, D, d/2]."""
    rotation = torch.ones_like(gram[:, 0])
    before = None
    for _ in range(rounds):
        toward_mean = torch.einsum("gjp,gijp->gip", rotation, gram)
        now = (rotation.conj() * toward_mean).real.sum((-2, -1))
        if before is not None and (now - before <= gain * now.abs()).all():
            break
        before, rotation = now, unit_phase(toward_mean)
    return rotation


def objective_gain(gram: torch.Tensor, ours: torch.Tensor, printed: torch.Tensor) -> torch.Tensor:
    """[G] objective of ours over the printed update's, minus one; values or keys."""
    overlap = key_overlap if gram.is_complex() else value_overlap
    first, second = (overlap(gram, rotation).sum((-2, -1)) for rotation in (ours, printed))
    return first / second - 1


def run_grams(run: str, kind: str) -> dict[str, torch.Tensor]:
    """The groups' "values" C [layers * G, D, D, d, d] and "keys" c [layers * G, D, D, d/2] of a run."""
    calibration = read_calibration(f"{run}/calibration")
    model = calibration["model"]
    _, groups = read_groups(f"{run}/groups.json", model)
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
    ways = {"values": (align_values, printed_values), "keys": (align_keys, printed_keys)}
    for name, gram in run_grams(run, CRITERIA[criterion]).items():
        (ours, seconds), (printed, printed_seconds) = (timed("cpu", way, gram) for way in ways[name])
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
