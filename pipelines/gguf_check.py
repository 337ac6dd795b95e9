"""Convert a checkpoint to GGUF and compare llama.cpp with transformers. See gguf.sh.

Both read the token ids of the checkpoint's own tokenizer, keep keys and values in float32 and decode
greedily; an end of sequence is a token like any other. A prompt's tokens count as equal up to the first
that differs, and logits are compared as far as both have read the same tokens. The smallest lead of
transformers' likeliest token over its second is printed, too: where that is no larger than the difference of
the logits, rounding decides between the two. --text adds the perplexity of both, also with quantized caches:
llama.cpp's own, and in transformers as 07_eval.py --cache simulates them. llama.cpp reads a Mistral's entire
context, whatever its sliding window: keep prompts within the window.

Exit code 2 if llama.cpp has other kv heads or another vocabulary than config.json, if it tokenizes a prompt
otherwise, or if a token of an f32 file differs.
"""

import common.run.openmp  # noqa: F401 - before torch
import ctypes
import os
import re

import llama_cpp
import numpy as np
import torch
from transformers import DynamicCache

from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.evaluation import evaluate
from common.models.equivalence import perplexity_of
from common.models.families import geometry
from common.models.load import load_config, load_model, load_tokenizer
from common.models.quantized_cache import has_blocks, parse_cache, quantized
from common.run.errors import UserError, run_stage
from common.run.files import read_text
from common.run.flags import Parser, positive
from common.run.progress import Progress
from pipelines.gguf_convert import convert

PROMPTS = (
    "The capital of France is",
    "def mean(values):\n    return sum(",
    "It's 12345 metres, or 7.6 miles; she'll walk.",
    "  Two spaces, then\ttabs and\n\n\nlines",
    "Übergrößenträger, naïve café, 北京, привет",
    "import os\nimport sys\n\nclass",
)
QUANTIZED = {  # types that llama.cpp's quantizer writes, not its converter
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
FORMATS = {"q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}
CACHES = tuple(map(parse_cache, ("q8_0", "q8_0/q4_0", "q4_0")))
TEXT_LENGTH = 512  # tokens in a sequence of --text
ALL_F32 = "0"  # value of general.file_type
ERROR = 4  # GGML_LOG_LEVEL_ERROR

log = []  # messages of llama.cpp: (level, text)


@llama_cpp.llama_log_callback
def keep_log(level, text, user_data):
    log.append((level, text.decode(errors="replace").strip()))


def parse():
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="checkpoint directory")
    parser.add_argument("out", help="GGUF file; if it already exists, it is compared as it is")
    parser.add_argument("--outtype", choices=("f32", "f16", "bf16", "q8_0", *QUANTIZED), default="f32",
                        help="type of the weights")
    parser.add_argument("--pre", help="llama.cpp's pre-tokenizer for a tokenizer unknown to its converter")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens generated per prompt")
    parser.add_argument("--prompts", help="text file, one prompt per line")
    parser.add_argument("--text", help="text file, to measure perplexity on")
    parser.add_argument("--sequences", type=positive, default=16,
                        help=f"sequences of {TEXT_LENGTH} tokens of --text")
    return parser.parse_args()


def write_gguf(checkpoint: str, out: str, outtype: str, pre: str | None) -> None:
    """Convert, and quantize if the converter cannot write that type."""
    if outtype not in QUANTIZED:
        convert(checkpoint, out, outtype, pre)
        return
    unquantized = out + ".f32"
    try:
        convert(checkpoint, unquantized, "f32", pre)
        quantize(unquantized, out, outtype)
    finally:
        if os.path.exists(unquantized):
            os.remove(unquantized)


def quantize(path: str, out: str, outtype: str) -> None:
    """llama.cpp's own quantizer, without an importance matrix."""
    llama_cpp.llama_log_set(keep_log, None)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = QUANTIZED[outtype], torch.get_num_threads()
    if llama_cpp.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(settings)):
        raise UserError(f"{path}: llama.cpp cannot quantize it to {outtype}: {first_error('no reason')}")


