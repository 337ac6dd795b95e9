"""The seven stages as a user runs them, on a tiny model with biases; then each mistake a user can make."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.artifacts import read_layer
from conftest import TRAINING, copy_run, run, save_tiny


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def digests(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.suffix in (".safetensors", ".distcp")]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_artifact_lets_anyone_recompute_the_similarities(aligned_run):
    """All 512 tokens were sampled, so Eq. 3 and 19 from the stored vectors must give what stage 2 got from Grams."""
    similarity = safe_open(aligned_run / "similarity.safetensors", "pt")
    for layer in range(3):
        for head in ("key", "value"):
            vectors = read_layer(str(aligned_run / "calibration"), layer)[f"sample.{head}"].double()
            assert vectors.shape == (512, 8, 8)
            unit = torch.nn.functional.normalize(vectors, dim=-1)
            before = torch.einsum("nia,nja->ij", unit, unit) / 512
            torch.testing.assert_close(similarity.get_tensor(f"{head}.cos.before")[layer], before, rtol=0, atol=1e-6)
            distance = -torch.cdist(vectors.transpose(0, 1).reshape(8, -1), vectors.transpose(0, 1).reshape(8, -1)).square() / 512
            torch.testing.assert_close(similarity.get_tensor(f"{head}.dist.before")[layer], distance, rtol=1e-6, atol=1e-6)
            if head == "value":
                overlap = torch.einsum("nia,njb->ijab", unit, unit)
                after = torch.linalg.matrix_norm(overlap, "nuc") / 512
            else:
                z = torch.complex(unit[..., :4], unit[..., 4:])
                after = torch.einsum("nip,njp->ijp", z.conj(), z).abs().sum(-1) / 512
            torch.testing.assert_close(similarity.get_tensor(f"{head}.cos.after")[layer], after, rtol=0, atol=1e-6)


def test_alignment_record(aligned_run, inputs):
    written = read(aligned_run / "aligned" / "stage.json")
    summary = written["summary"]
    assert summary["max_logit_difference"] <= 1e-4 and summary["kl"] < 1e-8
    assert summary["perplexity_aligned"] == pytest.approx(summary["perplexity_source"], rel=1e-5)
    assert all(c["value_after"] > c["value_before"] for c in summary["within_group_cosine"])
    assert all(c["key_after"] > c["key_before"] for c in summary["within_group_cosine"])
    assert written["model"]["path"] == inputs["model"] and set(written["inputs"]) == {"calibration", "groups.json"}
    assert (aligned_run / "similarity.png").stat().st_size > 10_000


def test_aligned_and_merged_load_in_plain_transformers(aligned_run, inputs):
    tokens = torch.arange(60)[None]
    source, aligned, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (inputs["model"], aligned_run / "aligned", aligned_run / "merged"))
    assert (source(tokens).logits - aligned(tokens).logits).abs().max() <= 1e-4
    assert type(merged).__name__ == "LlamaForCausalLM" and merged.config.num_key_value_heads == 2
    blocks = aligned.model.layers[1].self_attn.k_proj.weight.view(2, 4, 8, 48)
    torch.testing.assert_close(merged.model.layers[1].self_attn.k_proj.weight.view(2, 8, 48), blocks.mean(1))


def test_whole_run(finished_run):
    export = read(finished_run / "gqa" / "stage.json")["summary"]
    assert export["class"] == "LlamaForCausalLM" and export["max_logit_difference_stored"] <= 1e-4
    model, tokenizer = AutoModelForCausalLM.from_pretrained(finished_run / "gqa"), AutoTokenizer.from_pretrained(finished_run / "gqa")
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (2 * 8, 48)
    generated = model.generate(**tokenizer("Question: which?", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert generated.shape[1] > len("Question: which?")

    lines = [json.loads(line) for line in (finished_run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert lines[0]["mask_target"] == 1 and lines[0]["mask_expected"] > 0.999 and lines[5]["mask_target"] == 0
    assert len(lines[0]["mask_per_layer"]) == 3 and "mask_mean" not in lines[-1]  # masks are gone after 80%
    assert lines[0]["loss"] == pytest.approx(lines[0]["kl"] + lines[0]["bild"], abs=1e-6)

    results = read(finished_run / "eval.json")["results"]
    assert list(results) == ["teacher", "merged", "gqa"]
    assert results["gqa"]["cache_bytes_per_token"] * 4 == results["teacher"]["cache_bytes_per_token"]
    assert len(results["gqa"]["tasks"]) == 8 and all(t["questions"] == 5 for t in results["gqa"]["tasks"].values())
    assert "| perplexity" in (finished_run / "eval.md").read_text()


@pytest.mark.parametrize("stage", ["01", "02", "03", "04", "05", "06"])
def test_a_stage_run_again_writes_the_same_bytes(finished_run, inputs, tmp_path, stage):
    home = copy_run(finished_run, tmp_path / "run")
    outputs = {"01": ["calibration"], "02": ["similarity.safetensors"], "03": ["groups.json"], "04": ["aligned", "merged"],
               "05": ["teacher", "train"], "06": ["gqa"]}[stage]
    before = {name: read(home / name)["groups"] if name == "groups.json" else digests(home / name) for name in outputs}
    command = next(p.name for p in Path(__file__).parent.parent.glob(f"{stage}_*.py"))
    arguments = {"01": ["--model", inputs["model"], "--text", inputs["text"], "--sequences", 8, "--length", 64, "--sample-tokens", 512],
                 "03": ["--kv-heads", 2, "--restarts", 20, "--iterations", 300], "05": ["--tasks", inputs["tasks"], *TRAINING]}.get(stage, [])
    done = run(command, "--run", home, *arguments, fails=stage != "05")  # not without --force; 05 says that it is done
    assert "--force" in done.stdout + done.stderr
    run(command, "--run-dir", home, *arguments, "--force", processes=2 if stage == "05" else 0)
    after = {name: read(home / name)["groups"] if name == "groups.json" else digests(home / name) for name in outputs}
    assert after == before and all(before.values())


def test_mean_pool_baseline(aligned_run, tmp_path):
    """--by none --rotate none: the merged checkpoint is the mean of adjacent heads of the untouched model."""
    home = copy_run(aligned_run, tmp_path / "run")
    run("03_group.py", "--run", home, "--kv-heads", 4, "--by", "none", "--force")
    run("04_align.py", "--run", home, "--rotate", "none", "--force")
    source = AutoModelForCausalLM.from_pretrained(read(home / "groups.json")["model"]["path"])
    merged = AutoModelForCausalLM.from_pretrained(home / "merged")
    for ours, was in zip(merged.model.layers, source.model.layers, strict=True):
        mean = was.self_attn.v_proj.weight.view(4, 2, 8, 48).mean(1)
        torch.testing.assert_close(ours.self_attn.v_proj.weight.view(4, 8, 48), mean)


@pytest.mark.parametrize(("arguments", "masks"), [(["--merge", "closed-form"], "l0"), (["--merge", "closed-form", "--refit"], "off"), (["--refit"], "l0")])
def test_other_starts_through_all_stages(finished_run, aligned_run, inputs, tmp_path, arguments, masks):
    """Energy groups, merges that change W_Q and W_O, with masks and without: what comes out is a stock checkpoint."""
    home = copy_run(aligned_run, tmp_path / "run")
    shutil.copytree(finished_run / "teacher", home / "teacher")
    shutil.rmtree(home / "merged")
    run("03_group.py", "--run", home, "--kv-heads", 2, "--by", "energy", "--restarts", 20, "--iterations", 300, "--force")
    done = run("04_align.py", "--run", home, "--force", *arguments)
    summary = read(home / "merged" / "stage.json")["summary"]
    assert ("refit   perplexity of merged" in done.stdout) == ("--refit" in arguments) == summary["refit"]
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, "--masks", masks, processes=2)
    run("06_export.py", "--run", home)
    lines = [json.loads(line) for line in (home / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11)) and sum("mask_mean" in line for line in lines) == (8 if masks == "l0" else 0)
    model = AutoModelForCausalLM.from_pretrained(home / "gqa")
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.num_key_value_heads == 2
    export = read(home / "gqa" / "stage.json")["summary"]
    assert export["max_logit_difference_stored"] <= 1e-4


def test_what_closed_form_merging_weighs_by(aligned_run, inputs):
    """Query energies and Grams of W_O in the artifact, against the model itself."""
    calibration = str(aligned_run / "calibration")
    model = AutoModelForCausalLM.from_pretrained(inputs["model"])
    for layer in range(3):
        columns = model.model.layers[layer].self_attn.o_proj.weight.detach().double().view(48, 8, 8)
        for head in range(8):
            torch.testing.assert_close(read_layer(calibration, layer)["output.gram"][head], columns[:, head].T @ columns[:, head])
    from common.data.text import load_tokens

    tokens, _ = load_tokens(inputs["text"], AutoTokenizer.from_pretrained(inputs["model"]), 8, 64)
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
    model(tokens)
    queries = seen[0].view(-1, 8, 8).double()
    energy = (queries[..., :4].square() + queries[..., 4:].square()).sum(0)
    torch.testing.assert_close(read_layer(calibration, 0)["query.energy"], energy, rtol=1e-5, atol=0)


def expect(message: str, command: str, *arguments, processes: int = 0) -> None:
    done = run(command, *arguments, fails=True, processes=processes)
    assert message in done.stderr, done.stderr


def test_mistakes_in_calibration(inputs, tmp_path):
    common = ["--run", tmp_path / "run", "--sequences", 4, "--length", 64]
    expect("neither a directory nor a hub repository", "01_calibrate.py", *common, "--model", "no/such-model")
    expect("expected c4, demo, or", "01_calibrate.py", *common, "--model", inputs["model"], "--text", "missing.txt")
    expect("expected 4000 x 64 = 256000 tokens, found", "01_calibrate.py", *common, "--model", inputs["model"], "--text", inputs["text"], "--sequences", 4000)
    assert not (tmp_path / "run").exists()


def test_mistakes_between_stages(aligned_run, inputs, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    expect("--kv-heads: expected one of [1, 2, 4] for 8 key/value heads, found 3", "03_group.py", "--run", home, "--kv-heads", 3, "--force")
    expect("calibration not found; run 01_calibrate.py first", "02_similarity.py", "--run", tmp_path / "empty")

    other = tmp_path / "other"
    model = save_tiny(tmp_path / "model", seed=9, bias=True)
    run("01_calibrate.py", "--run", other, "--model", model, "--text", inputs["text"], "--sequences", 2, "--length", 64)
    shutil.copy(home / "groups.json", other)
    expect("expected an artifact of model", "04_align.py", "--run", other)

    (home / "similarity.safetensors").write_bytes((home / "similarity.safetensors").read_bytes()[:-8])
    expect("run 02_similarity.py again with --force", "03_group.py", "--run", home, "--force")
    assert (home / "groups.json").exists()

    shutil.rmtree(home / "merged")
    expect("merged not found; run 04_align.py first", "05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], processes=2)
    expect("train not found; run 05_prune_train.py first", "06_export.py", "--run", home)
    expect("expected one of teacher, merged, gqa, found none", "07_eval.py", "--run", tmp_path / "empty")
    expect("nowhere/at-all: expected a checkpoint directory, found none", "07_eval.py", "--run", tmp_path / "empty", "--model", "nowhere/at-all", "--text", "none")
