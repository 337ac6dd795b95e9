"""Stages 1 to 4 on a tiny model with biases: artifacts against definitions."""

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.documents import HELDOUT
from common.data.sources import DataContext, read_unread
from common.data.text import load_tokens
from common.reporting import plots
from models import byte_tokenizer, tiny_model
from reference import all_groupings, value_gram
from runs import (
    GROUPING,
    HEADS,
    LAYERS,
    SIZE,
    calibrate_arguments,
    calibrated_layer,
    expect_error,
    read,
    run,
    save_lines,
)

TOKENS = 512  # of the text of `inputs`; every one is sampled
ABOVE = np.triu_indices(HEADS, 1)  # pairs of heads


@torch.no_grad()
def projected(model_path, inputs) -> list[dict[str, torch.Tensor]]:
    """Per layer the model's own queries, keys (before RoPE) and values on the calibration text.

    Each [tokens, heads, d] float64.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path)
    tokens, _ = load_tokens(inputs["text"], AutoTokenizer.from_pretrained(model_path), 8, 64)
    layers = [{} for _ in model.model.layers]
    for vectors, layer in zip(layers, model.model.layers, strict=True):
        for kind in ("query", "key", "value"):

            def keep(module, arguments, output, vectors=vectors, kind=kind):
                vectors[kind] = output.double().view(TOKENS, -1, SIZE)

            getattr(layer.self_attn, f"{kind[0]}_proj").register_forward_hook(keep)
    model(tokens)
    return layers


def half(vectors: torch.Tensor) -> torch.Tensor:
    """The stored half of the Gram matrix of [n, H, d]: blocks [d, d] of heads i <= j."""
    return value_gram(vectors)[tuple(torch.triu_indices(HEADS, HEADS))]


def test_calibration_holds_sums_over_the_models_own_vectors(aligned_run, inputs):
    model = AutoModelForCausalLM.from_pretrained(inputs["model"])
    for index, vectors in enumerate(projected(inputs["model"], inputs)):
        queries, keys, values = (vectors[kind] for kind in ("query", "key", "value"))
        output = model.model.layers[index].self_attn.o_proj.weight.detach().double().view(48, HEADS, SIZE)
        unit_keys, unit_values = (torch.nn.functional.normalize(each, dim=-1) for each in (keys, values))
        pairs = torch.complex(*unit_keys.chunk(2, dim=-1))  # RoPE turns channels p and p + d / 2
        expected = {
            "query.gram": torch.einsum("nia,nib->iab", queries, queries),
            "key.sum": keys.sum(0),
            "key.raw": half(keys),
            "key.unit": torch.view_as_real(torch.einsum("nip,njp->ijp", pairs.conj(), pairs)),
            "value.raw": half(values),
            "value.unit": half(unit_values),
            "output.gram": torch.einsum("oia,oib->iab", output, output),
            "sample.key": keys,
            "sample.value": values,
        }
        tensors = calibrated_layer(aligned_run / "calibration", index)
        for name, tensor in expected.items():
            tolerance = 1e-5 * float(tensor.abs().max())
            torch.testing.assert_close(tensors[name].double(), tensor, rtol=0, atol=tolerance)
        assert tensors["key.free"].all()


def test_sampled_tokens_are_spread_evenly_and_products_are_summed_in_float32(inputs, tmp_path):
    """Parts of a sum that a GPU splits may otherwise be rounded to 16 bits."""
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
    for name in names:
        setattr(torch.backends.cuda.matmul, name, True)
    run("01_calibrate.py", "--run", tmp_path, *calibrate_arguments(inputs)[:-1], 5)
    assert not any(getattr(torch.backends.cuda.matmul, name) for name in names)
    for index, vectors in enumerate(projected(inputs["model"], inputs)):
        tensors = calibrated_layer(tmp_path / "calibration", index)
        for kind in ("key", "value"):
            expected = vectors[kind][[0, 127, 255, 383, 511]].float()
            torch.testing.assert_close(tensors[f"sample.{kind}"], expected, rtol=1e-5, atol=1e-5)


def test_activations_that_overflow_are_named(inputs, tmp_path):
    model = tiny_model()
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(1e38)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    expect_error("NaN or Inf in the output of model.layers.1.self_attn.k_proj", "01_calibrate.py", "--run",
                 tmp_path / "run", *calibrate_arguments(inputs | {"model": tmp_path / "model"}))


def test_the_picture_and_the_summary_of_similarities(aligned_run, tmp_path, monkeypatch):
    """Figure 2: the cosines of evenly spaced layers; of version 1: of all pairs."""
    similarity, drawn = load_file(aligned_run / "similarity/similarity.safetensors"), {}
    for name in ("heatmaps", "pairs"):
        monkeypatch.setattr(plots, name, lambda path, *columns: drawn.update({Path(path).name: columns}))
    monkeypatch.setattr(plots, "spaced_layers", lambda count: [0, count - 1])
    run("02_similarity.py", "--run", tmp_path, "--calibration", aligned_run / "calibration")
    rows, layers, _ = drawn["similarity.png"]
    assert layers == [0, 2] and len(rows) == 4
    for title, matrices in rows.items():
        stored = similarity[title.replace("s ", ".cos.")]
        assert np.array_equal(np.stack(matrices), stored[layers])
        head, when = title.split()
        pairs = drawn["pairs.png"][0][head][f"{when} alignment"]
        assert pairs == [matrix[ABOVE].tolist() for matrix in stored]
    for name, mean in read(tmp_path / "similarity/stage.json")["summary"].items():
        means = [matrix[ABOVE].mean() for matrix in similarity[name]]
        assert mean == pytest.approx(np.mean(means), abs=1e-6)


def sum_within(matrix: np.ndarray, groups: list[list[int]]) -> float:
    return sum(matrix[a, b] for group in groups for a, b in itertools.combinations(group, 2))


@pytest.mark.parametrize(("by", "criterion", "kv_heads"), [
    ("key", "dist", 2), ("value", "cos", 4), ("both", "dist", 4), ("energy", "cos", 2),
])
def test_groups_have_the_highest_score_of_all(aligned_run, tmp_path, by, criterion, kv_heads):
    """The sum of similarities after alignment, against all 35 or 105 groupings of eight heads."""
    similarity = load_file(aligned_run / "similarity/similarity.safetensors")
    key, value = (similarity[f"{kind}.{criterion}.after"] for kind in ("key", "value"))
    both = [sum(matrix / matrix[ABOVE].std() for matrix in pair) for pair in zip(key, value, strict=True)]
    matrices = {"key": key, "value": value, "both": both, "energy": similarity["energy"]}[by]
    run("03_group.py", "--run", tmp_path, "--similarity", aligned_run / "similarity", *GROUPING,
        "--kv-heads", kv_heads, "--by", by, "--criterion", criterion)
    written, size = read(tmp_path / "groups/stage.json"), HEADS // kv_heads
    adjacent, summary = np.arange(HEADS).reshape(-1, size).tolist(), written["summary"]
    for layer, matrix in enumerate(matrices):
        best = max(all_groupings(list(range(HEADS)), size), key=lambda groups: sum_within(matrix, groups))
        assert written["groups"][layer] == best
        for name, groups in (("default", adjacent), ("found", best)):
            score = sum_within(matrix, groups)
            assert summary[f"score_{name}"][layer] == pytest.approx(score, abs=1e-8)
    assert written["groups"] != [adjacent] * LAYERS
    used = None if by == "energy" else criterion
    assert (summary["kv_heads"], summary["by"], summary["criterion"]) == (kv_heads, by, used)


def test_the_default_is_a_quarter_of_the_heads_and_by_none_groups_adjacent_ones(aligned_run, tmp_path):
    run("03_group.py", "--run", tmp_path, "--similarity", aligned_run / "similarity", "--by", "none")
    assert read(tmp_path / "groups/stage.json")["groups"] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * LAYERS


@torch.no_grad()
def test_recorded_perplexities_are_those_of_the_checkpoints_as_loaded_back(aligned_run, inputs):
    summary = read(aligned_run / "merged" / "stage.json")["summary"]
    tokenizer = AutoTokenizer.from_pretrained(inputs["model"])
    tokens, _ = load_tokens(inputs["text"], tokenizer, 4, 64, HELDOUT)
    paths = {"source": inputs["model"], "aligned": aligned_run / "aligned", "merged": aligned_run / "merged"}
    logits = {name: AutoModelForCausalLM.from_pretrained(path)(tokens).logits for name, path in paths.items()}
    for name, rows in logits.items():
        loss = torch.nn.functional.cross_entropy(rows[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert summary[f"perplexity_{name}"] == pytest.approx(float(loss.exp()), rel=1e-5)
    source, merged = (logits[name][:, :-1].log_softmax(-1) for name in ("source", "merged"))
    kl = float((source.exp() * (source - merged)).sum(-1).mean())
    assert summary["kl_merged"] == pytest.approx(kl, rel=1e-4) and kl > 0.01
    difference = float((logits["source"] - logits["aligned"]).abs().max())
    assert summary["max_logit_difference"] == pytest.approx(difference, rel=0.5)
    assert set(read(aligned_run / "aligned" / "stage.json")["inputs"]) == {"RUN/calibration", "RUN/groups"}


def unread(path, model: str, length: int, calibrated: int = 8) -> tuple[torch.Tensor, str]:
    """Four sequences for the equivalence check, of a text that has calibrated with so many."""
    origin = DataContext(model, str(path.parent), "cpu")
    record = {"arguments": {"text": str(path)}, "summary": {"sequences": calibrated}}
    return read_unread(record, origin, 4, length)


def test_the_equivalence_check_reads_what_the_calibration_has_not(inputs, tmp_path, monkeypatch):
    """The held-out part of a text, whose blocks are lines here, or of several documents."""
    monkeypatch.setattr("common.data.documents.BLOCK", 1)
    lines = [f"{number} is a number, and {7 * number} is seven times as much.\n" for number in range(100)]
    text, documents = tmp_path / "text.txt", tmp_path / "documents.jsonl"
    text.write_text("".join(lines))
    save_lines(documents, lines)
    held_out = [line for line in lines if hashlib.sha256(line.encode()).hexdigest() < "1" + 63 * "9"]
    tokenizer = AutoTokenizer.from_pretrained(inputs["model"])
    of_text, of_documents = tokenizer("".join(held_out))["input_ids"], tokenizer(held_out)["input_ids"]
    expected = {text: [of_text[start : start + 40] for start in range(0, 160, 40)],
                documents: [ids[:40] for ids in of_documents[:4]]}
    for path, rows in expected.items():
        tokens, description = unread(path, inputs["model"], 40)
        assert tokens.tolist() == rows and "part of the calibration's text" not in description


def test_a_note_says_where_perplexity_is_of_the_calibration_text(inputs, tmp_path):
    """Where the held-out part is too short."""
    short, documents, rows = (tmp_path / name for name in ("short.txt", "documents.jsonl", "rows.npy"))
    short.write_text("Some text. " * 50)
    save_lines(documents, ["word " * 60])
    np.save(str(rows), np.full((8, 70), 7, "<i4"))
    for path in (short, documents, rows):
        tokens, description = unread(path, inputs["model"], 60)
        assert tokens.shape == (4, 60) and "perplexity on other text may be higher" in description
        assert len(unread(path, inputs["model"], 60, calibrated=3)[0]) == 3  # it may have no more
