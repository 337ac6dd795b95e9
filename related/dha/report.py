"""DHA, with and without fusion, and GQA with as large a cache: held-out loss over tokens, or before any.

Reads   RUN/searched/, RUN/search/, RUN/fusion/, RUN/fused/, and the rows of pretrain.py: RUN/NAME/
Writes  RUN/compare/: compare.md, compare.png; with --models RUN/starts/: starts.md

    python -m related.dha.report                 # after related/dha/run.sh, which ends with it
    python -m related.dha.report --models fused=runs/dha/fused measured=runs/dha/start-measured

Tokens count from the source model, and those of search and fusion count for DHA. During these DHA has the
cache of its source; that part of its curve is dashed. Rows that differ in tokens, text, batches, learning
rate or cache size are refused.

With --models, checkpoints are compared before any training, in nats per token on the held-out sequences:
their loss, its excess over the source's, with the standard error of the paired differences, and the KL.
"""

import os
import statistics

import torch

from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.evaluation.evaluate import cache_bytes_per_token
from common.models.equivalence import mean_kl, mean_nll, sequence_losses
from common.models.load import load_model, load_tokenizer
from common.reporting import plots
from common.reporting.tables import markdown_table
from common.run import artifact, flags
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import stage_parser
from common.training.lines import read_metrics
from related.dha import fusion, training
from related.dha.records import FUSE, PRETRAIN, REPORT, SEARCH

SOURCE, DHA = "source", "dha"
SHARES = (0.25, 0.5, 0.75, 1.0)  # of all tokens, at which the table shows the loss
NEAR = 0.05  # share of all tokens within which a held-out loss counts for one of SHARES
ROWS = (SOURCE, "mean-pool", "aligned", "closed-form", "cold", "unfused", DHA)


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--names", nargs="+", type=flags.name, default=list(ROWS), metavar="NAME",
                        help="rows; source, the uncompressed model trained further, may have a larger cache")
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME=DIR",
                        help="rows of the table before any training, which is written instead")
    args = parser.parse_args()
    for model in args.models:
        if not all(model.partition("=")):
            raise UserError(f"--models: expected NAME=DIR, found {model}")
    return args


@plots.drawing
def curves(plt, rows: dict[str, list], uncompressed: list, title: str):
    """Held-out loss over tokens. rows: name -> [tokens, loss] points; uncompressed: DHA before fusing."""
    figure, axis = plt.subplots(figsize=(8.2, 4.6), layout="constrained")

    def draw(points, label, **style):
        tokens, losses = zip(*points, strict=True)
        return axis.plot([count / 1e6 for count in tokens], losses, label=label, **style)[0]

    for name, points in rows.items():
        style = {"color": "black", "linewidth": 0.9} if name == SOURCE else {"linewidth": 1.4}
        line = draw(points, name, marker="o", markersize=2.5, **style)
        if name == DHA:
            label = "dha, search and fusion (full cache)"
            draw(uncompressed, label, color=line.get_color(), linestyle="--")
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
    rows = {name: artifact.read_record(os.path.join(run, name), PRETRAIN)["summary"] for name in names}
    reference = rows[names[-1]]
    for name, row in rows.items():
        cache = () if name == SOURCE else ("cache_bytes_per_token",)
        for field in ("tokens", "data", "batch", *cache):
            if row[field] != reference[field]:
                raise UserError(f"{os.path.join(run, name)}: expected the {field} of {names[-1]}, "
                                f"{reference[field]}, found {row[field]}")
    return rows


def loss_at(row: dict, share: float) -> str:
    """A row's held-out loss after that share of all tokens; empty if it has none close to that."""
    wanted = share * row["tokens"]
    tokens, loss = min(row["heldout"], key=lambda point: abs(point[0] - wanted))
    return f"{loss:.3f}" if abs(tokens - wanted) <= NEAR * row["tokens"] else ""


def comparison_table(rows: dict[str, dict]) -> str:
    """Markdown: a line per row."""
    tokens = next(reversed(rows.values()))["tokens"]
    shares = [f"{share * tokens / 1e6:.2f} M" for share in SHARES]
    lines = []
    for name, row in rows.items():
        first_tokens, first_loss = row["heldout"][0]
        start = f"{row['cache_bytes_per_token']:.0f}", f"{first_loss:.3f}", f"{first_tokens / 1e6:.2f} M"
        lines.append([name, *start, *(loss_at(row, share) for share in SHARES)])
    header = ["", "cache bytes per token", "first loss", "after tokens", *shares]
    return markdown_table(header, lines, "<" + ">" * (len(header) - 1))


