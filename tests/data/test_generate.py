"""Text and chats from the model itself: its distribution, its template, and the same tokens however run."""

import contextlib
import importlib
import itertools
import json
import math
import operator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.data import decoding, generate
from common.data.chat import load_chats
from common.data.decoding import Decoder
from common.data.documents import EVALUATION, HELDOUT, TRAIN, in_part
from common.data.generate import TEXT, Rows, chat_form, chat_script
from common.data.rows import as_samples, decoded
from common.data.sources import DataContext, choose_chats, generated
from common.data.text import load_tokens
from common.models.families import geometry
from common.models.load import load_config, load_tokenizer
from common.run.errors import UserError
from models import (
    CHATML,
    END,
    FAMILIES,
    THOUGHT,
    byte_tokenizer,
    chatml_tokenizer,
    llama2_tokenizer,
    tiny_model,
)
from runs import messages, save_chats


def logits_of(model, rows: np.ndarray) -> torch.Tensor:
    """[n, T, V] float64, without a cache. rows: [n, T]."""
    with torch.no_grad():
        return model(torch.from_numpy(rows).long(), use_cache=False).logits.double()


def sampled(model, beginnings: list[list[int]], length: int, seed: int) -> np.ndarray:
    decoder = Decoder(model, len(beginnings), length)
    return generate.sample(decoder, Rows(TEXT, beginnings, length), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [5, decoding.BLOCK + 5])
def test_a_token_of_probability_zero_is_never_drawn(size):
    """Where the random number is a bound between two tokens, too, and where it is all but one."""
    logits = torch.full((3, size), -math.inf)
    logits[:, [1, size - 2]] = 0
    for number, token in ((0.0, 1), (0.5, size - 2), (1 - 2**-53, size - 2), (1.0, size - 2)):
        numbers = torch.full((3, 1), number, dtype=torch.float64)
        assert decoding.draw(logits, numbers).tolist() == [token] * 3


def test_a_token_is_drawn_where_the_sums_of_the_softmax_pass_a_number():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, 2 * decoding.BLOCK + 9, generator=generator)
    numbers = torch.rand(2000, 1, generator=generator, dtype=torch.float64)
    sums = logits.double().softmax(-1).cumsum(-1)
    for shift in (0, 500):  # whose exponential is infinite
        drawn = decoding.draw(logits + shift, numbers)
        assert (drawn == torch.searchsorted(sums, numbers)[:, 0]).float().mean() > 0.999


@pytest.mark.parametrize("changes", [
    {}, {"model_type": "mistral", "sliding_window": 7}, FAMILIES["gpt_oss"],
    *(pytest.param(FAMILIES[name], marks=pytest.mark.slow) for name in ("phi", "gemma2", "olmoe")),
])
def test_every_token_is_drawn_from_the_softmax_after_those_before_it(changes):
    """Surprise less entropy, summed, is a standard normal number; the begins are of different lengths."""
    model = tiny_model(**{"num_key_value_heads": 4} | changes)
    tokens = sampled(model, [[5] * (1 + n % 9) for n in range(40)], 30, seed=1)
    log = logits_of(model, tokens).log_softmax(-1)
    surprise = -log[:, :-1].gather(-1, torch.from_numpy(tokens).long()[:, 1:, None])[..., 0]
    entropy = -(log.exp() * log).sum(-1)[:, :-1]
    variance = (log.exp() * log**2).sum(-1)[:, :-1] - entropy**2
    drawn = torch.tensor([[t >= n % 9 for t in range(29)] for n in range(40)])
    assert (torch.from_numpy(tokens)[:, :-1][~drawn] == 5).all()
    assert abs((surprise - entropy)[drawn].sum() / variance[drawn].sum().sqrt()) < 3.5


def test_a_text_so_long_that_rope_changes_with_every_token_is_one_line():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model(rope_parameters=rope, max_position_embeddings=32)
    assert Decoder(model, 1, 32).switch is None
    with pytest.raises(UserError, match="at most 32 tokens, beyond which its RoPE changes with every .* 40"):
        Decoder(model, 1, 40)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def written(script, drawn: list[int]) -> np.ndarray:
    """[1, T]: what a script makes of the tokens that a model would draw."""
    rows = Rows(script, [[]], 1 + len(drawn))
    for position, token in enumerate([0, *drawn]):
        rows.write(position, torch.tensor([token]))
    return rows.numpy()


