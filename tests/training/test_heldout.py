"""Held-out measurement: against its definition, sample by sample; and that it does not change training."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from common.data import documents
from common.data.documents import EVALUATION, TRAIN, in_part, parse_source
from common.data.pool import NONE, Sources
from common.data.rows import Sample
from common.data.sources import DataContext
from common.data.tasks import load_task, tokenize
from common.data.text import load_tokens
from common.evaluation.evaluate import perplexity
from common.models import blending
from common.models.equivalence import COMPARED
from common.models.head import product
from common.models.load import load_model, load_tokenizer
from common.run.artifact import read_record
from common.run.errors import UserError
from common.training.checkpoints import saved_checkpoints, whole_weights
from common.training.engine import Step, steps
from common.training.heldout import Heldout, heldout_texts, load_heldout
from common.training.lines import METRICS, TASK_SET, TEXT_SET, read_metrics
from models import tiny_model
from reference import (
    HELDOUT,
    NOTHING,
    SAMPLES,
    SCHEDULE,
    compared,
    gqa_student,
    half_masked_student,
    measured,
)
from runs import MEASURED, STAGE, save_lines, train, valid_record, with_teacher


@torch.no_grad()
def metrics_by_sample(student, teacher, sets: dict[str, list[Sample]]) -> dict[str, float]:
    """The definition: each sample by itself, whole logits, float64. student, teacher: transformers models."""
    figures = {}
    for prefix, samples in sets.items():
        columns: dict[str, list[float]] = {}
        for sample in samples:
            ids = torch.tensor([id for segment in sample.segments for id in segment])
            parts = [index % 2 for index, segment in enumerate(sample.segments) for _ in segment]
            wanted = torch.tensor(parts[1:]).bool() | (prefix == TEXT_SET)
            ours, theirs = (m(ids[None]).logits[0, :-1].double().log_softmax(-1) for m in (student, teacher))
            for name, column in compared(ours, theirs, ids[1:]).items():
                columns.setdefault(name, []).extend(column[wanted].tolist())
        figures |= {f"{prefix}_{name}": sum(column) / len(column) for name, column in columns.items()}
    return figures


def test_metrics_are_their_definition(group_of_one, tmp_path, monkeypatch):
    student = gqa_student(group_of_one, tmp_path)
    expected = metrics_by_sample(tiny_model(num_key_value_heads=2), tiny_model(seed=1), HELDOUT.sets)
    assert len(expected) == len(set(expected.values())) == 2 * len(COMPARED)
    clock = SimpleNamespace(perf_counter=iter((1.0, 3.5)).__next__)
    monkeypatch.setattr("common.training.heldout.time", clock)
    figures = HELDOUT.metrics(student.job, student.teacher, SCHEDULE)
    assert figures == pytest.approx(expected | {"heldout_seconds": 2.5}, rel=1e-5)


def test_logits_are_chunked_and_nothing_is_kept(group_of_one, tmp_path, monkeypatch):
    formed, student = [], gqa_student(group_of_one, tmp_path)
    monkeypatch.setattr("common.models.head.product",
                        lambda *factors: formed.append(product(*factors)) or formed[-1])
    measured(student)
    assert max(map(len, formed)) == SCHEDULE.loss_chunk
    assert not any(logits.requires_grad for logits in formed)
    parameters = student.job.trainee.parameters()
    assert all(isinstance(parameter, DTensor) for parameter in parameters)  # sharded again


def test_a_masked_student_is_measured_without_noise(group_of_one, tmp_path):
    """Its masks as after training (Louizos et al., Eq. 13), whatever the last step drew."""
    student = half_masked_student(group_of_one, tmp_path)
    reference, merged = tiny_model(), tiny_model(seed=2, num_key_value_heads=2)
    blending.patch(reference, 2)
    for name, tensor in merged.state_dict().items():
        if ".k_proj." in name or ".v_proj." in name:
            reference.get_parameter(blending.blended_name(name)).data.copy_(tensor)
    log_alpha = torch.linspace(-4, 4, 24).view(3, 8)
    blending.set_masks(reference, (1.2 * torch.sigmoid(log_alpha) - 0.1).clamp(0, 1))
    expected = metrics_by_sample(reference, tiny_model(seed=1), HELDOUT.sets)
    assert measured(student) == pytest.approx(expected, rel=1e-5)
    for step in steps(student.job, SCHEDULE, SAMPLES, until=1):
        student.take(step)
    z = student.masks.noiseless()
    assert all(torch.equal(projection.z, z[index])
               for index, _, projections in blending.blended_projections(student.job.trainee.net)
               for projection in projections)


def lines_of(directory: Path) -> list[dict]:
    """Of a training's metrics.jsonl, what does not depend on the machine."""
    return [{name: figure for name, figure in line.items() if name not in MEASURED}
            for line in read_metrics(str(directory / METRICS))]


