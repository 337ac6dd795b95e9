"""Every row of paper.py's table on tiny runs: what holds, what is off, and what does not apply."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import paper
from conftest import calibrate_arguments, copy_run, expect_error, run, save_tiny
from pipelines import paper_check, paper_run

ALIGNED = [
    "Eq. 1:", "Eq. 2:", "Eq. 3:", "Eq. 4-6:", "Algorithm 1: values", "Algorithm 1: keys", "Eq. 7, 8:",
    "Eq. 11:", "Eq. 12:", "Eq. 13:", "Eq. 14, 15:", "Eq. 16:", "Eq. 17:", "Eq. 18:", "Eq. 19:",
    "Eq. 22: value", "Eq. 22: key", "Eq. 24:", "Algorithm 2:", "Eq. 25:", "Eq. 26:", "Eq. 27:", "Eq. 28:",
    "Hard concrete: samples", "Hard concrete: P(z > 0)", "Hard concrete: without", "Eq. 29: loss",
    "Eq. 30: loss", "Eq. 31: loss", "Eq. 31: gradient",
]
TRAINED = ["Section 3.5:", "Eq. 29: T of", "Eq. 29: recorded", "Eq. 30: recorded"]
WINDOWS = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}
SEARCH = ["--kv-heads", 2, "--restarts", 10, "--iterations", 100]


def name(title: str) -> str:
    """A row's title as part of a test's name, which lists of mutations separate by blanks."""
    return re.sub(r"[^\w.]+", "-", title).strip("-")


def table(home) -> list[paper_check.Row]:
    run = paper_check.Run(str(home))
    return paper_check.all_rows(run, list(range(run.model["layers"])))


@pytest.fixture(scope="session")
def aligned_table(aligned_run):
    return table(aligned_run)


@pytest.mark.parametrize("title", ALIGNED, ids=name)
def test_row(aligned_table, title):
    (row,) = (row for row in aligned_table if row.equation.startswith(title))
    assert row.ok == "yes", row


@pytest.mark.parametrize("title", TRAINED, ids=name)
def test_trained_row(finished_run, title):
    rows = paper_check.recorded_rows(paper_check.Run(str(finished_run)))
    (row,) = (row for row in rows if row.equation.startswith(title))
    assert row.ok == "yes", row


def test_rows_are_all_there_in_the_papers_order(aligned_table):
    rows = zip(aligned_table, ALIGNED, strict=True)
    assert all(row.equation.startswith(title) for row, title in rows)


def test_every_equation_has_a_function_that_is_compared():
    sources = [Path(module.__file__).read_text() for module in (paper, paper_check, paper_run)]
    for name in [*(f"eq_{number}" for number in range(1, 32)), "algorithm_1", "algorithm_2"]:
        assert getattr(paper, name).__doc__
        assert re.search(rf"(?<!def ){name}\b", "".join(sources)), name


def test_the_equations_import_nothing_of_the_project():
    equations = Path(paper.__file__).read_text().partition("if __name__")[0]
    modules = set(re.findall(r"^\s*(?:from|import) (\w+)", equations, re.MULTILINE))
    assert modules == {"itertools", "math", "numpy", "torch"}


def test_both_forms_are_given_where_the_stages_differ_from_print(aligned_table):
    """And the line of AUDIT.md; what is printed is worse by far where it is the transpose."""
    lines = Path(paper.__file__).with_name("AUDIT.md").read_text().splitlines()
    two = [row for row in aligned_table if ";" in row.printed]
    assert len(two) == 6
    for row in two:
        for number in re.findall(r"AUDIT.md:(\d+)", row.note):
            assert re.match(r"\| Eq\. (6, 10|22|29, z)", lines[int(number) - 1]), row
    printed = {row.equation.partition(",")[0]: map(float, row.printed.split("; ")) for row in two}
    first, second = printed["Eq. 19: value cosine"]
    assert first < second / 2
    first, second = printed["Eq. 4-6: error of Procrustes"]
    assert first > second


def test_the_printed_distance_is_a_mean_of_lengths():
    """Eq. 22, whose number no stage computes: columns that are 5 and 1 apart."""
    V_i, V_j = torch.tensor([[3.0, 0.0], [4.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    assert float(paper.eq_22(V_i, V_j, torch.tensor([[0.0, -1.0], [1.0, 0.0]]))) == -3


def test_large_models_are_compared_by_one_layer(inputs, tmp_path, monkeypatch):
    """The middle one; Eq. 29 to 31 by the first between embedding and head."""
    home, source = tmp_path / "run", save_tiny(tmp_path / "model", model_type="qwen2", **WINDOWS)
    run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs | {"model": source}))
    run("02_similarity.py", "--run", home)
    run("03_group.py", "--run", home, *SEARCH)
    run("04_align.py", "--run", home)
    held = paper_check.Run(str(home))
    assert paper_check.choose_layers(None, held) == [0, 1, 2]
    monkeypatch.setattr(paper_check, "SMALL", 3 * 64**2)
    monkeypatch.setattr(paper_check, "LARGE", 48)
    assert paper_check.choose_layers(None, held) == [1]
    assert not missing(home)
    networks = paper_check.networks(held)
    assert [len(network.model.layers) for network in networks] == [1, 1, 1]
    assert [len(network.config.layer_types) for network in networks] == [1, 1, 1]


def test_the_command_prints_and_writes_the_table(aligned_run, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    done = run("paper.py", "--run", home, "--layer", 2, 0)
    written = (home / "paper.md").read_text()
    assert written in done.stdout and "rows, 2 layers," in done.stdout
    lines = [line for line in written.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(ALIGNED) and all(line.endswith("| yes |") for line in lines[1:])
    assert not any("layer 1" in line for line in lines)


def edit(directory: Path, tensor: str, change) -> None:
    """Change a tensor wherever it is in a checkpoint or a calibration."""
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if tensor in tensors:
            tensors[tensor] = change(tensors[tensor]).contiguous()
            save_file(tensors, file, metadata={"format": "pt"})


def edit_record(path: Path, **changes) -> None:
    """Change fields of a record's summary, or its arguments."""
    record = json.loads(path.read_text())
    for part in ("summary", "arguments"):
        record[part] |= {field: value for field, value in changes.items() if field in record[part]}
    path.write_text(json.dumps(record))


