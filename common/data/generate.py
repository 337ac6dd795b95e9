"""Text and chats from the source model itself: a conversion then needs no data set.

`generated` is text from the begin-of-sequence token on; `generated:FILE` continues the first 32 to 64 tokens
of FILE's documents after it. Held-out text has another seed, and continues FILE's held-out documents. For
chats, the model writes the user's turn and then the answer, in its tokenizer's template. It samples at
temperature 1 and excludes no token.
"""

import functools
import gc
import hashlib
import itertools
import json
import math
import os
import random
from dataclasses import dataclass

import numpy as np
import torch

from common.data.chat import apply_template, fixed_template, render
from common.data.decoding import SPAN, Decoder
from common.data.documents import EVALUATION, GENERATED, HELDOUT, PARTS, TRAIN, parse_source
from common.data.text import TOKEN, TOKENS, TooShort, token_ids
from common.models.families import geometry
from common.models.load import end_tokens, fingerprint, load_config, load_model, load_tokenizer
from common.models.weights import open_checkpoint, shape_of
from common.run.artifact import find_part, write_directory, write_record
from common.run.errors import UserError
from common.run.files import read_json
from common.run.progress import Progress

SEEDS = {TRAIN: 0, HELDOUT: 1}
SHORTEST, LONGEST = 32, 64  # tokens of a document that are continued
# On CPUs float32: in bfloat16 torch's attention of one query takes five times as long, products half as long.
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
CPU_ROWS, CPU_CACHE = 64, 2**31  # on a CPU: rows side by side, bytes of their keys and values
GPU_ROWS, LOGIT_BYTES = 12, 20  # on a GPU: at most 2^12 rows; bytes of a row for each token of the vocabulary
ADVICE = "--chat none generates no chats"  # where a chat template does not serve
SPEAKS = -1  # in place of a state's token: the model says what it has drawn


@dataclass(frozen=True)
class Script:
    """What a row says, as an automaton whose states each write one token.

    A state writes its own token and goes to the next one; a state that SPEAKS writes what the model draws and
    stays until the model ends its turn. A chat, of which ( ) are states that SPEAK:

        opening -> (user's turn) --marker----> rest ----+-> (answer) --marker or kept--> rest ---+-> opening
                        |                               |       |                                |
                        +-------end token--> whole -----+       +-----end token--> whole --------+

    A marker is written as it is drawn; an end token is not: the whole end of the turn takes its place.
    """

    tokens: list[int]  # of the states, or SPEAKS
    answered: list[bool]  # whether a state is part of an answer
    next: list[int]  # the state after each; after one that SPEAKS itself
    markers: list[tuple[int, list[int], int]]  # speaking state, tokens that end its turn, state after them
    ends: list[tuple[int, int]]  # speaking state, end token in whose place the next states' tokens come


TEXT = Script([SPEAKS], [False], [0], [], [])


def chat_script(opening: list[int], endings: list, end: int, others=()) -> Script:
    """Chats of two turns, in the form that chat_form gives, one after another.

    An answer keeps an end token that its template does not write, unless it is `end`: models end calls of
    tools so. end: the end-of-sequence token. others: the other end tokens.
    """
    tokens, answered, markers, ends = [*opening], [False] * len(opening), [], []
    following = list(range(1, len(opening) + 1))
    for is_answer, (marker, rest, whole) in zip((False, True), endings, strict=True):
        turn = len(tokens)
        tokens += [SPEAKS, *whole, *rest]
        answered += [is_answer] * (len(tokens) - turn)
        following += [turn, *range(turn + 2, len(tokens) + 1)]
        if whole:
            following[turn + len(whole)] = len(tokens)  # past the rest, which the whole has
        kept = [token for token in others if is_answer and token not in whole]
        markers += [(turn, last, turn + 1 + len(whole)) for last in (marker, *([token] for token in kept))]
        ends += [(turn, token) for token in (end, *others) if token not in kept and [token] != marker]
    cycle = len(tokens)  # the last state goes on with the next chat
    return Script(tokens, answered, [state % cycle for state in following],
                  [(turn, marker, after % cycle) for turn, marker, after in markers], ends)


