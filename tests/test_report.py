"""RUN/report.html: everything that the records say, on a page that stands by itself."""

import base64
import html
import json
import re
import shlex
from html.parser import HTMLParser

import pytest

from common.artifacts import write_json
from common.cli import UserError, stage_parser
from common.reporting import report

MODEL = {"name": "<b>toy</b>", "path": "models/toy", "fingerprint": "ab" * 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "hidden": 32}
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")
SUMMARIES = {
    "calibration/stage.json": ("01_calibrate.py", {"tokens": 70001, "sequences": 70002, "length": 70003, "text": "<script>alert('x')</script>", "mean_squared_value": [0.4001, 0.4002]}),
    "similarity.json": ("02_similarity.py", {"key.cos.before": 0.1003, "key.cos.after": 0.1004, "value.cos.before": 0.1005, "value.cos.after": 0.1006}),
    "groups.json": ("03_group.py", {"kv_heads": 2, "by": "value", "score_found": [-3.001, -3.002]}),
    "aligned/stage.json": ("04_align.py", {"kv_heads": 2, "max_logit_difference": 2.1e-06, "perplexity_source": 7.001, "perplexity_aligned": 7.002, "perplexity_merged": 9.003,
                                           "within_group_cosine": [{"key_before": 0.2001, "key_after": 0.2002, "value_before": 0.2005, "value_after": 0.2006}, {"key_before": 0.2003, "key_after": 0.2004, "value_before": 0.2007, "value_after": 0.2008}]}),
    "teacher/stage.json": ("05_prune_train.py", {"steps": 30, "batch": 31, "loss": 0.5001, "tokens": 90001}),
    "train/stage.json": ("05_prune_train.py", {"steps": 32, "batch": 33, "loss": 0.6001, "tokens": 90002, "new": {"figure": 0.1234, "none": None, "flag": True}}),
    "gqa/stage.json": ("06_export.py", {"kv_heads": 2, "dtype": "torch.float32", "max_logit_difference": 3.1e-07, "class": "LlamaForCausalLM"}),
    "eval.json": ("07_eval.py", {}),
}
BESIDE = {"groups.json": {"kv_heads": 2, "groups": [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]},
          "eval.json": {"device": "cpu", "results": {
              name: {"path": name, "heads": 4, "kv_heads": kv, "perplexity": 7.5, "cache_bytes_per_token": 1024.0 * kv, "macro_exact_match": rate, "macro_exact_match_stderr": 0.0123,
                     "novel_figure": 0.4321, "tasks": {"piqa": {"questions": 8, "chance": 0.5, "exact_match": rate, "exact_match_stderr": 0.0234}}}
              for name, rate, kv in (("teacher", 0.9876, 4), ("g<q>a", 0.8764, 2))}}}

REQUIRED = {  # what records must hold beside the figures that these tests look for
    "calibration/stage.json": {"summary": {"sampled_tokens": 64, "peak_memory_gib": 0.5},
                               "files": {f"layer-{layer:05d}.safetensors": "ef" * 32 for layer in range(2)}},
    "similarity.json": {"sha256": "ef" * 32, "summary": {f"{head}.dist.{when}": -1.0 for head in ("key", "value") for when in ("before", "after")}},
    "groups.json": {"summary": {"criterion": "dist", "score_default": [-4.0, -4.0]}},
    "aligned/stage.json": {"files": {}, "groups": [[[0, 2], [1, 3]], [[0, 1], [2, 3]]],
                           "summary": {"by": "value", "criterion": "dist", "rotate": "dist", "merge": "mean", "refit": False, "calibration_tokens": 64, "kl": 0.0}},
    "teacher/stage.json": {"files": {}, "summary": {"lr": 0.1}},
    "train/stage.json": {"files": {}, "summary": {"lr": 0.1}},
    "gqa/stage.json": {"files": {}, "summary": {"max_logit_difference_stored": 0.0}},
}


def save(run, artifact: str, **arguments) -> None:
    stage, summary = SUMMARIES[artifact]
    required = REQUIRED.get(artifact, {})
    summary = required.get("summary", {}) | summary
    written = {"stage": stage, "arguments": {"run": str(run)} | arguments, "model": MODEL, "inputs": {"in.safetensors": "cd" * 32}, "packages": {"torch": "9.8.7"},
               "commit": "ef" * 20, "seconds": 1.5, "date": "2026-01-02T03:04:05+00:00"}
    write_json(str(run / artifact), written | required | {"summary": summary} | BESIDE.get(artifact, {}))


