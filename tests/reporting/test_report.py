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
from runs import flags, valid_record

PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJ"
                         "RU5ErkJggg==")
ARTIFACTS = {f"{name}/stage.json": stage for name, (stage, *_) in report.PARTS.items()}
TABLE = "A caption.\n\n|      | teacher |\n|------|--------:|\n| piqa |    98.8 |\n"


def record(artifact: str) -> dict:
    """A valid one, with a name and a text that must be escaped; the text is another in each artifact."""
    made = valid_record(ARTIFACTS[artifact])
    made["model"]["name"], made["commit"] = "<b>toy</b>", "ef" * 20
    made["summary"]["new"] = {"figure": 0.1234, "none": None, "text": f"<script>{artifact}</script>"}
    if artifact == "eval/stage.json":
        made["results"] = {"g<q>a": {"tasks": {}, "perplexity": 7.5, "cache_bytes_per_token": 64.0}}
    return made


def save(run, artifact: str) -> None:
    write_json(str(run / artifact), record(artifact))


@pytest.fixture
def whole(tmp_path):
    run = tmp_path / "run"
    for artifact in ARTIFACTS:
        save(run, artifact)
    (run / "eval" / "eval.md").write_text(TABLE)
    for name in ("similarity/similarity", "similarity/pairs", "groups/groups", "train/curves"):
        (run / f"{name}.png").write_bytes(PIXEL)
    return run


def test_every_figure_of_every_stage_is_on_one_self_contained_page(whole):
    report.write(str(whole))
    page = (whole / "report.html").read_text(encoding="utf-8")
    root = ElementTree.fromstring(re.sub("(<(meta|img) [^>]*)>", r"\1/>", page))  # every element is closed
    rows = [["".join(part.itertext()) for part in row] for row in root.iter("tr")]
    for artifact in ARTIFACTS:
        for name, value in flatten(record(artifact)["summary"]).items():
            assert isinstance(value, list) or [label(name), cell(value)] in rows, (artifact, name)
    for row in (
        ["commit", "ef" * 6], ["sha256 of RUN/calibration", "ab" * 6], ["torch", "2"],
        ["KV cache", "50.0% of the bytes"],
        # of eval.md, and of each layer
        ["", "teacher"], ["piqa", "98.8"], ["1", "-2", "-1.5", "0 1 | 2 3"],
        ["1", "0.1", "0.3", "0.2", "0.1", *("0.1", "0.2", "-0.1", "0.2"), "0 1 | 2 3"],
    ):
        assert row in rows, row
    text = "".join(root.find("body").itertext())
    assert "<b>toy</b>: 4 → 2 key/value heads" in text and "g<q>a perplexity 7.500" in text
    picture = f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"
    assert [image.get("src") for image in root.iter("img")] == [picture] * 4
    assert not re.search(r"<script|<link|<b>|url\(|@import|https?:", page)


def test_a_run_has_sections_of_its_records_alone(tmp_path):
    with pytest.raises(UserError, match="expected a run directory with artifacts, found none"):
        report.write(str(tmp_path))
    assert not (tmp_path / "report.html").exists()
    save(tmp_path, "groups/stage.json")
    report.write(str(tmp_path))
    assert (tmp_path / "report.html").read_text().count("<h2>") == 1


def test_the_command_reproduces_the_arguments(tmp_path):
    """Read by the shell's rules and by the stage, it is what the record says."""
    given = vars(flags("--run", str(tmp_path), "--tasks", "it's <a> $text", "--only", "piqa", "siqa", "--lr",
                       "1e-5", "--seed", "0", "--deterministic", "--no-recompute"))
    words = shlex.split(report.command("05_prune_train.py", json.loads(json.dumps(given))))
    assert words[:4] == ["torchrun", "--nproc-per-node", "auto", "05_prune_train.py"]
    assert vars(flags(*words[4:])) == given
