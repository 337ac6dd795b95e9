"""Chats: the template's own text and tokens, assistant turns as answers, and bad chats in one line."""

import hashlib
import json
import time
from types import SimpleNamespace

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from common.data import chat
from common.data.chat import load_chats
from common.data.text import EVALUATION, HELDOUT, TRAIN, TooShort
from common.errors import UserError
from helpers import END, byte_tokenizer

TURN = "{{ message['content'] + '<|im_end|>\n' }}"
CHATML = ("{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
          "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
          "{{ '<|im_start|>' + message['role'] + '\n' }}" + TURN + "{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# the same text, with transformers' marks around what the assistant generates
MARKED = CHATML.replace(TURN, "{% if message['role'] == 'assistant' %}{% generation %}" + TURN +
                        "{% endgeneration %}{% else %}" + TURN + "{% endif %}")
LLAMA2 = ("{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
          "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
          "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
          "{% if loop.index0 == 0 and system is defined %}"
          "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
          "{% else %}{% set content = message['content'] %}{% endif %}"
          "{% if message['role'] == 'user' %}"
          "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
          "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
          "{% endif %}{% endfor %}")
CHAT = [("system", "Obey."), ("user", "Hi!"), ("assistant", "Hello, ça va?"), ("user", "日本語 🙂"),
        ("assistant", " leading\n\nand trailing \n"), ("assistant", "once more")]


def chatml_tokenizer(template: str = CHATML):
    """Bytes; two line ends in a row, or a line end and a double quote, are one token. It begins a text with
    <eos>, which no chat begins with unless its template says so.
    """
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", "ĊĊ", 'Ċ"']
    vocabulary = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("Ċ", '"')]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A",
                                                             special_tokens=[("<eos>", END)])
    marks = [AddedToken(mark, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens(marks)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>",
                                                chat_template=template)


def llama2_tokenizer():
    """A blank before the text and blanks as parts of words, as in Llama 2."""
    characters = sorted(set("▁[]/<>INSTYinstalhelo, wrd!.ObyHmue\n'?A"))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(characters, 3)}
    merges = [("▁", "H"), ("▁", "▁")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>",
                                                unk_token="<unk>", chat_template=LLAMA2)


def messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def save_chats(path, *chats) -> str:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(path)


def loaded(tmp_path, tokenizer, *chats, longest: int = 1000):
    """From the entire file."""
    return load_chats(save_chats(tmp_path / "chats.jsonl", *chats), tokenizer, longest, EVALUATION)


def texts(sample, tokenizer) -> list[str]:
    return [tokenizer.decode(segment) for segment in sample.segments]


def test_assistant_turns_are_answers(tmp_path):
    tokenizer = chatml_tokenizer()
    chat = messages(*CHAT[:2], CHAT[2], ("user", "Bye."), ("assistant", "Bye!"), ("user", "?"))
    samples, description = loaded(tmp_path, tokenizer, chat, messages(CHAT[1], CHAT[2]))
    assert texts(samples[0], tokenizer) == [
        "<|im_start|>system\nObey.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
        "Hello, ça va?<|im_end|>\n",
        "<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n",
        "Bye!<|im_end|>\n",
        "<|im_start|>user\n?<|im_end|>\n",
    ]
    assert texts(samples[1], tokenizer)[0].startswith("<|im_start|>system\nBe brief.")  # the template's own
    assert description == f"{tmp_path}/chats.jsonl: 2 chats, 3 answers; 0 cut to 1000 tokens"


@pytest.mark.parametrize("chat", [
    [*CHAT, ("system", "Wake."), ("tool", "5"), CHAT[2]], CHAT[1:], [*CHAT, CHAT[1]],
    [("user", "a"), ("assistant", "")],
    [("user", "a"), ("assistant", "\nb"), ("user", "\n"), ("assistant", '"')],
])  # fmt: skip
def test_tokens_and_answers_are_those_of_transformers(tmp_path, chat):
    """transformers' mask of assistant tokens is the witness; here and there a token crosses a border."""
    tokenizer = chatml_tokenizer(MARKED)
    (sample,), _ = loaded(tmp_path, tokenizer, messages(*chat))
    expected = tokenizer.apply_chat_template(messages(*chat), return_assistant_tokens_mask=True)
    ids, mask = [], []
    for number, segment in enumerate(sample.segments):
        ids += segment
        mask += [number % 2] * len(segment)
    assert ids == expected["input_ids"] and mask == expected["assistant_masks"]
    plain = loaded(tmp_path, chatml_tokenizer(), messages(*chat))[0]
    assert plain == [sample]


