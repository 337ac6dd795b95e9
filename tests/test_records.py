"""Records and artifacts: whatever is edited, damaged, cut off or taken from another run is refused in one
line."""

import copy
import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import artifacts, cli
from common.cli import UserError
from common.records import STAGES, find_fault
from conftest import copy_run, expect_error, run

SHA = "ab" * 32
MODEL = {"name": "m", "path": "models/m", "fingerprint": SHA,
         "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "hidden": 64}
GROUPS = [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
REFIT = {"ridge": 0.1, "merged": 0.3, "output": 0.2, "attention": 0.1}
COSINES = {"key_before": 0.1, "key_after": 0.2, "value_before": -0.1, "value_after": 0.2}
STUDENT = {"kv_heads": 2, "masks": "l0", "merge": "mean"}
TRAINED = {"steps": 3, "batch": 4, "lr": 0.1, "loss": 0.5, "tokens": 64}
FIELDS = {  # stage -> the fields that its record has beside those of every record
    "01_calibrate.py": {
        "arguments": {"text": "t"},
        "files": {"layer-00000.safetensors": SHA, "layer-00001.safetensors": SHA},
        "summary": {"tokens": 64, "sequences": 2, "length": 32, "text": "t", "sampled_tokens": 8,
                    "positions": 64, "peak_memory_gib": 0.5},
    },
    "02_similarity.py": {
        "sha256": SHA,
        "summary": {f"{head}.{criterion}.{when}": -0.5 for head in ("key", "value")
                    for criterion in ("cos", "dist") for when in ("before", "after")},
    },
    "03_group.py": {
        "kv_heads": 2,
        "groups": GROUPS,
        "summary": {"kv_heads": 2, "by": "value", "criterion": "dist", "score_default": [-1.0, -2.0],
                    "score_found": [-1.0, -1.5], "score_optimum": [-1.0, -1.5]},
    },
    "04_align.py": {
        "files": {"config.json": SHA, "model-00001-of-00004.safetensors": SHA},
        "groups": GROUPS,
        "summary": {"kv_heads": 2, "by": "value", "criterion": "dist", "rotate": "dist", "merge": "mean",
                    "refit": "attention", "key_context": 64, "refit_layers": [REFIT, REFIT],
                    "calibration_tokens": 64,
                    "within_group_cosine": [COSINES, COSINES],
                    "max_logit_difference": 1e-6, "kl": 1e-9, "perplexity_source": 9.0,
                    "perplexity_aligned": 9.0, "perplexity_merged": 12.0},
    },
    "05_prune_train.py": {"files": {"step-00000003/.metadata": SHA}, "summary": TRAINED | STUDENT},
    "06_export.py": {
        "files": {"model.safetensors": SHA},
        "summary": {"kv_heads": 2, "dtype": "torch.float32", "class": "LlamaForCausalLM",
                    "max_logit_difference": 0.0, "max_logit_difference_stored": 0.0},
    },
    "07_eval.py": {
        "device": "cpu",
        "summary": {},
        "results": {"gqa": {"path": "gqa", "heads": 8, "kv_heads": 2}},
    },
}
OPEN = ("arguments", "packages")  # objects whose names are free


def valid(stage: str) -> dict:
    """A record that every stage accepts."""
    every = {"stage": stage, "arguments": {"run": "r"}, "model": MODEL, "inputs": {"calibration": SHA},
             "packages": {"torch": "2"}, "commit": None, "seconds": 1.5, "date": "2026-01-02T03:04:05+00:00"}
    return copy.deepcopy(every | FIELDS[stage])


def write(directory: Path, record) -> str:
    directory.mkdir(exist_ok=True)
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    (directory / "stage.json").write_bytes(text)
    return str(directory)


def refusal(path: str, stage: str) -> str:
    """The message of the UserError that reading this record raises."""
    with pytest.raises(UserError) as refused:
        artifacts.read_record(path, stage)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 1000 and path in message and message.isprintable()
    return message


def places(value, prefix: tuple = ()):
    """Every place in a record, as the names and indices that lead to it, but those inside open objects."""
    if prefix:
        yield prefix
    if prefix[-1:] in [(name,) for name in OPEN]:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*prefix, key))


def changed(record: dict, place: tuple, value=None, remove: bool = False) -> dict:
    record = copy.deepcopy(record)
    parent = record
    for key in place[:-1]:
        parent = parent[key]
    if remove:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return record


