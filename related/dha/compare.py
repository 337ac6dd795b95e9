"""DHA, with and without fusion, beside GQA with as large a cache: held-out loss over tokens.

Reads   RUN/search.json, RUN/search/, RUN/fusion/, RUN/fused/, and the rows of pretrain.py: RUN/NAME/
Writes  RUN/compare.json, compare.md, compare.png

    python -m related.dha.compare                # after related/dha/run.sh, which ends with it

Tokens count from the source model, and those of search and fusion count for DHA. During search and fusion DHA
has the cache of its source; that part of its curve is dashed. Rows that differ in tokens, text, batches,
learning rate or cache size are refused.
"""

import os

from common.artifacts import check_input, claim, input_digests, make_record
from common.cli import Clock, UserError, run_stage, stage_parser
from common.files import write_json, write_text
from common.reporting import plots
from common.reporting.tables import markdown_table
from common.training.metrics import read_metrics
from related.dha import training
from related.dha.records import COMPARE, FUSE, PRETRAIN, SEARCH, read, row_name

SOURCE, DHA = "source", "dha"
SHARES = (0.25, 0.5, 0.75, 1.0)  # of all tokens, at which the table shows the loss
NEAR = 0.05  # share of all tokens within which a held-out loss counts for one of SHARES


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument(
        "--names",
        nargs="+",
        type=row_name,
        default=[SOURCE, "mean-pool", "aligned", "closed-form", "cold", "unfused", DHA],
        metavar="NAME",
        help="rows; source, the uncompressed model trained on, may have a larger cache",
    )
    return parser.parse_args()


@plots.drawing
def curves(plt, rows: dict[str, list], uncompressed: list, title: str):
    """Held-out loss over tokens. rows: name -> [tokens, loss] points; uncompressed: DHA before fusing."""
    figure, axis = plt.subplots(figsize=(8.2, 4.6), layout="constrained")
    for name, points in rows.items():
        tokens, losses = zip(*points, strict=True)
        style = {"color": "black", "linewidth": 0.9} if name == SOURCE else {"linewidth": 1.4}
        millions = [count / 1e6 for count in tokens]
        line = axis.plot(millions, losses, label=name, marker="o", markersize=2.5, **style)[0]
        if name == DHA:
            millions = [count / 1e6 for count, _ in uncompressed]
            losses = [loss for _, loss in uncompressed]
            label = "dha, search and fusion (full cache)"
            axis.plot(millions, losses, color=line.get_color(), linestyle="--", label=label)
    axis.set(title=title, xlabel="training tokens, millions", ylabel="held-out loss, nats per token")
    axis.legend(fontsize=8)
    return figure


def uncompressed_curve(run: str, searched: dict, fused: dict) -> list[list[float]]:
    """[tokens, held-out loss] points of DHA during search and fusion, up to where its heads are fused.

    searched, fused: the summaries of search and fusion.
    """
    points, before = [], 0
    per_step = fused["data"]["batch"] * fused["data"]["length"]
    for phase, summary in (("search", searched), ("fusion", fused)):
        lines = read_metrics(os.path.join(run, phase, "metrics.jsonl"))
        points += training.heldout_curve(lines, before * per_step, per_step)
        before += summary["steps"]
    return [*points, [before * per_step, fused["loss_ended"]]]


def read_rows(run: str, names: list[str]) -> dict[str, dict]:
    """Name -> summary of each row. Raises UserError if they differ in what makes them comparable."""
    rows = {name: read(os.path.join(run, name), PRETRAIN)["summary"] for name in names}
    reference = rows[names[-1]]
    for name, row in rows.items():
        fields = ["tokens", "data", "batch"]
        if name != SOURCE:
            fields.append("cache_bytes_per_token")
        for field in fields:
            if row[field] != reference[field]:
                raise UserError(
                    f"{os.path.join(run, name)}: expected the {field} of {names[-1]}, {reference[field]}, "
                    f"found {row[field]}"
                )
    return rows


def loss_at(row: dict, share: float) -> str:
    """A row's held-out loss after that share of all tokens; empty if it has none near there."""
    wanted = share * row["tokens"]
    tokens, loss = min(row["heldout"], key=lambda point: abs(point[0] - wanted))
    return f"{loss:.3f}" if abs(tokens - wanted) <= NEAR * row["tokens"] else ""


def comparison_table(rows: dict[str, dict]) -> str:
    """A Markdown table with a line per row."""
    tokens = next(reversed(rows.values()))["tokens"]
    shares = [f"{share * tokens / 1e6:.2f} M" for share in SHARES]
    header = ["", "cache bytes per token", "first loss", "after tokens", *shares]
    lines = []
    for name, row in rows.items():
        first_tokens, first_loss = row["heldout"][0]
        start = f"{row['cache_bytes_per_token']:.0f}", f"{first_loss:.3f}", f"{first_tokens / 1e6:.2f} M"
        lines.append([name, *start, *(loss_at(row, share) for share in SHARES)])
    return markdown_table(header, lines, align="<" + ">" * (len(header) - 1))


def main():
    args, clock = parse(), Clock()
    outputs = {kind: os.path.join(args.run, f"compare.{kind}") for kind in ("json", "md", "png")}
    claim(COMPARE, args, outputs["json"])
    search_path, fused_path = os.path.join(args.run, "search.json"), os.path.join(args.run, "fused")
    search = read(search_path, SEARCH)
    fusion = read(fused_path, FUSE, search["model"])
    check_input(fusion, search_path)
    searched, fused, model = search["summary"], fusion["summary"], search["model"]
    rows = read_rows(args.run, args.names)

    text = (
        f"{comparison_table(rows)}\n\n"
        f"Key heads per layer {searched['key']['heads']}, value heads {searched['value']['heads']}. "
        f"L_fusion ended at {fused['fusion_loss']:.1e} after {fused['steps']} steps; "
        f"averaging took the held-out loss from {fused['loss_ended']:.3f} to {fused['loss_fused']:.3f}.\n"
    )
    uncompressed = uncompressed_curve(args.run, searched, fused)
    points = {name: row["heldout"] for name, row in rows.items()}
    title = f"{model['name']}: {model['heads']} heads, a cache of {searched['kv_heads']} per layer"
    curves(outputs["png"], points, uncompressed, title)
    write_text(outputs["md"], text)
    inputs = input_digests(args.run, [os.path.join(args.run, name) for name in args.names])
    summary = {"rows": rows, "uncompressed": uncompressed}
    write_json(outputs["json"], make_record(COMPARE, args, model, inputs, summary, clock()))
    print(text, end="")
    print(f"wrote   {outputs['json']}, {outputs['md']}")
    losses = {name: row["heldout"][-1][1] for name, row in rows.items() if name != SOURCE}
    if losses:
        best, tokens = min(losses, key=losses.get), rows[args.names[-1]]["tokens"]
        print(f"compare: lowest held-out loss after {tokens} tokens: {best}, {losses[best]:.3f}")


if __name__ == "__main__":
    run_stage(main)