def test_a_template_that_merges_turns(tmp_path):
    tokenizer = llama2_tokenizer()
    chat = messages(("system", "Obey."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why"),
                    ("assistant", "Hm"))
    (sample,), _ = loaded(tmp_path, tokenizer, chat)
    rendered = [tokenizer.convert_ids_to_tokens(list(segment)) for segment in sample.segments]
    assert "".join(rendered[0]).startswith("<s>▁[INST]▁<<SYS>>")
    assert rendered[1] == ["▁H", *"ello▁", "</s>"]  # alone it would begin with two blanks
    assert rendered[2][0] == "<s>" and rendered[2].count("<s>") == 1
    assert rendered[3] == ["▁H", *"m▁", "</s>"]
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    assert [token for segment in sample.segments for token in segment] == whole


# like Qwen3's: of the turns before the last question, the reasoning is dropped
REASONING = CHATML.replace("message['content'] +", "(message['content'] if loop.revindex0 == 0 or "
                           "message['role'] != 'assistant' else message['content'].split('</think>')[-1]) +")


@pytest.mark.parametrize("after", [(), (("user", "?"),)])
def test_a_template_that_rewrites_earlier_turns_gives_a_sample_per_answer(tmp_path, after):
    """Each is the chat up to its answer, as transformers renders it. What follows the last is left out."""
    tokenizer = chatml_tokenizer(REASONING)
    chat = messages(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"),
                    ("assistant", "<think>y</think>d"), *after)
    samples, description = loaded(tmp_path, tokenizer, chat, messages(("user", "a"), ("assistant", "b")))
    assert [len(sample.segments) for sample in samples] == [2, 2, 2]
    for sample, stop in zip(samples, (2, 4), strict=False):
        whole = tokenizer.apply_chat_template(chat[:stop])["input_ids"]
        assert [token for segment in sample.segments for token in segment] == whole
    assert texts(samples[0], tokenizer)[1] == "<think>x</think>b<|im_end|>\n"
    assert "x" not in texts(samples[1], tokenizer)[0] and "b" in texts(samples[1], tokenizer)[0]
    assert texts(samples[1], tokenizer)[1] == "<think>y</think>d<|im_end|>\n"
    assert "2 chats in 3 samples, 3 answers; 0 cut" in description


# like DeepSeek-R1's: the generation prompt opens a thought, and finished turns show none
THOUGHT = ("{% for message in messages %}{% if message['role'] == 'user' %}"
           "{{ '<|im_start|>' + message['content'] }}{% else %}"
           "{{ '<|im_end|>' + message['content'].split('</think>')[-1] + '<eos>' }}{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_end|><think>\n' }}{% endif %}")


def test_an_answer_begins_where_its_generation_prompt_would_open_a_thought(tmp_path):
    """The sample is the chat as transformers renders it, whatever the answer begins with."""
    tokenizer = chatml_tokenizer(THOUGHT)
    chat = messages(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "<t>"))
    (sample,), _ = loaded(tmp_path, tokenizer, chat)
    assert texts(sample, tokenizer) == ["<|im_start|>a<|im_end|>", "b<eos>",
                                        "<|im_start|>c<|im_end|>", "<t><eos>"]
    whole = tokenizer.apply_chat_template(chat)["input_ids"]
    assert [token for segment in sample.segments for token in segment] == whole