def at(record, place: tuple):
    for key in place:
        record = record[key]
    return record


WRONG = {  # type of a valid value -> values that are none of its kind
    str: (None, 3, True, [], {}, "\ud800"),
    bool: (None, 0, "true", [], {}),
    int: (None, "3", 1.5, True, -1, 2**63, math.nan, math.inf, [], {}),
    float: (None, "0.5", True, math.nan, math.inf, -math.inf, [], {}),
    list: (None, "x", 3, True, {}, [None], ["x"], [{}]),
    dict: (None, "x", 3, True, [], [{}]),
}


@pytest.mark.parametrize("stage", FIELDS)
def test_every_field_is_required_and_checked(tmp_path, stage):
    """Each one removed, and replaced by values of every other kind: about 3000 records."""
    assert FIELDS.keys() == STAGES.keys()
    record = valid(stage)
    assert find_fault(record, stage) is None
    assert artifacts.read_record(write(tmp_path / "a", record), stage) == record
    for place in places(record):
        if place == ("commit",):
            continue
        if not isinstance(place[-1], int) and place not in FREE:
            fault = find_fault(changed(record, place, remove=True), stage)
            assert fault or place[-1] in OPTIONAL, place
        for wrong in WRONG[type(at(record, place))]:
            if wrong is None and place[-1] in OPTIONAL:
                continue
            fault = find_fault(changed(record, place, wrong), stage)
            assert fault and "expected" in fault and "found" in fault and fault.isprintable(), (place, wrong)


OPTIONAL = {"score_optimum", "key_context", "refit", "refit_layers", "ridge", "attention"}
FREE = {("inputs", "calibration"), ("files", "config.json"), ("files", "model-00001-of-00004.safetensors"),
        ("files", "step-00000003/.metadata"), ("files", "model.safetensors"), ("results", "gqa")}
CONTENTS = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a string": b'"record"',
    "a number": b"3",
    "cut off": b'{"stage": "06_export',
    "invalid UTF-8": b'{"stage": "\xff\xfe"}',
    "UTF-16": '{"stage": "06_export.py"}'.encode("utf-16"),
    "zeros": bytes(100),
    "nested too deeply": b"[" * 100_000,
    "an integer of 5000 digits": b"9" * 5000,
    "an empty object": b"{}",
    "another stage": json.dumps(valid("04_align.py")).encode(),
    "a stage that is a list": b'{"stage": ["06_export.py"]}',
    "a stage with a line break": b'{"stage": "06_export.py\\n"}',
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    message = refusal(write(tmp_path / "a", CONTENTS[content]), "06_export.py")
    assert "expected" in message and "06_export.py" in message


def test_every_kind_of_fault_names_its_place(tmp_path):
    for stage, place, wrong, message in (
        ("06_export.py", "summary.kv_heads", "2", "expected an integer of at least 1, found '2'"),
        ("01_calibrate.py", "model.heads", 7, "record.model.kv_heads: expected a divisor of 7"),
        ("01_calibrate.py", "model.layers", 3, "record.files: expected one per layer (3), found"),
        ("04_align.py", "summary.merge", "men", "expected one of mean, first, closed-form, found 'men'"),
        ("04_align.py", "inputs.calibration", "12", "expected a sha256 of 64 hexadecimal digits, found '12'"),
        ("04_align.py", "summary.within_group_cosine", [[]], "cosine[0]: expected an object, found []"),
        ("05_prune_train.py", "summary.lr", -1.0, "expected a finite number of at least 0, found -1.0"),
        ("05_prune_train.py", "summary.masks", "on", "expected one of l0, l0-released, off, found 'on'"),
        ("07_eval.py", "results.gqa.kv_heads", 0, "expected an integer of at least 1, found 0"),
    ):
        record = changed(valid(stage), tuple(place.split(".")), wrong)
        fault = refusal(write(tmp_path / "a", record), stage)
        assert message in fault and (f"record.{place}" in fault or message.startswith("record."))


UNSAFE_NAMES = ["../x", "/x", "a/../../x", "..", ".", "a/..", "", "a\\b", "a\n/../x", "\ud800", "a/./b"]


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_record_names_only_files_inside_its_directory(name):
    record = valid("06_export.py")
    record["files"][name] = SHA
    assert "a relative path inside the directory" in find_fault(record, "06_export.py")


