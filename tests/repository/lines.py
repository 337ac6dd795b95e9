"""The ratchet: `make lint` fails where an area of the repository has grown beyond its number in lines.txt.

    python tests/repository/lines.py

Of code, lines of Python and shell are counted, blank ones and docstrings too; of documents, words.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Path(__file__).with_name("lines.txt")


def size(unit: str, patterns: list[str]) -> int:
    """Lines or words of the files that git tracks under these patterns."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, text=True)
    suffixes = (".md",) if unit == "words" else (".py", ".sh")
    files = [ROOT / name for name in listed.split("\0") if name.endswith(suffixes)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    return sum(len(text.split()) if unit == "words" else text.count("\n") for text in texts)


def main() -> int:
    grown = False
    for line in LIMITS.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        limit, unit, *patterns = line.split()
        found = size(unit, patterns)
        grown |= found > int(limit)
        if found > int(limit):
            print(f"error: {' '.join(patterns)}: expected at most {limit} {unit}, found {found}: "
                  f"{found - int(limit)} more", file=sys.stderr)
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