def first_error(otherwise: object) -> object:
    """llama.cpp's first error message, if there is one."""
    return next((text for level, text in log if level == ERROR), otherwise)


def greedy(
    step,  # tokens [n] -> logits [n, vocab] after each, given all tokens of earlier calls
    prompt: list[int],
    count: int,
) -> tuple[list[int], np.ndarray]:
    """The `count` likeliest next tokens, and the logits [prompt + count, vocab] after every token."""
    logits, tokens = [step(prompt)], []
    for _ in range(count):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(step(tokens[-1:]))
    return tokens, np.concatenate(logits)


def transformers_step(model):
    """A `step` of greedy() with its own cache."""
    cache = DynamicCache(config=model.config)

    def step(tokens):
        return model(torch.tensor([tokens]), past_key_values=cache).logits[0].numpy()

    return step


def llama_cpp_step(engine: llama_cpp.Llama):
    """A `step` of greedy(), from an empty cache."""
    engine.reset()

    def step(tokens):
        engine.eval(tokens)
        return engine.scores[engine.n_tokens - len(tokens):engine.n_tokens].copy()

    return step


def load_engine(path: str, context: int, **options) -> llama_cpp.Llama:
    """llama.cpp on the CPU, its cache in float32 instead of the default float16 unless options say more."""
    llama_cpp.llama_log_set(keep_log, None)
    defaults = llama_cpp.llama_model_default_params()
    # no AMX: built by GCC 12, whose _tile_loadconfig drops most of the tiles' configuration, its kernels for
    # quantized weights are illegal instructions
    defaults.use_extra_bufts = False
    llama_cpp.llama_cpp.llama_model_default_params = lambda: defaults
    cache = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
    exact = {"n_batch": context, "logits_all": True, "n_threads": torch.get_num_threads()} | cache
    try:
        return llama_cpp.Llama(path, n_ctx=context, verbose=False, **exact | options)
    except ValueError as error:
        raise UserError(f"{path}: llama.cpp cannot load it: {first_error(error)}") from error


def read_prompts(path: str | None) -> list[str]:
    """The lines of a file that are not empty, or the built-in prompts."""
    return [line for line in read_text(path).split("\n") if line] if path else list(PROMPTS)


def engine_perplexity(engine: llama_cpp.Llama, tokens: torch.Tensor) -> float:
    """llama.cpp's perplexity of tokens [n, T], a row at a time."""
    rows = (torch.from_numpy(llama_cpp_step(engine)(row)) for row in tokens.tolist())
    return perplexity_of(rows, tokens)


def simulated_perplexities(model, tokens: torch.Tensor) -> dict:
    """Cache -> perplexity of tokens [n, T] in transformers; None: of float32."""
    perplexities = {None: evaluate.perplexity(model, tokens)}
    for cache in CACHES if has_blocks(model.config) else ():
        with quantized(model, cache, "rotated"):
            perplexities[cache] = evaluate.perplexity(model, tokens)
    return perplexities


def check_shape(out: str, checkpoint: str, engine: llama_cpp.Llama, config) -> None:
    """Print llama.cpp's kv heads and cache. Raises UserError unless its sizes are those of config.json."""
    architecture = engine.metadata["general.architecture"]
    kv_heads = int(engine.metadata[f"{architecture}.attention.head_count_kv"])
    expected_kv_heads = geometry(config).kv_heads
    if kv_heads != expected_kv_heads:
        raise UserError(f"{out}: expected head_count_kv {expected_kv_heads} as in {checkpoint}, "
                        f"found {kv_heads}")
    if engine.n_vocab() != config.vocab_size:
        raise UserError(f"{out}: expected a vocabulary of {config.vocab_size} as in {checkpoint}, "
                        f"found {engine.n_vocab()}")
    # layers with a sliding window have a cache of their own
    caches = re.findall(r"size = +([\d.]+) MiB \( *(\d+) cells", "\n".join(text for _, text in log))
    mib, cells = sum(float(size) for size, _ in caches), max(int(cells) for _, cells in caches)
    print(f"{out}: head_count_kv {kv_heads} of {config.num_attention_heads} heads; "
          f"KV cache {mib:.2f} MiB for {cells} tokens in float32")