GROUP_FAULTS = {
    "a missing head": [[[0, 2], [1, 1]], GROUPS[1]],
    "head -1": [[[0, 2], [1, -1]], GROUPS[1]],
    "head 7 of 4": [[[0, 2], [1, 7]], GROUPS[1]],
    "a huge head": [[[0, 2], [1, 10**30]], GROUPS[1]],
    "a text": [[[0, 2], [1, "3"]], GROUPS[1]],
    "a fraction": [[[0, 2], [1, 3.5]], GROUPS[1]],
    "a float": [[[0, 2], [1, 3.0]], GROUPS[1]],
    "a bool": [[[0, 2], [True, 3]], GROUPS[1]],
    "a null": [[[0, 2], [1, None]], GROUPS[1]],
    "a null for a group": [[[0, 2], None], GROUPS[1]],
    "a null for a layer": [None, GROUPS[1]],
    "unequal sizes": [[[0, 2, 1], [3]], GROUPS[1]],
    "an empty group": [[[0, 2, 1, 3], []], GROUPS[1]],
    "too many groups": [[[0], [2], [1], [3]], GROUPS[1]],
    "one group": [[[0, 1, 2, 3]], GROUPS[1]],
    "a head too many": [[[0, 2, 4], [1, 3, 5]], GROUPS[1]],
    "a layer too few": [GROUPS[0]],
    "a layer too many": [*GROUPS, GROUPS[0]],
    "no layers": [],
    "null": None,
    "an object": {"0": GROUPS[0]},
    "flat": [[0, 2, 1, 3], [0, 1, 2, 3]],
}


@pytest.mark.parametrize("name", ["score_default", "score_found", "score_optimum", "within_group_cosine"])
def test_figures_per_layer_are_as_many_as_layers(name):
    stage = "04_align.py" if name == "within_group_cosine" else "03_group.py"
    items = valid(stage)["summary"][name]
    for wrong in (items[:1], [*items, items[0]], []):
        fault = find_fault(changed(valid(stage), ("summary", name), wrong), stage)
        assert fault == f"record.summary.{name}: expected 2 layers, found {len(wrong)}"
    if name == "score_optimum":
        assert find_fault(changed(valid(stage), ("summary", name), None), stage) is None


def test_sizes_beyond_any_memory_are_refused():
    for kv_heads in (10**6, 10**18):
        record = valid("03_group.py") | {"kv_heads": kv_heads}
        record["summary"]["kv_heads"] = kv_heads
        record["model"]["heads"] = record["model"]["kv_heads"] = 2 * kv_heads
        assert "groups of 2 heads" in find_fault(record, "03_group.py")
    calibration = changed(valid("01_calibrate.py"), ("model", "layers"), 10**18)
    assert "expected one per layer" in find_fault(calibration, "01_calibrate.py")


@pytest.mark.parametrize("fault", GROUP_FAULTS)
def test_groups_are_a_partition_of_every_layer(tmp_path, fault):
    for stage in ("03_group.py", "04_align.py"):
        record = valid(stage) | {"groups": GROUP_FAULTS[fault]}
        assert "record.groups" in refusal(write(tmp_path / "a", record), stage)


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 8, 0, -2, 2.0, "2", None, True])
def test_kv_heads_agree_with_the_groups(tmp_path, kv_heads):
    for stage, places_ in (("03_group.py", [("kv_heads",)]), ("03_group.py", [("summary", "kv_heads")]),
                           ("03_group.py", [("kv_heads",), ("summary", "kv_heads")]),
                           ("04_align.py", [("summary", "kv_heads")])):
        record = valid(stage)
        for place in places_:
            record = changed(record, place, kv_heads)
        refusal(write(tmp_path / "a", record), stage)


def test_groups_come_back_as_written(tmp_path):
    (tmp_path / "groups.json").write_text(json.dumps(valid("03_group.py")))
    record, groups = artifacts.read_groups(str(tmp_path / "groups.json"), MODEL)
    assert groups.dtype == torch.int64 and groups.tolist() == GROUPS == record["groups"]
    for name, value in (("fingerprint", "cd" * 32), ("layers", 3), ("kv_heads", 8), ("head_dim", 16)):
        with pytest.raises(UserError, match="groups.json: expected"):
            artifacts.read_groups(str(tmp_path / "groups.json"), MODEL | {name: value})


