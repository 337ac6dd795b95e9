"""llama.cpp's own converter to GGUF, whose refusals become one line each. See gguf.sh.

    python -m pipelines.gguf_convert CHECKPOINT --pre NAME    # exits with 2 if it refuses config or tokenizer

It needs llama.cpp's source, not a build.
"""

import common.run.openmp  # noqa: F401 - before torch
import logging
import os
import re
import sys
import tempfile
import traceback

from common.run.errors import UserError, run_stage
from common.run.files import read_text
from common.run.flags import Parser, suggest


def parse():
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="checkpoint directory")
    parser.add_argument("--pre", help="llama.cpp's pre-tokenizer for a tokenizer unknown to its converter")
    return parser.parse_args()


def convert(checkpoint: str, out: str, outtype: str, pre: str | None, *flags: str) -> None:
    """Run the converter. It knows tokenizers by a hash of their output; `pre` is for others."""
    logging.basicConfig(level=logging.ERROR)  # the converter would set INFO
    import convert_hf_to_gguf
    from conversion import TextModel

    recognise = TextModel.get_vocab_base_pre

    def recognise_or_assume(model, tokenizer) -> str:
        try:
            return recognise(model, tokenizer)
        except NotImplementedError:
            if pre is None:
                raise UserError(
                    f"{checkpoint}: llama.cpp's converter does not know this tokenizer; PRE=NAME assumes "
                    "one of its pre-tokenizers: gpt-2 suits GPT-2's byte-level BPE, superbpe the demo model's"
                ) from None
            check_pre(pre, os.path.dirname(convert_hf_to_gguf.__file__))
            print(f"{checkpoint}: the converter does not know this tokenizer; assumed pre-tokenizer {pre}")
            return pre

    TextModel.get_vocab_base_pre = recognise_or_assume
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", outtype, *flags]
    try:
        convert_hf_to_gguf.main()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the converter refuses by exceptions of any class
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion's line
        refusal = f"llama.cpp's converter refuses it: {type(error).__name__}: {reason}"
        raise UserError(f"{checkpoint}: {refusal}") from error
    finally:
        TextModel.get_vocab_base_pre = recognise


def check_pre(pre: str, source: str) -> None:
    """Raise UserError unless llama.cpp, whose source is there, has a pre-tokenizer of this name."""
    code = read_text(os.path.join(source, "src", "llama-vocab.cpp"))
    known = sorted({*re.findall(r'tokenizer_pre == "([^"]+)"', code)})
    if pre not in known:
        raise UserError(f"PRE: expected a pre-tokenizer of llama.cpp, found {pre}{suggest(pre, known)}")


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as directory:
        convert(args.checkpoint, os.path.join(directory, "vocabulary.gguf"), "f32", args.pre, "--vocab-only")
    print(f"{args.checkpoint}: llama.cpp's converter takes its config and tokenizer")


if __name__ == "__main__":
    run_stage(main)