class Rows:
    """[n, length] tokens, written position by position: each row's beginning, then what the script says."""

    def __init__(self, script: Script, beginnings: list[list[int]], length: int, device="cpu"):
        tensor = functools.partial(torch.tensor, device=device)
        self.script, self.answered, self.next = map(tensor, (script.tokens, script.answered, script.next))
        self.ends = tensor(script.ends).view(len(script.ends), 2)
        self.markers = [(turn, tensor(marker), after) for turn, marker, after in script.markers if marker]
        self.tokens = torch.zeros(len(beginnings), length, dtype=torch.int64, device=device)
        self.of_answers = torch.zeros_like(self.tokens, dtype=torch.bool)
        self.beginning = tensor([len(beginning) for beginning in beginnings])
        for row, beginning in zip(self.tokens, beginnings, strict=True):
            row[: len(beginning)] = tensor(beginning[:length])
        self.state = torch.zeros_like(self.beginning)
        self.spoken = torch.zeros_like(self.beginning)  # tokens of the turn so far

    def write(self, position: int, drawn: torch.Tensor) -> torch.Tensor:
        """[n]: the tokens at a position, where the model has drawn these."""
        state, token = self.state, self.script[self.state]
        speaks = token == SPEAKS
        ended = (torch.stack((state, drawn), 1)[:, None] == self.ends).all(2).any(1)
        state = torch.where(ended, (state + 1) % len(self.script), state)
        tokens = torch.where(speaks & ~ended, drawn, self.script[state])
        tokens = torch.where(position < self.beginning, self.tokens[:, position], tokens)
        self.tokens[:, position], self.of_answers[:, position] = tokens, self.answered[state]
        self.spoken = torch.where(speaks & ~ended, self.spoken + 1, 0)
        self.state = self.next[state]
        for turn, marker, after in self.markers:
            if len(marker) <= position + 1:
                last = self.tokens[:, position + 1 - len(marker) : position + 1]
                over = (self.state == turn) & (self.spoken >= len(marker)) & (last == marker).all(1)
                self.state = torch.where(over, after, self.state)
                self.spoken = torch.where(over, 0, self.spoken)
        return tokens

    def numpy(self) -> np.ndarray:
        """[n, length] int32; tokens of answers as ~token."""
        return torch.where(self.of_answers, ~self.tokens, self.tokens).cpu().numpy().astype(TOKEN)


def chat_form(tokenizer) -> tuple[list[int], list[tuple]]:
    """Tokens before a user's turn, and after that turn and after the answer: (marker, rest, whole).

    The marker is the whole without the blanks around it, and without a thought that the generation prompt
    opens; the rest follows it. Raises UserError for a tokenizer without a template, or whose template has no
    user's turn or no generation prompt.
    """
    template, name = fixed_template(tokenizer, GENERATED), tokenizer.name_or_path
    question, reply = "QQQQQQQQ", "AAAAAAAA"  # words that no template writes itself
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    try:
        prompt, answer = render(chat, [1], template)
        unprompted = apply_template(chat[:1], template, prompting=False)
    except ValueError as error:
        raise UserError(f"{name}: {error}; {ADVICE}") from error
    opening, turn, between = prompt.partition(question)
    header, _, closing = answer.partition(reply)
    if not turn or not opening.strip() or not between.strip() or prompt == unprompted and header.strip():
        missing = "generation prompt" if turn and opening.strip() else "marked user's turn"
        raise UserError(f"{name}: expected a chat template with a {missing}, found none; {ADVICE}")
    opening, prompted, closing = (part.rstrip(" ")  # the model writes " word"
                                  for part in (opening, between + template.thought, closing))
    parts = [(before.strip(), whole[len(before.rstrip()) :], whole)
             for before, whole in ((between, prompted), (closing, closing))]
    ids = functools.partial(tokenizer, add_special_tokens=False)
    return ids(opening)["input_ids"], [tuple(ids(list(each))["input_ids"]) for each in parts]


def sample(decoder: Decoder, rows: Rows, generator: torch.Generator, bar=None) -> np.ndarray:
    """Rows.numpy() of what the model draws from its softmax, a random number of the generator a token.

    Raises UserError for logits that are not finite.
    """
    count, length = rows.tokens.shape
    options = {"dtype": torch.float64, "device": rows.tokens.device, "generator": generator}
    numbers, drawn = torch.rand(length, count, 1, **options), torch.zeros_like(rows.beginning)
    for position in range(length):
        tokens = rows.write(position, drawn)
        if position < length - 1:
            drawn = decoder.next(position, tokens, numbers[position])
        if (position + 1) % SPAN == 0 or position == length - 1:
            decoder.check()
            if bar is not None:
                bar.update(count * (position % SPAN + 1))
    return rows.numpy()


