"""Samples, the unit of training: token ids, with the ones that are answers told apart."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, init=False)
class Sample:
    """A tokenized sample: segments of token ids, prompt and answer in turn.

    A text is a prompt alone, a question a prompt and its answer, a chat several of both.
    """

    segments: tuple[Sequence[int], ...]

    def __init__(self, *segments: Sequence[int]):
        object.__setattr__(self, "segments", segments)

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def prompt(self) -> Sequence[int]:
        """A question's prompt."""
        return self.segments[0]

    @property
    def answer(self) -> Sequence[int]:
        """A question's answer, which ends with end-of-sequence."""
        return self.segments[1]

    @property
    def answer_tokens(self) -> int:
        """The number of tokens in all answers."""
        return sum(map(len, self.segments[1::2]))