@pytest.mark.parametrize(("turns", "segments"), [
    (["a", "b\n", "\nc"], ["a", "b\n\n", "c"]),
    (["a", "\n", "", "\n", "b"], ["a", "\n\n", "", "", "b"]),
])
def test_a_token_that_crosses_a_border_is_the_answers(tmp_path, turns, segments):
    tokenizer = chatml_tokenizer("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    roles = ["assistant" if number % 2 else "user" for number in range(len(turns))]
    (sample,), _ = loaded(tmp_path, tokenizer, messages(*zip(roles, turns, strict=True)))
    assert texts(sample, tokenizer) == segments


def test_longer_chats_are_cut(tmp_path):
    tokenizer = chatml_tokenizer()
    chat = messages(*CHAT[1:3], ("user", "Bye."), ("assistant", "Bye!"))
    (whole,), _ = loaded(tmp_path, tokenizer, chat)
    prompt, answer, *others = map(len, whole.segments)
    assert len(others) == 2
    flat = [token for segment in whole.segments for token in segment]
    for longest, segments in ((len(whole), 4), (len(whole) - 1, 4), (prompt + answer + 1, 3),
                              (prompt + answer, 2), (prompt + 1, 2)):
        (sample,), description = loaded(tmp_path, tokenizer, chat, longest=longest)
        assert [token for segment in sample.segments for token in segment] == flat[:longest]
        assert list(map(len, sample.segments[:-1])) == list(map(len, whole.segments[: segments - 1]))
        assert len(sample.segments) == segments
        counts = f"1 chats, {segments // 2} answers; {int(longest < len(whole))} cut"
        assert description.endswith(f"{counts} to {longest} tokens")


def test_a_chat_without_an_answer_is_left_out(tmp_path):
    """Cut before its answer, or dropped by the template: there is nothing to fine-tune on."""
    tokenizer = chatml_tokenizer()
    long, short = messages(("user", "x" * 80), CHAT[2]), messages(("user", "x"), CHAT[2])
    samples, description = loaded(tmp_path, tokenizer, long, short, longest=80)
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


@pytest.mark.parametrize(("row", "message"), [
    ({"text": "x"}, r"column 'messages' is missing; found columns \['text'\]"),
    ({"messages": "x"}, r"column 'messages': expected a list, found \"x\""),
    ({"messages": [USER, 5]}, "message 2: expected an object, found 5"),
    ({"messages": [{"content": "a"}, ANSWER]}, r"message 1: column 'role' is missing; .* \['content'\]"),
    ({"messages": [USER, ANSWER | {"content": None}]}, "message 2: column 'content' is null"),
    ({"messages": [ANSWER, USER]}, "expected an assistant message after another one"),
])
def test_bad_chats_are_one_line(tmp_path, row, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [USER, ANSWER]}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"chats.jsonl line 3: {message}") as error:
        load_chats(str(path), chatml_tokenizer(), 100)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("template", "chat", "message"), [
    (LLAMA2, [USER, USER, ANSWER], "messages 1 to 2: refused by .*: Conversation roles must alternate"),
    ("{{ messages[0] + 1 }}", [USER, ANSWER], "messages 1 to 1: refused by the tokenizer's chat template"),
    (CHATML.replace("<|im_start|>assistant", "think"), [USER, ANSWER], "messages 1 to 2: expected a chat"),
    (THOUGHT.replace("{{ '<|im_end|>' + message", "{{ message"), [USER, ANSWER], "messages 1 to 2: expected"),
    ("{{ '\ud800' }}" + CHATML, [USER, ANSWER], "messages 1 to 1: expected text .* surrogate at character 1"),
    ("{% if messages|length > 1 %}x{% endif %}", [USER, ANSWER], "expected a prompt before the first answer"),
])
def test_templates_that_do_not_fit_are_one_line(tmp_path, template, chat, message):
    tokenizer = chatml_tokenizer(template)
    tokenizer.bos_token = "<eos>"
    with pytest.raises(UserError, match=f"chats.jsonl line 1: {message}") as error:
        loaded(tmp_path, tokenizer, chat)
    assert "\n" not in str(error.value)


