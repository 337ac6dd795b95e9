"""A text of any length as tokens, in constant memory: those of the whole text, tokenized a piece at a time.

Neighbouring pieces overlap. They are joined at a place in the overlap around which both have the same tokens.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator

PIECE = 2**18  # characters tokenized at a time: some 50 MB
OVERLAP = 2**14  # characters that neighbouring pieces share
AROUND = 32  # tokens on either side of a joint that both pieces have


def first_tokens(file, tokenizer, count: int) -> list[int]:
    """The first `count` tokens of an open text file, or all if it has fewer, without special tokens."""
    return list(itertools.islice(itertools.chain.from_iterable(token_lists(file, tokenizer)), count))


def token_lists(file, tokenizer) -> Iterator[list[int]]:
    """Yield all tokens of an open text file in order, in lists, without special tokens.

    The file is read as far as they are taken. Where pieces cannot be joined they become one, and so does the
    whole text for a slow tokenizer, which does not say where its tokens are.
    """
    piece, more = file.read(PIECE), file.read(PIECE)
    if more and not tokenizer.is_fast:
        piece, more = piece + more + file.read(), ""
    if not more:
        yield tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return
    tokens, begin = located_tokens(piece, tokenizer), 0
    while more:
        overlap, size = piece[-OVERLAP:], PIECE
        following = located_tokens(overlap + more, tokenizer)
        joint = find_joint(tokens, following, len(piece) - len(overlap), overlap)
        if joint:
            yield [token for _, _, token in tokens[begin : joint[0]]]
            piece, tokens, begin = overlap + more, following, joint[1]
        else:
            piece += more
            tokens, size = located_tokens(piece, tokenizer), len(piece)
        more = file.read(size)
    yield [token for _, _, token in tokens[begin:]]


def located_tokens(text: str, tokenizer) -> list[tuple[int, int, int]]:
    """(first character, character after the last, id) of each token."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = zip(encoded["offset_mapping"], encoded["input_ids"], strict=True)
    return [(*place, token) for place, token in places]


def find_joint(before: list, after: list, start: int, overlap: str) -> tuple[int, int] | None:
    """The numbers of tokens of a piece, and of the next one, before a place around which both have the same.

    before, after: their located_tokens. The overlap is what the next piece begins with, and the first one has
    from character `start` on. Blanks alone do not count: what follows a run of them may decide how all of it
    is split. Of several places it is the one nearest to the middle; None if there is none.
    """
    skipped = bisect_left(before, (start,))
    before = [(first - start, last - start, token) for first, last, token in before[skipped:]]
    for place in sorted(range(len(overlap)), key=lambda place: abs(place - len(overlap) // 2)):
        ours, theirs = bisect_left(before, (place,)), bisect_left(after, (place,))
        common = before[ours - AROUND : ours + AROUND] if ours >= AROUND else []
        if len(common) == 2 * AROUND and common == after[max(0, theirs - AROUND) : theirs + AROUND]:
            first, middle, last = common[0][0], common[AROUND][0], common[-1][1]
            if overlap[first:middle].strip() and overlap[middle:last].strip():
                return skipped + ours, theirs
    return None
