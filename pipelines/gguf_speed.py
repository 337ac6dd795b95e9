"""Size of the cache and speed of decoding in llama.cpp, of a source and of its export.

    python -m pipelines.gguf_speed SOURCE.gguf EXPORT.gguf
    python -m pipelines.gguf_speed A.gguf B.gguf --shape 16 2048 32 8192 4096 --kv-heads 32 8   # random ones

Both stay loaded and take turns, so that other work of the machine slows both; the ratio is the median of the
turns', the export's tokens per second over the source's. The cache is full but for CHUNK tokens: CHUNK random
ones, read once, and copies of their keys and values. Flash attention, which slows CPUs down, is on for the
quantized cache, which needs it. llama.cpp is the one that gguf.sh has built. Prints a table in Markdown.
"""

import argparse
import common.waiting  # noqa: F401 - before torch
import ctypes
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
CHUNK, TURN = 64, 8  # tokens read, and decoded in a turn
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


def fill(api, engine, context: int) -> None:
    """Fill an engine's cache but for CHUNK tokens. api: the module llama_cpp."""
    engine.eval(np.random.default_rng(0).integers(2, engine.n_vocab(), CHUNK).tolist())
    handle = engine.ctx
    memory, size = api.llama_get_memory(handle), api.llama_state_seq_get_size(handle, 0)
    state = (ctypes.c_uint8 * size)()
    api.llama_state_seq_get_data(handle, state, size, 0)
    for _ in range(context // CHUNK - 2):
        if not api.llama_state_seq_set_data(handle, state, size, 1):
            raise UserError(f"--contexts {context}: llama.cpp's cache is full before")
        api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
        api.llama_memory_seq_rm(memory, 1, -1, -1)


def tokens_per_second(engine) -> float:
    """The speed of a turn, whose tokens overwrite those of the turn before."""
    engine.n_tokens = CHUNK
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
        engine = check.load_engine(path, context, type_k=cache_type, type_v=cache_type, n_batch=CHUNK,
                                   logits_all=False, flash_attn=cache != "f16")
        messages = "\n".join(text for _, text in check.log)
        sizes.append(float(re.search(r"size = +([\d.]+) MiB \( *\d+ cells", messages)[1]))
        fill(check.llama_cpp, engine, context)
        engines.append(engine)
    print(f"context {context}, cache {cache}: {turns} turns", file=sys.stderr, flush=True)
    speeds = np.array([[tokens_per_second(engine) for engine in engines] for _ in range(turns)])
    medians = (f"{speed:.3g}" for speed in np.median(speeds, axis=0))
    return context, cache, *sizes, *medians, f"{np.median(speeds[:, 1] / speeds[:, 0]):.2f}"


def load_llama_cpp():
    """The module gguf_check, its engines with room for a second sequence in the same cache."""
    built = glob.glob(os.path.join(ROOT, ".gguf", "*", "installed"))
    if not built:
        raise UserError("expected llama.cpp in .gguf/, found none; gguf.sh builds it")
    sys.path.append(built[0])
    from pipelines import gguf_check  # imports llama.cpp

    defaults = gguf_check.llama_cpp.llama_context_default_params()
    defaults.n_seq_max, defaults.kv_unified = 2, True
    gguf_check.llama_cpp.llama_cpp.llama_context_default_params = lambda: defaults
    return gguf_check


def main() -> None:
    args, check = parse(), load_llama_cpp()
    if args.shape:
        for path, kv_heads in zip(args.files, args.kv_heads, strict=True):
            write_random(path, args.shape, kv_heads)
    rows = [compare(check, args.files, context, cache, args.turns)
            for context in args.contexts for cache in args.caches]
    print(markdown_table(HEADER, rows, "><" + ">" * 5))


if __name__ == "__main__":
    run_stage(main)
