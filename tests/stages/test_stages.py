"""Stages 1 to 4 on a tiny model with biases: artifacts against definitions."""

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.data.documents import HELDOUT
from common.data.sources import DataContext, read_unread
from common.data.text import load_tokens
from common.reporting import plots
from common.run.errors import UserError
from models import byte_tokenizer, tiny_model
from reference import all_groupings
from runs import GROUPING, HEADS, LAYERS, SIZE, calibrate_arguments, calibrated_layer, expect_error, read, run

TOKENS = 512  # of the text of `inputs`; every one is sampled


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


def pairs_of(keys: torch.Tensor) -> torch.Tensor:
    """RoPE pairs as complex numbers: [..., d] -> [..., d/2]."""
    return torch.complex(keys[..., : SIZE // 2], keys[..., SIZE // 2 :])


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors, dim=-1)


def test_16_bit_products_of_calibration_are_summed_in_float32(inputs, tmp_path):
    """Parts of a sum that a GPU splits may otherwise be rounded to 16 bits."""
    names = [f"allow_{half}_reduced_precision_reduction" for half in ("bf16", "fp16")]
    for name in names:
        setattr(torch.backends.cuda.matmul, name, True)
    run("01_calibrate.py", "--run", tmp_path, *calibrate_arguments(inputs))
    assert not any(getattr(torch.backends.cuda.matmul, name) for name in names)


def test_calibration_holds_sums_over_the_models_own_vectors(aligned_run, inputs):
    model = AutoModelForCausalLM.from_pretrained(inputs["model"])
    rows, columns = torch.triu_indices(HEADS, HEADS)
    for index, vectors in enumerate(projected(inputs["model"], inputs)):
        tensors = calibrated_layer(aligned_run / "calibration", index)
        keys = vectors["key"]
        expected = {
            "query.gram": torch.einsum("nia,nib->iab", vectors["query"], vectors["query"]),
            "key.sum": keys.sum(0),
            "key.raw": torch.einsum("nia,njb->ijab", keys, keys)[rows, columns],
        }
        for kind, values, keys in (("raw", vectors["value"], vectors["key"]),
                                   ("unit", unit(vectors["value"]), unit(vectors["key"]))):
            pairs = pairs_of(keys)
            expected[f"value.{kind}"] = torch.einsum("nia,njb->ijab", values, values)[rows, columns]
            if kind == "unit":
                expected["key.unit"] = torch.view_as_real(torch.einsum("nip,njp->ijp", pairs.conj(), pairs))
        output = model.model.layers[index].self_attn.o_proj.weight.detach().double().view(48, HEADS, SIZE)
        expected["output.gram"] = torch.einsum("oia,oib->iab", output, output)
        expected |= {f"sample.{kind}": vectors[kind] for kind in ("key", "value")}
        for name, tensor in expected.items():
            tolerance = 1e-5 * float(tensor.abs().max())
            torch.testing.assert_close(tensors[name].double(), tensor, rtol=0, atol=tolerance)
        assert tensors["key.free"].all()


def test_sampled_tokens_are_spread_evenly_and_products_are_summed_in_float32(inputs, tmp_path):
    """Parts of a sum that a GPU splits may otherwise be rounded to 16 bits."""
    names = [f"allow_{half}_reduced_precision_reduction" for half in ("bf16", "fp16")]
    for name in names:
        setattr(torch.backends.cuda.matmul, name, True)
    run("01_calibrate.py", "--run", tmp_path, *calibrate_arguments(inputs)[:-1], 5)
    assert not any(getattr(torch.backends.cuda.matmul, name) for name in names)
    positions = [0, 127, 255, 383, 511]
    for index, vectors in enumerate(projected(inputs["model"], inputs)):
        tensors = calibrated_layer(tmp_path / "calibration", index)
        for kind in ("key", "value"):
            expected = vectors[kind][positions].float()
            torch.testing.assert_close(tensors[f"sample.{kind}"], expected, rtol=1e-5, atol=1e-5)


def test_activations_that_overflow_are_named(inputs, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1e38)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    expect_error("NaN or Inf in the output of model.layers.1.self_attn.k_proj", "01_calibrate.py", "--run",
                 tmp_path / "run", "--model", tmp_path / "model", *calibrate_arguments(inputs)[2:])


def test_the_picture_and_the_summary_of_similarities(aligned_run, tmp_path, monkeypatch):
    """Figure 2: the cosines of evenly spaced layers; of version 1: of all pairs."""
    similarity = safe_open(aligned_run / "similarity/similarity.safetensors", "numpy")
    pictures, points = [], []
    monkeypatch.setattr(plots, "pairs", lambda path, *drawn: points.append((Path(path).name, *drawn)))
    monkeypatch.setattr(plots, "heatmaps", lambda path, *drawn: pictures.append((Path(path).name, *drawn)))
    monkeypatch.setattr(plots, "spaced_layers", lambda count: [0, count - 1])
    run("02_similarity.py", "--run", tmp_path / "run", "--calibration", aligned_run / "calibration")
    (name, rows, drawn, _), = pictures
    assert name == "similarity.png" and drawn == [0, 2] and len(rows) == 4
    for title, matrices in rows.items():
        stored = similarity.get_tensor(title.replace("s ", ".cos."))
        assert np.array_equal(np.stack(matrices), stored[drawn])
    above = np.triu_indices(HEADS, 1)
    for head in ("key", "value"):
        for when in ("before", "after"):
            stored = similarity.get_tensor(f"{head}.cos.{when}")
            name, cosines, _ = points[0]
            drawn = cosines[f"{head}s"][f"{when} alignment"]
            assert name == "pairs.png" and np.array_equal(drawn, [matrix[above] for matrix in stored])

    summary = read(tmp_path / "run" / "similarity/stage.json")["summary"]
    for name, mean in summary.items():
        matrices = similarity.get_tensor(name)
        assert mean == pytest.approx(np.mean([matrix[above].mean() for matrix in matrices]), abs=1e-6)


def sum_within(matrix: np.ndarray, groups: list[list[int]]) -> float:
    return sum(matrix[a, b] for group in groups for a, b in itertools.combinations(group, 2))


@pytest.mark.parametrize(("by", "criterion", "kv_heads"), [
    ("key", "dist", 2), ("value", "cos", 4), ("both", "dist", 4), ("energy", "cos", 2),
])
def test_groups_have_the_highest_score_of_all(aligned_run, tmp_path, by, criterion, kv_heads):
    """The sum of similarities after alignment, against all 35 or 105 groupings of eight heads."""
    similarity = safe_open(aligned_run / "similarity/similarity.safetensors", "numpy")
    key, value = (similarity.get_tensor(f"{kind}.{criterion}.after") for kind in ("key", "value"))
    above = np.triu_indices(HEADS, 1)
    both = [key[i] / key[i][above].std() + value[i] / value[i][above].std() for i in range(LAYERS)]
    matrices = {"key": key, "value": value, "both": both, "energy": similarity.get_tensor("energy")}[by]
    run("03_group.py", "--run", tmp_path, "--similarity", aligned_run / "similarity",
        *GROUPING, "--kv-heads", kv_heads, "--by", by, "--criterion", criterion)
    written = read(tmp_path / "groups/stage.json")
    size = HEADS // kv_heads
    adjacent = [list(range(first, first + size)) for first in range(0, HEADS, size)]
    for layer, matrix in enumerate(matrices):
        best = max(all_groupings(list(range(HEADS)), size), key=lambda groups: sum_within(matrix, groups))
        assert written["groups"][layer] == best
        scores = {"default": sum_within(matrix, adjacent), "found": sum_within(matrix, best)}
        for name, score in scores.items():
            assert written["summary"][f"score_{name}"][layer] == pytest.approx(score, abs=1e-8)
    assert written["groups"] != [adjacent] * LAYERS
    used = None if by == "energy" else criterion
    assert written["summary"] | {"kv_heads": kv_heads, "by": by, "criterion": used} == written["summary"]


def test_the_default_is_a_quarter_of_the_heads_and_by_none_groups_adjacent_ones(aligned_run, tmp_path):
    similarity = aligned_run / "similarity"
    run("03_group.py", "--run", tmp_path, "--similarity", similarity, "--by", "none")
    assert read(tmp_path / "groups/stage.json")["groups"] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * LAYERS


def test_the_random_seed_decides_the_search(aligned_run, tmp_path):
    chosen = []
    for number, seed in enumerate((1, 1, 2)):
        home, similarity = tmp_path / str(number), aligned_run / "similarity"
        run("03_group.py", "--run", home, "--similarity", similarity,
            "--restarts", 1, "--iterations", 1, "--seed", seed)
        chosen.append(read(home / "groups/stage.json")["groups"])
    assert chosen[0] == chosen[1] != chosen[2]


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
    documents.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
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
    documents.write_text(json.dumps({"text": "word " * 60}) + "\n")
    np.save(str(rows), np.full((8, 70), 7, "<i4"))
    for path in (short, documents, rows):
        tokens, description = unread(path, inputs["model"], 60)
        assert tokens.shape == (4, 60) and "perplexity on other text may be higher" in description
        assert len(unread(path, inputs["model"], 60, calibrated=3)[0]) == 3  # it may have no more
    np.save(str(rows), np.full((8, 70), 10**6, "<i4"))
    with pytest.raises(UserError, match="rows.npy.*: expected token ids below 26., the vocabulary, found 10"):
        unread(rows, inputs["model"], 60)
