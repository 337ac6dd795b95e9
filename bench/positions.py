"""Cross-entropy by position: what merging loses near the start of a sequence and far into it.

    python -m bench.positions --source DIR --models pairs=RUN1/merged rope=RUN2/merged --text heldout.txt
    python -m bench.positions --source DIR --models ... --text heldout.txt --length 1024 --sequences 16

Merging keys with RoPE in mind is an approximation in the distance between tokens, and its statistics come
from sequences of the calibration's length: this measures the loss past it. Every model reads the same
sequences, one at a time, and its next-token loss is averaged over buckets of positions. The table has the
source's loss, and the nats that each model loses against it with the standard error over the sequences.
Writes OUT/positions.md and positions.png; the last line is JSON.
"""

import argparse
import json
import os
import statistics

import torch
import torch.nn.functional as F

from bench.machine import machine
from bench.plots import mean_and_error, standard_error
from common.cli import UserError, run_stage
from common.data.text import load_tokens, sequence_length
from common.files import write_text
from common.models import load_config, load_model, load_tokenizer
from common.progress import Progress
from common.reporting.plots import drawing
from common.reporting.tables import markdown_table

EDGES = (0, 256, 512, 1024, 2048, 4096)  # of the buckets
CHUNK = 256  # positions whose logits are in memory at a time


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--source", required=True, metavar="DIR", help="the model before merging")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=DIR", help="merged from it")
    parser.add_argument("--text", required=True, help="as --text of 01_calibrate.py; not the calibration's")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 4096, or the positions)")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--name", default="loss by position", help="title of the picture")
    parser.add_argument("--out", default="runs/positions")
    return parser.parse_args()


def named_directories(models: list[str]) -> dict[str, str]:
    """{name: directory} of the arguments NAME=DIR. Raises UserError for one without a name."""
    directories = {}
    for model in models:
        name, equals, directory = model.partition("=")
        if not (name and equals and directory):
            raise UserError(f"--models: expected NAME=DIR, found {model}")
        directories[name] = directory
    return directories


@torch.no_grad()
def token_losses(model, row: torch.Tensor) -> torch.Tensor:
    """Next-token losses [T - 1] of one sequence [T], in nats, float64; logits CHUNK positions at a time."""
    hidden = model.model(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
    pieces = zip(hidden.split(CHUNK), row[1:].split(CHUNK), strict=True)
    return torch.cat([F.cross_entropy(model.lm_head(states).double(), targets, reduction="none")
                      for states, targets in pieces])


def bucket_edges(length: int) -> list[int]:
    """EDGES up to the last position, `length` tokens having one less that predicts."""
    return [*(edge for edge in EDGES if edge < length - 1), length - 1]


def bucket_means(losses: torch.Tensor, edges: list[int]) -> list[float]:
    """Mean of one sequence's losses [T - 1] between each two neighbouring edges."""
    return [float(losses[first:last].mean()) for first, last in zip(edges, edges[1:], strict=False)]


def model_losses(path: str, tokens: torch.Tensor, edges: list[int]) -> list[tuple[float, ...]]:
    """A checkpoint's mean loss in each bucket: [buckets][sequences]."""
    model = load_model(path)
    bar = Progress(tokens, desc=path, unit="seq", leave=False)
    by_sequence = [bucket_means(token_losses(model, row), edges) for row in bar]
    by_bucket = list(zip(*by_sequence, strict=True))
    print(path, *map(mean_and_error, by_bucket), sep=" | ", flush=True)
    return by_bucket


def lost(losses: list[tuple[float, ...]], source: list[tuple[float, ...]]) -> list[list[float]]:
    """Nats lost against the source, [buckets][sequences]."""
    return [[ours - theirs for ours, theirs in zip(*bucket, strict=True)]
            for bucket in zip(losses, source, strict=True)]


def table(source: list, losses: dict[str, list], buckets: list[str]) -> str:
    """The source's loss by bucket, and what each model loses against it, as Markdown."""
    rows = [["source: loss", *map(mean_and_error, source)]]
    rows += [[f"{name}: lost", *map(mean_and_error, nats)] for name, nats in losses.items()]
    return markdown_table(["position", *buckets], rows) + "\n"


@drawing
def loss_by_position(
    plt,
    lost: dict[str, list[list[float]]],  # name -> bucket -> nats lost against the source, per sequence
    buckets: list[str],  # "0-256", ...
    title: str,
):
    """Nats lost against the source by position, one line per model; bars of one standard error."""
    figure, axis = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    for name, by_bucket in lost.items():
        means = [statistics.mean(sequences) for sequences in by_bucket]
        errors = [standard_error(sequences) if len(sequences) > 1 else 0.0 for sequences in by_bucket]
        axis.errorbar(range(len(buckets)), means, errors, marker="o", markersize=3, capsize=2, label=name)
    axis.set(title=title, xlabel="position in the sequence", ylabel="nats lost against the source",
             xticks=range(len(buckets)), xticklabels=buckets)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    return figure


def main():
    args = parse()
    directories = named_directories(args.models)
    positions = load_config(args.source).max_position_embeddings
    length = sequence_length(args.length, EDGES[-1], positions, least=2)
    tokens, description = load_tokens(args.text, load_tokenizer(args.source), args.sequences, length)
    print(f"{description}, {length} tokens each", flush=True)
    edges = bucket_edges(length)
    buckets = [f"{first}-{last}" for first, last in zip(edges, [*edges[1:-1], length], strict=False)]
    source = model_losses(args.source, tokens, edges)
    losses = {name: lost(model_losses(path, tokens, edges), source) for name, path in directories.items()}
    text = table(source, losses, buckets)
    os.makedirs(args.out, exist_ok=True)
    write_text(os.path.join(args.out, "positions.md"), text)
    print(text)
    loss_by_position(os.path.join(args.out, "positions.png"), losses, buckets, args.name)
    print(json.dumps({
        "source": dict(zip(buckets, map(statistics.mean, source), strict=True)),
        "lost": {name: dict(zip(buckets, map(statistics.mean, nats), strict=True))
                 for name, nats in losses.items()},
        "settings": vars(args),
        "machine": machine("cpu"),
    }))


if __name__ == "__main__":
    run_stage(main)
