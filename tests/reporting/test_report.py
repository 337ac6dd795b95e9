"""RUN/report.html: everything that the records say, on one self-contained page."""

import base64
import json
import re
import shlex
from xml.etree import ElementTree

import pytest

from common.reporting import report
from common.reporting.report import cell, flatten, label
from common.run.errors import UserError
from common.run.files import write_json
from runs import copy_run, flags, read, valid_record

ARTIFACTS = {f"{name}/stage.json": stage for name, (stage, *_) in report.PARTS.items()}


def save(run, artifact: str, record: dict) -> None:
    """A record whose model and summary have text that must be escaped, other text in each."""
    record["model"]["name"], record["commit"] = "<b>toy</b>", "ef" * 20
    record["summary"]["new"] = {"figure": 0.1234, "none": None, "text": f"<script>{artifact}</script>"}
    write_json(str(run / artifact), record)


def test_every_figure_of_every_stage_is_on_one_self_contained_page(finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run")
    records = {artifact: read(run / artifact) for artifact in ARTIFACTS}
    for artifact, record in records.items():
        save(run, artifact, record)
    report.write(str(run))
    page = (run / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(re.sub("(<(meta|img) [^>]*)>", r"\1/>", page))  # every element is closed
    rows = [["".join(part.itertext()) for part in row] for row in root.iter("tr")]
    for artifact, record in records.items():
        for name, value in flatten(record["summary"]).items():
            assert isinstance(value, list) or [label(name), cell(value)] in rows, (artifact, name)
    groups, table = records["groups/stage.json"], (run / "eval" / "eval.md").read_text()
    (scores, _) = [[word.strip("| ") for word in line.split(" | ")] for line in table.splitlines()
                   if "boolq" in line]
    refitted = records["aligned/stage.json"]["summary"]["within_group_cosine"]
    for row in (
        ["commit", "ef" * 6], ["sha256 of RUN/calibration", groups["calibration"][:12]],
        ["torch", groups["packages"]["torch"]], ["KV cache", "25.0% of the bytes"], scores,
        ["1", *(cell(groups["summary"][f"score_{which}"][1]) for which in ("default", "found")),
         cell(groups["groups"][1])],
        ["2", *map(cell, refitted[2].values()), cell(groups["groups"][2])],
    ):
        assert row in rows, row
    text = "".join(root.find("body").itertext())
    assert "<b>toy</b>: 8 → 2 key/value heads" in text and "gqa micro average " in text
    shown = [base64.b64decode(image.get("src").removeprefix("data:image/png;base64,"))
             for image in root.iter("img")]
    names = "similarity/similarity", "similarity/pairs", "groups/groups", "train/curves"
    assert shown == [(run / f"{name}.png").read_bytes() for name in names]
    assert not re.search(r"<script|<link|<b>|url\(|@import|https?:", page)


def test_a_run_has_sections_of_its_records_alone(tmp_path):
    with pytest.raises(UserError, match="expected a run directory with artifacts, found none"):
        report.write(str(tmp_path))
    assert not (tmp_path / "report.html").exists()
    save(tmp_path, "groups/stage.json", valid_record("03_group.py"))
    report.write(str(tmp_path))
    assert (tmp_path / "report.html").read_text().count("<h2>") == 1


def test_the_command_reproduces_the_arguments(tmp_path):
    """Read by the shell's rules and by the stage, it is what the record says."""
    given = vars(flags("--run", str(tmp_path), "--tasks", "it's <a> $text", "--only", "piqa", "siqa", "--lr",
                       "1e-5", "--seed", "0", "--deterministic", "--no-recompute"))
    words = shlex.split(report.command("05_prune_train.py", json.loads(json.dumps(given))))
    assert words[:4] == ["torchrun", "--nproc-per-node", "auto", "05_prune_train.py"]
    assert vars(flags(*words[4:])) == given
