"""Chats: the template's own text and tokens, assistant turns as answers, and bad chats in one line."""

import hashlib
import json

import pytest

from common.data import chat
from common.data.chat import load_chats
from common.data.documents import EVALUATION, HELDOUT, TRAIN
from common.data.rows import Sample
from common.data.text import TooShort
from common.run.errors import UserError
from models import CHATML, LLAMA2, MARKED, THOUGHT, byte_tokenizer, chatml_tokenizer, llama2_tokenizer
from runs import messages, save_chats

CHAT = [("system", "Obey."), ("user", "Hi!"), ("assistant", "Hello, ça va?"), ("user", "日本語 🙂"),
        ("assistant", " leading\n\nand trailing \n"), ("assistant", "once more")]


def loaded(tmp_path, tokenizer, *chats, longest: int = 1000):
    """From the entire file."""
    return load_chats(save_chats(tmp_path / "chats.jsonl", *chats), tokenizer, longest, EVALUATION)


def texts(sample, tokenizer) -> list[str]:
    return [tokenizer.decode(segment) for segment in sample.segments]


def tokens_of(sample) -> list[int]:
    return [token for segment in sample.segments for token in segment]


@pytest.mark.parametrize("chat", [
    [*CHAT, ("tool", "5"), CHAT[2]], [*CHAT[1:], CHAT[1]],
    [("user", "a"), ("assistant", "\nb"), ("user", "\n"), ("assistant", '"')],
])  # fmt: skip
def test_tokens_and_answers_are_those_of_transformers(tmp_path, chat):
    """transformers' mask of assistant tokens is the witness; here and there a token crosses a border."""
    tokenizer = chatml_tokenizer(MARKED)
    (sample,), _ = loaded(tmp_path, tokenizer, messages(*chat))
    expected = tokenizer.apply_chat_template(messages(*chat), return_assistant_tokens_mask=True)
    mask = [number % 2 for number, segment in enumerate(sample.segments) for _ in segment]
    assert tokens_of(sample) == expected["input_ids"] and mask == expected["assistant_masks"]
    assert loaded(tmp_path, chatml_tokenizer(), messages(*chat))[0] == [sample]


