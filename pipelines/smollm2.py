"""Text and table of smollm2.sh.

    python -m pipelines.smollm2 text --run RUN [--text FILE.txt]     # writes RUN/text/
    python -m pipelines.smollm2 table --run RUN                      # writes RUN/starts.json, .md and .png

The text is halved: stage 1 calibrates on the first half, and the perplexity is that of the second. By default
it is the reference manual that every Python carries for help(), without the paragraphs that it repeats.
"""

import common.run.openmp  # noqa: F401 - before torch
import math
import os
import re

import torch

from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.evaluation.evaluate import cache_bytes_per_token, perplexity
from common.models.load import load_model, load_tokenizer, source_model
from common.reporting.plots import drawing
from common.reporting.tables import markdown_table
from common.run.artifact import read_record, write_directory
from common.run.errors import UserError, run_stage
from common.run.files import read_text, write_json, write_text
from common.run.flags import Parser, positive

STARTS = {  # run directory -> name in table and picture
    "mean-pool": "mean-pool",
    "paper": "the paper: rotations and mean",
    "closed-form": "closed form",
    "output-refit": "closed form + output refit",
    "attention-refit": "closed form + attention refit",
}
TRAINED = "attention-refit/gqa"
NAMES = {"source": "source"} | STARTS | {TRAINED: "closed form + attention refit, trained"}


def parse():
    parser = Parser(__doc__)
    parser.add_argument("part", choices=("text", "table"))
    parser.add_argument("--run", default="runs/smollm2", help="run directory")
    parser.add_argument("--text", help="text: a .txt file to halve instead of the manual")
    parser.add_argument("--sequences", type=positive, default=16, help="table: sequences of the second half")
    parser.add_argument("--length", type=positive, default=512, help="table: tokens per sequence")
    return parser.parse_args()


def manual() -> str:
    """Python's reference manual as help() shows it, each paragraph once: topics share entire sections."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("expected the manual pydoc_data.topics in this Python, found none; "
                        "set TEXT=FILE.txt") from error
    paragraphs = {}  # a dictionary keeps the order
    for topic in sorted(topics):
        paragraphs |= dict.fromkeys(re.split("\n{2,}", topics[topic].strip("\n")))
    return "\n\n".join(paragraphs)


def write_halves(run: str, file: str | None) -> None:
    """Write RUN/text/calibration.txt and heldout.txt: the halves of a file, or of the manual.

    Raises UserError if those of another text are there.
    """
    text, home = manual() if file is None else read_text(file), os.path.join(run, "text")
    halves = {"calibration.txt": text[: len(text) // 2], "heldout.txt": text[len(text) // 2 :]}
    if not os.path.exists(home):
        with write_directory(home) as directory:
            for name, half in halves.items():
                write_text(os.path.join(directory, name), half)
        print(f"wrote   {home}")
    for name, half in halves.items():
        if read_text(os.path.join(home, name)) != half:
            raise UserError(f"{home}: expected the halves of {file or 'the manual'}, found another text's; "
                            "pass another RUN")


def measure(path: str, tokens: torch.Tensor) -> dict[str, float]:
    """Perplexity on tokens [n, T] and size of the KV cache of a checkpoint in float32."""
    model = load_model(path)
    return {"kv_heads": model.config.num_key_value_heads, "perplexity": perplexity(model, tokens),
            "cache_bytes_per_token": cache_bytes_per_token(model, tokens[0])}


def measure_all(args, source: str) -> dict[str, dict]:
    """Metrics of the source and of every merged model in the run directory, also printed as they come."""
    text = os.path.join(args.run, "text", "heldout.txt")
    tokens, description = load_tokens(text, load_tokenizer(source), args.sequences, args.length, EVALUATION)
    print(f"reads   {description}; {tokens.numel()} tokens")
    paths = {"source": source}
    for directory in STARTS:
        paths[directory] = os.path.join(args.run, directory, "merged")
        read_record(paths[directory], "04_align.py")  # refuses one that is missing
    paths[TRAINED] = os.path.join(args.run, TRAINED)
    results = {}
    for name, path in paths.items():
        results[name] = measure(path, tokens)
        print(f"{name}: perplexity {results[name]['perplexity']:.3f}", flush=True)
    return results


def table(results: dict[str, dict]) -> str:
    """A Markdown table, a row per model, the source first. Losses: nats per token above the source's."""
    source, *_, last = results.values()
    rows = []
    for name, metrics in results.items():
        loss = math.log(metrics["perplexity"] / source["perplexity"])
        digits = 1 if metrics["perplexity"] < 1000 else 0
        rows.append((NAMES[name], f"{metrics['perplexity']:,.{digits}f}", f"+{loss:.2f}" if rows else "",
                     f"{metrics['cache_bytes_per_token']:.0f}"))
    merged = f"{source['kv_heads']} -> {last['kv_heads']} kv heads"
    return markdown_table((merged, "perplexity", "loss", "KV bytes per token"), rows, "<>>>")


@drawing
def losses_above_source(
    plt,
    perplexities: dict[str, float],  # name -> perplexity; the source's first
    title: str,
):
    """How far each merged model's loss is above the source's: a bar per model, labelled with its perplexity.

    On a linear scale of nats: bars of perplexities themselves would show the worst one only.
    """
    (_, source), *merged = perplexities.items()
    names = [name for name, _ in merged]
    losses = [math.log(perplexity / source) for _, perplexity in merged]
    figure, axis = plt.subplots(figsize=(8.6, 0.42 * len(merged) + 1.3), layout="constrained")
    bars = axis.barh(names, losses, height=0.62)
    labels = [f"perplexity {perplexity:,.{1 if perplexity < 1000 else 0}f}" for _, perplexity in merged]
    axis.bar_label(bars, labels, padding=4, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.25)  # room for the labels
    axis.spines[["top", "right"]].set_visible(False)
    axis.set(title=title, xlabel=f"loss above the source's (perplexity {source:.1f}), nats per token")
    return figure


def main():
    args = parse()
    if args.part == "text":
        write_halves(args.run, args.text)
        return
    model = source_model(read_record(os.path.join(args.run, "calibration"), "01_calibrate.py"), args.run)
    results = measure_all(args, model["path"])
    text = table(results)
    print(f"\n{text}\n")
    name = os.path.basename(os.path.normpath(model["name"])).removesuffix(".gguf")
    kv_heads = [metrics["kv_heads"] for metrics in results.values()]
    title = f"{name}: {kv_heads[0]} -> {kv_heads[-1]} kv heads"
    perplexities = {NAMES[start]: metrics["perplexity"] for start, metrics in results.items()}
    losses_above_source(os.path.join(args.run, "starts.png"), perplexities, title)
    write_json(os.path.join(args.run, "starts.json"), results)
    write_text(os.path.join(args.run, "starts.md"), text + "\n")  # last: smollm2.sh looks for it
    print(f"wrote   {os.path.join(args.run, 'starts.json')}, starts.md")


if __name__ == "__main__":
    run_stage(main)
