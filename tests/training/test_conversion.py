"""What stage 5 reads of stages 4 and 6."""

import pytest

from common.models import blending
from common.run.errors import UserError
from common.training.conversion import read_conversion
from runs import copy_run, run

pytestmark = pytest.mark.slow


@pytest.fixture
def home(aligned_run, tmp_path):
    return copy_run(aligned_run, tmp_path / "run")


@pytest.mark.parametrize("flags, blended", [
    ([], blending.KEY_VALUE), (["--refit"], blending.WHOLE_HEAD),
    (["--merge", "closed-form"], blending.WHOLE_HEAD),
])
def test_masks_move_what_merging_has_changed(home, flags, blended, request):
    run("04_align.py", "--run", home, "--force", *flags)
    ranks = request.getfixturevalue("group_of_one")  # after a stage, which joins a group of its own
    assert {*read_conversion(str(home), ranks).blended} == {*blended}


def test_a_student_that_goes_on_is_an_export_as_it_was_written(home, request):
    run("06_export.py", "--run", home, "--untrained")
    ranks, exported = request.getfixturevalue("group_of_one"), home / "gqa"
    assert read_conversion(str(home), ranks, str(exported)).exported == str(exported)
    (exported / "config.json").write_text((exported / "config.json").read_text() + "\n")
    with pytest.raises(UserError, match="gqa/config.json"):
        read_conversion(str(home), ranks, str(exported))
