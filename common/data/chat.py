"""Chats for training: `messages` through the tokenizer's chat template, assistant turns as answers."""

import itertools
import json
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property

from common.data.data_sets import DATA_SET
from common.data.documents import PARTS, TRAIN, DataSet, in_part, parse_source
from common.data.rows import TABLE_NAMES, TABLES, Sample, abbreviated, column, nested, parse_rows, read_rows
from common.data.text import TooShort
from common.models.weights import first_line
from common.run.errors import UserError
from common.run.progress import Progress

TOKENS = "segments"  # column of tokenized chats: lists of token ids, prompt and answer in turn
# Put before every template: the same chats must give the same tokens tomorrow.
FIXED_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro +%}"


def read_chats(source: str, split: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield (place, messages) of the chats in a part of a source, as for load_chats.

    Raises UserError for a source or a row that is not what load_chats takes.
    """
    kind = parse_source(source)
    if not isinstance(kind, DataSet) and not (os.path.isfile(source) and source.endswith(TABLES)):
        state = "another name" if os.path.isfile(source) else "no such file"
        raise UserError(f"chats {source}: expected {DATA_SET} or a {TABLE_NAMES} file, found {state}")
    for place, messages in parse_rows(source, kind.rows(), _messages):
        content = json.dumps([[message["role"], message["content"]] for message in messages])
        if in_part(content, kind.part(split)):
            yield place, messages


def _messages(row: dict) -> list[dict]:
    """The messages of a row. Raises ValueError unless each has a role and a content, both text."""
    messages = column(row, "messages", list)
    for number, message in enumerate(messages, 1):
        name = f"messages.{number}"
        columns = nested(message, name)
        column(columns, f"{name}.role")
        column(columns, f"{name}.content")
    return messages


def load_chats(source: str, tokenizer, longest: int, split: str = TRAIN, most: int | None = None,
               tokens: int | None = None) -> tuple[list[Sample], str]:
    """Samples of the chats in a part of a source, and a one-line description of what was read.

    source: a file of TABLES or hf:NAME[:CONFIG[:SPLIT]], with a column "messages", a list of {"role": ...,
    "content": ...}. A sample has the token ids of tokenizer.apply_chat_template (with a fixed date), at most
    `longest` of them; those without an answer there are left out. Its answers are what the template renders
    for assistant messages after a generation prompt, end of turn included; the rest, an assistant message
    that opens the chat included, is prompt. Reading ends with `most` samples, or with the chat in which they
    have `tokens` tokens; a source may have fewer. Raises TooShort if there are none, and UserError for a row
    that is not a chat with an answer, and for a tokenizer without a template, or whose template refuses it.
    """
    template = fixed_template(tokenizer, source)

    def tokenize(messages: list[dict]) -> list[Sample]:
        return [Sample(*tokenize_chat(segments, tokenizer)) for segments in render_all(messages, template)]

    rows = Progress(read_chats(source, split), desc=f"tokenizing {source}", unit="chat", leave=False)
    samples, chats, cut, taken = [], 0, 0, 0
    for _, whole in parse_rows(source, rows, tokenize):
        chats += 1
        cut += sum(len(sample) > longest for sample in whole)
        found = [sample for sample in (truncate(each, longest) for each in whole) if sample.answer_tokens]
        samples += found
        taken += sum(map(len, found))
        if (most and len(samples) >= most) or (tokens and taken >= tokens):
            break
    samples = samples[:most]
    if not samples:
        raise TooShort(f"{source}: expected a chat with an answer in its first {longest} tokens, found none "
                       f"among {chats}{PARTS[split]}")
    answers = sum(len(sample.segments) // 2 for sample in samples)
    where = PARTS[split] + (f" in {len(samples)} samples" if len(samples) > chats else "")
    return samples, f"{source}: {chats} chats{where}, {answers} answers; {cut} cut to {longest} tokens"


def token_lines(chats: list[Sample]) -> str:
    """Tokenized chats as lines of JSON, which load_tokenized reads."""
    rows = ({TOKENS: [list(map(int, segment)) for segment in chat.segments]} for chat in chats)
    return "".join(json.dumps(row) + "\n" for row in rows)


def has_tokens(path: str) -> bool:
    """Whether the chats of a file are tokenized, which suits one tokenizer alone."""
    return os.path.isfile(path) and path.endswith(TABLES) and TOKENS in next(read_rows(path), ("", {}))[1]


def load_tokenized(path: str, vocabulary: int, most: int) -> tuple[list[Sample], str]:
    """The first chats of a file of token_lines, and a one-line description. Raises UserError for token ids
    that are not below `vocabulary`.
    """
    def sample(row: dict) -> Sample:
        chat = Sample(*column(row, TOKENS, list))
        largest = max(itertools.chain(*chat.segments))
        if largest >= vocabulary:
            raise ValueError(f"expected token ids below {vocabulary}, found {largest}")
        return chat

    samples = [chat for _, chat in parse_rows(path, itertools.islice(read_rows(path), most), sample)]
    return samples, f"{path}: {len(samples)} tokenized chats"


class Template:
    """A tokenizer's chat template, with a fixed date."""

    def __init__(self, tokenizer, text: str):
        self.tokenizer, self.text = tokenizer, FIXED_DATE + text

    @cached_property
    def thought(self) -> str:
        """What the generation prompt adds to the beginning of a finished turn: DeepSeek-R1's opens a thought
        there, which finished turns do not show. Usually "".
        """
        content = "AAAAAAAA"
        chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]
        try:
            asked, prompt = (apply_template(chat[:1], self, prompting) for prompting in (False, True))
            header = apply_template(chat, self, prompting=False).rpartition(content)[0]
        except ValueError:  # it refuses this chat, and may take others
            return ""
        opened = prompt.startswith(header) and len(header.rstrip()) > len(asked)
        return prompt[len(header) :] if opened else ""