def test_bad_files_and_tokenizers_are_one_line(tmp_path):
    tokenizer = chatml_tokenizer()
    (tmp_path / "chats.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (("nowhere.jsonl", "found no such file"), ("chats.txt", "found another name"),
                          ("empty.jsonl", "empty.jsonl: expected at least one row, found none")):
        with pytest.raises(UserError, match=message):
            load_chats(str(tmp_path / name), tokenizer, 100)
    path = save_chats(tmp_path / "chats.jsonl", messages(*CHAT))
    with pytest.raises(UserError, match="expected a tokenizer with a chat template for .*, found none"):
        load_chats(path, byte_tokenizer(), 100)
    slow = SimpleNamespace(name_or_path="somewhere", is_fast=False, get_chat_template=lambda: CHATML)
    with pytest.raises(UserError, match="somewhere: expected a fast tokenizer .*, found SimpleNamespace"):
        load_chats(path, slow, 100)


def test_one_chat_in_ten_is_held_out_by_its_content(tmp_path):
    """Whatever else its row has, so that copies are on the same side; reading ends where enough are read."""
    turns, tokenizer = {}, chatml_tokenizer()
    for number in range(100):
        turns[number] = messages(("user", f"{number}?"), ("assistant", str(number)))
    content = {number: json.dumps([["user", f"{number}?"], ["assistant", str(number)]]) for number in turns}
    held_out = [number for number in turns
                if hashlib.sha256(content[number].encode()).hexdigest() < "1" + 63 * "9"]
    rows = [{"messages": chat} for chat in turns.values()]
    rows += [{"messages": [message | {"name": "x"} for message in chat], "id": 5} for chat in turns.values()]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(*part) -> list[int]:
        samples, description = load_chats(str(path), tokenizer, 100, *part)
        return [int(tokenizer.decode(sample.answer).split("<")[0]) for sample in samples], description

    chats, description = read(HELDOUT)
    assert chats == 2 * held_out and 5 < len(held_out) < 15
    assert f": {len(chats)} chats in its held-out part, " in description
    assert read(HELDOUT, 3)[0] == held_out[:3]
    others = [number for number in turns if number not in held_out]
    assert read()[0] == read(TRAIN)[0] == 2 * others and read(EVALUATION)[0] == 2 * list(turns)
    path.write_text("".join(json.dumps({"messages": turns[number]}) + "\n" for number in others))
    with pytest.raises(TooShort, match="found none among 0 in its held-out part"):
        read(HELDOUT)


@pytest.mark.parametrize(("template", "message"), [
    ("{% for i in range(10000) %}{% endfor %}", "refused by the tokenizer's chat template: Range too big"),
    ("{% for i in range(999) %}{% for j in range(999) %}{% for k in range(999) %}{% endfor %}{% endfor %}"
     "{% endfor %}", "refused by the tokenizer's chat template: it takes more than 0.2 s, or 0.1 s on"),
    ("{{ 'x' * 20000000 }}", "expected at most 10000000 characters .*, found 20000"),
])
def test_a_template_that_does_not_end_is_refused(tmp_path, monkeypatch, template, message):
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = template + tokenizer.chat_template
    path = save_chats(tmp_path / "chats.jsonl", messages(("user", "Hi"), ("assistant", "Yes")))
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.2 if "it takes" in message else 1000)
    with pytest.raises(UserError, match=message):
        load_chats(path, tokenizer, 100)


@pytest.mark.parametrize("seconds", [0.05, 0.14])
def test_a_template_may_take_its_time_once_but_not_for_every_chat(tmp_path, monkeypatch, seconds):
    tokenizer, rendered = chatml_tokenizer(), []
    render = tokenizer.apply_chat_template

    def slow(*arguments, **flags):
        time.sleep(seconds)
        rendered.append(1)
        return render(*arguments, **flags)

    monkeypatch.setattr(tokenizer, "apply_chat_template", slow)
    monkeypatch.setattr(chat, "RENDER_SECONDS", 0.3)
    path = save_chats(tmp_path / "chats.jsonl", *[messages(("user", "Hi"), ("assistant", "Yes"))] * 20)
    if seconds < chat.AVERAGE_SECONDS:
        assert len(load_chats(path, tokenizer, 100)[0]) == 20
    else:
        with pytest.raises(UserError, match="it takes more than 0.3 s, or 0.1 s on average"):
            load_chats(path, tokenizer, 100)
        assert 2 <= len(rendered) < 10
