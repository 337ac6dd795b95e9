"""On a busy machine: OpenMP's threads sleep while they wait, as its own report of its settings says."""

import os
import subprocess
import sys

import pytest

from torchrun import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("0*_*.py"))
for path in sorted((ROOT / "pipelines").glob("*.py")):
    if "\nimport torch\n" in path.read_text() and "__main__" in path.read_text():
        SCRIPTS.append(f"pipelines/{path.name}")


def spins_of(*words, **environment) -> int:
    """How often a thread looks before it sleeps, as libgomp chose when torch loaded it."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, cwd=ROOT,
                          check=True)
    (line,) = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    return int(line.split("'")[1])


@pytest.mark.slow
def test_threads_wait_passively_unless_the_user_chose_otherwise():
    words = ["-c", "import common.run.openmp, torch"]
    assert spins_of(*words) == 0 < spins_of(*words, OMP_WAIT_POLICY="ACTIVE")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_policy_is_set_before_anything_else_is_imported(script):
    lines = (ROOT / script).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    ours = next(number for number, line in enumerate(imports) if line.startswith("import common.run.openmp "))
    before = {line.split()[1].split(".")[0] for line in imports[:ours]}
    assert before <= sys.stdlib_module_names, before