def compare(
    engine: llama_cpp.Llama,
    text: str,
    prompt: list[int],
    expected: tuple[list[int], np.ndarray],  # of transformers: tokens and logits, as greedy() returns them
) -> tuple[int, bool]:
    """Print how one prompt compares. Returns its equal tokens, and whether it is tokenized alike."""
    expected_tokens, expected_logits = expected
    tokens, logits = greedy(llama_cpp_step(engine), prompt, len(expected_tokens))
    equal = len(os.path.commonprefix([expected_tokens, tokens]))
    shared = len(prompt) + equal  # tokens that both have read
    difference = np.abs(expected_logits[:shared] - logits[:shared]).max()
    second, first = np.partition(expected_logits[len(prompt) - 1:shared], -2)[:, -2:].T
    alike = engine.tokenize(text.encode(), special=True) == prompt
    print(f"{equal} of {len(expected_tokens)} tokens equal, logits within {difference:.1e}, "
          f"smallest lead {(first - second).min():.1e}, prompt of {len(prompt)} tokens, "
          f"tokenized {'alike' if alike else 'differently'}: {text!r}", flush=True)
    return equal, alike


def print_perplexities(args, context: int, tokens: torch.Tensor, expected: dict) -> None:
    """Print llama.cpp's perplexity of tokens [n, T] with each cache beside that of transformers."""
    print(f"perplexity of {tokens.numel()} tokens of {args.text}:")
    for cache, perplexity in expected.items():
        options = {}
        if cache:
            options = {"flash_attn": True, "type_k": FORMATS[cache.keys], "type_v": FORMATS[cache.values]}
        engine = load_engine(args.out, context, **options)
        print(f"  cache {cache or 'float32'}: {engine_perplexity(engine, tokens):.3f} in llama.cpp, "
              f"{perplexity:.3f} in transformers", flush=True)
        engine.close()


@torch.inference_mode()
def main() -> None:
    args = parse()
    config, texts, converted = load_config(args.checkpoint), read_prompts(args.prompts), args.out
    if os.path.exists(args.out):
        print(f"{args.out} already exists: compared as it is")
    else:
        converted += ".tmp"
        write_gguf(args.checkpoint, converted, args.outtype, args.pre)

    tokenizer, model = load_tokenizer(args.checkpoint), load_model(args.checkpoint)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    bar = Progress(prompts, desc="transformers", unit="prompt", leave=False)
    expected = [greedy(transformers_step(model), prompt, args.tokens) for prompt in bar]
    if args.text:
        text_tokens, _ = load_tokens(args.text, tokenizer, args.sequences, TEXT_LENGTH, EVALUATION)
        expected_perplexities = simulated_perplexities(model, text_tokens)
    del model  # a large model need not be in memory twice

    context = max(max(map(len, prompts)) + args.tokens, TEXT_LENGTH if args.text else 0)
    engine = load_engine(converted, context)
    check_shape(args.out, args.checkpoint, engine, config)
    os.replace(converted, args.out)

    comparisons = [compare(engine, *inputs) for inputs in zip(texts, prompts, expected, strict=True)]
    equal, alike = zip(*comparisons, strict=True)
    total = args.tokens * len(prompts)
    result = (f"{equal.count(args.tokens)} of {len(prompts)} prompts, "
              f"{sum(equal)} of {total} tokens equal to transformers; "
              f"{sum(alike)} of {len(prompts)} prompts tokenized alike; "
              f"{os.path.getsize(args.out) / 2**20:.1f} MiB")
    if engine.metadata["general.file_type"] == ALL_F32 and sum(equal) < total or not all(alike):
        raise UserError(f"{args.out}: expected the tokens of transformers, found {result}")
    engine.close()
    if args.text:
        print_perplexities(args, context, text_tokens, expected_perplexities)
    print(f"gguf: {result}")


if __name__ == "__main__":
    run_stage(main)
