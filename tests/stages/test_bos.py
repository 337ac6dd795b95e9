"""Sequences and prompts that begin with the begin-of-sequence token, as the tokenizer's own texts do."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from common.data.documents import TRAIN, in_part
from common.data.pool import Sources, load_pool
from common.data.sources import DataContext, generated, read_sequences
from common.evaluation.compared import Settings, calibration_bos, read_calibration_text
from common.models.load import bos_prefix, load_tokenizer
from common.run.errors import UserError
from common.training.heldout import heldout_texts, load_heldout
from common.training.lines import TASK_SET
from models import END, byte_tokenizer, save_tiny
from runs import GROUPING, TRAINING, digests, expect_error, read, run, save_lines

SEQUENCES, LENGTH = 6, 24
ROWS = 60  # of generated text: more tokens than a row begin them


def beginning(tokenizer, adds: bool = True):
    """A tokenizer with "^" as begin-of-sequence token, which it adds to a text itself, or does not."""
    tokenizer.bos_token = "^"
    if adds:
        begin = TemplateProcessing(single="^ $A", special_tokens=[("^", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = begin
    return tokenizer


BEGIN = beginning(byte_tokenizer()).bos_token_id


def test_a_sequence_begins_as_the_tokenizers_own_texts_do(tmp_path):
    for tokenizer, by_default in ((beginning(byte_tokenizer()), [BEGIN]), (byte_tokenizer(), []),
                                  (beginning(byte_tokenizer(), adds=False), [])):
        assert bos_prefix(tokenizer) == by_default
        save_tiny(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert [bos_prefix(load_tokenizer(tmp_path, bos)) for bos in (None, False)] == [by_default, []]
        if tokenizer.bos_token:
            assert bos_prefix(load_tokenizer(tmp_path, True)) == [BEGIN]
    save_tiny(tmp_path)
    with pytest.raises(UserError, match="--bos: expected a tokenizer with a begin-of-sequence token, found"):
        bos_prefix(load_tokenizer(tmp_path, True))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model whose tokenizer begins texts with "^"; documents as they are, and with "^" before each."""
    home = tmp_path_factory.mktemp("bos")
    save_tiny(home / "model")
    beginning(byte_tokenizer()).save_pretrained(home / "model")
    draw = random.Random(0)
    documents = ["".join(draw.choices("abcdefgh ", k=LENGTH - 1)) for _ in range(2 * SEQUENCES)]
    trained = [text for text in documents if in_part(text, TRAIN) and in_part(f"^{text}", TRAIN)]
    for name, begin in (("bare", ""), ("marked", "^")):
        save_lines(home / f"{name}.jsonl", [begin + document for document in trained[:SEQUENCES]])
    return home


ROADS = (("bare", []), ("marked", ["--no-bos"]))  # the same tokens


@pytest.fixture(scope="module")
def aligned(home):
    """Run directories after stages 1-4: "bare" text by default, and "marked" text with --no-bos."""
    for name, flag in ROADS:
        out, text = home / f"run-{name}", home / f"{name}.jsonl"
        run("01_calibrate.py", "--run", out, "--model", home / "model", "--text", text,
            "--sequences", SEQUENCES, "--length", LENGTH, *flag)
        run("02_similarity.py", "--run", out, "--energy")
        run("03_group.py", "--run", out, *GROUPING, "--by", "energy")
        run("04_align.py", "--run", out, "--merge", "closed-form", "--refit")
    return {name: home / f"run-{name}" for name, _ in ROADS}


@pytest.mark.slow
def test_calibration_and_alignment_are_those_of_text_which_begins_so(aligned):
    """So are the refit, the equivalence check, and what stage 7 reads of the calibration's text."""
    for name in ("calibration", "merged"):
        bare, marked = (digests(out / name) for out in aligned.values())
        assert bare == marked
    summaries = [read(out / "merged" / "stage.json")["summary"] for out in aligned.values()]
    for name in ("perplexity_source", "perplexity_merged", "refit_layers"):
        assert summaries[0][name] == summaries[1][name]
    for bos, out in zip((True, False), aligned.values(), strict=True):
        text = str(out / "calibration")
        assert calibration_bos(text, None) == bos
        tokens, _ = read_calibration_text(Settings(text=text, bos=bos, length=LENGTH, sequences=2))
        assert (tokens == BEGIN).sum(1).tolist() == [1, 1]


