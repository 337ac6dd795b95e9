"""All seven stages on a tiny model with biases: what comes out at the end."""

import os
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runs import (
    GROUPING,
    SIZE,
    STAGES,
    TRAINING,
    calibrate_arguments,
    copy_run,
    digests,
    final_weights,
    metrics,
    read,
    run,
)


def test_whole_run(finished_run, inputs):
    summary = read(finished_run / "gqa" / "stage.json")["summary"]
    home = str(Path(inputs["model"]).parents[1])
    assert home not in (finished_run / "gqa" / "stage.json").read_text()  # which is published
    assert summary["class"] == "LlamaForCausalLM" and summary["max_logit_difference"] <= 1e-4
    model = AutoModelForCausalLM.from_pretrained(finished_run / "gqa")
    tokenizer = AutoTokenizer.from_pretrained(finished_run / "gqa")
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (2 * SIZE, 48)
    prompt = tokenizer("Question: which?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=5, do_sample=False).shape[1] > prompt["input_ids"].shape[1]

    lines = metrics(finished_run)
    read_from = {f"RUN/{name}" for name in ("aligned", "merged", "teacher")}
    assert read(finished_run / "train" / "stage.json")["inputs"].keys() == read_from
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert ["mask_mean" in line for line in lines] == 8 * [True] + 2 * [False]  # no masks after 80 %

    results = read(finished_run / "eval/stage.json")["results"]
    assert [figures.get("open_masks") for figures in results.values()] == [None, None, lines[7]["open_masks"]]
    assert list(results) == ["teacher", "merged", "gqa"]
    assert results["gqa"]["cache_bytes_per_token"] * 4 == results["teacher"]["cache_bytes_per_token"]
    assert len(results["gqa"]["tasks"]) == 8
    assert all(task["questions"] == 5 for task in results["gqa"]["tasks"].values())


def test_the_model_card_of_a_run(finished_run):
    """It has its scores, and its snippet runs."""
    card = (finished_run / "gqa" / "README.md").read_text()
    scores = card.partition("<!-- scores -->")[2].partition("<!-- /scores -->")[0]
    assert "| winogrande" in scores and "teacher" in scores and "Not evaluated yet" not in card
    snippet = textwrap.dedent(card.partition("## Use\n\n")[2].partition("\n\nIn vLLM")[0])
    printed: list[str] = []
    exec(snippet.replace("PATH", str(finished_run / "gqa")), {"print": printed.append})
    assert printed[0].startswith("Question: Which is a metal?\nChoices: ['wood', 'iron']\nAnswer:")


def test_who_may_read_a_directory_may_read_its_files(finished_run):
    """Every file has the permissions that the umask gives."""
    umask = os.umask(0)
    os.umask(umask)
    modes = {path: path.stat().st_mode & 0o777 for path in finished_run.rglob("*") if path.is_file()}
    assert len(modes) > 40 and not {path for path, mode in modes.items() if mode != 0o666 & ~umask}


def test_the_exported_weights_are_those_of_the_last_checkpoint(finished_run):
    exported = AutoModelForCausalLM.from_pretrained(finished_run / "gqa").state_dict()
    trained = final_weights(finished_run)
    assert len(trained) == len(exported)
    for name, tensor in exported.items():
        assert torch.equal(trained[name], tensor), name


STAGE_OUTPUTS = {
    "01": ["calibration"], "02": ["similarity"], "03": ["groups"],
    "04": ["aligned", "merged"], "05": ["teacher", "train"], "06": ["gqa"],
}


@pytest.mark.parametrize("stage", ["01", "02", "03", "04", pytest.param("05", marks=pytest.mark.slow), "06"])
def test_a_stage_run_again_writes_the_same_bytes(finished_run, inputs, tmp_path, stage):
    home = copy_run(finished_run, tmp_path / "run [1]*")  # a pattern of glob
    training = ["--tasks", inputs["tasks"], *TRAINING]
    arguments = {"01": calibrate_arguments(inputs), "02": ["--energy"], "03": GROUPING, "05": training}
    command = [STAGES[stage], "--run", home, *arguments.get(stage, [])]

    def written() -> dict:
        return {name: digests(home / name) for name in STAGE_OUTPUTS[stage]}

    before = written()
    assert "complete" in run(*command).stdout and written() == before
    assert "\r" not in run(*command, "--force").stderr  # no bar where there is no terminal
    assert written() == before and all(before.values())
