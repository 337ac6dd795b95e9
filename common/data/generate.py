"""Text and chats from the source model itself: a conversion then needs no data set.

`generated` is text from the begin-of-sequence token on; `generated:FILE` continues the first 32 to 64 tokens
of FILE's documents after it. Held-out text has another seed, and continues FILE's held-out documents. For
chats, the model writes the user's turn and then the answer, in its tokenizer's template. It samples at
temperature 1 and excludes no token.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import operator
import os
import random

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from common.data.chat import apply_template, fixed_template, render
from common.data.rows import decoded
from common.data.text import (
    EVALUATION,
    GENERATED,
    HELDOUT,
    PARTS,
    TOKEN,
    TRAIN,
    TooShort,
    first_tokens,
    read_documents,
    read_token_rows,
    write_array,
)
from common.errors import UserError
from common.families import geometry
from common.files import read_json, sha256, write_json
from common.method.losses import product
from common.models import fingerprint, load_config, load_model, load_tokenizer
from common.progress import Progress

SEEDS = {TRAIN: 0, HELDOUT: 1}
SHORTEST, LONGEST = 32, 64  # tokens of a document that are continued
# On CPUs float32: in bfloat16 torch's attention of one query takes five times as long, products half as long.
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ROWS = {"cpu": 64, "cuda": 256}  # generated side by side; fewer if their cache would take more than
CACHE = {"cpu": 2**31, "cuda": 2**34}  # bytes
ADVICE = "--chat none generates no chats"  # where a chat template does not serve


class PreallocatedLayer(DynamicLayer):
    """A layer's cache in memory allocated once: transformers' copies all of it for every token."""

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity, self.length = capacity, 0

    def update(self, keys, values, *args, **kwargs):
        """keys, values [n, G, 1, d] of a token -> of all so far, [n, G, length, d]."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
            self.buffer = keys.new_empty(2, *keys.shape[:2], self.capacity, keys.shape[3])
        self.buffer[:, :, :, self.length] = torch.stack((keys, values))[:, :, :, 0]
        self.length += 1
        self.keys, self.values = self.buffer[:, :, :, : self.length]
        return self.keys, self.values


def text_row(begin: list[int]):
    """A coroutine that is sent sampled tokens and yields those of a text, which begins with `begin`."""
    sampled = None
    for token in begin:
        sampled = yield token
    while True:
        sampled = yield sampled


def chat_row(opening: list[int], endings: list, end: int):
    """The same for chats of two turns, in the form that chat_form gives; tokens of answers as ~token.

    A turn ends with its marker, or with the end-of-sequence token, in whose place comes all that ends it.
    """
    sampled = None
    while True:
        for token in opening:
            sampled = yield token
        for stored, (marker, rest, whole) in zip((operator.pos, operator.invert), endings, strict=True):
            turn = []
            while sampled != end or marker == [end]:
                turn.append(sampled)
                sampled = yield stored(sampled)
                if turn[-len(marker) :] == marker:
                    whole = rest
                    break
            for token in whole:
                sampled = yield stored(token)


def chat_form(tokenizer) -> tuple[list[int], list[tuple]]:
    """Tokens before a user's turn, and after that turn and after the answer: (marker, rest, whole).

    The marker is the whole without the blanks around it, and without a thought that the generation prompt
    opens; the rest follows it. Raises UserError for a tokenizer without a template, or whose template has no
    user's turn or no generation prompt.
    """
    template, name = fixed_template(tokenizer, GENERATED), tokenizer.name_or_path
    words = ((letter * length for length in itertools.count(8)) for letter in "QA")
    asked, answered = (next(word for word in longer if word not in template.text) for longer in words)
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    try:
        prompt, answer = render(chat, [1], template)
        unprompted = apply_template(chat[:1], template, prompting=False)
    except ValueError as error:
        raise UserError(f"{name}: {error}; {ADVICE}") from error
    opening, turn, between = prompt.partition(asked)
    header, _, closing = answer.partition(answered)
    if not turn or not opening.strip() or not between.strip() or prompt == unprompted and header.strip():
        missing = "generation prompt" if turn and opening.strip() else "marked user's turn"
        raise UserError(f"{name}: expected a chat template with a {missing}, found none; {ADVICE}")
    opening, prompted, closing = (text.rstrip(" ")  # the model writes " word"
                                  for text in (opening, between + template.thought, closing))
    texts = [(before.strip(), whole[len(before.rstrip()) :], whole)
             for before, whole in ((between, prompted), (closing, closing))]
    ids = functools.partial(tokenizer, add_special_tokens=False)
    return ids(opening)["input_ids"], [tuple(ids(list(parts))["input_ids"]) for parts in texts]


@torch.no_grad()
def sample(model, rows: list, length: int, generator: torch.Generator, bar=None) -> np.ndarray:
    """[n, length] int32: what the rows, coroutines, yield when they are sent tokens from the model's softmax.

    Raises UserError for logits that are not finite.
    """
    cache, tokens = DynamicCache(config=model.config), np.empty((len(rows), length), TOKEN)
    cache.layers = [layer if layer.is_sliding else PreallocatedLayer(length) for layer in cache.layers]
    sampled = [None] * len(rows)
    for position in range(length):
        if position:
            ids = torch.from_numpy(decoded(tokens[:, position - 1 : position])).to(model.device)
            hidden = model.model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
            logits = product(hidden[:, -1], model.lm_head.weight.T)  # [n, V] float32
            if not logits.sum().isfinite():
                raise UserError(f"{model.name_or_path}: cannot generate: found NaN or Inf in its logits")
            sampled = drawn(logits, generator).tolist()
        tokens[:, position] = [row.send(token) for row, token in zip(rows, sampled, strict=True)]
        if bar is not None:
            bar.update(len(rows))
    return tokens


