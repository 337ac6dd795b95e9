"""Size of the cache and speed of decoding in llama.cpp, a source beside its export.

    python -m pipelines.gguf_speed SOURCE.gguf EXPORT.gguf
    python -m pipelines.gguf_speed A.gguf B.gguf --shape 16 2048 32 8192 4096 --kv-heads 32 8   # random ones

Both stay loaded and take turns, so that what else the machine does slows both; the ratio is the median of the
turns', the export's tokens per second over the source's. Before the first turn each reads a context of random
tokens, which it keeps through all turns; flash attention, which a quantized cache needs, is always on.
llama.cpp is the one that gguf.sh has built. Prints a table in Markdown.
"""

import argparse
import common.waiting  # noqa: F401 - before torch
import glob
import os
import re
import sys
import time

import gguf
import numpy as np

from common.cli import UserError, positive, run_stage
from common.reporting.tables import markdown_table

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHES = ("f16", "q8_0")
TURN = 8  # tokens decoded in a turn
HEADER = ("context", "cache", "source: MiB", "export: MiB", "source: tokens/s", "export: tokens/s", "ratio")


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs=2, help="GGUF files of the source and of the export")
    parser.add_argument("--contexts", nargs="+", type=positive, default=[2048, 8192], help="in tokens")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES, help="types of the cache")
    parser.add_argument("--turns", type=positive, default=7, help=f"of {TURN} tokens each")
    parser.add_argument("--shape", nargs=5, type=positive, help="write random f16 models to the files first",
                        metavar=("LAYERS", "HIDDEN", "HEADS", "MLP", "VOCABULARY"))
    parser.add_argument("--kv-heads", nargs=2, type=positive, help="of the random source and export")
    return parser.parse_args()


def write_random(path: str, shape: list[int], kv_heads: int) -> None:
    """A Llama without a tokenizer, its output tied to its embedding; layers have the same weights."""
    layers, hidden, heads, mlp, vocabulary = shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_context_length(2**17)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    shared = kv_heads * hidden // heads
    sizes = {"attn_q": (hidden, hidden), "attn_k": (shared, hidden), "attn_v": (shared, hidden),
             "attn_output": (hidden, hidden), "ffn_gate": (mlp, hidden), "ffn_up": (mlp, hidden),
             "ffn_down": (hidden, mlp)}
    draw = np.random.default_rng(0)
    tensors = {name: (0.02 * draw.standard_normal(size, np.float32)).astype(np.float16)
               for name, size in (sizes | {"token_embd": (vocabulary, hidden)}).items()}
    tensors |= dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), np.ones(hidden, np.float32))
    for name in ("token_embd", "output_norm"):
        writer.add_tensor(f"{name}.weight", tensors[name])
    for layer in range(layers):
        for name in (*sizes, "attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", tensors[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens_per_second(engine, context: int) -> float:
    """The speed of a turn, whose tokens overwrite those of the turn before."""
    engine.n_tokens = context - TURN
    start = time.perf_counter()
    for _ in range(TURN):
        engine.eval([1])
    return TURN / (time.perf_counter() - start)


def compare(check, files: list[str], context: int, cache: str, turns: int) -> tuple:
    """A row of the table. check: the module gguf_check."""
    cache_type = getattr(check.llama_cpp, f"GGML_TYPE_{cache.upper()}")
    engines, sizes = [], []
    for path in files:
        check.log.clear()
        engine = check.load_engine(path, context, type_k=cache_type, type_v=cache_type, n_batch=512,
                                   logits_all=False, flash_attn=True)
        messages = "\n".join(text for _, text in check.log)
        sizes.append(float(re.search(r"size = +([\d.]+) MiB \( *\d+ cells", messages)[1]))
        draw = np.random.default_rng(0)
        print(f"{path}: reading {context - TURN} tokens, cache in {cache}", file=sys.stderr, flush=True)
        engine.eval(draw.integers(2, engine.n_vocab(), context - TURN).tolist())
        engines.append(engine)
    speeds = np.array([[tokens_per_second(engine, context) for engine in engines] for _ in range(turns)])
    medians = (f"{speed:.3g}" for speed in np.median(speeds, axis=0))
    return context, cache, *sizes, *medians, f"{np.median(speeds[:, 1] / speeds[:, 0]):.2f}"


def main() -> None:
    args = parse()
    built = glob.glob(os.path.join(ROOT, ".gguf", "*", "installed"))
    if not built:
        raise UserError("expected llama.cpp in .gguf/, found none; gguf.sh builds it")
    sys.path.append(built[0])
    from pipelines import gguf_check  # imports llama.cpp

    if args.shape:
        for path, kv_heads in zip(args.files, args.kv_heads, strict=True):
            write_random(path, args.shape, kv_heads)
    rows = [compare(gguf_check, args.files, context, cache, args.turns)
            for context in args.contexts for cache in args.caches]
    print(markdown_table(HEADER, rows, "><" + ">" * 5))


if __name__ == "__main__":
    run_stage(main)