def rotate_head(weight: torch.Tensor) -> torch.Tensor:
    """The first head under a rotation of two of its coordinates."""
    return torch.cat((weight[[1]], -weight[[0]], weight[2:]))


WEIGHT = "model.layers.1.self_attn.{}_proj.weight"
DAMAGES = {  # -> the rows that it turns off
    "sampled keys": (lambda home: edit(home / "calibration", "sample.key", lambda keys: keys.roll(1, 1)),
                     "Eq. 1:"),
    "Grams of keys": (lambda home: edit(home / "calibration", "key.unit", lambda gram: 1.001 * gram),
                      "Eq. 2:|Eq. 18:"),
    "Grams of values": (lambda home: edit(home / "calibration", "value.raw", lambda gram: 1.001 * gram),
                        "Eq. 22: value"),
    "scores": (lambda home: edit_record(home / "groups.json", score_found=[-1e6] * 3),
               "Eq. 24:|Algorithm 2:"),
    "a value head": (lambda home: edit(home / "aligned", WEIGHT.format("v"), rotate_head),
                     "Algorithm 1: values|Eq. 11:|Eq. 12:|Eq. 13:|Eq. 26:"),
    "key heads": (lambda home: edit(home / "aligned", WEIGHT.format("k"), lambda weight: weight.roll(8, 0)),
                  "Algorithm 1: keys|Eq. 11:|Eq. 14, 15:|Eq. 16:|Eq. 17:|Eq. 25:"),
    "a shared head": (lambda home: edit(home / "merged", WEIGHT.format("k"), lambda weight: 1.001 * weight),
                      "Eq. 25:"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_computed_is_named(aligned_run, tmp_path, damage):
    home, (change, titles) = copy_run(aligned_run, tmp_path / "run"), DAMAGES[damage]
    change(home)
    done = run("paper.py", "--run", home, code=1)
    named = done.stdout.partition(" s, off: ")[2].strip().split("; ")
    assert [title for title in ALIGNED if any(row.startswith(title) for row in named)] == titles.split("|")
    assert len(named) == len(titles.split("|")) == done.stdout.count("| NO ")


def test_steps_recorded_otherwise_are_named(finished_run, tmp_path):
    home = copy_run(finished_run, tmp_path / "run")
    path = home / "train" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2] |= {"l0": lines[2]["l0"] + 0.01, "kl": lines[2]["kl"] + 0.01, "mask_target": 0.123}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row.equation for row in table(home) if row.ok == "NO"] == [
        "Eq. 29: T of recorded steps", "Eq. 29: recorded steps", "Eq. 30: recorded steps"]