def drawn(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token of each row's softmax, [n, V] -> [n]: where its sums pass a random number.

    torch.multinomial draws a number for every token of the vocabulary: on a CPU, a sixth of the time.
    """
    sums = logits.softmax(-1).double().cumsum(-1)
    numbers = torch.rand(len(sums), 1, dtype=sums.dtype, device=sums.device, generator=generator)
    return torch.searchsorted(sums, numbers * sums[:, -1:], right=True)[:, 0]


def generated(source: str, context, sequences: int, length: int, split=TRAIN, chats=False) -> np.ndarray:
    """[sequences, length] int32, as `sample` returns them, generated unless RUN/tokens/ has them.

    context: a DataContext of common/data/sources.py. A text begins with the token that it is sampled after:
    begin-of-sequence or, without one, end-of-sequence. The tokens are written there in pieces, each with a
    seed of its own and a record: a killed run goes on with the next piece, and the number of ranks, which
    share them, changes nothing. Raises UserError for a model or a template that cannot generate, and for a
    piece that its record does not describe.
    """
    split = HELDOUT if split == EVALUATION else split
    config, tokenizer = load_config(context.model), load_tokenizer(context.model)
    device, shape, end = torch.device(context.device).type, geometry(config), tokenizer.eos_token_id
    start = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    form, file = chat_form(tokenizer) if chats else None, source.partition(":")[2]
    if form and file:
        raise UserError(f"--chat {source}: expected generated, which continues no file, or a file of chats")
    begins = beginnings(file, tokenizer, split, sequences) if file else [[]]
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPES[device].itemsize * length
    at_once = max(1, min(ROWS[device], CACHE[device] // cached))
    record = {"source": fingerprint(context.model), "chats": form, "continued": file,
              "sha256": sha256(file) if os.path.isfile(file) else None, "seed": SEEDS[split],
              "temperature": 1, "length": length, "rows_at_once": at_once, "device": device}
    record |= {} if chats else {"begin": start}
    key = hashlib.sha256(json.dumps(record).encode()).hexdigest()[:12]
    directory = os.path.join(context.run, "tokens", f"generated-{key}")
    pieces = [range(sequences)[first : first + at_once] for first in range(0, sequences, at_once)]
    paths = {piece: os.path.join(directory, f"{piece.start}-{piece.stop}.npy") for piece in pieces}
    rank, world = (context.ranks.rank, context.ranks.world) if context.ranks else (0, 1)
    present = {piece for piece in pieces if os.path.lexists(paths[piece])}
    for piece in present:  # before the others are generated
        read_piece(paths[piece], record, len(piece))
    missing = [piece for piece in pieces[rank::world] if piece not in present]
    if missing and context.layerwise:
        raise UserError(f"{source}: expected no --layerwise, as the model must be in memory to generate")
    with context.ranks.waiting() if context.ranks else contextlib.nullcontext():
        model = missing and load_model(context.model, DTYPES[device], context.device)
        total = sum(map(len, missing)) * length
        with Progress(total=total, desc="generating", unit="tok", unit_scale=True, leave=False) as bar:
            for piece in missing:
                draw, writers = random.Random(f"{key} {piece}"), []
                for row in piece:
                    begin = begins[row % len(begins)][: draw.randint(SHORTEST, LONGEST)]
                    writers.append(chat_row(*form, end) if form else text_row([start, *begin]))
                generator = torch.Generator(model.device).manual_seed(draw.getrandbits(63))
                write_piece(paths[piece], record, sample(model, writers, length, generator, bar))
    if rank == 0:
        verb = "wrote" if missing else "reads"
        print(f"{verb}   {directory}: {source}, {sequences} x {length} tokens", flush=True)
    return np.concatenate([read_piece(path, record, len(piece)) for piece, path in paths.items()])


def write_piece(path: str, record: dict, tokens: np.ndarray) -> None:
    """Write a .npy file of tokens, and before it X.json: what made them, their shape and the file's sha256.

    A process that is killed in between leaves no tokens, and they are generated again.
    """
    content = io.BytesIO()
    np.save(content, tokens)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    write_json(record_of(path), record | {"shape": list(tokens.shape), "tokens_sha256": digest})
    write_array(path, tokens)


def read_piece(path: str, record: dict, rows: int) -> np.ndarray:
    """[rows, length] int32: the tokens that write_piece wrote. Raises UserError for any others."""
    if not os.path.isfile(path):
        raise UserError(f"{path}: expected generated tokens, found no file")
    described = record | {"shape": [rows, record["length"]], "tokens_sha256": sha256(path)}
    if read_json(record_of(path)) != json.loads(json.dumps(described)):
        raise UserError(f"{path}: expected the generated tokens that {os.path.basename(record_of(path))} "
                        "describes, found others; remove the file")
    return read_token_rows(path)


def record_of(path: str) -> str:
    """Where the record of a piece is."""
    return f"{os.path.splitext(path)[0]}.json"


def beginnings(source: str, tokenizer, split: str, count: int) -> list[list[int]]:
    """The first LONGEST tokens of the first `count` documents that have as many, of a part of a source.

    Of a .txt file each line is a document. Raises TooShort if there is none.
    """
    documents = map(io.StringIO, read_documents(source, split))
    tokenized = (first_tokens(document, tokenizer, LONGEST) for document in documents)
    chosen = list(itertools.islice((ids for ids in tokenized if len(ids) == LONGEST), count))
    if not chosen:
        raise TooShort(f"text {GENERATED}:{source}: expected a document of {LONGEST} tokens{PARTS[split]}, "
                       "found none")
    return chosen
