"""Every row of the audit on tiny runs: what holds, what is off, and what does not apply."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import audit
import paper
from audit import training as audit_training
from audit.training import stage5
from common.method import grouping, masks, released_masks
from common.method import procrustes as align
from common.models import blending
from common.run.artifact import write_record
from common.run.errors import UserError
from common.training import mask_state
from models import save_tiny
from runs import calibrate_arguments, copy_run, expect_error, run

AUDIT = "audit/__main__.py"
STEPS = [f"{figure}, --masks {kind}" for figure in audit_training.QUANTITIES for kind in audit_training.KINDS]
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
SEARCH = ["--kv-heads", 2, "--restarts", 10, "--iterations", 100]


def find(rows: list[audit.Row], title: str) -> audit.Row:
    """The row that begins with the title; of a step, that has it."""
    (row,) = (row for row in rows
              if row.equation == title or title not in STEPS and row.equation.startswith(title))
    return row


@pytest.fixture(scope="session")
def aligned_table(aligned_run):
    """All rows of one layer."""
    return audit.all_rows(audit.Run(str(aligned_run)), [1])


def test_every_equation_has_a_function_that_is_compared():
    sources = "".join(Path(module.__file__).read_text() for module in (paper, audit, audit_training))
    for equation in [*(f"eq_{number}" for number in range(1, 32)), "algorithm_1", "algorithm_2"]:
        assert getattr(paper, equation).__doc__
        assert re.search(rf"(?<!def ){equation}\b", sources), equation


def test_the_equations_import_nothing_of_the_project():
    imported = re.findall(r"^\s*(?:from|import) (\w+)", Path(paper.__file__).read_text(), re.MULTILINE)
    assert set(imported) == {"itertools", "math", "numpy", "torch"}


def test_equation_22_and_its_square_by_hand():
    V_i, V_j = torch.tensor([[3.0, 0.0], [4.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    P_V = torch.tensor([[0.0, -1.0], [1.0, 0.0]])  # columns are 5 and 1 apart
    assert float(paper.eq_22(V_i, V_j, P_V)) == -3 and float(paper.eq_22_squared(V_i, V_j, P_V)) == -13


def scaled(real, at=None):
    """A function, or the part of its results at a place, times 1.01."""
    def wrong(*arguments, **options):
        results = real(*arguments, **options)
        if at is None:
            return 1.01 * results
        return *results[:at], 1.01 * results[at], *results[at + 1 :]

    return wrong


def turned(real):
    """Rotations the other way."""
    return lambda *arguments: (real(*arguments)[0].mT, real(*arguments)[1].conj())


def step_rows(run: audit.Run, _) -> list[audit.Row]:
    return list(itertools.starmap(audit.compare, audit_training.step_rows(run)))


def recorded_rows(run: audit.Run, _=None) -> list[audit.Row]:
    return list(itertools.starmap(audit.compare, audit_training.recorded_rows(run)))


first, second = partial(scaled, at=0), partial(scaled, at=1)
FAULTS = [  # whose row, which, where the stages have a function, its name, what makes it a wrong one
    (audit.similarity_rows, "Eq. 2:", align, "key_similarity", first),
    (audit.similarity_rows, "Eq. 3:", align, "value_similarity", first),
    (audit.similarity_rows, "Eq. 4-6:", align, "value_similarity", second),
    (audit.alignment_rows, "Algorithm 1 of Eq. 6: values", audit, "align_layer", turned),
    (audit.alignment_rows, "Algorithm 1 of Eq. 6: keys", audit, "align_layer", turned),
    (audit.similarity_rows, "Eq. 7, 8:", audit, "to_unit", scaled),
    (audit.similarity_rows, "Eq. 18:", align, "key_similarity", second),
    (audit.similarity_rows, "Eq. 19:", align, "value_similarity", second),
    (audit.similarity_rows, "Eq. 22: key", audit, "align_layer", turned),
    (audit.similarity_rows, "Eq. 22: value", audit, "align_layer", turned),
    (audit.similarity_rows, "Eq. 22 squared: key", align, "key_similarity", second),
    (audit.similarity_rows, "Eq. 22 squared: value", align, "value_similarity", second),
    (audit.grouping_rows, "Eq. 23:", audit, "score", scaled),
    (audit.grouping_rows, "Eq. 24:", audit, "score", scaled),
    (audit.grouping_rows, "Algorithm 2", audit, "anneal",
     lambda real: lambda *_: grouping.default_groups(1, 8, 2)),
    (audit.merging_rows, "Eq. 27: W_K", blending.BlendedProjection, "blend", scaled),
    (audit.merging_rows, "Eq. 28: W_V", blending.BlendedProjection, "blend", scaled),
    (recorded_rows, "Appendix A", mask_state, "SWITCH", lambda real: 0.5),
    (step_rows, "Eq. 27, 28: log alpha after the step, --masks l0", mask_state.Masks, "ADAM",
     lambda real: real | {"betas": (0.9, 0.999)}),
    (step_rows, "Eq. 27, 28: log alpha after the step, --masks l0-released", released_masks, "after_update",
     lambda real: lambda log_alpha, copy, *place: real(log_alpha.clone(), copy, *place)),
    (step_rows, "Eq. 27, 28: samples of the masks, --masks l0-released", released_masks, "pulled",
     lambda real: lambda log_alpha, *_: log_alpha.clone()),
]
STEP_FAULTS = [  # of a step with masks of either kind; None: where the masks of the kind are
    ("Eq. 27, 28: samples of the masks", None, "draw", scaled),
    ("Eq. 27, 28: masks without noise", None, "deterministic", scaled),
    ("Eq. 29: sizes of the masks", None, "expected", scaled),
    ("Eq. 29: loss of the masks", stage5, "l0_loss", scaled),
    ("Eq. 30: loss of a batch", stage5, "distillation_loss", first),
    ("Eq. 30: loss of a batch, --kl-on all", stage5, "distillation_loss",
     lambda real: lambda *inputs: real(*inputs[:4], "prompt", *inputs[5:])),
    ("Eq. 31: gradient in log alpha", stage5, "l0_loss",
     lambda real: lambda *inputs: real(*inputs).detach().requires_grad_()),
]
for kind, module in (("l0", masks), ("l0-released", released_masks)):
    for title, where, function, wrong in STEP_FAULTS:
        fault = step_rows, f"{title}, --masks {kind}", where or module, function, wrong
        FAULTS.append(fault if module is masks else pytest.param(*fault, marks=pytest.mark.slow))


@pytest.fixture(scope="session")
def compared(aligned_run) -> tuple[audit.Run, audit.Layer]:
    held = audit.Run(str(aligned_run))
    return held, audit.Layer(held, 1)


@pytest.mark.parametrize(("rows", "title", "where", "function", "wrong"), FAULTS)
def test_a_wrong_function_of_the_stages_turns_its_row_off(
    compared, monkeypatch, rows, title, where, function, wrong
):
    monkeypatch.setattr(audit, "STARTS", 2)
    monkeypatch.setattr(audit_training, "TAKEN", audit_training.TAKEN[:2])
    if title in STEPS:
        kind = title.split()[-1]
        monkeypatch.setattr(audit_training, "KINDS", {kind: audit_training.KINDS[kind]})
    monkeypatch.setattr(where, function, wrong(getattr(where, function)))
    row = find(list(rows(*compared)), title)
    assert row.ok == "NO", row


def edit(directory: Path, tensor: str, change) -> None:
    """Change a tensor wherever it is in a checkpoint or a calibration."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if tensor in tensors:
            tensors[tensor] = change(tensors[tensor]).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})
    write_record(str(directory), json.loads((directory / "stage.json").read_text()))


