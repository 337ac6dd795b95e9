"""Retrieval from long text: pass keys hidden in it, recalled by a source and by what was merged from it.

    python -m bench.retrieval --source DIR --models merged=RUN/merged trained=RUN/gqa --text heldout.txt
    python -m bench.retrieval --source DIR --models ... --text heldout.txt --lengths 512 1024 --samples 3

Somewhere in a text is a line, "The red pass key is 48213."; the text ends with "The red pass key is". A
key is recalled if every token of the number is the most likely one, so that greedy decoding would write it.
Each length is tried at ten depths, with that key alone and with seven of other colours in between. Every
model reads the same texts. Writes OUT/retrieval.md, the share recalled by length; the last line is JSON, with
the share by depth, too.
"""

import json
import os
import random
import statistics

import torch

from bench.machine import machine, named_directories
from common.data.documents import EVALUATION
from common.data.text import load_tokens
from common.models.load import load_config, load_model, load_tokenizer, pick_device
from common.reporting.tables import markdown_table
from common.run.errors import UserError, run_stage
from common.run.files import write_text
from common.run.flags import Parser, positive
from common.run.progress import Progress

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "brown", "purple")
DEPTHS = tuple((2 * tenth + 1) / 20 for tenth in range(10))  # share of the text before the key asked for
KEYS = 1, len(COLOURS)  # hidden in a text
SHORTEST = 512  # tokens; lengths double from it to the model's positions


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--source", required=True, metavar="DIR", help="the model before merging")
    flags.add_argument("--models", nargs="+", required=True, metavar="NAME=DIR", help="merged from it")
    flags.add_argument("--text", required=True, help="to hide keys in, as --text of 01_calibrate.py")
    flags.add_argument("--lengths", type=positive, nargs="+", metavar="N",
                       help=f"tokens (default: {SHORTEST}, {2 * SHORTEST}, ... up to the positions)")
    flags.add_argument("--samples", type=positive, default=1, help="texts for each length and depth")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--out", default="runs/retrieval")
    return flags.parse_args()


def hide(filler: list[int], tokenizer, length: int, depth: float, keys: int, draw) -> tuple[list[int], int]:
    """A text of `length` tokens that ends with the number asked for, and how many tokens that number has.

    filler: token ids of as long a text; depth: share of it before the key asked for, one of DEPTHS; the other
    keys - 1 are at others of them. draw: a random.Random. Raises UserError if there is no room.
    """
    numbers, colours = draw.sample(range(10000, 100000), keys), draw.sample(COLOURS, keys)
    depths = [depth, *draw.sample([other for other in DEPTHS if other != depth], keys - 1)]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    lines = [ids(f"\nThe {colour} pass key is {number}.\n")
             for colour, number in zip(colours, numbers, strict=True)]
    question, answer = ids(f"\nThe {colours[0]} pass key is"), ids(f" {numbers[0]}")
    room = length - sum(map(len, [*lines, question, answer]))
    if room < len(DEPTHS):
        raise UserError(f"--lengths {length}: expected room for {keys} keys and text, found too few tokens")
    row, begin = [], 0
    for end, line in sorted(zip((round(share * room) for share in depths), lines, strict=True)):
        row += filler[begin:end] + line
        begin = end
    return row + filler[begin:room] + question + answer, len(answer)


@torch.no_grad()
def recalls(model, row: list[int], answer: int) -> bool:
    """Whether each of the last `answer` tokens of the row is the most likely one after those before it."""
    ids = torch.tensor([row], device=model.device)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, -answer - 1 : -1]
    return torch.equal(model.lm_head(hidden).argmax(-1), ids[0, -answer:])


def measure(path: str, dtype: torch.dtype, texts: dict) -> dict:
    """{(keys, length, depth): share of its texts whose key the checkpoint recalls}.

    texts: {(keys, length, depth): [(row, answer), ...]}.
    """
    model = load_model(path, dtype, pick_device("auto"))
    bar = Progress(texts.items(), desc=path, unit="place", leave=False)
    return {place: statistics.mean(recalls(model, *text) for text in samples) for place, samples in bar}


def by_length(shares: dict, keys: int, length: int) -> float:
    """The mean share over all depths."""
    return statistics.mean(shares[keys, length, depth] for depth in DEPTHS)


def table(recalled: dict[str, dict], lengths: list[int]) -> str:
    """Percent recalled by length, a row for each model and number of keys, as Markdown."""
    rows = [[f"{name}, {keys} key{'s' * (keys > 1)}",
             *(f"{100 * by_length(shares, keys, length):.0f}" for length in lengths)]
            for keys in KEYS for name, shares in recalled.items()]
    return markdown_table(["% recalled", *(f"{length} tokens" for length in lengths)], rows) + "\n"


def main():
    args = parse()
    directories = {"source": args.source} | named_directories(args.models)
    tokenizer, positions = load_tokenizer(args.source), load_config(args.source).max_position_embeddings
    doublings = (SHORTEST << number for number in range(positions.bit_length()))
    lengths = args.lengths or [length for length in doublings if length <= positions]
    if not lengths or max(lengths) > positions:
        raise UserError(f"--lengths: expected lengths of at most the model's {positions} positions, "
                        f"found {max(lengths, default=SHORTEST)}")
    fillers, description = load_tokens(args.text, tokenizer, args.samples, max(lengths), EVALUATION)
    print(description, flush=True)
    draw = random.Random(0)
    texts = {(keys, length, depth): [hide(filler, tokenizer, length, depth, keys, draw)
                                     for filler in fillers.tolist()]
             for keys in KEYS for length in lengths for depth in DEPTHS}
    dtype = getattr(torch, args.dtype)
    recalled = {name: measure(path, dtype, texts) for name, path in directories.items()}
    text = table(recalled, lengths)
    write_text(os.path.join(args.out, "retrieval.md"), text)
    print(text)
    by_depth = {f"{name}, {keys}": {length: [shares[keys, length, depth] for depth in DEPTHS]
                                    for length in lengths}
                for name, shares in recalled.items() for keys in KEYS}
    print(json.dumps({"recalled": by_depth, "settings": vars(args), "machine": machine(pick_device("auto"))}))


if __name__ == "__main__":
    run_stage(main)
