"""Text for calibration and perplexity: a source becomes a [sequences, length] matrix of token ids."""

import gzip
import json
import os

import torch
from tqdm import tqdm

from common.cli import UserError
from common.models import DEMO, DEMO_HOME

C4 = "allenai/c4"
C4_FILES = {"train": "en/c4-train.00000-of-01024.json.gz", "heldout": "en/c4-validation.00000-of-00008.json.gz"}


def load_tokens(source: str, tokenizer, sequences: int, length: int, split: str = "train") -> tuple[torch.Tensor, str]:
    """[sequences, length] int64 token ids, and one line that says what was read and how it was cut.

    source: "c4" (streamed from the hub), "demo", or a .txt, .jsonl, .json or .json.gz file with a column "text". split: "train" or
    "heldout", which c4 and demo keep apart; a file is one and the same.
    As published: the first `sequences` documents of at least `length` tokens, each cut to it. Where a source has
    fewer of those, all its documents in order are packed end to end (end-of-sequence between) and cut into pieces.
    Raises UserError when even so there are too few tokens.
    """
    if source == DEMO:
        source = os.path.join(DEMO_HOME, "text", f"{'train' if split == 'train' else 'heldout'}.txt")
    whole, packed, documents = [], [], 0
    with tqdm(total=sequences, desc="tokenizing", unit="seq", leave=False) as bar:
        for text in _documents(source, split):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            documents += 1
            if len(ids) >= length:
                whole.append(ids[:length])
                bar.update()
                if len(whole) == sequences:
                    return torch.tensor(whole), f"{source}: first {sequences} documents of at least {length} tokens"
            if len(packed) < sequences * length:
                packed += [*ids, tokenizer.eos_token_id]
    if len(packed) < sequences * length:
        raise UserError(f"{source}: expected {sequences} x {length} = {sequences * length} tokens, found {len(packed)}")
    tokens = torch.tensor(packed[: sequences * length]).view(sequences, length)
    return tokens, (f"{source}: packed ({len(whole)} of {documents} documents have {length} tokens, "
                    f"{sequences} were asked for)")


def _documents(source: str, split: str):
    """Yield the documents of a source one by one; a .txt file is one document."""
    if source == "c4":
        yield from _c4(C4_FILES[split])
        return
    if not os.path.exists(source):
        raise UserError(f"text {source}: not found; expected c4, demo, or a .txt, .jsonl, .json or .json.gz file")
    if source.endswith(".txt"):
        with open(source, encoding="utf-8") as file:
            yield file.read()
        return
    if not source.endswith((".jsonl", ".json", ".json.gz")):
        raise UserError(f"text {source}: expected c4, demo, or a .txt, .jsonl, .json or .json.gz file")
    with (gzip.open if source.endswith(".gz") else open)(source, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)["text"]
            except json.JSONDecodeError as error:
                raise UserError(f"{source} line {number}: not JSON: {error.msg} at column {error.colno}") from error
            except (KeyError, TypeError) as error:
                raise UserError(f"{source} line {number}: column 'text' is missing") from error


def _c4(file: str):
    import datasets  # slow to import, and not needed with local files

    try:
        for row in datasets.load_dataset(C4, data_files=file, split="train", streaming=True):
            yield row["text"]
    except Exception as error:  # the hub client raises a different class for each way of not being reached
        raise UserError(f"cannot stream {C4} from the hub ({type(error).__name__}); give --text a local file") from error
