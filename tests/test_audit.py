"""AUDIT.md names functions and tests that exist."""

import re

from conftest import ROOT

ROWS = [line.split("|") for line in (ROOT / "AUDIT.md").read_text().splitlines() if line.count("|") == 5]


def test_every_named_test_exists():
    named = 0
    for row in ROWS:
        file = None
        for stem, test in re.findall(r"`(\w*)::(test_\w+)`", row[4]):
            file = stem or file
            assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file}::{test}"
            named += 1
    assert named > 25


def test_every_named_function_exists():
    named = 0
    for row in ROWS:
        texts = []
        for name in re.findall(r"`([^`]+)`", row[3]):
            if name.endswith(".py"):
                texts.append((ROOT / name).read_text())
            else:
                assert any(re.search(rf"^(def|class) {name}\b|^{name} = ", text, re.M) for text in texts), f"{name} in {row[3]}"
                named += 1
    assert named > 25