def save_metrics(run, steps: int) -> None:
    lines = [{"step": step, "loss": 1 / step, "mask_mean": 0.5, "mask_target": 1 - step / steps, "mask_expected": 0.5} for step in range(1, steps + 1)]
    (run / "train").mkdir(exist_ok=True)
    (run / "train" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99')  # the last one cut off


@pytest.fixture
def whole(tmp_path):
    run = tmp_path / "run"
    for artifact in SUMMARIES:
        save(run, artifact)
    save_metrics(run, 5)
    for picture in ("similarity.png", "train/curves.png"):
        (run / picture).write_bytes(PIXEL)
    return run


class Page(HTMLParser):
    """What a browser would make of it: text, ids, addresses and whether every element is closed by its own name."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.ids, self.addresses, self.tags, self.open = "", [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[name] for name in ("src", "href", "data", "action", "srcset", "xlink:href") if name in found]
        assert not [name for name in found if name.startswith("on")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}" if self.open[-1:] != ["style"] else ""


def read(run) -> Page:
    path = report.write(str(run))
    assert path == str(run / "report.html")
    with open(path, encoding="utf-8") as file:
        return Page(file.read())


def shown(value) -> list[str]:
    """The ways a summary's leaf may be read on the page."""
    if isinstance(value, dict | list):
        return [text for item in (value.values() if isinstance(value, dict) else value) for text in shown(item)]
    if value is None or isinstance(value, bool):
        return []
    return [f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else value]


def test_every_figure_of_every_stage_is_there(whole):
    page = read(whole)
    for stage, summary in SUMMARIES.values():
        assert stage in page.text and all(name in page.text for name in summary if name != "new")
        for text in shown(summary):
            assert text in page.text, (stage, text)
    words = page.text.replace("\u00a0", " ")
    for text in ("new.figure", "novel_figure", "0.4321", "98.8 ± 1.2%", "87.6 ± 1.2%", "87.6 ± 2.3%", "0 2 | 1 3", "cdcdcdcdcdcd", "efefefefefef", "9.8.7", "2026-01-02", "50.0% of the bytes"):
        assert text in words, text
    assert "cd" * 7 not in words and "<b>toy</b>: 4 → 2 key/value heads" in words and "not run yet" not in words.lower()


def test_the_page_stands_by_itself(whole):
    save(whole / "inner", "groups.json")
    page = read(whole)
    assert "script" not in page.tags and "link" not in page.tags and "b" not in page.tags
    pictures = [address for address in page.addresses if address.startswith("data:image/png;base64,")]
    assert [base64.b64decode(picture.partition(",")[2]) for picture in pictures] == [PIXEL, PIXEL]
    anchors = [address for address in page.addresses if address not in pictures]
    assert anchors and all(address.startswith("#") and address[1:] in page.ids for address in anchors)
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r"url\(|@import|https?:", (whole / "report.html").read_text())


def test_same_records_same_bytes(whole):
    read(whole)
    first = (whole / "report.html").read_bytes()
    read(whole)
    assert (whole / "report.html").read_bytes() == first


def test_a_half_finished_run(tmp_path):
    """Without pictures, killed in training: curves from the metrics, the step it reached, and the commands that are left."""
    run = tmp_path / "a run"
    for artifact in list(SUMMARIES)[:4]:
        save(run, artifact, teacher="elsewhere/teacher" if artifact == "aligned/stage.json" else None)
    save_metrics(run, 4)
    page = read(run)
    assert "Begun, not finished: step 4." in page.text and page.tags.count("polyline") == 3 and "img" not in page.tags
    assert "Taken from elsewhere/teacher." in page.text
    for stage in ("06_export.py", "07_eval.py"):
        assert f"python {stage} --run {shlex.quote(str(run))}" in page.text
    assert "similarity.png is not there" in page.text
    save_metrics(run, 1)
    assert "step 1." in read(run).text


def test_runs_inside_a_run(tmp_path):
    save(tmp_path, "calibration/stage.json")
    save(tmp_path / "rows" / "cos & dist", "groups.json", similarity="x")
    page = read(tmp_path)
    assert "rows/cos & dist/" in page.text and "In inner runs: rows/cos & dist." in page.text and "score_found" in page.text
    assert "#rows/cos%20%26%20dist/" in page.addresses and "rows/cos%20%26%20dist/groups" in page.ids
    (tmp_path / "calibration/stage.json").unlink()
    assert "score_found" in read(tmp_path).text


def test_the_command_gives_the_arguments_back(tmp_path):
    """Read by the shell's rules and by argparse, it is what the record says."""
    parser = stage_parser("")
    for name, options in {"--text": {}, "--only": {"nargs": "+"}, "--lr": {"type": float}, "--refit": {"action": "store_true"}, "--steps": {"type": int}, "--limit": {"type": int}}.items():
        parser.add_argument(name, **options)
    arguments = {"text": "it's <a> $text", "only": ["piqa", "siqa"], "lr": 1e-5, "refit": True, "steps": 0, "limit": None}
    for artifact, launcher in (("gqa/stage.json", "python"), ("train/stage.json", "torchrun")):
        save(tmp_path, artifact, **arguments)
        report.write(str(tmp_path))
        commands = re.findall(r"<details>.*?<pre>(.*?)</pre>", (tmp_path / "report.html").read_text(), re.DOTALL)
        words = shlex.split(html.unescape(next(command for command in commands if command.startswith(launcher))))
        found = vars(parser.parse_args(words[words.index(SUMMARIES[artifact][0]) + 1:]))
        assert found == arguments | {"run": str(tmp_path), "force": False}


def test_time_counts_a_teacher_made_by_the_same_command_once(tmp_path):
    def times(**seconds) -> str:
        for name, (taken, date) in seconds.items():
            save(tmp_path, f"{name}/stage.json")
            path = tmp_path / name / "stage.json"
            write_json(str(path), json.loads(path.read_text()) | {"seconds": taken, "date": f"2026-01-02T03:{date}+00:00"})
        return re.search(r"([\d,]+) s in all", read(tmp_path).text)[1]

    assert times(teacher=(60, "01:00"), train=(300, "05:00")) == "300"  # the command ran from 03:00:00
    assert times(teacher=(60, "01:00"), train=(200, "05:00")) == "260"  # it began at 03:01:40, after the teacher


def test_mistakes_are_one_line(tmp_path):
    with pytest.raises(UserError, match="expected a run directory with at least one stage's artifact, found none"):
        report.write(str(tmp_path))
    save(tmp_path, "groups.json")
    (tmp_path / "groups.json").write_text("{")
    with pytest.raises(UserError, match="groups.json: expected the record of 03_group.py"):
        report.write(str(tmp_path))
    assert not (tmp_path / "report.html").exists()