def compare_trained(args, search: dict, aside: str) -> tuple[str, dict, str]:
    """The text of compare.md, the summary and a closing line; draws compare.png in `aside`."""
    fusing = artifact.read_record(os.path.join(args.run, "fused"), FUSE, search["model"])
    artifact.check_input(fusing, os.path.join(args.run, "searched"))
    model, searched, fused = search["model"], search["summary"], fusing["summary"]
    rows = read_rows(args.run, args.names)
    uncompressed = uncompressed_curve(args.run, searched, fused)
    points = {name: row["heldout"] for name, row in rows.items()}
    title = f"{model['name']}: {model['heads']} heads, a cache of {searched['kv_heads']} per layer"
    curves(os.path.join(aside, "compare.png"), points, uncompressed, title)
    losses = {name: row["heldout"][-1][1] for name, row in rows.items()}
    best = min([name for name in rows if name != SOURCE] or rows, key=losses.get)
    tokens = rows[best]["tokens"]
    closing = f"lowest held-out loss after {tokens} tokens: {best}, {losses[best]:.3f}"
    return comparison_table(rows) + "\n", {"rows": rows, "uncompressed": uncompressed}, closing


@torch.no_grad()
def measure(path: str, tokens: torch.Tensor, source: list[torch.Tensor]) -> dict:
    """The metrics of one checkpoint. source: the source's logits on `tokens`."""
    model = load_model(path)
    logits = training.all_logits(model, tokens)
    losses = sequence_losses(logits, tokens), sequence_losses(source, tokens)
    lost = [ours - theirs for ours, theirs in zip(*losses, strict=True)]
    return {
        "heads": fusion.head_counts(model.config),
        "cache_bytes_per_token": cache_bytes_per_token(model, tokens[0]),
        "loss": mean_nll(logits, tokens),
        "lost": statistics.mean(lost),
        "lost_stderr": statistics.stdev(lost) / len(lost) ** 0.5,
        "kl": mean_kl(source, logits),
    }


def compare_starts(args, search: dict, aside: str) -> tuple[str, dict, str]:
    """The text of starts.md, the summary and a closing line."""
    data, path = search["summary"]["data"], search["model"]["path"]
    tokens, text = load_tokens(data["heldout"], load_tokenizer(path), data["heldout_sequences"],
                               data["length"], EVALUATION)
    print(f"reads   {path}\nreads   {text}")
    source = training.all_logits(load_model(path), tokens)
    checkpoints = dict(model.split("=", 1) for model in [f"{SOURCE}={path}", *args.models])
    rows = {name: measure(checkpoint, tokens, source) for name, checkpoint in checkpoints.items()}
    header, lines = ["", "key heads", "value heads", "cache bytes", "loss", "above the source", "KL"], []
    for name, row in rows.items():
        heads = (" ".join(map(str, row["heads"][kind])) for kind in ("key", "value"))
        lines.append((name, *heads, f"{row['cache_bytes_per_token']:.0f}", f"{row['loss']:.3f}",
                      f"{row['lost']:.3f} ± {row['lost_stderr']:.3f}", f"{row['kl']:.3f}"))
    nearest = min((name for name in rows if name != SOURCE), key=lambda name: rows[name]["lost"])
    closing = f"closest to the source {nearest}, {rows[nearest]['lost']:.3f} nats above it"
    return markdown_table(header, lines, "<>>>>>>") + "\n", {"rows": rows}, closing


def main():
    args = parse()
    name = "starts" if args.models else "compare"
    rows = [] if args.models else args.names
    inputs = artifact.input_digests(args.run, [os.path.join(args.run, name) for name in ("searched", *rows)])
    output = os.path.join(args.run, name)
    started = artifact.begin_stage(REPORT, args, output, inputs=inputs)
    search = artifact.read_record(os.path.join(args.run, "searched"), SEARCH)
    with artifact.write_directory(output) as aside:
        text, summary, closing = (compare_starts if args.models else compare_trained)(args, search, aside)
        write_text(os.path.join(aside, f"{name}.md"), text)
        artifact.write_record(aside, started.record(search["model"], summary))
    print(f"\n{text}\nwrote   {output}\nreport: {closing}, in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
