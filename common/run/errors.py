"""How a stage ends: complete, with an error on one line, or interrupted."""

import contextlib
import os
import sys
import time

import torch
from safetensors import SafetensorError

from common.run.progress import Progress

PATIENCE = 10  # seconds in which torchrun ends a rank because another one left
LESS_MEMORY = ("Lower --batch, --tokens-per-microbatch or --loss-chunk, or pass --recompute, --layerwise or "
               "--device cpu, where the stage has it")
cleanup = contextlib.ExitStack()  # closed by run_stage when the stage ends: releases its lock


class UserError(Exception):
    """An error the user can fix: reported on one line (what, where, expected, found), exit code 2."""


class Complete(Exception):
    """What a stage would make is there, made by the same command from the same inputs: exit code 0."""


def printable(text: str) -> str:
    """Text with escapes in place of characters that a terminal would act on; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def explanation(error: BaseException) -> str | None:
    """What to print for an error that is no fault of the program; None for one that is, or for an exit."""
    text = str(error)
    if isinstance(error, (UserError, OSError, MemoryError, SafetensorError)):  # the last: of a full disk
        return text
    if isinstance(error, torch.OutOfMemoryError):  # of a GPU
        return f"{text.partition(' GPU ')[0]} {LESS_MEMORY}"  # the rest is advice on the allocator
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text:
        return f"out of memory: {text.partition('DefaultCPUAllocator: ')[2]}. {LESS_MEMORY}"
    if type(error).__name__ == "PanicException":  # of a library in Rust, as of tokenizers
        return f"a library failed on this model or text: {text}"
    return None


def run_stage(main) -> None:
    """Call main() and exit with the code that it returns, or 0.

    A UserError, an OSError or a lack of memory is printed on one line, with exit code 2; Ctrl-C exits with
    130. Under torchrun the first rank of a node speaks at once. The others wait: torchrun ends them as soon
    as one leaves, so that what all of them met is printed once, and what follows from another's end is not.
    """
    first, rank = os.environ.get("LOCAL_RANK", "0") == "0", ""
    try:
        code = main() or 0
    except Complete as complete:
        print(f"found   {complete}")
        code = 0
    except KeyboardInterrupt:
        if first:
            Progress.write("interrupted: unfinished output was removed, checkpoints are kept", sys.stderr)
        code = 130
    except BaseException as error:
        message = explanation(error)
        if "LOCAL_RANK" in os.environ and not (first and message) and not isinstance(error, SystemExit):
            time.sleep(PATIENCE)
            rank = "" if first else f"rank {os.environ['RANK']}: "  # nobody has ended it: it is alone
        if message is None:
            raise
        Progress.write(f"error: {rank}{printable(' '.join(message.split()))}", sys.stderr)
        code = 2
    finally:
        cleanup.close()
    sys.stdout.flush()
    if "RANK" in os.environ:
        # Skip interpreter shutdown: a process-group thread that needs the interpreter during it aborts the
        # process, and torchrun reports a failed run.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
