"""DHA without fusion: search's groups and head counts, with the heads of each group averaged as GQA does.

Reads   RUN/search.json and the source model, or with --weights searched RUN/searched/
Writes  RUN/start-cold/      the source's heads, averaged: the paper's cold start (Figure 7)
        RUN/start-unfused/   those of the model after search: "w.o. linear heads fusion" (Table 2)

    python -m related.dha.pool
    python -m related.dha.pretrain --name cold --checkpoint runs/dha/start-cold

Both are DHA checkpoints. The groups cost the steps of search, so pretrain.py counts them for both, although
the cold start drops the weights that search has trained.
"""

import os

from common import companions
from common.artifacts import (
    check_input,
    claim,
    input_digests,
    make_record,
    read_record,
    verify_files,
    write_record,
)
from common.cli import Clock, run_stage, stage_parser
from common.files import write_directory
from common.models import load_config, load_model
from related.dha import export, fusion
from related.dha.records import POOL, SEARCH, read

NAMES = {"source": "cold", "searched": "unfused"}  # weights -> name of the start


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--weights", choices=tuple(NAMES), default="source",
                        help="average heads of the source model, or of the model after search")
    return parser.parse_args()


def pooled_model(config, weights: dict, groups: dict[str, list]):
    """The DHA model of an MHA model's tensors whose key (value) heads are the means of their groups."""
    start = fusion.starting_operators(groups, config.head_dim)
    return export.fused_model(config, fusion.combine_heads(weights, start, groups, fusion.fold), groups)


def main():
    args, clock = parse(), Clock()
    output, searched = (os.path.join(args.run, name) for name in (f"start-{NAMES[args.weights]}", "searched"))
    search_path = os.path.join(args.run, "search.json")
    inputs = input_digests(args.run, [search_path])
    search = read(search_path, SEARCH)
    claim(POOL, args, output)
    path = search["model"]["path"]
    if args.weights == "searched":
        check_input(search, searched)
        verify_files(searched, read_record(searched, SEARCH, search["model"]))
        path = searched
    print(f"reads   {search_path}, {path}")
    groups, steps = search["groups"], search["summary"]["steps_so_far"]
    model = pooled_model(load_config(path), load_model(path).state_dict(), groups)
    export.check_cache(model, {kind: search["summary"][kind]["heads"] for kind in groups})
    with write_directory(output) as aside:
        companions.save(model, aside, path)
        summary = {"steps_so_far": steps}
        write_record(aside, make_record(POOL, args, search["model"], inputs, summary, clock()))
    print(f"wrote   {output}\npool: heads of {path} averaged within search's groups, in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
