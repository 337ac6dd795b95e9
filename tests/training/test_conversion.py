"""What stage 5 reads of stages 4 and 6."""

import pytest
import torch

from common.training.conversion import read_conversion
from common.training.sharding import Ranks
from helpers import copy_run, run


@pytest.mark.parametrize("flags, blended", [
    ([], {"k_proj", "v_proj"}),
    (["--refit"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
    (["--merge", "closed-form"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
])
def test_masks_move_what_merging_has_changed(aligned_run, tmp_path, flags, blended):
    home = copy_run(aligned_run, tmp_path / "run")
    run("04_align.py", "--run", home, "--force", *flags)
    assert {*read_conversion(str(home), Ranks(0, 1, torch.device("cpu"))).blended} == blended
