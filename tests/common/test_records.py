"""Records: whatever is edited, damaged, cut off or of another stage is refused in one line."""

import json
import math

import pytest
from common.records import MERGES, STAGES, find_fault

from common import artifacts
from common.errors import UserError
from runs import (
    COSINES,
    FIELDS,
    GROUPS,
    LOST,
    SHA,
    SMALL_MODEL,
    STUDENT,
    TRAINED,
    changed_record,
    places_in,
    save_record,
    valid_record,
    value_at,
)


def refusal(path: str, stage: str) -> str:
    """The message of the UserError that reading this record raises."""
    with pytest.raises(UserError) as refused:
        artifacts.read_record(path, stage)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 1000 and path in message and message.isprintable()
    return message


WRONG = {str: 3, bool: "true", int: "3", float: math.nan, list: {}, dict: "x"}  # type -> none of its kind


@pytest.mark.parametrize("stage", FIELDS)
def test_every_field_is_required_and_checked(tmp_path, stage):
    """Each one removed, and replaced by a value of another kind."""
    assert FIELDS.keys() == {stage for stage in STAGES if "/" not in stage}  # others are of related/
    record = valid_record(stage)
    assert find_fault(record, stage) is None
    assert artifacts.read_record(save_record(tmp_path / "a", record), stage) == record
    for place in places_in(record):
        if place == ("commit",):
            continue
        if not isinstance(place[-1], int) and place not in FREE:
            fault = find_fault(changed_record(record, place, remove=True), stage)
            assert fault or place[-1] in OPTIONAL, place
        fault = find_fault(changed_record(record, place, WRONG[type(value_at(record, place))]), stage)
        assert fault and "expected" in fault and "found" in fault, place


OPTIONAL = {"flags", "key_context", "refit", "refit_layers", "ridge", "attention",
            "kl_merged", "energy_lost"}
FREE = {("inputs", "calibration"), ("results", "gqa"),
        *(("files", name) for fields in FIELDS.values() for name in fields["files"])}
CONTENTS = {
    "empty": b"",
    "a list": b"[]",
    "cut off": b'{"stage": "06_export',
    "an empty object": b"{}",
    "another stage": json.dumps(valid_record("04_align.py")).encode(),
}


@pytest.mark.parametrize("content", CONTENTS)
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    message = refusal(save_record(tmp_path / "a", CONTENTS[content]), "06_export.py")
    assert "expected" in message and "06_export.py" in message


UNSAFE_NAMES = ("../x", "/x", "a/../../x")
HEADS = "record.groups[0]: expected each of heads 0 to 3 once"
PAIRS = "record.groups[0]: expected 2 groups of 2 heads, found sizes"
FAULTS = [  # stage, the field, a wrong value of it, message
    ("01_calibrate.py", "model.heads", 7, "record.model.kv_heads: expected a divisor of 7"),
    ("01_calibrate.py", "model.layers", 3, "files: expected tokens.safetensors and one per layer (3)"),
    ("04_align.py", "summary.merge", "men", f"expected one of {', '.join(MERGES)}, found"),
    ("04_align.py", "inputs.calibration", "1" * 41, "a sha256 of 64 hexadecimal digits, or a commit of 40"),
    ("05_prune_train.py", "arguments.text", "c4", "expected a list, found 'c4'"),
    ("05_prune_train.py", "summary.lr", -1.0, "expected a finite number of at least 0, found -1.0"),
    ("07_eval.py", "results.gqa.kv_heads", 0, "expected an integer of at least 1, found 0"),
    ("03_group.py", "kv_heads", 1, "record.kv_heads: expected 2 as in its summary, found 1"),
    ("03_group.py", "summary.kv_heads", 4, "record.kv_heads: expected 4 as in its summary, found 2"),
    ("03_group.py", "groups", [], "record.groups: expected 2 layers, found 0"),
    ("04_align.py", "summary.kv_heads", 1, "record.groups[0]: expected 1 groups of 4 heads, found sizes [2"),
    *(("04_align.py", "summary.kv_heads", count,
       f"record.kv_heads: expected a proper divisor of 4, found {count}") for count in (3, 4, 8)),
    ("04_align.py", "groups", GROUPS[:1], "record.groups: expected 2 layers, found 1"),
    ("04_align.py", "groups", [[[0, 2], [1, 1]], GROUPS[1]], HEADS),
    *(("04_align.py", "groups", [layer, GROUPS[1]], f"{PAIRS} {[len(group) for group in layer]}")
      for layer in ([[0, 2, 1], [3]], [[0], [2], [1], [3]])),
    ("04_align.py", "groups", [[[0, 2], [1, 3.0]], GROUPS[1]], "record.groups[0][1][1]: expected an integer"),
    *((stage, f"summary.{name}", [item] * count, f"record.summary.{name}: expected 2 layers, found {count}")
      for stage, name, item in (("03_group.py", "score_default", -1.0), ("03_group.py", "score_found", -1.0),
                                ("04_align.py", "within_group_cosine", COSINES),
                                ("04_align.py", "energy_lost", LOST))
      for count in (1, 3)),
    *(("06_export.py", ("files", name), SHA,
       "record.files: name: expected a relative path inside the directory")
      for name in UNSAFE_NAMES),
]


@pytest.mark.parametrize(("stage", "field", "wrong", "message"), FAULTS)
def test_every_kind_of_fault_names_its_place(tmp_path, stage, field, wrong, message):
    """Also those between fields: groups are a partition of every layer, as many as kv_heads says; figures
    per layer are as many as layers; files are inside the directory."""
    place = tuple(field.split(".")) if isinstance(field, str) else field
    fault = refusal(save_record(tmp_path / "a", changed_record(valid_record(stage), place, wrong)), stage)
    assert message in fault and (f"record.{field}" in fault or message.startswith(("record.", "files:")))


@pytest.mark.parametrize(("name", "value"), [("fingerprint", "cd" * 32), ("layers", 3), ("kv_heads", 8),
                                             ("head_dim", 16)])
def test_a_record_of_another_model_is_refused(tmp_path, name, value):
    path = save_record(tmp_path / "a", valid_record("03_group.py"))
    assert artifacts.read_record(path, "03_group.py", SMALL_MODEL)["groups"] == GROUPS
    with pytest.raises(UserError, match="a: expected"):
        artifacts.read_record(path, "03_group.py", SMALL_MODEL | {name: value})


def test_a_teacher_needs_no_students_fields_and_a_student_all():
    teacher = valid_record("05_prune_train.py") | {"summary": dict(TRAINED)}
    assert find_fault(teacher, "05_prune_train.py") is None
    for name in STUDENT:
        partly = changed_record(teacher, ("summary", name), STUDENT[name])
        assert "expected a field" in find_fault(partly, "05_prune_train.py")
