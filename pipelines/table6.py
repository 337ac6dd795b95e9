"""The table of table6.sh, from the seconds in the records of stages 1 to 4.

    python -m pipelines.table6 --run runs/table6 --kv-heads 16 8 4

With grouping: stages 2 (similarity), 3 and 4. Without: stage 3, which then lists adjacent heads, and stage 4.
Stage 4's seconds include writing both checkpoints and the equivalence check.
"""

import os

from common.reporting.tables import markdown_table
from common.run.artifact import read_record
from common.run.errors import run_stage
from common.run.files import write_text
from common.run.flags import Parser, positive


def parse():
    parser = Parser(__doc__)
    parser.add_argument("--run", default="runs/table6", help="run directory of table6.sh")
    parser.add_argument("--kv-heads", type=positive, nargs="+", default=[16, 8, 4],
                        help="numbers in the names of its directories")
    return parser.parse_args()


def table(run: str, kv_heads: list[int]) -> str:
    """Markdown: seconds of the calibration, and of transforming to each number of kv heads."""

    def seconds(stage: str, *path: str) -> float:
        return read_record(os.path.join(run, *path), stage)["seconds"]

    rows = [("calibration", "", f"{seconds('01_calibrate.py', 'calibration'):.1f}")]
    similarity = seconds("02_similarity.py", "similarity")
    for number in kv_heads:
        for row, title, shared in (("grouped", "w/ grouping", similarity), ("default", "w/o grouping", 0.0)):
            name = f"gqa{number}-{row}"
            total = shared + seconds("03_group.py", name, "groups")
            total += seconds("04_align.py", name, "aligned")
            rows.append((f"GQA-{number}", title, f"{total:.1f}"))
    model = read_record(os.path.join(run, "calibration"), "01_calibrate.py")["model"]
    return markdown_table((model["name"], "", "seconds"), rows, "<<>")


def main():
    args = parse()
    text = table(args.run, args.kv_heads)
    write_text(os.path.join(args.run, "table6.md"), text + "\n")
    print(f"\n{text}\n\nwrote   {os.path.join(args.run, 'table6.md')}")


if __name__ == "__main__":
    run_stage(main)