WEIGHT = "model.layers.1.self_attn.{}_proj.weight"
DAMAGES = {  # -> the rows that it turns off
    "sampled keys": (lambda home: edit(home / "calibration", "sample.key", lambda keys: keys.roll(1, 1)),
                     "Eq. 1:"),
    "a value head": (lambda home: edit(home / "aligned", WEIGHT.format("v"),  # turned, of two coordinates
                                       lambda weight: torch.cat((weight[[1]], -weight[[0]], weight[2:]))),
                     "Algorithm 1 of Eq. 6: values|Eq. 11:|Eq. 12:|Eq. 13:|Eq. 26:"),
    "key heads": (lambda home: edit(home / "aligned", WEIGHT.format("k"), lambda weight: weight.roll(8, 0)),
                  "Algorithm 1 of Eq. 6: keys|Eq. 11:|Eq. 14, 15:|Eq. 16:|Eq. 17:|Eq. 25:"),
}


@pytest.mark.parametrize("damage", [
    name if name == "a value head" else pytest.param(name, marks=pytest.mark.slow)
    for name in DAMAGES])
def test_what_is_not_as_computed_is_named(aligned_run, tmp_path, monkeypatch, damage):
    monkeypatch.setattr(audit, "step_rows", lambda run: ())  # which read none of it
    monkeypatch.setattr(audit, "STARTS", 2)
    home, (change, titles) = copy_run(aligned_run, tmp_path / "run"), DAMAGES[damage]
    change(home)
    done = run(AUDIT, "--run", home, "--layer", 1, code=1)
    named, titles = done.stdout.partition(" s, off: ")[2].strip().split("; "), titles.split("|")
    assert all(any(row.startswith(title) for row in named) for title in titles)
    assert len(named) == len(titles) == done.stdout.count("| NO ")


def test_every_row_holds_unless_a_fault_or_a_damage_turns_it_off(aligned_table):
    """In the paper's order."""
    assert not [row for row in aligned_table if row.ok != "yes"]
    damaged = {title for _, titles in DAMAGES.values() for title in titles.split("|")}
    faults = {getattr(fault, "values", fault)[1] for fault in FAULTS}  # of pytest.param, the values
    rows = [find(aligned_table, title) for title in faults | damaged]
    assert sorted(rows) == sorted(aligned_table)
    numbers = [int(re.search(r"Eq\. (\d+)", row.equation)[1]) for row in aligned_table]
    assert numbers == sorted(numbers)