@pytest.mark.parametrize("make_student", [
    half_masked_student, pytest.param(gqa_student, marks=pytest.mark.slow)])
def test_measuring_leaves_no_trace_in_training(group_of_one, tmp_path, make_student):
    lines, weights = [], []
    for name, heldout in (("without", NOTHING), ("with", HELDOUT)):
        student = make_student(group_of_one, tmp_path, name)
        torch.manual_seed(0)
        assert student.train(heldout)
        lines.append(lines_of(tmp_path / name))
        weights.append(whole_weights(saved_checkpoints(student.job.directory)[-1]))
    assert [line["step"] for line in lines[1] if f"{TEXT_SET}_kl" in line] == [1, 2, 4, 5]
    others = [{name: line[name] for name in line if not name.startswith("heldout")} for line in lines[1]]
    assert lines[0] == others
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_steps_to_measure_after():
    assert not any(NOTHING.due(step, 10) for step in range(1, 11))
    heldout = replace(HELDOUT, every=4)
    assert [step for step in range(1, 11) if heldout.due(step, 10)] == [1, 4, 8, 10]


def test_the_untrained_student_is_measured_before_the_first_step(group_of_one, tmp_path):
    """Not as a part of that step's time."""
    student = gqa_student(group_of_one, tmp_path)
    named = {f"start_{name}": figure for name, figure in measured(student).items()}
    for number, expected in ((0, named), (1, {})):
        step = Step(student.job, SCHEDULE, [], SAMPLES)
        step.number = number
        HELDOUT.measure_start(step, student.teacher)
        assert step.began == step.metrics.pop("start_heldout_seconds", 0.0)
        assert step.metrics == expected


# what is held out


def kept_out(inputs, ranks, run="", texts=(), **changes) -> Heldout:
    """What these sources keep out of training, beside these texts."""
    sources = {"tasks": inputs["tasks"], "only": ["piqa", "siqa"], "text_length": 64, "heldout_sequences": 3}
    origin = DataContext(inputs["model"], str(run), "cpu", ranks)
    sources = Sources(**sources | changes)
    return load_heldout(sources, origin, [*texts, *heldout_texts(sources, origin)], every=7)


def test_what_is_held_out(group_of_one, inputs, tmp_path):
    """Every second text, as stage 7 reads them, and the first questions of the validation splits."""
    tokenizer = load_tokenizer(inputs["model"])
    heldout = kept_out(inputs, group_of_one, tmp_path, heldout_text=inputs["text"], heldout_questions=2)
    assert heldout.every == 7 and list(heldout.sets) == [TEXT_SET, TASK_SET]
    tokens, _ = load_tokens(inputs["text"], tokenizer, 6, 64, EVALUATION)
    assert [sample.segments for sample in heldout.sets[TEXT_SET]] == [(row,) for row in tokens[::2].tolist()]
    assert np.load(Path(heldout.left, "tokens.npy")).tolist() == tokens[1::2].tolist()  # for stage 7
    examples = [example for task in ("piqa", "siqa")
                for example in load_task(task, "validation", inputs["tasks"])[0][:2]]
    assert heldout.sets[TASK_SET] == [tokenize(example, tokenizer) for example in examples]
    text = Sample((1, 2, 3))
    with pytest.raises(UserError, match="--heldout-questions 2: expected --tasks with it"):
        kept_out(inputs, group_of_one, tasks=NONE, heldout_questions=2)
    single = kept_out(inputs, group_of_one, texts=[text], tasks=NONE)
    assert single.sets == {TEXT_SET: [text]} and single.left is None


