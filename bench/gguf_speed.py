"""Size of the cache and speed of decoding in llama.cpp, of a source and of its export, by type of cache.

    bash pipelines/gguf.sh RUN/gqa          # builds llama.cpp and writes RUN/gqa.f32.gguf; so for the source
    python -m bench.gguf_speed SOURCE.gguf RUN/gqa.f32.gguf

Both stay loaded and take turns, so that other work of the machine slows both; the ratio is the median of the
turns', the export's tokens per second over the source's. The cache is full but for CHUNK tokens: CHUNK random
ones, read once, and copies of their keys and values. Flash attention, which slows CPUs down, is on for the
quantized caches, which need it. Prints a table in Markdown.
"""

import ctypes
import glob
import os
import re
import sys
import time

import numpy as np

from common.reporting.tables import markdown_table
from common.run.errors import UserError, run_stage
from common.run.flags import Parser, positive

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHES = ("f16", "q8_0", "q8_0/q4_0", "q4_0")  # keys/values
CHUNK, TURN = 64, 8  # tokens read, and decoded in a turn
HEADER = ("context", "cache", "source: MiB", "export: MiB", "source: tokens/s", "export: tokens/s", "ratio")


def parse():
    flags = Parser(__doc__)
    flags.add_argument("files", nargs=2, help="GGUF files of the source and of the export")
    flags.add_argument("--contexts", nargs="+", type=positive, default=[2048, 8192], help="in tokens")
    flags.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES, help="keys/values, or both")
    flags.add_argument("--turns", type=positive, default=7, help=f"of {TURN} tokens each")
    return flags.parse_args()


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
    keys, _, values = cache.partition("/")
    types = [getattr(check.llama_cpp, f"GGML_TYPE_{name.upper()}") for name in (keys, values or keys)]
    engines, sizes = [], []
    for path in files:
        check.log.clear()
        engine = check.load_engine(path, context, type_k=types[0], type_v=types[1], n_batch=CHUNK,
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
        raise UserError("expected llama.cpp in .gguf/, found none; pipelines/gguf.sh builds it")
    engine = os.path.dirname(built[0])
    sys.path += [built[0], os.path.join(engine, "vendor", "llama.cpp")]
    from pipelines import gguf_check  # imports llama.cpp

    defaults = gguf_check.llama_cpp.llama_context_default_params()
    defaults.n_seq_max, defaults.kv_unified = 2, True
    gguf_check.llama_cpp.llama_cpp.llama_context_default_params = lambda: defaults
    return gguf_check


def main() -> None:
    args, check = parse(), load_llama_cpp()
    rows = [compare(check, args.files, context, cache, args.turns)
            for context in args.contexts for cache in args.caches]
    print(markdown_table(HEADER, rows, "><" + ">" * 5))


if __name__ == "__main__":
    run_stage(main)
