"""Text for calibration and perplexity: a source is tokenized into a [sequences, length] matrix of ids."""

import os
from collections.abc import Iterator

import torch
from tqdm import tqdm

from common.cli import UserError
from common.data.jsonl import read_objects, text_column
from common.models import DEMO, DEMO_HOME

C4 = "allenai/c4"
C4_FILES = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "heldout": "en/c4-validation.00000-of-00008.json.gz",
}
LINES_OF_JSON = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
EXPECTED = "c4, demo, or a .txt, .jsonl, .json or .json.gz file"


def sequence_length(requested: int | None, default: int, positions: int, least: int = 1) -> int:
    """Tokens per sequence of text: the requested number, or `default` limited to the model's positions.

    least: 2 where next tokens are predicted. Raises UserError for a request outside least..positions.
    """
    if requested is None:
        return min(default, positions)
    if not least <= requested <= positions:
        raise UserError(f"--length: expected {least} to {positions} tokens (the model's "
                        f"max_position_embeddings), found {requested}")
    return requested


def load_tokens(
    source: str,
    tokenizer,
    sequences: int,
    length: int,
    split: str = "train",
) -> tuple[torch.Tensor, str]:
    """[sequences, length] int64 token ids, and a one-line description of what was read.

    source: "c4" (streamed from the hub), "demo", a .txt file, or a .jsonl, .json or .json.gz file with a
    column "text". split: "train" or "heldout", which differ for c4 and demo; a file gives the same text for
    both.

    As published: the first `sequences` documents of at least `length` tokens, each truncated to it. If there
    are too few, documents are packed instead: concatenated in order, separated by end-of-sequence, and cut
    into sequences. Raises UserError if that gives too few tokens, and for text that cannot be read.
    """
    if source == DEMO:
        source = os.path.join(DEMO_HOME, "text", f"{split}.txt")
    whole, packed, documents = [], [], 0
    with tqdm(total=sequences, desc="tokenizing", unit="seq", leave=False) as bar:
        for text in _documents(source, split):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            documents += 1
            if len(ids) >= length:
                whole.append(ids[:length])
                bar.update()
                if len(whole) == sequences:
                    description = f"{source}: first {sequences} documents of at least {length} tokens"
                    return torch.tensor(whole), description
            if len(packed) < sequences * length:
                packed += [*ids, tokenizer.eos_token_id]
    needed = sequences * length
    if len(packed) < needed:
        raise UserError(f"{source}: expected {sequences} x {length} = {needed} tokens, found {len(packed)}")
    description = (f"{source}: packed ({len(whole)} of {documents} documents have {length} tokens, "
                   f"{sequences} needed)")
    return torch.tensor(packed[:needed]).view(sequences, length), description


def _documents(source: str, split: str) -> Iterator[str]:
    """Yield the documents of a source; a .txt file is one document."""
    if source == "c4":
        yield from _c4(C4_FILES[split])
    elif not os.path.exists(source):
        raise UserError(f"text {source}: not found; expected {EXPECTED}")
    elif source.endswith(".txt"):
        yield _plain(source)
    elif source.endswith(LINES_OF_JSON):
        for number, row in read_objects(source):
            try:
                yield text_column(row, "text")
            except ValueError as error:
                raise UserError(f"{source} line {number}: {error}") from error
    else:
        raise UserError(f"text {source}: expected {EXPECTED}")


def _plain(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"text {path}: not UTF-8: {error.reason} at byte {error.start + 1}") from error


def _c4(file: str) -> Iterator[str]:
    import datasets  # slow to import, and not needed for local files

    try:
        for row in datasets.load_dataset(C4, data_files=file, split="train", streaming=True):
            yield row["text"]
    except Exception as error:  # the exception class depends on how the hub fails
        raise UserError(f"cannot stream {C4} from the hub ({type(error).__name__}); "
                        "pass a local file to --text") from error
