"""Finished parts of an output: found by the command that wrote them, removed by another."""


import pytest
from common.files import unfinished
from common.parts import Parts, remove_parts

COMMAND = {"stage": "04_align.py", "flags": {"refit": "output"}, "inputs": {"groups.json": "0" * 64},
           "packages": {"torch": "2"}, "commit": None, "device": "cpu", "seconds": 1.0, "summary": {}}


def fill(directory: str) -> dict:
    with open(f"{directory}/weights", "w") as file:
        file.write("weights")
    return {"error": 0.1}


@pytest.fixture
def home(tmp_path):
    """A directory in which a command has finished the part "first"."""
    path = tmp_path / "partial"
    assert Parts(str(path), COMMAND).add("first", fill) == (str(path / "first"), {"error": 0.1})
    return path


def test_a_part_is_found_again_by_its_command(home):
    parts = Parts(str(home), COMMAND | {"seconds": 2.0, "summary": None})
    assert parts.find("first") == (str(home / "first"), {"error": 0.1})
    assert parts.find("second") is None and (home / "first" / "weights").read_text() == "weights"


@pytest.mark.parametrize("name", ["flags", "inputs", "packages"])
def test_parts_of_another_command_are_removed(home, name):
    for path in (home / "first" / "notes", home / "notes"):
        path.touch()
    assert Parts(str(home), COMMAND | {name: "other"}).find("first") is None
    left = sorted(str(path.relative_to(home)) for path in home.rglob("*"))
    assert left == ["first.old-1", "first.old-1/notes", "notes"]


@pytest.mark.parametrize("damage", [
    lambda part: (part / "weights").write_text("wEights"), lambda part: (part / "weights").unlink(),
], ids=["modified", "missing"])
def test_a_part_that_was_changed_is_not_found_and_is_replaced(home, damage):
    damage(home / "first")
    parts = Parts(str(home), COMMAND)
    assert parts.find("first") is None
    parts.add("first", fill)
    assert parts.find("first") == (str(home / "first"), {"error": 0.1})


def test_only_the_stages_own_parts_are_removed(home):
    """Not those of another stage or what is being written."""
    Parts(str(home), COMMAND | {"stage": "05_prune_train.py"}).add("second", fill)
    (home / "empty").mkdir()
    with unfinished(str(home / "fourth")) as aside:
        remove_parts(str(home), "04_align.py")
        left = {path.name for path in home.iterdir()}
        assert left == {"second", "empty", aside.split("/")[-2]}
