"""Write the text of smollm2.sh, which halves it: RUN/text/calibration.txt and heldout.txt.

    python -m pipelines.smollm2 --run RUN [--text FILE.txt]

By default it is the reference manual that every Python carries for help(), without the paragraphs that it
repeats.
"""

import os
import re

from common.run.artifact import write_directory
from common.run.errors import UserError, run_stage
from common.run.files import read_text, write_text
from common.run.flags import Parser


def parse():
    parser = Parser(__doc__)
    parser.add_argument("--run", default="runs/smollm2", help="run directory")
    parser.add_argument("--text", help="a .txt file to halve instead of the manual")
    return parser.parse_args()


def manual() -> str:
    """Python's reference manual as help() shows it, each paragraph once: topics share entire sections."""
    from pydoc_data.topics import topics

    paragraphs = {}  # a dictionary keeps the order
    for topic in sorted(topics):
        paragraphs |= dict.fromkeys(re.split("\n{2,}", topics[topic].strip("\n")))
    return "\n\n".join(paragraphs)


def write_halves(run: str, file: str | None) -> None:
    """Write the halves of a file, or of the manual. Raises UserError if those of another text are there."""
    text, home = manual() if file is None else read_text(file), os.path.join(run, "text")
    halves = {"calibration.txt": text[: len(text) // 2], "heldout.txt": text[len(text) // 2 :]}
    if not os.path.exists(home):
        with write_directory(home) as directory:
            for name, half in halves.items():
                write_text(os.path.join(directory, name), half)
        print(f"wrote   {home}")
    for name, half in halves.items():
        if read_text(os.path.join(home, name)) != half:
            raise UserError(f"{home}: expected the halves of {file or 'the manual'}, found another text's; "
                            "pass another RUN")


def main() -> None:
    args = parse()
    write_halves(args.run, args.text)


if __name__ == "__main__":
    run_stage(main)