def test_number_of_questions(group_of_one, inputs, tmp_path):
    """Five validation questions of each of two tasks; by default none of a task without any."""

    def count(**changes) -> int:
        return len(kept_out(inputs, group_of_one, **changes).sets.get(TASK_SET, ()))

    assert count() == count(heldout_questions=99) == 10 and count(heldout_questions=3) == 6
    assert count(heldout_questions=0) == count(tasks=NONE) == 0
    shutil.copy(Path(inputs["tasks"], "siqa.validation.jsonl"), tmp_path)
    assert count(tasks=str(tmp_path)) == 5


def test_what_training_or_calibration_reads_is_left_out(inputs, tmp_path, group_of_one, capsys):
    """Of a file for --heldout-text: blocks of a text, and documents of a table that calibration has read."""
    origin = DataContext(inputs["model"], str(tmp_path), "cpu", group_of_one)
    sources = Sources(text=[inputs["text"]], text_length=8, heldout_sequences=5)
    apart = "".join(parse_source(inputs["text"]).contents(documents.HELDOUT))
    tokenizer = load_tokenizer(inputs["model"])
    texts = heldout_texts(replace(sources, heldout_text=inputs["text"]), origin)
    assert sum((sample.prompt for sample in texts), []) == tokenizer(apart)["input_ids"][:80]
    (tmp_path / "copy.txt").write_text("".join(parse_source(inputs["text"]).contents(TRAIN)))
    with pytest.raises(UserError, match="/copy.txt: expected text that training and calibration do not read"):
        heldout_texts(replace(sources, heldout_text=str(tmp_path / "copy.txt")), origin)
    assert "blocks that training or calibration reads" in capsys.readouterr().out
    rows = [f"{number} is read " * 9 for number in range(99)]
    rows = [row for row in rows if in_part(row, TRAIN)][:2] + ["for neither " * 40]
    table = save_lines(tmp_path / "table.jsonl", rows)
    record = valid_record("01_calibrate.py")
    record["arguments"]["text"] = save_lines(tmp_path / "train.jsonl", rows[:2])
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration/stage.json").write_text(json.dumps(record))
    texts = heldout_texts(replace(sources, text=(), heldout_text=table), origin)
    assert sum((sample.prompt for sample in texts), []) == tokenizer(rows[2])["input_ids"][:80]


@pytest.mark.slow
def test_the_stage_measures_the_student_that_it_writes(finished_run, aligned_run, inputs, tmp_path):
    """The held-out loss of the last line is the last checkpoint's, on text that calibration has not read."""
    home = with_teacher(aligned_run, finished_run, tmp_path / "run")
    train(home, inputs, "--steps", 3, "--masks", "off",
          "--heldout-text", inputs["text"], "--heldout-sequences", 4, "--heldout-every", 2)
    losses = {line["step"]: line.get("heldout_loss") for line in read_metrics(str(home / "train" / METRICS))}
    assert losses.keys() == {1, 2, 3} and all(losses.values())
    student = load_model(str(home / "merged"))
    student.load_state_dict(whole_weights(saved_checkpoints(str(home / "train"))[-1]))
    tokens, _ = load_tokens(inputs["text"], load_tokenizer(inputs["model"]), 8, 256, documents.HELDOUT)
    assert math.exp(losses[3]) == pytest.approx(perplexity(student, tokens[::2]), rel=1e-4)
    record = read_record(str(home / "train"), STAGE)
    assert record["summary"]["heldout_loss"] == losses[3]
    assert np.load(Path(record["heldout"], "tokens.npy")).tolist() == tokens[1::2].tolist()  # for stage 7