def test_a_template_that_merges_turns(tmp_path):
    tokenizer = llama2_tokenizer()
    chat = messages(("system", "Obey."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why"),
                    ("assistant", "Hm"))
    (sample,), _ = loaded(tmp_path, tokenizer, chat)
    rendered = [tokenizer.convert_ids_to_tokens(list(segment)) for segment in sample.segments]
    assert rendered[1] == ["▁H", *"ello▁", "</s>"]  # alone it would begin with two blanks
    assert tokens_of(sample) == tokenizer.apply_chat_template(chat)["input_ids"]


# like Qwen3's: of the turns before the last question, the reasoning is dropped
REASONING = CHATML.replace("message['content'] +", "(message['content'] if loop.revindex0 == 0 or "
                           "message['role'] != 'assistant' else message['content'].split('</think>')[-1]) +")


def test_a_template_that_rewrites_earlier_turns_gives_a_sample_per_answer(tmp_path):
    """Each is the chat up to its answer, as transformers renders it. What follows the last is left out."""
    tokenizer = chatml_tokenizer(REASONING)
    chat = messages(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"),
                    ("assistant", "<think>y</think>d"), ("user", "?"))
    samples, description = loaded(tmp_path, tokenizer, chat, messages(("user", "a"), ("assistant", "b")))
    assert [len(sample.segments) for sample in samples] == [2, 2, 2]
    for sample, stop in zip(samples, (2, 4), strict=False):
        assert tokens_of(sample) == tokenizer.apply_chat_template(chat[:stop])["input_ids"]
    answers = [texts(sample, tokenizer)[1] for sample in samples[:2]]
    assert answers == ["<think>x</think>b<|im_end|>\n", "<think>y</think>d<|im_end|>\n"]
    assert "2 chats in 3 samples, 3 answers; 0 cut" in description


def test_an_answer_begins_where_its_generation_prompt_would_open_a_thought(tmp_path):
    """The sample is the chat as transformers renders it, whatever the answer begins with."""
    tokenizer = chatml_tokenizer(THOUGHT)
    chat = messages(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<t>"))
    (sample,), _ = loaded(tmp_path, tokenizer, chat)
    assert texts(sample, tokenizer) == ["<|im_start|>a<|im_end|>", "b<eos>",
                                        "<|im_start|>c<|im_end|>", "<t><eos>"]
    assert tokens_of(sample) == tokenizer.apply_chat_template(chat)["input_ids"]


def test_longer_chats_are_cut(tmp_path):
    tokenizer = chatml_tokenizer()
    chat = messages(*CHAT[1:3], ("user", "Bye."), ("assistant", "Bye!"))
    (whole,), _ = loaded(tmp_path, tokenizer, chat)
    prompt, answer, *others = map(len, whole.segments)
    assert len(others) == 2
    for longest, segments in ((len(whole), 4), (prompt + answer + 1, 3), (prompt + 1, 2)):
        (sample,), description = loaded(tmp_path, tokenizer, chat, longest=longest)
        assert tokens_of(sample) == tokens_of(whole)[:longest] and len(sample.segments) == segments
        counts = f"1 chats, {segments // 2} answers; {int(longest < len(whole))} cut"
        assert description.endswith(f"{counts} to {longest} tokens")


def test_a_chat_without_an_answer_is_left_out(tmp_path):
    """Cut before its answer, or dropped by the template: there is nothing to fine-tune on."""
    long, short = messages(("user", "x" * 80), CHAT[2]), messages(("user", "x"), CHAT[2])
    samples, description = loaded(tmp_path, chatml_tokenizer(), long, short, longest=80)
    assert len(samples) == 1 and samples[0].answer_tokens and "2 chats" in description
    silent = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    for chats, template in (([long], CHATML), ([short, long], silent)):
        with pytest.raises(UserError, match="with an answer in its first 80 tokens, found none among"):
            loaded(tmp_path, chatml_tokenizer(template), *chats, longest=80)


def test_the_date_is_fixed(tmp_path):
    date = "\n{% if strftime_now is defined %}{{ strftime_now('%d %B %Y') }}{% endif %}"
    tokenizer = chatml_tokenizer(date + CHATML)
    (sample,), _ = loaded(tmp_path, tokenizer, messages(*CHAT))
    assert texts(sample, tokenizer)[0].startswith("\n26 Jul 2024<|im_start|>system")


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(("template", "row", "message"), [
    (CHATML, {"text": "x"}, r"column 'messages' is missing; found columns \['text'\]"),
    (CHATML, {"messages": [ANSWER, USER]}, "expected an assistant message after another one"),
    (LLAMA2, {"messages": [USER, USER, ANSWER]}, "refused by .*: Conversation roles must"),
    ("{{ messages.__class__.__mro__ }}", {"messages": [USER, ANSWER]},
     ".*refused by the .* chat template: .*__class__.* is unsafe"),
])
def test_chats_and_templates_that_do_not_fit_are_one_line(tmp_path, template, row, message):
    (tmp_path / "chats.jsonl").write_text("\n" + json.dumps(row) + "\n")
    tokenizer = chatml_tokenizer(template)
    tokenizer.bos_token = "<eos>"
    with pytest.raises(UserError, match=f"chats.jsonl line 2: {message}") as error:
        load_chats(str(tmp_path / "chats.jsonl"), tokenizer, 100)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a tokenizer with a chat template for .*, found none"):
        loaded(tmp_path, byte_tokenizer(), messages(*CHAT))


def test_tokenized_chats_beyond_the_vocabulary_are_one_line(tmp_path):
    path, chats = tmp_path / "tokens.jsonl", [Sample([1, 2], [8]), Sample([1], [9])]
    path.write_text(chat.token_lines(chats))
    assert chat.load_tokenized(str(path), 9, 1)[0] == chats[:1]
    with pytest.raises(UserError, match="tokens.jsonl line 2: expected token ids below 9, found 9"):
        chat.load_tokenized(str(path), 9, 2)


def test_one_chat_in_ten_is_held_out_by_its_content(tmp_path):
    """Whatever else its row has, so that copies are on the same side; reading ends where enough are read."""
    path, tokenizer, rows, held_out, others = tmp_path / "chats.jsonl", chatml_tokenizer(), [], [], []
    for number in range(100):
        rows.append({"messages": messages(("user", f"{number}?"), ("assistant", str(number)))})
        content = json.dumps([["user", f"{number}?"], ["assistant", str(number)]])
        chosen = hashlib.sha256(content.encode()).hexdigest() < "1" + 63 * "9"
        (held_out if chosen else others).append(number)
    copies = [{"messages": [message | {"name": "x"} for message in row["messages"]], "id": 5} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + copies))

    def read(*part) -> tuple[list[int], str]:
        samples, description = load_chats(str(path), tokenizer, 100, *part)
        return [int(tokenizer.decode(sample.answer).split("<")[0]) for sample in samples], description

    chats, description = read(HELDOUT)
    assert chats == 2 * held_out and 5 < len(held_out) < 15
    assert f": {len(chats)} chats in its held-out part, " in description
    assert read(HELDOUT, 3)[0] == held_out[:3]
    assert read()[0] == read(TRAIN)[0] == 2 * others and read(EVALUATION)[0] == 2 * list(range(100))
    save_chats(path, *(rows[number]["messages"] for number in others))
    with pytest.raises(TooShort, match="found none among 0 in its held-out part"):
        read(HELDOUT)