def fixed_template(tokenizer, path: str) -> Template:
    """The tokenizer's chat template for the chats at `path`. Raises UserError if it has none."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # none, or several without a default
        raise UserError(f"{tokenizer.name_or_path}: expected a tokenizer with a chat template for {path}, "
                        "found none") from error
    if not tokenizer.is_fast:
        raise UserError(f"{tokenizer.name_or_path}: expected a fast tokenizer (tokenizer.json) for {path}, "
                        f"found {type(tokenizer).__name__}")
    return Template(tokenizer, template)


def apply_template(messages: list[dict], template: Template, prompting: bool) -> str:
    """Messages as text. prompting: with the beginning of an answer.

    Templates are programs, which transformers runs in a sandbox: raises ValueError for one that fails in any
    way.
    """
    try:
        return template.tokenizer.apply_chat_template(messages, chat_template=template.text, tokenize=False,
                                                      add_generation_prompt=prompting)
    except Exception as error:
        raise ValueError(f"refused by the tokenizer's chat template: {first_line(error)}") from error


class Rewritten(ValueError):
    """A template renders the first messages of a chat differently once the chat goes on."""


def render_all(messages: list[dict], template: Template) -> list[list[str]]:
    """A chat as text: one list of segments as render gives them or, if the template rewrites earlier turns,
    one for the messages up to each answer, which alone is an answer there.

    Qwen3's drops the reasoning of earlier turns: that is how the model sees them when it answers. Raises
    ValueError if there is no answer, or if the template refuses the chat.
    """
    roles = [message["role"] for message in messages]
    answers = [index for index in range(1, len(roles)) if roles[index] == "assistant"]
    if not answers:
        raise ValueError(f"expected an assistant message after another one, found roles {abbreviated(roles)}")
    try:
        return [render(messages, answers, template)]
    except Rewritten:
        return [render(messages[: index + 1], [index], template) for index in answers]


def render(messages: list[dict], answers: list[int], template: Template) -> list[str]:
    """A chat as text in segments, prompt and answer in turn, whose concatenation is the rendered chat.

    answers: indices of the messages that are answers. A template's thought is in no segment. Raises
    ValueError if the template refuses the chat, and Rewritten if what it renders for the first messages is
    not how it renders the chat.
    """
    stops = [stop for index in answers for stop in ((index, True), (index + 1, False))]
    if answers[-1] + 1 < len(messages):
        stops.append((len(messages), False))
    segments, rendered = [], ""
    for stop, prompting in stops:
        longer = apply_template(messages[:stop], template, prompting)
        longer = longer.removesuffix(template.thought) if prompting else longer
        if not longer.startswith(rendered):
            raise Rewritten(f"messages 1 to {stop}: expected a chat template that adds the answer to its "
                            "generation prompt, found one that changes it")
        segments.append(longer[len(rendered) :])
        rendered = longer
    return segments


def tokenize_chat(segments: list[str], tokenizer) -> list[array]:
    """The tokens of a chat, split into its segments. A token that crosses a border is the answer's.

    The chat is tokenized as a whole, because a segment by itself may be tokenized differently: Llama 2 would
    put another blank before each. Raises ValueError if no token is before the first answer.
    """
    chat = tokenizer("".join(segments), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = array("i", chat["input_ids"])
    starts = [start for start, _ in chat["offset_mapping"]]
    ends = [end for _, end in chat["offset_mapping"]]
    borders, characters = [0], 0
    for number, segment in enumerate(segments[:-1]):
        characters += len(segment)
        before_answer = number % 2 == 0
        border = bisect_right(ends, characters) if before_answer else bisect_left(starts, characters)
        borders.append(max(border, borders[-1]))
    if borders[1] == 0:
        raise ValueError("expected a prompt before the first answer, found none")
    return [ids[start:end] for start, end in itertools.pairwise([*borders, len(ids)])]


def truncate(sample: Sample, longest: int) -> Sample:
    """The first `longest` tokens of a sample."""
    segments, room = [], longest
    for segment in sample.segments:
        segments.append(segment[:room])
        room -= len(segments[-1])
        if room == 0:
            break
    return Sample(*segments)