def missing(home) -> dict[str, str]:
    """The reasons of the rows that do not apply; all others hold."""
    rows = table(home)
    assert not [row for row in rows if row.ok == "NO"]
    return {row.equation.partition(", layer")[0]: row.note for row in rows if row.ok == "-"}


@pytest.mark.parametrize(("grouping", "aligning", "expected"), [
    ("--by key --criterion cos", "--rotate cos", {}),
    ("--by none", "--rotate none", {"Algorithm 1": "--rotate none", "Eq. 23, 24, Algorithm 2": "--by none"}),
    ("--by both", "--merge first", {"Eq. 23, 24, Algorithm 2": "--by both", "Eq. 25: W_K": "--merge first",
                                    "Eq. 26: W_V": "--merge first"}),
    ("--by value", "--merge closed-form --refit", {
        "Eq. 25: W_K": "--merge closed-form --refit", "Eq. 26: W_V": "--merge closed-form --refit",
        "Eq. 29-31": "closed-form merges and refits blend W_Q and W_O, too"}),
])
def test_rows_of_other_runs(aligned_run, tmp_path, grouping, aligning, expected):
    home = copy_run(aligned_run, tmp_path / "run")
    run("03_group.py", "--run", home, "--force", *SEARCH, *grouping.split())
    run("04_align.py", "--run", home, "--force", *aligning.split())
    assert missing(home) == expected


@pytest.mark.parametrize("kind", ["l0-released", "off"])
def test_rows_of_other_masks(finished_run, tmp_path, kind):
    home = copy_run(finished_run, tmp_path / "run")
    edit_record(home / "train" / "stage.json", masks=kind)
    assert missing(home) == {"Hard concrete, Eq. 29, 31": f"--masks {kind}"}


def test_rows_without_the_text(aligned_run, tmp_path):
    home = copy_run(aligned_run, tmp_path / "run")
    edit_record(home / "calibration" / "stage.json", text="gone.txt")
    reasons = missing(home)
    assert list(reasons) == ["Eq. 1", "Eq. 29-31"]
    assert all("no calibration text: text gone.txt: not found" in reason for reason in reasons.values())


@pytest.mark.slow
@pytest.mark.parametrize(("options", "reasons"), [
    ({"num_key_value_heads": 4, "tie_word_embeddings": True}, 0),
    ({"model_type": "qwen2", "num_key_value_heads": 4, **WINDOWS}, 0),
    ({"model_type": "qwen3", "bias": True}, 3),
    ({"model_type": "mistral", "dtype": torch.bfloat16}, 0),
], ids=["llama-GQA-tied", "qwen2-GQA", "qwen3-biases", "mistral-bfloat16"])
def test_rows_of_other_families(inputs, tmp_path, options, reasons):
    """Keys of Qwen3 may only be flipped."""
    home, source = tmp_path / "run", save_tiny(tmp_path / "model", **options)
    run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs | {"model": source}))
    run("02_similarity.py", "--run", home)
    run("03_group.py", "--run", home, *SEARCH)
    run("04_align.py", "--run", home)
    flipped = missing(home)
    assert len(flipped) == reasons and all("may only be flipped" in reason for reason in flipped.values())


def test_bad_input_is_one_line(aligned_run, tmp_path, monkeypatch):
    home = copy_run(aligned_run, tmp_path / "run")
    expect_error("--layer: expected layers from 0 to 2, found 3", "paper.py", "--run", home, "--layer", 0, 3)
    expect_error("calibration not found; run 01_calibrate.py", "paper.py", "--run", tmp_path / "nowhere")
    shutil.move(home / "aligned", tmp_path / "aligned")
    expect_error("aligned not found; run 04_align.py", "paper.py", "--run", home)
    shutil.move(tmp_path / "aligned", home / "aligned")
    monkeypatch.setattr("pipelines.paper_run.CHECKED", ("mistral",))
    expect_error("expected model_type in ['mistral'], found 'llama'", "paper.py", "--run", home)
    monkeypatch.undo()
    (home / "similarity.safetensors").write_bytes(b"")
    expect_error("similarity.safetensors: its content does not match", "paper.py", "--run", home)
    assert not (home / "paper.md").exists()