def test_steps_recorded_otherwise_are_named(finished_run, tmp_path):
    assert [row.ok for row in recorded_rows(audit.Run(str(finished_run)))] == ["yes"] * 5
    home = copy_run(finished_run, tmp_path / "run")
    path = home / "train" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2] |= {"l0": lines[2]["l0"] + 0.01, "kl": lines[2]["kl"] + 0.01, "mask_target": 0.123}
    for figure in ("l0", "mask_expected", "mask_target"):
        lines[7].pop(figure)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.equation for row in recorded_rows(audit.Run(str(home))) if row.ok == "NO"] == [
        "Eq. 30: recorded steps", "Eq. 29: T of recorded steps", "Eq. 29: recorded steps",
        "Appendix A, Eq. 29: steps with masks"]


def test_the_command_prints_and_writes_the_table_over_its_own_alone(aligned_run, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "step_rows", lambda run: ())  # which take longest
    home = copy_run(aligned_run, tmp_path / "run")
    monkeypatch.setattr(audit, "STARTS", 2)
    done = run(AUDIT, "--run", home, "--layer", 2, 0)
    written = (home / "paper.md").read_text()
    assert written in done.stdout and "rows, 2 layers," in done.stdout
    lines = [line for line in written.splitlines() if line.startswith("| ")]
    assert len(lines) > 20 and all(line.endswith("| yes |") for line in lines[1:])
    assert not any("layer 1" in line for line in lines)
    (home / "paper.md").write_text("# Notes")  # of another program
    expect_error("paper.md: expected nothing or an earlier page", AUDIT, "--run", home)
    assert (home / "paper.md").read_text() == "# Notes"


def missing(home) -> dict[str, str]:
    """The reasons of the rows that do not apply; all others hold."""
    held = audit.Run(str(home))
    rows = audit.all_rows(held, list(range(held.model["layers"])))
    assert not [row for row in rows if row.ok == "NO"]
    return {row.equation.partition(", layer")[0]: row.note for row in rows if row.ok == "-"}


def test_as_printed_is_beside_what_the_stages_mean_and_worse(aligned_table):
    two = {row.equation.partition(":")[0]: map(float, row.printed.split("; "))
           for row in aligned_table if ";" in row.printed}
    assert list(two) == ["Eq. 4-6", "Algorithm 1 of Eq. 6", "Eq. 19", "Eq. 22", "Eq. 22 squared"]
    for equation, (literal, meant) in two.items():
        assert literal > meant if equation == "Eq. 4-6" else literal < meant, equation


@pytest.mark.slow
@pytest.mark.parametrize(("grouping", "aligning", "expected"), [
    ("--by key --criterion cos", "--rotate cos", {}),
    ("--by none", "--rotate none", {"Algorithm 1 of Eq. 6": "--rotate none"}),
    ("--by value", "--merge closed-form --refit", {
        "Eq. 25: W_K": "--merge closed-form --refit", "Eq. 26: W_V": "--merge closed-form --refit",
        "Eq. 29-31": "closed-form merges and refits blend W_Q and W_O, too"}),
])
def test_rows_of_other_runs(aligned_run, tmp_path, grouping, aligning, expected):
    home = copy_run(aligned_run, tmp_path / "run")
    run("03_group.py", "--run", home, "--force", *SEARCH, *grouping.split())
    run("04_align.py", "--run", home, "--force", *aligning.split())
    assert missing(home) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("options", "reasons"), [
    ({"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": True,
      "dtype": torch.bfloat16, **WINDOWS}, 0),
    ({"model_type": "qwen3", "bias": True}, 4),
], ids=["qwen2-GQA-tied-bfloat16", "qwen3-biases"])
def test_rows_of_other_families(inputs, tmp_path, monkeypatch, options, reasons):
    """Keys of Qwen3 may only be flipped. Of a large model the middle layer is compared."""
    home, source = tmp_path / "run", save_tiny(tmp_path / "model", **options)
    run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs | {"model": source}))
    run("02_similarity.py", "--run", home)
    run("03_group.py", "--run", home, *SEARCH)
    run("04_align.py", "--run", home)
    flipped = missing(home)
    assert len(flipped) == reasons and all("may only be flipped" in reason for reason in flipped.values())
    held = audit.Run(str(home))
    assert audit.choose_layers(None, held) == [0, 1, 2]
    monkeypatch.setattr(audit, "SMALL", 0)
    assert audit.choose_layers(None, held) == [1]


def test_bad_input_is_one_line(aligned_run, tmp_path, monkeypatch):
    expect_error("--layer: expected layers from 0 to 2, found 3", AUDIT, "--run", aligned_run, "--layer", 3)
    expect_error("calibration not found; run 01_calibrate.py", AUDIT, "--run", tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"expected one of \['mistral'\], found llama"):
        monkeypatch.setattr(audit, "CHECKED", ["mistral"])
        audit.Run(str(aligned_run))
