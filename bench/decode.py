"""A GQA checkpoint against its source: KV cache bytes, prefill and decoding speed by context and batch.

    python -m bench.decode                                  # a random pair, under 50 s on one core
    python -m bench.decode --model runs/demo-model/model runs/demo/gqa --contexts 256
    python -m bench.decode --model DIR DIR --device cuda --dtype bfloat16 --contexts 2048 8192 --batches 1 16

Without --model, the pair is two random Llamas of the given shape: MHA, and GQA with --kv-heads heads. One
prefill of random tokens fills the cache, then --steps tokens are decoded one by one. Attention and cache are
transformers' own, as generate() uses them: the cache is copied as it grows. The two models alternate; rates
are medians, speed-ups are medians of paired rounds. Bytes are those of the tensors in the cache after
prefill. The last line is JSON.
"""

import itertools
import json
import statistics

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.machine import machine, median_ratio, timed
from common.models.edits import merged_config
from common.models.load import load_model
from common.reporting.tables import markdown_table
from common.run.errors import run_stage
from common.run.flags import Parser

HEADER = ("context", "batch", "cache MiB", "prefill tokens/s", "speed-up", "decode tokens/s", "speed-up")


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--model", nargs=2, metavar="DIR", help="the source and its GQA checkpoint")
    # the random pair
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--heads", type=int, default=8)
    flags.add_argument("--kv-heads", type=int, default=2)
    flags.add_argument("--head-dim", type=int, default=64)
    flags.add_argument("--intermediate", type=int, default=1024)
    # the measurements
    flags.add_argument("--contexts", type=int, nargs="+", default=(512, 2048),
                       help="tokens in the cache before decoding")
    flags.add_argument("--batches", type=int, nargs="+", default=(1, 4))
    flags.add_argument("--steps", type=int, default=32, help="tokens decoded per sequence and round")
    flags.add_argument("--pairs", type=int, default=3, help="paired rounds")
    flags.add_argument("--device", default="cpu", help="cpu or cuda")
    flags.add_argument("--threads", type=int, default=1,
                       help="CPU threads; only one measures the same on a busy machine as on an idle one")
    flags.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return flags.parse_args()


def random_pair(args) -> list:
    """A random MHA model, and a random GQA model of otherwise the same shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.heads * args.head_dim, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, vocab_size=2000,
        max_position_embeddings=max(args.contexts) + args.steps)
    with torch.device(args.device):
        models = [LlamaForCausalLM(each) for each in (config, merged_config(config, args.kv_heads))]
    return [model.to(getattr(torch, args.dtype)).eval() for model in models]


def prefill(model, tokens: torch.Tensor) -> DynamicCache:
    return model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values


def decode(model, token: torch.Tensor, cache: DynamicCache, steps: int) -> None:
    """Greedy decoding of [B, 1] after the cache, which grows."""
    for _ in range(steps):
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits.argmax(-1)


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of all key and value tensors in the cache."""
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


@torch.no_grad()
def measure(args, models: dict, context: int, batch: int) -> dict:
    """What one context length and batch size take, by model."""
    vocab = min(model.config.vocab_size for model in models.values())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (batch, context), generator=generator).to(args.device)
    seconds = {phase: {name: [] for name in models} for phase in ("prefill", "decode")}
    kv_bytes = {}
    for _ in range(args.pairs):
        for name, model in models.items():
            cache, filling = timed(args.device, prefill, model, tokens)
            kv_bytes[name] = cache_bytes(cache)
            _, decoding = timed(args.device, decode, model, tokens[:, -1:], cache, args.steps)
            seconds["prefill"][name].append(filling)
            seconds["decode"][name].append(decoding)

    cell = {"context": context, "batch": batch, "kv_bytes": kv_bytes,
            "kv_bytes_ratio": kv_bytes["mha"] / kv_bytes["gqa"]}
    for phase, count in (("prefill", batch * context), ("decode", batch * args.steps)):
        cell[f"{phase}_speedup"] = round(median_ratio(seconds[phase]["mha"], seconds[phase]["gqa"]), 3)
        cell[f"{phase}_tokens_per_s"] = {
            name: round(count / statistics.median(taken), 1) for name, taken in seconds[phase].items()}
    return cell


def row(cell: dict) -> list:
    """One line of the table."""
    arrows = [f"{cell['kv_bytes']['mha'] / 2**20:.1f} -> {cell['kv_bytes']['gqa'] / 2**20:.1f}"]
    for phase in ("prefill", "decode"):
        rates = cell[f"{phase}_tokens_per_s"]
        arrows += [f"{rates['mha']:.0f} -> {rates['gqa']:.0f}", f"{cell[f'{phase}_speedup']:.2f}"]
    return [cell["context"], cell["batch"], *arrows]


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    pair = [load_model(path, dtype, args.device) for path in args.model] if args.model else random_pair(args)
    models = dict(zip(("mha", "gqa"), pair, strict=True))
    counts = " -> ".join(str(model.config.num_key_value_heads) for model in pair)
    print(f"{counts} kv heads, {pair[0].config.num_attention_heads} query heads")
    measure(args, models, min(args.contexts), 1)  # not counted: the first calls of a process are slow
    cells = []
    for context, batch in itertools.product(args.contexts, args.batches):
        cells.append(measure(args, models, context, batch))
        print(f"measured context {context}, batch {batch}", flush=True)
    print(markdown_table(HEADER, map(row, cells)))
    (ratio,) = {cell["kv_bytes_ratio"] for cell in cells}  # the same at every length, as it must be
    speedups = {f"{cell['context']}x{cell['batch']}": cell["decode_speedup"] for cell in cells}
    print(json.dumps({"kv_bytes_ratio": ratio, "decode_speedup": speedups, "cells": cells,
                      "settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    run_stage(main)