def test_samples_of_text_and_prompts_of_tasks_begin_with_it(home, inputs, tmp_path, group_of_one):
    """Each once, before the same tokens; held-out ones, too."""
    model, tokens = str(home / "model"), {}
    for bos, begin in ((None, [BEGIN]), (False, [])):
        length = LENGTH - 1 + len(begin)
        sources = Sources(inputs["tasks"], text=[inputs["text"]], text_length=length)
        origin = DataContext(model, str(tmp_path / str(bos)), "cpu", group_of_one, bos=bos)
        pool = load_pool(sources, origin)
        kept = replace(sources, text=(), heldout_text=inputs["text"], heldout_sequences=3)
        texts = heldout_texts(kept, origin)
        questions = load_heldout(kept, origin, texts, every=5).sets[TASK_SET]
        samples = [*pool.texts, *texts, *pool.answered, *questions]
        assert len(pool.answered) == 12 * 8 and len(pool.texts) > 10 and len(questions) == 5 * 8
        assert {len(sample) for sample in (*pool.texts, *texts)} == {LENGTH - 1 + len(begin)}
        assert all([*sample.prompt[: len(begin)]] == begin for sample in samples)
        tokens[bos] = [[*sample.prompt[len(begin) :]] for sample in samples]
    assert tokens[None] == tokens[False]


@pytest.mark.slow
def test_training_begins_so_and_goes_on_only_so(aligned, inputs):
    words = ["05_prune_train.py", "--run", aligned["bare"], "--tasks", inputs["tasks"], *TRAINING, "--text",
             inputs["text"], "--text-length", LENGTH, "--text-tokens", 3000, "--steps", 2]
    assert f" samples of {LENGTH} tokens, ^ first" in run(*words).stdout
    expect_error("samples_sha256", *words, "--no-bos")


@pytest.mark.slow
def test_evaluation_begins_text_and_prompts_with_it(home, inputs, tmp_path):
    shared = ["--model", home / "model", "--tasks", inputs["tasks"], "--limit", 2, "--only", "piqa",
              "--sequences", SEQUENCES, "--length", LENGTH]
    perplexities = []
    for (name, flag), begins in zip(ROADS, (True, False), strict=True):
        run("07_eval.py", "--run", tmp_path / name, *shared, "--text", home / f"{name}.jsonl", *flag)
        written = read(tmp_path / name / "eval/stage.json")
        assert written["begin_of_sequence"] is written["arguments"]["bos"] is begins
        perplexities.append(written["results"]["model"]["perplexity"])
    assert perplexities[0] == perplexities[1]


@pytest.mark.parametrize("begin", [BEGIN, END])
def test_generated_text_begins_with_the_token_that_it_is_sampled_after(tmp_path, group_of_one, begin):
    """Begin-of-sequence, where the model has one. No second one is put before it, in whichever stage."""
    model = save_tiny(tmp_path / "model")
    if begin == BEGIN:
        beginning(byte_tokenizer()).save_pretrained(model)
    origin = DataContext(model, str(tmp_path), "cpu", group_of_one)
    rows = generated("generated", origin, ROWS, LENGTH)
    assert (rows[:, 0] == begin).all() and len(np.unique(rows[:, 1:], axis=0)) == ROWS
    for bos in (None, False, begin == BEGIN):
        asked = replace(origin, bos=bos)
        tokens, _ = read_sequences("generated", None, asked, ROWS, LENGTH)
        assert tokens.dtype == torch.int64 and (tokens.numpy() == rows).all()
        tokens_of_text = ROWS * (LENGTH - (begin == BEGIN and bos is not False))
        sources = Sources(text=["generated"], text_length=LENGTH, text_tokens=tokens_of_text)
        pool = load_pool(sources, asked)
        assert [sample.prompt for sample in pool.texts] == rows.tolist()