def test_a_teacher_needs_no_students_fields_and_a_student_all():
    teacher = valid("05_prune_train.py") | {"summary": dict(TRAINED)}
    assert find_fault(teacher, "05_prune_train.py") is None
    for name in STUDENT:
        partly = changed(teacher, ("summary", name), STUDENT[name])
        assert "expected a field" in find_fault(partly, "05_prune_train.py")


# -- files of an artifact --


@pytest.fixture
def artifact(tmp_path) -> str:
    """A directory artifact with three files, one of them in a folder."""
    with artifacts.write_directory(str(tmp_path / "gqa")) as aside:
        for name in ("config.json", "weights", "step-1/shard"):
            os.makedirs(os.path.dirname(os.path.join(aside, name)), exist_ok=True)
            Path(aside, name).write_bytes(name.encode() * 100)
        artifacts.write_record(aside, valid("06_export.py"))
    return str(tmp_path / "gqa")


def test_files_are_verified_by_content(artifact):
    record = artifacts.read_record(artifact, "06_export.py")
    assert record["files"].keys() == {"config.json", "weights", "step-1/shard"}
    Path(artifact, "README.md").write_text("added later")
    artifacts.verify_files(artifact, record)
    for name in record["files"]:
        path, content = Path(artifact, name), Path(artifact, name).read_bytes()
        for damaged in (content[:-1], b"", content[:50] + b"!" + content[51:], content + b" ", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"{name}: .*06_export.py|{name}: .*run it again"):
                artifacts.verify_files(artifact, record)
            path.write_bytes(content)
    artifacts.verify_files(artifact, record)


def test_inputs_are_identified_by_content(artifact, tmp_path):
    record = {"stage": "07_eval.py", "inputs": artifacts.input_digests(str(tmp_path / "run"), [artifact])}
    assert list(record["inputs"]) == ["../gqa"]
    os.rename(artifact, tmp_path / "moved")
    artifacts.check_input(record, str(tmp_path / "moved"))  # a moved artifact is the same one
    artifacts.write_record(str(tmp_path / "moved"), valid("06_export.py") | {"seconds": 2.0})
    with pytest.raises(UserError, match=r"moved: expected the artifact that 07_eval.py read"):
        artifacts.check_input(record, str(tmp_path / "moved"))


# -- writing --


def content(path) -> dict[str, str]:
    return {file.name: file.read_text() for file in Path(path).iterdir()}


