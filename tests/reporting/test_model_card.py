"""The model card: what it says, and that no name can break it."""

import copy
import re

import pytest
from huggingface_hub import ModelCard

from common.reporting import card as model_card

MODEL = {"name": "meta-llama/Toy", "path": "models/toy", "fingerprint": "ab" * 32, "layers": 3, "heads": 8,
         "kv_heads": 4, "head_dim": 16, "hidden": 128}
ALIGNMENT = {
    "model": MODEL,
    "summary": {"kv_heads": 2, "by": "value", "criterion": "dist", "rotate": "dist", "merge": "mean",
                "refit": None, "key_context": None,
                "perplexity_source": 7.12345, "perplexity_merged": 9.98765},
    "groups": [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 3], [1, 2]]],
}
TRAINING = {"summary": {"steps": 320, "batch": 16, "tokens": 322330, "lr": 2e-05, "masks": "l0",
                        "loss": 0.117143},
            "arguments": {"seed": 41, "tasks": "hub", "only": ["boolq", "piqa"], "text": ["c4"],
                          "chat": [], "teacher": None}}
EXPORT = {"summary": {"dtype": "torch.float32", "class": "LlamaForCausalLM"},
          "packages": {"torch": "9.8.7", "numpy": "1.2.3"}, "commit": "cd" * 20}
OPENING, CLOSING = "<!-- scores -->", "<!-- /scores -->"


@pytest.fixture
def records():
    return copy.deepcopy((ALIGNMENT, TRAINING, EXPORT))


def write(directory, records, chat: bool = False) -> str:
    model_card.write(str(directory), *records, chat)
    return (directory / "README.md").read_text(encoding="utf-8")


def words(card: str) -> str:
    """The text without line breaks."""
    return " ".join(card.split())


PAPER = "[Align Attention Heads Before Merging Them](https://arxiv.org/abs/2412.20677)"
KLS = {"start_heldout_kl": 0.06, "heldout_kl": 0.05}


@pytest.mark.parametrize(("summaries", "arguments", "texts"), [  # of stages 4, 5 and 6; of stage 5
    ([{}, {}, {}], {}, [
        "heads grouped by values, rotated onto each other, averaged, merged gradually by L0 masks, distilled "
        "from a fine-tuned teacher on tasks and text. 8 query",
        # a key and a value, 3 layers, 16 numbers of 4 bytes per head
        f"takes {2 * 3 * 16 * 4 * 2} bytes per token instead of {2 * 3 * 16 * 4 * 4:,} (50.0%)",
        "perplexity rose from 7.123 to 9.988", "320 steps of 16 samples (322,330 tokens)",
        "torch 9.8.7, numpy 1.2.3", "0. 0 2; 1 3 1. 0 1; 2 3 2. 0 3; 1 2"]),
    ([{"refit": "output"}, KLS, {"step": 200, "heldout_kl": 0.04, "open_masks": 3}], {}, [
        "; 3 masks had not closed", "200 of 320 steps", "0.0600 before, 0.0400 after."]),
    ([{"by": "energy", "criterion": None, "merge": "closed-form", "refit": "attention", "key_context": 4096},
      KLS | {"masks": "off", "heldout_kl": 0.08, "start_heldout_task_kl": 3.4, "heldout_task_kl": 2.56},
      {"open_masks": None}],
     {"tasks": "none", "chat": ["x/a.jsonl", "hf:o/d:c"], "text": ["generated:/home/me/b.txt"],
      "teacher": "source"}, [
        ": heads grouped by energy, merged in closed form, the attention of each layer refitted to the "
        "source's, distilled from the untouched source on chats and self-generated text. 8 query",
        "chats (`a.jsonl`, `hf:o/d:c`), text (`generated:b.txt`)",
        "0.0600 before, 0.0800 after, which is no better; on questions 3.4000 before, 2.5600 after."]),
    ([{"by": "none", "criterion": None}, None, {}], {}, [
        ": adjacent heads grouped, rotated onto each other, averaged. 8 query", "- Training: none."]),
])
def test_the_card_says_how_it_was_made(tmp_path, records, summaries, arguments, texts):
    for record, summary in zip(records, summaries, strict=True):
        record["summary"] |= summary or {}
    records[1]["arguments"] |= arguments
    card = words(write(tmp_path, records if summaries[1] is not None else (records[0], None, records[2])))
    assert not [text for text in texts if text not in card]
    uses_paper = summaries[0].get("merge") != "closed-form"
    tags = ModelCard.load(tmp_path / "README.md").data.tags
    assert (PAPER in card) == uses_paper and tags == ["gqa", "kv-cache"] + ["arxiv:2412.20677"] * uses_paper
    assert ("Table 5" in card) == (summaries[1] is not None and not arguments)


@pytest.mark.parametrize("name", ["/home/me/models/toy", f"a\n---\n# <b> x{CLOSING}y{OPENING}"])
def test_no_directory_is_a_base_model_and_no_name_breaks_the_card(name, tmp_path, records):
    plain = write(tmp_path, records)
    records[0]["model"]["name"] = name
    card = write(tmp_path, records)
    assert "base_model" not in ModelCard.load(tmp_path / "README.md").data.to_dict()
    marks = [re.findall("^(?:#+|---)", text, re.MULTILINE) for text in (card, plain)]
    assert marks[0] == marks[1]  # headings, and the rules around the metadata
    assert card.count(OPENING) == card.count(CLOSING) == 1
    assert "<b>" not in card and "huggingface.co" not in card


def test_a_chat_model_is_prompted_through_its_template(tmp_path, records):
    for chat, data in ((True, "none"), (False, "none"), (True, "hub")):
        records[1]["arguments"]["tasks"] = data
        card = write(tmp_path, records, chat)
        assert ("apply_chat_template" in card) == (chat and data == "none")
        assert ("The capital of France is" in card) == (not chat)
        # the template has begun the sequence, and so has no prompt of the tasks
        assert ("add_special_tokens=False" in card) == (chat or data == "hub")


OTHER = {"license": "other", "license_name": "acme-community", "license_link": "https://example.org/LICENSE"}


@pytest.mark.parametrize(("name", "given", "shown"), [  # given: metadata of the source's own card
    ("acme/toy", {}, ""),
    ("/models/toy", {"license": "apache-2.0", "language": "de", "base_model": "some/Base"}, "apache-2.0"),
    ("acme/toy", OTHER, "acme-community"),
])
def test_license_and_base_model_are_those_of_the_sources_card(name, given, shown, tmp_path, records):
    records[0]["model"] |= {"name": name, "path": str(tmp_path / "source")}
    if given:
        (tmp_path / "source").mkdir()
        lines = "".join(f"{key}: {value}\r\n" for key, value in given.items())
        (tmp_path / "source" / "README.md").write_bytes(f"\ufeff---\r\n{lines}---\r\n# Toy\r\n".encode())
    sentence = f" ({shown})." if shown else ", which came without a card that names it."
    assert f"Its license is the source's{sentence}" in words(write(tmp_path, records))
    data = ModelCard.load(tmp_path / "README.md", ignore_metadata_errors=False).data.to_dict()
    base = {"base_model": given.get("base_model", name), "base_model_relation": "finetune"}
    assert data == given | base | {"library_name": "transformers", "pipeline_tag": "text-generation",
                                   "tags": ["gqa", "kv-cache", "arxiv:2412.20677"]}