def test_chats_are_what_the_template_makes_of_their_turns(tmp_path):
    """Turns that end with end-of-sequence, which is not in the template; while it speaks, nothing is read."""
    tokenizer, sent = chatml_tokenizer(), []
    chats = [messages(("user", "Hi?"), ("assistant", "Yes\n\n")),
             messages(("user", ""), ("assistant", "x <|im"))]
    for chat in chats:
        parts = ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", chat[0]["content"],
                 "<|im_end|>\n<|im_start|>assistant\n", chat[1]["content"], "<|im_end|>\n")
        for number, part in enumerate(parts):
            ids = ids_of(tokenizer, part)
            sent += ids if number % 2 else [0] * len(ids) if number == 0 else [END, *[0] * (len(ids) - 1)]
    row = written(chat_script(*chat_form(tokenizer), END), sent[1:])
    expected, _ = load_chats(save_chats(tmp_path / "chats.jsonl", *chats), tokenizer, 1000, EVALUATION)
    segments = [list(segment) for sample in expected for segment in sample.segments]
    assert [list(segment) for segment in as_samples(row)[0].segments] == segments


@pytest.mark.parametrize("tokenizer", [chatml_tokenizer(), llama2_tokenizer()])
def test_a_model_may_end_turns_as_the_template_does(tokenizer):
    chats = [messages(("user", "Hi?"), ("assistant", "Yes")), messages(("user", "and"), ("assistant", "So"))]
    text = "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)
    ids = ids_of(tokenizer, text)
    row = written(chat_script(*chat_form(tokenizer), tokenizer.eos_token_id), ids[1:])
    assert decoded(row)[0].tolist() == ids
    answers = tokenizer.decode(decoded(row)[row < 0]).replace("▁", "").replace(" ", "")
    assert answers == ("Yes</s>So</s>" if "</s>" in text else "Yes<|im_end|>\nSo<|im_end|>\n")


def chat_by_definition(opening: list[int], endings: list, end: int, others: tuple):
    """A coroutine that is sent drawn tokens and yields a chat's, one at a time."""
    drawn = None
    while True:
        for token in opening:
            drawn = yield token
        for stored, (marker, rest, whole) in zip((operator.pos, operator.invert), endings, strict=True):
            turn, kept = [], set(others) - {*whole} if stored is operator.invert else set()
            while drawn not in {end, *others} - kept or marker == [drawn]:
                turn.append(drawn)
                drawn = yield stored(drawn)
                if turn[-len(marker) :] == marker or turn[-1] in kept:
                    whole = rest
                    break
            for token in whole:
                drawn = yield stored(token)


@pytest.mark.parametrize("others", [(), (1, 3)])
@pytest.mark.parametrize("endings", [
    [([1, 2], [3], [1, 2, 3]), ([2], [], [2])],
    [([2, 2, 1], [], [2, 2, 1]), ([0], [4, 5], [0, 4, 5])],  # 0: the end-of-sequence token
    [([0], [], [0]), ([], [], [])],
    [([1], [1, 2], [4, 1, 1, 2]), ([2, 1], [2], [2, 1, 2])],
])
def test_rows_are_what_each_would_say_alone(endings, others):
    draws = torch.randint(0, 4, (50, 200), generator=torch.Generator().manual_seed(0))
    rows, alone = Rows(chat_script([5, 3], endings, 0, others), [[]] * 50, 200), []
    for position, drawn in enumerate(draws.T):
        rows.write(position, drawn)
    for row in draws.tolist():
        chat = chat_by_definition([5, 3], endings, 0, others)
        alone.append([chat.send(token) for token in [None, *row[1:]]])
    assert (rows.numpy() == alone).all()


def test_a_row_without_an_answer_is_no_sample():
    rows = np.array([[1, 2, 3, 4], [1, 0, ~3, 4], [1, ~2, ~3, ~4]], np.int32)
    segments = [[list(part) for part in sample.segments] for sample in as_samples(rows)]
    assert segments == [[[1, 0], [3], [4]], [[1], [2, 3, 4]]]


@pytest.mark.parametrize(("template", "missing"), [
    (CHATML.replace("{% if add_generation_prompt %}", "{% if false %}"), "generation prompt"),
    ("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}", "marked user's turn"),
])
def test_templates_without_turns_are_refused(template, missing):
    refusal = f"expected a chat template with a {missing}, found none; --chat none generates no chats"
    with pytest.raises(UserError, match=refusal):
        chat_form(chatml_tokenizer(template))


