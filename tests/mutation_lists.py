"""Apply the mutations listed in tests/mutations/*.py, each of which some test should notice.

    python tests/mutation_lists.py [TEXT]  # only those of rows with this text

A mutation is (row of AUDIT.md, or what it is about where there is no row; file, old text, new text, test
[, reason why no test can notice it]). The old text must be in its file exactly once.
"""

import runpy
import sys

from mutants import ROOT, Trial, report


def listed() -> list[tuple[str, ...]]:
    files = sorted((ROOT / "tests" / "mutations").glob("*.py"))
    return [entry for file in files for entry in runpy.run_path(str(file))["MUTANTS"]]


def trial(entry: tuple[str, ...]) -> Trial | None:
    row, file, old, new, test = entry[:5]
    source = (ROOT / file).read_bytes()
    if source.count(old.encode()) != 1:
        return print(f"{file}: expected exactly one {old!r}")
    start = source.index(old.encode())
    return Trial(tuple(test.split()), (row,), row, file, source, start, start + len(old.encode()), new)


if __name__ == "__main__":
    text = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = {entry: trial(entry) for entry in listed() if text.lower() in entry[0].lower()}
    chosen = {entry: each for entry, each in chosen.items() if each}
    explained = {(each.name, each.change()): entry[5] for entry, each in chosen.items() if len(entry) > 5}
    sys.exit(report(list(chosen.values()), explained, jobs=2))
