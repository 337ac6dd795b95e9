"""The tests of make gpu on a CPU that rounds like a GPU; those of several processes are left to make gpu."""

import os
import subprocess
import sys

import pytest

from torchrun import ROOT


@pytest.mark.release
def test_what_make_gpu_tests_holds_with_a_gpus_rounding():
    chosen = "not all_gpus and not two_nodes and not goes_on_on_all"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "-k", chosen,
               "tests/stages/test_gpu.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"GPU_TESTS_ON": "cpu"}, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
