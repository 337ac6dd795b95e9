"""A GQA checkpoint against its MHA source: KV cache bytes, prefill and decoding speed, at several contexts and batches.

    python -m bench.decode                                  # a random-weight pair, under 50 s on one core
    python -m bench.decode --model runs/demo-model/model runs/demo/gqa --contexts 256
    python -m bench.decode --model DIR DIR --device cuda --dtype bfloat16 --contexts 2048 8192 --batches 1 16

Without --model, a random MHA Llama of the given shape and its mean-pooled copy with --kv-heads heads: the same weights otherwise. The
cache is filled by one prefill of random tokens; then --steps tokens are decoded one after another. Attention and cache are transformers'
own, as generate() uses them: a cache that is copied as it grows. The two models alternate; rates are medians, speed-ups medians of
paired rounds. Bytes are those of the tensors in the cache after prefill. Last line: JSON.
"""

import argparse
import json
import statistics

import torch
from transform import timed
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bench.machine import machine
from common.cli import run_stage
from common.method.fuse import merge_model
from common.models import load_model


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=2, default=None, metavar="DIR", help="the source and what was exported of it")
    # the random pair
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--intermediate", type=int, default=1024)
    # what is measured
    parser.add_argument("--contexts", type=int, nargs="+", default=(512, 2048), help="tokens in the cache before decoding")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded per sequence and round")
    parser.add_argument("--pairs", type=int, default=3, help="paired rounds")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU: one measures the same on a busy machine as on a quiet one, several do not")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser.parse_args()


def random_pair(args) -> tuple:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=args.heads * args.head_dim, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
                         num_attention_heads=args.heads, vocab_size=2000, max_position_embeddings=max(args.contexts) + args.steps)
    with torch.device(args.device):
        model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    return model, merge_model(model, args.kv_heads)


def prefill(model, tokens: torch.Tensor) -> DynamicCache:
    return model(input_ids=tokens, use_cache=True, logits_to_keep=1).past_key_values


def decode(model, token: torch.Tensor, cache: DynamicCache, steps: int) -> None:
    """Greedy decoding of [B, 1] after the cache, which grows."""
    for _ in range(steps):
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits.argmax(-1)


def cache_bytes(cache: DynamicCache) -> int:
    return sum(tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in (layer.keys, layer.values))


@torch.no_grad()
def cell(args, models: dict, context: int, batch: int) -> dict:
    """Figures of one context length and batch size, by model."""
    vocab = min(model.config.vocab_size for model in models.values())
    tokens = torch.randint(0, vocab, (batch, context), generator=torch.Generator().manual_seed(0)).to(args.device)
    seconds, held = {name: {"prefill": [], "decode": []} for name in models}, {}
    for _ in range(args.pairs):
        for name, model in models.items():
            cache, filling = timed(args.device, prefill, model, tokens)
            held[name] = cache_bytes(cache)
            _, decoding = timed(args.device, decode, model, tokens[:, -1:], cache, args.steps)
            seconds[name]["prefill"].append(filling)
            seconds[name]["decode"].append(decoding)

    def speedup(phase: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["mha"][phase], seconds["gqa"][phase], strict=True)), 3)

    counts = {"prefill": batch * context, "decode": batch * args.steps}
    return {"context": context, "batch": batch, "kv_bytes": held, "kv_bytes_ratio": held["mha"] / held["gqa"]} | {
        f"{phase}_speedup": speedup(phase) for phase in counts} | {
        f"{phase}_tokens_per_s": {name: round(count / statistics.median(taken[phase]), 1) for name, taken in seconds.items()}
        for phase, count in counts.items()}


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    pair = [load_model(path, getattr(torch, args.dtype), args.device) for path in args.model] if args.model else random_pair(args)
    models = dict(zip(("mha", "gqa"), pair, strict=True))
    print(" -> ".join(f"{model.config.num_key_value_heads} kv heads" for model in pair) + f" of {pair[0].config.num_attention_heads} heads")
    print("| context | batch | cache MiB | prefill tokens/s | speed-up | decoded tokens/s | speed-up |")
    print("| --- " * 7 + "|")
    cell(args, models, min(args.contexts), 1)  # not counted: the first calls of a process are slow
    cells = []
    for context in args.contexts:
        for batch in args.batches:
            cells.append(one := cell(args, models, context, batch))
            print(f"| {context} | {batch} | {one['kv_bytes']['mha'] / 2**20:.1f} -> {one['kv_bytes']['gqa'] / 2**20:.1f} | "
                  + " | ".join(f"{one[f'{phase}_tokens_per_s']['mha']:.0f} -> {one[f'{phase}_tokens_per_s']['gqa']:.0f} | {one[f'{phase}_speedup']:.2f}"
                               for phase in ("prefill", "decode")) + " |", flush=True)
    (ratio,) = {one["kv_bytes_ratio"] for one in cells}  # the same at every length, as it must be
    print(json.dumps({"kv_bytes_ratio": ratio, "decode_speedup": {f"{one['context']}x{one['batch']}": one["decode_speedup"] for one in cells},
                      "cells": cells, "settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    run_stage(main)
