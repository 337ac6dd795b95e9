"""DHA beside mean-pooled, aligned and closed-form GQA: held-out loss over training tokens, at one cache size.

Reads   RUN/search.json, RUN/search/, RUN/fusion/, RUN/fused/, and what related/dha/pretrain.py trained: RUN/NAME/ of --names
Writes  RUN/compare.json, compare.md, compare.png

    python -m related.dha.compare                # after related/dha/run.sh, which ends with it

Tokens count from the source model on; those of search and fusion are DHA's. While it searches and fuses it is no smaller than
its source: that part of its curve is dashed. Rows that differ in tokens, text, batches, learning rate or bytes of cache are refused.
"""

import os

from common.artifacts import RECORD, read_record, record, refuse_overwrite, sha256, write_json, write_text
from common.cli import Clock, UserError, run_stage, stage_parser
from common.reporting import plots
from common.training.engine import read_metrics

NAME = "related/dha/compare.py"
SOURCE, DHA = "source", "dha"


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--names", nargs="+", default=[SOURCE, "mean-pool", "aligned", "closed-form", DHA], metavar="NAME", help="rows; source, the uncompressed model trained on, may be larger")
    return parser.parse_args()


@plots.drawing
def curves(plt, rows: dict[str, list], making: list, title: str):
    """rows: name -> [tokens, held-out loss] pairs. making: those of DHA while it is searched and fused."""
    figure, axis = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    for name, points in rows.items():
        tokens, losses = zip(*points, strict=True)
        colour = "black" if name == SOURCE else None
        line = axis.plot([token / 1e6 for token in tokens], losses, color=colour, linewidth=0.9 if name == SOURCE else 1.4, label=name, marker="o", markersize=2.5)[0]
        if name == DHA:
            axis.plot([token / 1e6 for token, _ in making], [loss for _, loss in making], color=line.get_color(), linestyle="--", label="dha, search and fusion (full cache)")
    axis.set(title=title, xlabel="training tokens, millions", ylabel="held-out loss, nats per token")
    axis.legend(fontsize=8)
    return figure


def making_of(run: str, searched: dict, fused: dict) -> list[list[float]]:
    """[tokens, held-out loss] of DHA during search and fusion, ending where its heads are fused."""
    points, before = [], 0
    per_step = fused["data"]["batch"] * fused["data"]["length"]
    for phase, steps in (("search", searched["steps"]), ("fusion", fused["steps"])):
        lines = read_metrics(os.path.join(run, phase, "metrics.jsonl"))
        points += [[(before + line["step"] - 1) * per_step, line["heldout"]] for line in lines if "heldout" in line]
        before += steps
    return [*points, [before * per_step, fused["loss_ended"]]]


def main():
    args, clock = parse(), Clock()
    outputs = {kind: os.path.join(args.run, f"compare.{kind}") for kind in ("json", "md", "png")}
    refuse_overwrite(outputs["json"], args.force)
    search = read_record(os.path.join(args.run, "search.json"), "related/dha/search.py")
    fusion = read_record(os.path.join(args.run, "fused"), "related/dha/fuse.py", search["model"])
    searched, fused = search["summary"], fusion["summary"]
    if fusion["inputs"]["search.json"] != sha256(os.path.join(args.run, "search.json")):
        raise UserError(f"{os.path.join(args.run, 'fused')}: expected the groups of search.json, found others; run related/dha/fuse.py again with --force")
    found = {name: read_record(os.path.join(args.run, name), "related/dha/pretrain.py")["summary"] for name in args.names}
    reference = found[args.names[-1]]
    for name, row in found.items():
        same = ["tokens", "data"] + (["cache_bytes_per_token"] if name != SOURCE else [])
        wrong = [what for what in same if row[what] != reference[what]]
        if wrong:
            raise UserError(f"{os.path.join(args.run, name)}: expected the {wrong[0]} of {args.names[-1]}, {reference[wrong[0]]}, found {row[wrong[0]]}")

    def at(row: dict, share: float) -> str:
        """The held-out loss nearest to that share of all tokens; nothing where DHA is still being made."""
        tokens, loss = min(row["heldout"], key=lambda point: abs(point[0] - share * row["tokens"]))
        return f"{loss:.3f}" if abs(tokens - share * row["tokens"]) <= 0.05 * row["tokens"] else ""

    shares = (0.25, 0.5, 0.75, 1.0)
    lines = ["| | cache bytes per token | first loss | after tokens | " + " | ".join(f"{share * reference['tokens'] / 1e6:.2f} M" for share in shares) + " |",
             "| --- " * (4 + len(shares)) + "|"]
    for name, row in found.items():
        tokens, loss = row["heldout"][0]
        lines.append(f"| {name} | {row['cache_bytes_per_token']:.0f} | {loss:.3f} | {tokens / 1e6:.2f} M | " + " | ".join(at(row, share) for share in shares) + " |")
    lines += ["", f"Key heads per layer {searched['key']['heads']}, value heads {searched['value']['heads']}. L_fusion ended at {fused['fusion_loss']:.1e} after {fused['steps']} steps; "
              f"averaging took the held-out loss from {fused['loss_ended']:.3f} to {fused['loss_fused']:.3f}."]
    table = "\n".join(lines) + "\n"
    making = making_of(args.run, searched, fused)
    name = search["model"]["name"]
    curves(outputs["png"], {name: row["heldout"] for name, row in found.items()}, making, f"{name}: {search['model']['heads']} heads, a cache of {searched['kv_heads']} per layer")
    write_text(outputs["md"], table)
    inputs = [os.path.join(args.run, name, RECORD) for name in args.names]
    write_json(outputs["json"], record(NAME, args, search["model"], inputs, {"rows": found, "making": making}, clock()))
    print(table, end="")
    print(f"wrote   {outputs['json']}, {outputs['md']}")
    small = {name: row["heldout"][-1][1] for name, row in found.items() if name != SOURCE}
    print(f"compare: least held-out loss after {reference['tokens']} tokens: {min(small, key=small.get)}, {min(small.values()):.3f}")


if __name__ == "__main__":
    run_stage(main)
