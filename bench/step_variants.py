"""A masked step of stage 5 in several ways, one change at a time, and the checkpoint after it.

    python -m bench.step_variants                                # a small Llama on a CPU
    python -m bench.step_variants --shape 1.3b --device cuda --row-tokens 1024 4096 16384

Rows of each size, and of the middle one: with layers recomputed, with logits of --chunk tokens at a time, and
with --deterministic. Each step trains one full row per rank. memory_gib and reserved_gib are what its tensors
and torch's allocator take at most, without the benchmark's other models; planned_gib is what
05_prune_train.py --plan expects. checkpoint_*_gb_per_s: GB/s at which a checkpoint of student and optimizer
is written, with its hashes, then hashed again, then loaded. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import tempfile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for determinism: read when CUDA starts

import torch

from bench import step_plan, train_step
from bench.machine import machine, timed
from common.data.rows import Sample
from common.files import files_in
from common.reporting.tables import markdown_table
from common.training import checkpoints
from common.training import plan as budget
from common.training.hardware import peak_flops
from common.training.packing import build_row
from common.training.sharding import joined_ranks, recompute_layers

COLUMNS = ("seconds", "tokens_per_s", "mfu", "memory_gib", "reserved_gib", "planned_gib")


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--shape", choices=train_step.SHAPES, default="small")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (bfloat16)")
    parser.add_argument("--row-tokens", type=int, nargs=3, default=(256, 512, 1024))
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of logits at a time, instead of 512")
    parser.add_argument("--pairs", type=int, default=3, help="steps of each, after one that is not counted")
    parser.set_defaults(attention="packed", recompute=False, compile=False, loss_chunk=512, batch=64,
                        tokens_per_microbatch=None)
    return parser.parse_args()


def variants(args) -> dict[str, dict]:
    """Name -> tokens in a row, and what differs from stage 5's defaults."""
    middle = {"tokens": args.row_tokens[1]}
    return {f"rows of {tokens}": {"tokens": tokens} for tokens in args.row_tokens} | {
        "recomputed": middle | {"recompute": True}, f"logits of {args.chunk}": middle | {"chunk": args.chunk},
        "deterministic": middle | {"deterministic": True}}


def full_row(tokens: int, vocab: int):
    """Samples as long as the paper's that fill a row, and the row."""
    samples: list[Sample] = []
    for sample in train_step.random_samples(tokens // 16, vocab):
        if len(sample) <= tokens - sum(map(len, samples)):
            samples.append(sample)
    return samples, build_row(samples, len(samples))


def disable_recomputation(model) -> None:
    """The opposite of recompute_layers, under its name in any transformers version."""
    name = "activation_checkpointing_disable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_disable")()


def measure(models, args, change: dict, others: int) -> dict[str, float]:
    """The figures of one variant. others: bytes of what else is in memory."""
    cuda, config = args.device == "cuda", models.masked.net.config
    samples, row = full_row(change["tokens"], config.vocab_size)
    row = row.pinned() if cuda else row  # as stage 5's thread leaves it
    models.options.loss_chunk = change.get("chunk", args.loss_chunk)
    if change.get("recompute"):
        recompute_layers(models.masked.net)
    else:
        disable_recomputation(models.masked.net)
    torch.use_deterministic_algorithms(change.get("deterministic", False))
    torch.utils.deterministic.fill_uninitialized_memory = False
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(args.device, models.masked_step, [row], samples)[1] for _ in range(1 + args.pairs)][1:]
    torch.use_deterministic_algorithms(False)
    taken, tokens = statistics.median(seconds), sum(row.lengths)
    work = budget.Workload.of(config, samples, models.options.loss_chunk, change.get("recompute", False),
                              2 if cuda else 4)
    need = budget.memory(work, step_plan.student_of(config), models.ranks.world, tokens)
    figures = {"seconds": taken, "tokens_per_s": tokens / taken, "planned_gib": need["total"] / 2**30}
    if cuda:
        figures["memory_gib"] = (torch.cuda.max_memory_allocated() - others) / 2**30
        figures["reserved_gib"] = (torch.cuda.max_memory_reserved() - others) / 2**30
        peak = peak_flops(torch.cuda.get_device_name())
        flops = models.jobs[models.masked].flops(row)
        figures |= {"mfu": flops / taken / peak} if peak else {}
    return {name: round(figure, 4) for name, figure in figures.items()}


def checkpoint_rates(job, device: str) -> dict[str, float]:
    """GB/s of saving, checking and loading a checkpoint of this job, on the disk of temporary files."""
    with tempfile.TemporaryDirectory() as job.directory:
        _, saving = timed(device, checkpoints.save, job)
        path = checkpoints.path_of(job.directory, job.step)
        damage, hashing = timed(device, checkpoints.damage, path)
        assert damage is None, damage
        _, loading = timed(device, checkpoints.load, job, path)
        size = sum(os.path.getsize(os.path.join(path, name)) for name in files_in(path))
    seconds = {"save": saving, "hash": hashing, "load": loading}
    rates = {f"checkpoint_{name}_gb_per_s": round(size / taken / 1e9, 3) for name, taken in seconds.items()}
    return rates | {"checkpoint_gb": round(size / 1e9, 3)}


def main():
    args = parse()
    with joined_ranks() as ranks:
        config = train_step.model_config(args)
        models = train_step.Models(args, ranks, config)
        others = sum(step_plan.resident(models.jobs[trainee]) for trainee in (models.plain, models.gqa))
        cells = {name: measure(models, args, change, others) for name, change in variants(args).items()}
        rows = [(name, *(figures.get(column, "") for column in COLUMNS)) for name, figures in cells.items()]
        print(markdown_table(("", *COLUMNS), rows), flush=True)
        stored = checkpoint_rates(models.jobs[models.masked], args.device)
    print(json.dumps(stored | {"variants": cells, "settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    main()
