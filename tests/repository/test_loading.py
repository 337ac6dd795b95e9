"""No model is loaded with code of its own; OpenMP's policy is set before torch reads it."""

import ast
import re
import sys

from torchrun import ROOT


def test_no_model_is_loaded_with_code_of_its_own():
    """Without the argument transformers asks whether to run it."""
    called = []
    for folder in (".", "common", "related", "bench", "pipelines"):
        for path in ROOT.glob("*.py" if folder == "." else f"{folder}/**/*.py"):
            source = path.read_text()
            nodes = ast.walk(ast.parse(source)) if "Auto" in source else ()
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                name = ast.unparse(call.func)
                if re.fullmatch(r"Auto\w+\.from_(pretrained|config)", name):
                    called.append(name)
                    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
                    assert options.get("trust_remote_code") == "False", (path, call.lineno)
    assert len(called) > 10


def test_openmps_policy_is_set_before_anything_else_is_imported():
    commands = [path for path in sorted(ROOT.glob("pipelines/*.py"))
                if "\nimport torch\n" in path.read_text() and "__main__" in path.read_text()]
    for path in (*ROOT.glob("0*_*.py"), *commands):
        imports = re.findall(r"^(?:import|from) ([\w.]+)", path.read_text(), re.MULTILINE)
        before = {name.split(".")[0] for name in imports[: imports.index("common.run.openmp")]}
        assert before <= sys.stdlib_module_names, path
