"""On a busy machine OpenMP's threads sleep while they wait, if that is set before torch is imported."""

import sys

import pytest

from torchrun import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("0*_*.py"))
for path in sorted((ROOT / "pipelines").glob("*.py")):
    if "\nimport torch\n" in path.read_text() and "__main__" in path.read_text():
        SCRIPTS.append(f"pipelines/{path.name}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_policy_is_set_before_anything_else_is_imported(script):
    lines = (ROOT / script).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    ours = next(number for number, line in enumerate(imports) if line.startswith("import common.run.openmp "))
    before = {line.split()[1].split(".")[0] for line in imports[:ours]}
    assert before <= sys.stdlib_module_names, before