def test_what_comes_between_generation_prompt_and_answer_is_the_models_to_write():
    thinking = CHATML.replace("message['content'] +", "('<think></think>' if message['role'] == 'assistant' "
                              "else '') + message['content'] +")
    assert thinking != CHATML and chat_form(chatml_tokenizer(thinking)) == chat_form(chatml_tokenizer())


def test_a_thought_that_the_generation_prompt_opens_comes_before_the_generated_answer():
    """The model may end its turn with the marker alone; what the prompt opens is put there."""
    tokenizer = chatml_tokenizer(THOUGHT)
    opening, ((marker, rest, whole), after) = chat_form(tokenizer)
    assert [tokenizer.decode(ids) for ids in (opening, marker, rest, whole)] == [
        "<|im_start|>", "<|im_end|>", "<think>\n", "<|im_end|><think>\n"]
    assert after == ([END], [], [END])


@pytest.fixture
def model(tmp_path) -> str:
    """A tiny model with a chat template."""
    tokenizer = chatml_tokenizer()
    tiny_model(num_hidden_layers=1, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_model_that_chats_generates_chats_beside_its_text(model, tmp_path):
    both = ["a.jsonl", "b.jsonl"]
    for chat, text, expected in ((None, ["a.txt", "generated"], ["generated"]), (["none"], ["generated"], []),
                                 (None, ["c4", "generated:a.txt"], []), (both, ["generated"], both)):
        assert choose_chats(chat, text, model) == expected
    byte_tokenizer().save_pretrained(model)
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert choose_chats(None, ["generated"], model) == []


def origin(model: str, home, **changes) -> DataContext:
    return DataContext(model, str(home), "cpu", **changes)


@pytest.mark.parametrize(("chats", "length"), [(False, 30), pytest.param(True, 60, marks=pytest.mark.slow)])
def test_tokens_do_not_depend_on_kills_or_on_the_number_of_ranks(model, tmp_path, monkeypatch, chats, length):
    monkeypatch.setattr(generate, "CPU_ROWS", 2)

    def tokens(name: str, **changes) -> np.ndarray:
        return generated("generated", origin(model, tmp_path / name, **changes), 5, length, chats=chats)

    expected = tokens("whole")
    assert expected.shape == (5, length) and len(np.unique(expected[:, -20:], axis=0)) == 5
    records = [json.loads(path.read_text()) for path in (tmp_path / "whole").glob("tokens/*/*/stage.json")]
    assert len(records) == 3  # pieces
    assert all(bool(record["chats"]) == chats == ("begin" not in record) for record in records)

    calls, through = [], generate.sample

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return through(*arguments)

    monkeypatch.setattr(generate, "sample", killed)
    with pytest.raises(KeyboardInterrupt):
        tokens("killed")
    for _ in range(2):
        assert (tokens("killed") == expected).all() and len(calls) == 4  # the killed piece again, once

    for rank in (1, 0):  # as ranks without the others: the last one finds all pieces
        ranks = SimpleNamespace(rank=rank, world=2, first=rank == 0, waiting=contextlib.nullcontext)
        with contextlib.suppress(UserError, OSError) if rank else contextlib.nullcontext():
            of_ranks = tokens("ranks", ranks=ranks)
        assert len(calls) == (5 if rank else 7)  # pieces of 2 rows; of 2 and of 1
    assert (of_ranks == expected).all()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_generated_turns_end_with_all_tokens_that_a_checkpoint_lists(model, tmp_path, where):
    tokenizer, changed = load_tokenizer(model), json.loads((tmp_path / "model" / f"{where}.json").read_text())
    calls, (turn,) = list(range(100)), ids_of(tokenizer, "<|im_end|>")
    listed = {"eos_token_id": [turn, END, *calls]}
    (tmp_path / "model" / f"{where}.json").write_text(json.dumps(changed | listed))
    rows = generated("generated", origin(model, tmp_path), 4, 120, chats=True)
    answers = [answer.tolist() for sample in as_samples(rows) for answer in sample.segments[1::2]]
    closing, called = ids_of(tokenizer, "\n"), 0
    for answer in answers:
        spoken = answer[: -len(closing)] if answer[-1:] == closing else answer
        called += spoken[-1] in calls
        assert not {*calls, turn, END}.intersection(spoken[:-1])
    assert called > 3


def test_heldout_text_has_another_seed_and_other_rows_follow(model, tmp_path, monkeypatch):
    shape = geometry(load_config(model))
    row = 2 * 4 * 30 * shape.layers * shape.kv_heads * shape.head_dim  # bytes of keys and values in float32
    monkeypatch.setattr(generate, "CPU_CACHE", 3 * row - 1)
    place = origin(model, tmp_path)
    train, longer = (generated("generated", place, rows, 30) for rows in (4, 6))
    heldout = generated("generated", place, 4, 30, HELDOUT)
    assert (generated("generated", place, 4, 30, EVALUATION) == heldout).all()
    assert (longer[:4] == train).all() and not (heldout == train).all(1).any()
    records = [json.loads(path.read_text()) for path in tmp_path.glob("tokens/*/*/stage.json")]
    assert sorted(record["seed"] for record in records) == [0] * 3 + [1] * 2
    assert all((record["temperature"], record["rows_at_once"]) == (1, 2) for record in records)


def test_documents_are_continued(model, tmp_path, monkeypatch):
    """The lines of a .txt file's part, where they are long enough."""
    monkeypatch.setattr("common.data.documents.BLOCK", 1)  # a line each
    numbered = [f"{number} " * 40 for number in range(99)]
    lines = [line for line in numbered if in_part(f"{line}\n", TRAIN)][:3]
    heldout = next(line for line in numbered if in_part(f"{line}\n", HELDOUT))
    content = "".join(f"{line}\n" for line in [*lines, "short", heldout])
    (tmp_path / "text.txt").write_text(content)
    rows = generated(f"generated:{tmp_path / 'text.txt'}", origin(model, tmp_path), 30, 100)
    common = []
    for number, row in enumerate(rows):
        ids = ids_of(load_tokenizer(model), lines[number % 3])[:99]
        same = [*(row[1 : 1 + len(ids)] == ids), False].index(False)
        common.append(same)
    assert min(common) >= 32 and max(common) <= 66 and len(set(common)) > 10
    generated_rows = generated(f"generated:{tmp_path / 'text.txt'}", origin(model, tmp_path), 5, 100, HELDOUT)
    assert (generated_rows[:, 1:33] == ids_of(load_tokenizer(model), heldout)[:32]).all()
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(UserError, match="text.txt: expected a document of 64 tokens in .*, found none"):
        generated(f"generated:{tmp_path / 'text.txt'}", origin(model, tmp_path), 2, 100)


def test_a_model_that_cannot_generate_is_one_line(model, tmp_path, monkeypatch):
    """In whichever of a row's steps."""
    steps = itertools.count()
    monkeypatch.setattr("common.models.head.product", lambda left, right: left.float() @ right.float() * (
        math.inf if next(steps) == 8 else 1))
    with pytest.raises(UserError, match="model: cannot generate: found NaN or Inf in its logits"):
        generated("generated", origin(model, tmp_path), 2, 10)


def test_calibration_is_half_text_and_half_chats(model, tmp_path, monkeypatch):
    """Of the sources that stage 1 is given, and that it chooses."""
    text, stage1 = tmp_path / "text.txt", importlib.import_module("01_calibrate")
    text.write_text("some words " * 100)
    path = save_chats(tmp_path / "chats.jsonl", *[messages(("user", "Hi"), ("assistant", "Yes"))] * 20)
    for words, chosen in (("--text generated", "generated"), (f"--text {text}", None),
                          (f"--text {text} --chat {path} --sequences 5", path)):
        monkeypatch.setattr("sys.argv", ["01_calibrate", "--run", "x", "--model", model, *words.split()])
        args = stage1.with_defaults(stage1.parse(), model)
        assert args.chat == chosen
    tokens, description = stage1.read_text(args, model, 64)
    assert (tokens[:3] == load_tokens(str(text), load_tokenizer(model), 3, 64)[0]).all()
    rendered = load_tokenizer(model).decode(tokens[3:].flatten())
    assert rendered.startswith("<|im_start|>system\nBe brief")
    assert "assistant\nYes<|im_end|>\n<|im_start|>" in rendered
    assert description.startswith(f"{text}: ") and f"; {path}: 3 chats" in description  # of 56 tokens
