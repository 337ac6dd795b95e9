"""On a busy machine OpenMP's threads sleep while they wait, if that is set before torch is imported."""

import os
import runpy
import sys

import pytest

from torchrun import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("0*_*.py"))
for path in sorted((ROOT / "pipelines").glob("*.py")):
    if "\nimport torch\n" in path.read_text() and "__main__" in path.read_text():
        SCRIPTS.append(f"pipelines/{path.name}")


def test_threads_wait_passively_unless_the_user_chose_otherwise(monkeypatch):
    for chosen, policy in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if chosen:
            monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
        runpy.run_path(str(ROOT / "common" / "run" / "openmp.py"))
        assert os.environ["OMP_WAIT_POLICY"] == policy


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_policy_is_set_before_anything_else_is_imported(script):
    lines = (ROOT / script).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    ours = next(number for number, line in enumerate(imports) if line.startswith("import common.run.openmp "))
    before = {line.split()[1].split(".")[0] for line in imports[:ours]}
    assert before <= sys.stdlib_module_names, before