def test_only_what_this_call_moved_is_removed(tmp_path):
    path = tmp_path / "gqa"
    for name in ("gqa.old", "gqa.old-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text(name)
    (tmp_path / "gqa.old-2").symlink_to("nowhere")
    for text in ("first", "second"):
        with artifacts.write_directory(str(path)) as aside:
            Path(aside, "file").write_text(text)
        assert content(path) == {"file": text}
    for name in ("gqa.old", "gqa.old-1"):
        assert content(tmp_path / name) == {"mine": name}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gqa", "gqa.old", "gqa.old-1", "gqa.old-2"]
    assert artifacts.move_aside(str(path)) == f"{path}.old-3" and artifacts.move_aside(str(path)) is None
    assert content(tmp_path / "gqa.old-3") == {"file": "second"}


@pytest.mark.parametrize("moment", ["in the block", "before the rename"])
def test_a_failed_replacement_leaves_the_previous_directory(tmp_path, monkeypatch, moment):
    path, rename = tmp_path / "gqa", os.rename
    with artifacts.write_directory(str(path)) as aside:
        Path(aside, "file").write_text("first")

    def refuse(source, target):
        if source.endswith(".tmp"):
            raise KeyboardInterrupt
        rename(source, target)

    with pytest.raises(KeyboardInterrupt):
        with artifacts.write_directory(str(path)) as aside:
            Path(aside, "file").write_text("second")
            if moment == "in the block":
                raise KeyboardInterrupt
            monkeypatch.setattr(os, "rename", refuse)
    assert content(path) == {"file": "first"}


def test_a_link_or_a_file_is_never_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("mine")
    for name, kind in (("link", "a symbolic link"), ("dangling", "a symbolic link"), ("file", "a file")):
        with pytest.raises(UserError, match=f"expected nothing or a directory, found {kind}"):
            with artifacts.write_directory(str(tmp_path / name)):
                pass
        args = SimpleNamespace(run=str(tmp_path), force=name != "file")
        with pytest.raises(UserError, match="found a symbolic link|pass --force"):
            artifacts.claim("06_export.py", args, str(tmp_path / name))
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()


# -- one process per run directory and stage --


@pytest.fixture
def claims(tmp_path):
    yield SimpleNamespace(run=str(tmp_path / "run"), force=False)
    cli.cleanup.close()


def test_a_stage_at_work_refuses_a_second_one(claims, monkeypatch):
    artifacts.claim("05_prune_train.py", claims)
    with pytest.raises(UserError) as refused:
        artifacts.claim("05_prune_train.py", claims)
    message = str(refused.value)
    assert f"expected no other 05_prune_train.py running there, found process {os.getpid()} on " in message
    assert " since 20" in message
    artifacts.claim("06_export.py", claims)  # another stage
    other_run = SimpleNamespace(run=claims.run + "2", force=False)
    artifacts.claim("05_prune_train.py", other_run)
    monkeypatch.setenv("RANK", "1")
    artifacts.claim("05_prune_train.py", claims)  # the first rank holds the lock for all
    monkeypatch.delenv("RANK")
    cli.cleanup.close()
    assert not os.path.exists(claims.run)  # neither a lock nor an empty directory is left
    artifacts.claim("05_prune_train.py", claims)


def test_a_calibration_names_its_text():
    record = valid("01_calibrate.py")
    for arguments in ({}, {"text": None}, {"text": 3}):
        assert "arguments" in find_fault(record | {"arguments": arguments}, "01_calibrate.py")


def test_a_file_that_cannot_take_its_name_leaves_nothing(tmp_path):
    for name in ("x.json", "x.safetensors"):
        (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError):
        artifacts.write_json(str(tmp_path / "x.json"), {})
    with pytest.raises(IsADirectoryError):
        artifacts.write_tensors(str(tmp_path / "x.safetensors"), {"a": torch.zeros(1)}, {})
    assert sorted(os.listdir(tmp_path)) == ["x.json", "x.safetensors"]


def test_calibration_that_is_not_finite_is_refused(tmp_path):
    artifacts.write_layer(str(tmp_path), 0, {"key.raw": torch.tensor([1.0, torch.nan])})
    with pytest.raises(UserError, match=r"layer-00000\.safetensors: NaN or Inf in key\.raw"):
        artifacts.read_layer(str(tmp_path), 0)


def test_an_empty_run_directory_that_existed_before_stays(claims):
    os.mkdir(claims.run)
    artifacts.claim("05_prune_train.py", claims)
    cli.cleanup.close()
    assert os.listdir(claims.run) == []


def test_a_killed_process_blocks_nobody(claims):
    child = os.fork()
    if not child:
        artifacts.claim("05_prune_train.py", claims)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(claims.run) == [".05_prune_train.lock"]
    artifacts.claim("05_prune_train.py", claims)


def test_a_live_process_is_named(claims):
    ready, leave = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(leave[1])  # so that the read below ends with the parent, whatever becomes of it
        artifacts.claim("01_calibrate.py", claims)
        os.write(ready[1], b"x")
        os.read(leave[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(UserError, match=f"found process {child} on "):
            artifacts.claim("01_calibrate.py", claims)
    finally:
        os.close(leave[1])
        os.waitpid(child, 0)


# -- whole stages --


@pytest.fixture
def home(aligned_run, tmp_path) -> Path:
    return copy_run(aligned_run, tmp_path / "run")


def flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def replace(old: str, new: str):
    """A damage: the record says another thing."""

    def damage(content: bytes) -> bytes:
        assert old.encode() in content
        return content.replace(old.encode(), new.encode())

    return damage


def refuse_each(home: Path, damages) -> None:
    """Damage one file after another (None: remove it), expect the command to refuse, repair it."""
    for file, damage, command, message in damages:
        path = home / file
        content = path.read_bytes()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(content) if callable(damage) else damage)
        expect_error(message, command, "--run", home, "--force")
        path.write_bytes(content)


def test_stages_refuse_damaged_inputs(home):
    layer, not_recorded = "calibration/layer-00001.safetensors", "its content does not match"
    similarity, align, group = "02_similarity.py", "04_align.py", "03_group.py"
    four_heads = replace('"kv_heads": 8', '"kv_heads": 4')
    refuse_each(home, (
        (layer, (home / layer).read_bytes()[:-8], similarity, not_recorded),
        (layer, flip_last, align, not_recorded),
        (layer, None, similarity, "expected the file written by 01_calibrate.py, found none"),
        ("calibration/stage.json", four_heads, similarity, "of shape [10, 8, 8] for the model"),
        ("similarity.safetensors", flip_last, group, not_recorded),
        ("similarity.json", four_heads, group, "of shape [3, 4, 4], found [3, 8, 8]"),
        ("similarity.json", b"[]", group, "record: expected an object, found []"),
        ("groups.json", replace('"kv_heads": 2', '"kv_heads": 4'), align, "expected 4 groups of 2 heads"),
        ("groups.json", b"\xff", align, "groups.json: expected the record of 03_group.py"),
    ))
    assert not list(home.glob("*.tmp")) and not list(home.glob(".*.lock"))


def test_a_wrong_layer_to_draw_is_refused_before_anything_is_written(home):
    before = (home / "similarity.json").read_bytes()
    draw = ["02_similarity.py", "--run", home, "--force", "--layers-drawn"]
    expect_error("--layers-drawn: expected layers from 0 to 2, found 3", *draw, 0, 3)
    expect_error("--layers-drawn: expected a whole number from 0 to 2^31 - 1, found -1", *draw, -1)
    assert (home / "similarity.json").read_bytes() == before


@pytest.mark.parametrize("command", ["01_calibrate.py", "02_similarity.py", "04_align.py"])
def test_a_full_disk_is_one_line_and_keeps_what_there_was(home, inputs, command):
    """The kernel's refusal of large files, as safetensors and tokenizers report it."""
    arguments = []
    if command == "01_calibrate.py":
        arguments = ["--model", inputs["model"], "--text", inputs["text"], "--sequences", 8, "--length", 64]
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    words = [command, "--run", home, "--force", *arguments]
    for size in (2000, 5000):
        with_limit(size, lambda: expect_error("File too large", *words))
    whole = [path for path in home.rglob("*") if path.is_file() and path.suffix != ".tmp"]
    assert {path: path.read_bytes() for path in whole} == before


def with_limit(size: int, action) -> None:
    """Call action while files of more than `size` bytes are refused, as all are on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        action()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_export_takes_only_the_chain_that_was_trained(finished_run, tmp_path):
    """Records and weights of train/ and aligned/, changed one after another; then a run directory with a glob
    in its name."""
    home = copy_run(finished_run, tmp_path / "run [1]*")
    step = max(path.name for path in (home / "train").glob("step-*"))
    not_recorded = "its content does not match stage.json"
    teacher = (home / "teacher/stage.json").read_bytes()
    another = replace('"seconds": ', '"seconds": 1')
    damages = (
        ("aligned/stage.json", another, "aligned: expected the artifact that"),
        ("merged/stage.json", another, "merged: expected the artifact that"),
        ("aligned/config.json", b"{}", not_recorded),
        ("train/stage.json", replace('"kv_heads": 2', '"kv_heads": 4'), "expected 2 kv heads as in"),
        ("train/stage.json", replace('"steps": 10', '"steps": 9'), "expected the checkpoint of step 9"),
        ("train/stage.json", teacher, "expected a trained student, found a teacher"),
        (f"train/{step}/__0_0.distcp", flip_last, not_recorded),
        (f"train/{step}/.metadata", b"cos\nsystem\n(S'true'\ntR.", not_recorded),
        ("train/metrics.jsonl", None, "metrics.jsonl: expected the file written by 05_prune_train.py"),
    )
    refuse_each(home, [(file, damage, "06_export.py", message) for file, damage, message in damages])
    with_limit(5000, lambda: expect_error("File too large", "06_export.py", "--run", home, "--force"))
    run("06_export.py", "--run", home, "--force")
    for name in ("config.json", *(path.name for path in (finished_run / "gqa").glob("*.safetensors*"))):
        assert (home / "gqa" / name).read_bytes() == (finished_run / "gqa" / name).read_bytes()
    shutil.move(home / "gqa", home / "moved")
    (home / "gqa").symlink_to(home / "moved")
    expect_error("gqa: expected nothing or an earlier output, found a symbolic link",
                 "06_export.py", "--run", home, "--force")
