"""DHA from aligned heads: before fusion, the heads of each group are rotated towards each other.

Reads   RUN/search.json, RUN/searched/, RUN/rotated/calibration/ (of RUN/searched/)
Writes  RUN/rotated/searched/, RUN/rotated/search.json   the same function and groups, for fuse.py or pool.py

    python 01_calibrate.py --run runs/dha/rotated --model runs/dha/searched     # after search.py
    python -m related.dha.rotate
    python -m related.dha.fuse --run runs/dha/rotated                           # or related.dha.pool
    python -m related.dha.pretrain --name rotated --checkpoint runs/dha/rotated/fused

Fusion mixes the same channels of different heads, so the basis of each head matters. The rotations are those
of stage 4 (generalized Procrustes, "dist"), of keys and values in groups of their own.
"""

import os

import torch

from common import companions
from common.artifacts import (
    check_input,
    check_same_model,
    claim,
    input_digests,
    make_record,
    read_calibration,
    read_grams,
    read_record,
    verify_files,
    write_record,
)
from common.cli import Clock, run_stage, stage_parser
from common.files import write_directory, write_json
from common.method.merge import fuse_layer
from common.method.procrustes import align_layer
from common.method.stats import LayerGrams
from common.models import describe, load_model
from related.dha import training
from related.dha.records import SEARCH, read

CHECKED = 4, 64  # random sequences and their tokens that must have the same logits


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    return parser.parse_args()


@torch.no_grad()
def rotate_layer(attention, grams: LayerGrams, key_groups: list, value_groups: list) -> None:
    """Rotate each head towards the others of its key group and of its value group, in place.

    The function of the layer is unchanged, and so is the order of its heads.
    """
    value_members, key_members = torch.tensor(value_groups), torch.tensor(key_groups)
    value_rotation, _ = align_layer(grams, value_members, "dist")
    _, key_rotation = align_layer(grams, key_members, "dist")
    fuse_layer(attention, list(range(grams.source_kv_heads)),
               by_head(value_rotation, value_members), by_head(key_rotation, key_members))


def by_head(rotations: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[G, D, ...] in the order of `groups` [G, D] -> [H, ...] in the order of the heads."""
    return rotations.flatten(0, 1)[groups.flatten().argsort()]


def main():
    args, clock = parse(), Clock()
    source, search_path = os.path.join(args.run, "searched"), os.path.join(args.run, "search.json")
    home = os.path.join(args.run, "rotated")
    calibration, output = os.path.join(home, "calibration"), os.path.join(home, "search.json")
    claim(SEARCH, args, output)
    search = read(search_path, SEARCH)
    check_input(search, source)
    verify_files(source, read_record(source, SEARCH, search["model"]))
    check_same_model(calibration, describe(source), read_calibration(calibration)["model"])
    print(f"reads   {search_path}, {source}, {calibration}")
    model, groups = load_model(source), search["groups"]
    tokens = torch.randint(model.config.vocab_size, CHECKED, generator=torch.Generator().manual_seed(0))
    expected = training.all_logits(model, tokens)
    for index, layer in enumerate(model.model.layers):
        grams = read_grams(calibration, model.config.num_key_value_heads, "cpu", index)
        rotate_layer(layer.self_attn, grams, groups["key"][index], groups["value"][index])
    name = "rotated/searched/ against searched/"
    difference = training.relative_difference(expected, training.all_logits(model, tokens), name)
    rotated = os.path.join(home, "searched")
    with write_directory(rotated) as aside:
        companions.save(model, aside, source)
        inputs = input_digests(args.run, [search_path, calibration])
        write_record(aside, make_record(SEARCH, args, search["model"], inputs, search["summary"], clock()))
    inputs = input_digests(args.run, [rotated])
    record = make_record(SEARCH, args, search["model"], inputs, search["summary"], clock())
    write_json(output, record | {"groups": groups})
    print(f"wrote   {rotated}, {output}\nrotate: heads of each group aligned, relative logit difference "
          f"{difference:.1e}, in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
