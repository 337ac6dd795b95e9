"""Starts of the same cache side by side, before any training: loss, and distance from the source.

Reads   RUN/search.json (source and held-out text), checkpoints
Writes  RUN/starts.json, RUN/starts.md

    python -m related.dha.starts --models fused=runs/dha/fused measured=runs/dha/start-measured

Every model reads the same held-out sequences. The table has its key and value heads by layer, its cache, its
next-token loss, what that is above the source's, with the standard error of the paired differences over the
sequences, and its KL from the source; all in nats per token.
"""

import os
import statistics

import torch

import related.dha.modeling  # noqa: F401  registers DHA checkpoints
from common.artifacts import claim, input_digests, make_record
from common.cli import Clock, UserError, run_stage, stage_parser
from common.data.text import load_tokens
from common.evaluate import cache_bytes_per_token, mean_kl, mean_nll
from common.files import write_json, write_text
from common.models import load_model, load_tokenizer
from common.reporting.tables import markdown_table
from related.dha.export import head_counts
from related.dha.records import SEARCH, STARTS_TABLE, read
from related.dha.training import all_logits


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=DIR", help="rows of the table")
    args = parser.parse_args()
    for model in args.models:
        if not all(model.partition("=")):
            raise UserError(f"--models: expected NAME=DIR, found {model}")
    return args


def losses_of(logits: list[torch.Tensor], tokens: torch.Tensor) -> list[float]:
    """Mean next-token loss of each sequence, in nats."""
    return [mean_nll([rows], row[None]) for rows, row in zip(logits, tokens, strict=True)]


@torch.no_grad()
def measure(path: str, tokens: torch.Tensor, source: list[torch.Tensor]) -> dict:
    """The figures of one checkpoint. source: the source's logits on `tokens`."""
    model = load_model(path)
    logits = all_logits(model, tokens)
    pairs = zip(losses_of(logits, tokens), losses_of(source, tokens), strict=True)
    lost = [loss - reference for loss, reference in pairs]
    return {
        "heads": head_counts(model.config),
        "cache_bytes_per_token": cache_bytes_per_token(model, tokens[0]),
        "loss": mean_nll(logits, tokens),
        "lost": statistics.mean(lost),
        "lost_stderr": statistics.stdev(lost) / len(lost) ** 0.5,
        "kl": mean_kl(source, logits),
    }


def table(rows: dict[str, dict]) -> str:
    """Markdown, a line per checkpoint."""
    header = "", "key heads", "value heads", "cache bytes", "loss", "above the source", "KL"
    lines = []
    for name, row in rows.items():
        heads = (" ".join(map(str, row["heads"][kind])) for kind in ("key", "value"))
        lines.append((name, *heads, f"{row['cache_bytes_per_token']:.0f}", f"{row['loss']:.3f}",
                      f"{row['lost']:.3f} ± {row['lost_stderr']:.3f}", f"{row['kl']:.3f}"))
    return markdown_table(header, lines, align="<" + ">" * (len(header) - 1))


def main():
    args, clock = parse(), Clock()
    output, search_path = (os.path.join(args.run, name) for name in ("starts", "search.json"))
    inputs = input_digests(args.run, [search_path])
    search = read(search_path, SEARCH)
    claim(STARTS_TABLE, args, output + ".json")
    data, path = search["summary"]["data"], search["model"]["path"]
    tokens, text = load_tokens(data["heldout"], load_tokenizer(path), data["heldout_sequences"],
                               data["length"], "heldout")
    print(f"reads   {search_path}, {path}\nreads   {text}")
    source = all_logits(load_model(path), tokens)
    checkpoints = dict(model.split("=", 1) for model in ["source=" + path, *args.models])
    rows = {name: measure(checkpoint, tokens, source) for name, checkpoint in checkpoints.items()}
    write_text(output + ".md", table(rows) + "\n")
    write_json(output + ".json",
               make_record(STARTS_TABLE, args, search["model"], inputs, {"rows": rows}, clock()))
    print(f"\n{table(rows)}\n\nwrote   {output}.json, {output}.md")
    nearest = min((name for name in rows if name != "source"), key=lambda name: rows[name]["lost"])
    print(f"starts: nearest to the source {nearest}, {rows[nearest]['lost']:.3f} nats above it, "
          f"in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
