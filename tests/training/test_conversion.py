"""What stage 5 reads of stages 4 and 6."""

import pytest
import torch

from common.run.errors import UserError
from common.training.conversion import read_conversion
from common.training.sharding import Ranks
from runs import copy_run, run


@pytest.mark.parametrize("flags, blended", [
    ([], {"k_proj", "v_proj"}),
    (["--refit"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
    (["--merge", "closed-form"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
])
@pytest.mark.slow
def test_masks_move_what_merging_has_changed(aligned_run, tmp_path, flags, blended, request):
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", *flags)
    assert {*read_conversion(str(home), request.getfixturevalue("group_of_one")).blended} == blended


@pytest.mark.slow
def test_a_student_that_goes_on_is_an_export_as_it_was_written(aligned_run, tmp_path, request):
    home = copy_run(aligned_run, tmp_path / "run")
    run("06_export.py", "--run", home, "--untrained")
    ranks, exported = request.getfixturevalue("group_of_one"), home / "gqa"
    assert read_conversion(str(home), ranks, str(exported)).exported == str(exported)
    (exported / "config.json").write_text((exported / "config.json").read_text() + "\n")
    with pytest.raises(UserError, match="gqa/config.json"):
        read_conversion(str(home), ranks, str(exported))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["aligned", "merged"])
def test_files_that_were_edited_are_refused(aligned_run, tmp_path, part):
    home = copy_run(aligned_run, tmp_path / "run")
    config = home / part / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match=f"{part}/config.json"):
        read_conversion(str(home), Ranks(0, 1, torch.device("cpu")))
