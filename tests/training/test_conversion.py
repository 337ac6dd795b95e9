"""What stage 5 reads of stage 4."""

import pytest

from common.models import blending
from common.training.conversion import read_conversion
from runs import copy_run, run


@pytest.mark.slow
@pytest.mark.parametrize("flags, blended", [
    ([], blending.KEY_VALUE), (["--refit"], blending.WHOLE_HEAD),
    (["--merge", "closed-form"], blending.WHOLE_HEAD),
])
def test_masks_move_what_merging_has_changed(aligned_run, tmp_path, flags, blended, request):
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", *flags)
    ranks = request.getfixturevalue("group_of_one")  # after a stage, which joins a group of its own
    assert {*read_conversion(str(home), ranks).blended} == {*blended}
