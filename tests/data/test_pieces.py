"""Text that is tokenized in pieces has the tokens of the whole text."""

import functools
import io
import random

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data import text
from common.data.text import token_lists
from models import byte_tokenizer

WORDS = "the cat sat on a mat, and it's then 1234567 that every one wasn't found; naïve Größe 東京 🙂🙃"
LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def unicode_text(seed: int, characters: int) -> str:
    """Words, digits and characters of one to four bytes, with long runs of blanks, newlines and letters."""
    draw, parts, length = random.Random(seed), [], 0
    ranges = ((0x20, 0x7F), (0xA0, 0x3000), (0x300, 0x370), (0x4E00, 0xA000), (0x1F300, 0x1F700))
    while length < characters:
        run = draw.choice((1, 2, 5, 40, 300))
        parts.append(draw.choice((
            " " * run, "\n" * run, "".join(draw.choices(" \n\t\r\u2003", k=run)), draw.choice("aé🙂") * run,
            "".join(draw.choices("0123456789", k=run // 3)),
            "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(run // 3)),
            *4 * [" ".join(draw.choices(WORDS.split(), k=20))])))
        length += len(parts[-1])
    return "".join(parts)


def trained(pre_tokenizer, normalizer=None, alphabet=()) -> PreTrainedTokenizerFast:
    """A BPE of merges learned from such a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    tokenizer.train_from_iterator([unicode_text(0, 50_000)], trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<eos>"], initial_alphabet=list(alphabet),
        max_token_length=16, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's: a character may be several tokens, and offsets leave blanks out."""
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), None, BYTES)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def begun(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that begins texts with a token, where it is not told not to."""
    ids = [("<eos>", tokenizer.eos_token_id)]
    begin = processors.TemplateProcessing(single="<eos> $A", special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = begin
    return tokenizer


BYTES = pre_tokenizers.ByteLevel.alphabet()
SPLIT = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
TOKENIZERS = {
    "byte-level BPE": byte_level,
    "Llama 3's pattern": lambda: trained(pre_tokenizers.Sequence([
        SPLIT, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), None, BYTES),
    "Metaspace": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "Llama 2's blank before all, and a beginning": lambda: begun(trained(None, PREPENDED)),
}


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    return TOKENIZERS[name]()


@pytest.fixture
def small(monkeypatch):
    for name, value in (("PIECE", 2000), ("OVERLAP", 600), ("AROUND", 16)):
        monkeypatch.setattr(text, name, value)


def lists_of(text: str, tokenizer) -> list[list[int]]:
    return list(token_lists(io.StringIO(text, newline=""), tokenizer))


def whole(text: str, tokenizer) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", [
    "byte-level BPE", *(pytest.param(name, marks=pytest.mark.slow) for name in [*TOKENIZERS][1:])])
@pytest.mark.parametrize("seed", range(1, 4))
def test_pieces_have_the_tokens_of_the_whole_text(small, name, seed, monkeypatch):
    entire, tokenizer, sizes = unicode_text(seed, 40_000), tokenizer_of(name), []
    through = text.located_tokens
    monkeypatch.setattr(text, "located_tokens", lambda *given: sizes.append(len(given[0])) or through(*given))
    lists = lists_of(entire, tokenizer)
    assert sum(lists, []) == whole(entire, tokenizer) and len(lists) > 10
    assert sorted(sizes)[len(sizes) // 2] == 2600  # a piece and what it shares with the one before


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("middle", [
    " " * 9000, "\n" * 9000, "\n" + " " * 8999 + "\n", "1234" * 2000, "a" * 9000])
def test_what_is_longer_than_a_piece_is_not_split_differently(small, name, middle):
    text, tokenizer = unicode_text(1, 5000) + " x" + middle + "x " + unicode_text(2, 5000), tokenizer_of(name)
    assert sum(lists_of(text, tokenizer), []) == whole(text, tokenizer)


def test_a_place_without_enough_tokens_on_both_sides_is_no_joint(monkeypatch):
    """Nor one between blanks: the tokens must agree around it, and do so far enough."""
    monkeypatch.setattr(text, "AROUND", 2)
    before = [(number, number + 1, number) for number in range(20)]
    overlap, after = "abcdefghij", [(number, number + 1, 10 + number) for number in range(15)]
    assert text.find_seam(before, after, 10, overlap) == (15, 5)
    others = [(first, last, 0 if first in (3, 4, 5) else token) for first, last, token in after]
    assert text.find_seam(before, others, 10, overlap) == (18, 8)
    assert text.find_seam(before, others, 10, "abcdefgh  ") is None
    assert text.find_seam(before, after, 10, "abc    hij") == (12, 2)
    assert text.find_seam(before[:12], after, 10, overlap) is None


def test_a_slow_tokenizer_has_the_whole_text_at_once(small):
    class Slow:
        is_fast = False

        def __call__(self, text, add_special_tokens, verbose):
            return byte_tokenizer()(text, add_special_tokens=add_special_tokens)

    text = unicode_text(1, 10_000)
    assert lists_of(text, Slow()) == [whole(text, byte_tokenizer())]
