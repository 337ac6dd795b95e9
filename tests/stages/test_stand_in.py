"""The tests of make gpu on a CPU that rounds like a GPU; those of several processes are left to make gpu."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT
from stand_in import ROUNDING, Rounding

SEVERAL_PROCESSES = ("all_gpus", "two_nodes", "goes_on_on_all")


def test_rounding_is_small_and_the_same_each_time():
    x, weight = (torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    exact = F.linear(x, weight)
    with Rounding():
        first, second = F.linear(x, weight), F.linear(x, weight)
    assert torch.equal(first, second) and not torch.equal(first, exact)
    torch.testing.assert_close(first, exact, rtol=1.5 * ROUNDING, atol=0)
    assert float(((first - exact) / exact).abs().max()) > ROUNDING / 2


@pytest.mark.release
def test_what_make_gpu_tests_holds_with_a_gpus_rounding():
    chosen = " and ".join(f"not {name}" for name in SEVERAL_PROCESSES)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-k", chosen,
               "tests/stages/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"GPU_TESTS_ON": "cpu"}, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