def rows_at_once(model: str, config, length: int, device: torch.device) -> int:
    """Rows generated side by side: on a GPU as many as half of the memory beside its weights holds, a power
    of two; on a CPU at most CPU_ROWS, with CPU_CACHE bytes of keys and values.
    """
    shape, size = geometry(config), DTYPES[device.type].itemsize
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * size * length
    if device.type == "cpu":
        return max(1, min(CPU_ROWS, CPU_CACHE // cached))
    weights = sum(math.prod(shape_of(tensor)) for tensor in open_checkpoint(model).values())
    memory = (torch.cuda.get_device_properties(device).total_memory - weights * size) / 2
    fitting = memory / (cached + LOGIT_BYTES * config.vocab_size)
    return 2 ** max(0, min(GPU_ROWS, math.floor(math.log2(max(1, fitting)))))


def generated(source: str, context, sequences: int, length: int, split=TRAIN, chats=False) -> np.ndarray:
    """[sequences, length] int32, as `sample` returns them, generated unless RUN/tokens/ has them.

    context: a DataContext of common/data/sources.py. A text begins with the token that it is sampled after:
    begin-of-sequence or, without one, end-of-sequence. The tokens are written there in pieces, each with a
    seed of its own and a record: a killed run goes on with the next piece, and the number of ranks, which
    share them, changes nothing. Raises UserError for a model or a template that cannot generate.
    """
    split = HELDOUT if split == EVALUATION else split
    tokenizer, file = load_tokenizer(context.model), source.partition(":")[2]
    if chats and file:
        raise UserError(f"--chat {source}: expected generated, which continues no file, or a file of chats")
    record, script = recorded_script(context, tokenizer, file, length, split, chats)
    begins = beginnings(file, tokenizer, split, sequences) if file else [[]]
    key, at_once = hashlib.sha256(json.dumps(record).encode()).hexdigest()[:12], record["rows_at_once"]
    directory = os.path.join(context.run, "tokens", f"generated-{key}")
    pieces = (range(sequences)[first : first + at_once] for first in range(0, sequences, at_once))
    paths = {piece: os.path.join(directory, f"{piece.start}-{piece.stop}") for piece in pieces}
    rank, world = (context.ranks.rank, context.ranks.world) if context.ranks else (0, 1)
    with context.writing_tokens(directory):
        own = itertools.islice(paths.items(), rank, None, world)
        missing = {piece: path for piece, path in own if find_part(path, record) is None}
        if missing and context.layerwise:
            raise UserError(f"{source}: expected no --layerwise, as the model must be in memory to generate")
        if missing:
            write_pieces(context, record, key, script, begins, missing)
    if rank == 0:
        verb = "wrote" if missing else "reads"
        print(f"{verb}   {directory}: {source}, {sequences} x {length} tokens", flush=True)
    return np.concatenate([np.load(os.path.join(path, TOKENS)) for path in paths.values()])


def recorded_script(context, tokenizer, file: str, length: int, split: str, chats: bool):
    """What decides about generated tokens, for their record, and the Script of their rows."""
    config, end, device = load_config(context.model), tokenizer.eos_token_id, torch.device(context.device)
    settings = read_json(os.path.join(context.model, "generation_config.json")) or {}
    listed = end_tokens(tokenizer, config.eos_token_id, settings.get("eos_token_id"))
    others = [token for token in listed if token != end]
    form = chat_form(tokenizer) if chats else None
    record = {"source": fingerprint(context.model), "chats": form, "continued": file,
              "sha256": parse_source(file).version(), "seed": SEEDS[split], "temperature": 1,
              "length": length, "rows_at_once": rows_at_once(context.model, config, length, device),
              "device": device.type}
    if not chats:
        return record | {"begin": end if tokenizer.bos_token_id is None else tokenizer.bos_token_id}, TEXT
    script = chat_script(*form, end, others)
    return record | ({} if script == chat_script(*form, end) else {"ends": others}), script


def write_pieces(context, record: dict, key: str, script: Script, begins: list[list[int]], paths: dict):
    """Generate pieces of rows and write them to their paths. key: the record's digest, for random numbers."""
    length, device = record["length"], torch.device(context.device)
    model, decoder = load_model(context.model, DTYPES[device.type], context.device), None
    total = sum(map(len, paths)) * length
    with Progress(total=total, desc="generating", unit="tok", unit_scale=True, leave=False) as bar:
        for piece, path in paths.items():
            draws = random.Random(f"{key} {piece}")
            starts = [begins[row % len(begins)][: draws.randint(SHORTEST, LONGEST)] for row in piece]
            starts = [[record["begin"], *start] if script is TEXT else [] for start in starts]
            if decoder is None or decoder.rows != len(piece):
                decoder = None  # its memory, before the next one's
                decoder = Decoder(model, len(piece), length)
            rows = Rows(script, starts, length, model.device)
            generator = torch.Generator(model.device).manual_seed(draws.getrandbits(63))
            tokens = sample(decoder, rows, generator, bar)
            with write_directory(path) as aside:
                np.save(os.path.join(aside, TOKENS), tokens)
                write_record(aside, record)
    model = decoder = None
    if device.type == "cuda":  # modules are in reference cycles
        gc.collect()
        torch.cuda.empty_cache()


def beginnings(source: str, tokenizer, split: str, count: int) -> list[list[int]]:
    """The first LONGEST tokens of the first `count` documents that have as many, of a part of a source.

    Of a .txt file each line is a document. Raises TooShort if there is none.
    """
    documents = (token_ids([document], tokenizer) for document in parse_source(source).texts(split))
    tokenized = (list(itertools.islice(ids, LONGEST)) for ids in documents)
    chosen = list(itertools.islice((ids for ids in tokenized if len(ids) == LONGEST), count))
    if not chosen:
        raise TooShort(f"text {GENERATED}:{source}: expected a document of {LONGEST} tokens{PARTS[split]}, "
                       "found none")
    return chosen
