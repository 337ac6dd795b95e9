"""RUN/report.html: everything that the records say, on one self-contained page."""

import argparse
import base64
import copy
import html
import json
import os
import re
import shlex
from html.parser import HTMLParser

import pytest

from common.cli import UserError, stage_parser
from common.files import write_json
from common.reporting import report
from common.reporting.tables import cell, label, markdown_table, rate, score_tables

MODEL = {"name": "<b>toy</b>", "path": "models/toy", "fingerprint": "ab" * 32, "layers": 2, "heads": 4,
         "kv_heads": 4, "head_dim": 8, "hidden": 32}
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJ"
                         "RU5ErkJggg==")
GROUPS = [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]
CALIBRATION = next(part.record for part in report.PARTS if part.name == "calibration")
SUMMARIES = {  # record -> stage and summary
    CALIBRATION: ("01_calibrate.py", {
        "tokens": 70001, "sequences": 70002, "length": 70003, "text": "<script>alert('x')</script>",
        "positions": 70006, "sampled_tokens": 70004, "peak_memory_gib": 1.234,
        "mean_squared_value": [0.4001, 0.4002]}),
    "similarity.json": ("02_similarity.py", {
        "key.cos.before": 0.1003, "key.cos.after": 0.1004, "value.cos.before": 0.1005,
        "value.cos.after": 0.1006, "key.dist.before": 0.1007, "key.dist.after": 0.1008,
        "value.dist.before": 0.1009, "value.dist.after": 0.101}),
    "groups.json": ("03_group.py", {
        "kv_heads": 2, "by": "value", "criterion": "dist", "score_default": [-5.001, -5.002],
        "score_found": [-3.001, -3.002]}),
    "aligned/stage.json": ("04_align.py", {
        "kv_heads": 2, "by": "value", "criterion": "dist", "rotate": "cos", "merge": "closed-form",
        "refit": None, "key_context": None, "calibration_tokens": 70005,
        "max_logit_difference": 2.1e-06, "kl": 1.2e-11,
        "perplexity_source": 7.001, "perplexity_aligned": 7.002, "perplexity_merged": 9.003,
        "within_group_cosine": [
            {"key_before": 0.2001, "key_after": 0.2002, "value_before": 0.2003, "value_after": 0.2004},
            {"key_before": 0.2005, "key_after": 0.2006, "value_before": 0.2007, "value_after": 0.2008}]}),
    "teacher/stage.json": ("05_prune_train.py", {
        "steps": 30, "batch": 31, "lr": 3e-05, "loss": 0.5001, "tokens": 90001}),
    "train/stage.json": ("05_prune_train.py", {
        "steps": 32, "batch": 33, "lr": 4e-05, "loss": 0.6001, "tokens": 90002, "kv_heads": 2, "masks": "l0",
        "merge": "mean", "new": {"figure": 0.1234, "none": None, "flag": True}}),
    "gqa/stage.json": ("06_export.py", {
        "kv_heads": 2, "dtype": "torch.float32", "class": "LlamaForCausalLM", "max_logit_difference": 3.1e-07,
        "max_logit_difference_stored": 4.1e-07}),
    "eval.json": ("07_eval.py", {}),
}


def results(name: str, exact: float, kv_heads: int) -> dict:
    scores = {"questions": 8, "chance": 0.5, "exact_match": exact, "exact_match_stderr": 0.0234}
    averages = {"micro_exact_match": exact, "micro_exact_match_stderr": 0.0123, "micro_chance": 0.25,
                "macro_exact_match": 0.4444, "macro_chance": 0.125}
    return {name: {"path": "runs/x", "heads": 4, "kv_heads": kv_heads, "perplexity": 7.5, **averages,
                   "cache_bytes_per_token": 1024.0 * kv_heads, "novel_figure": 0.4321,
                   "tasks": {"piqa": scores}}}


def files(*names: str) -> dict:
    return {"files": dict.fromkeys(names, "98" * 32)}


BESIDE = {  # what the stages put beside their summaries
    CALIBRATION: files("layer-00000.safetensors", "layer-00001.safetensors", "tokens.safetensors"),
    "similarity.json": files("similarity.safetensors"),
    "groups.json": {"kv_heads": 2, "groups": GROUPS} | files("groups.png"),
    "aligned/stage.json": {"groups": GROUPS} | files("model.safetensors"),
    "teacher/stage.json": files("model.safetensors"),
    "train/stage.json": files("metrics.jsonl"),
    "gqa/stage.json": files("model.safetensors"),
    "eval.json": {"device": "cpu", "results": results("teacher", 0.9876, 4) | results("g<q>a", 0.8764, 2)}
    | files("eval.md"),
}


def record(artifact: str, run: str = "runs/x", **arguments) -> dict:
    stage, summary = SUMMARIES[artifact]
    data = {"tasks": "hub", "only": ["piqa"], "seed": 0} if "train" in stage else {"text": "c4"}
    return copy.deepcopy({
        "stage": stage, "flags": {}, "arguments": {"run": run} | data | arguments, "model": MODEL,
        "inputs": {"in.safetensors": "cd" * 32}, "packages": {"torch": "9.8.7"}, "commit": "ef" * 20,
        "seconds": 1.5, "date": "2026-01-02T03:04:05+00:00", "summary": summary} | BESIDE[artifact])


def save(run, artifact: str, **arguments) -> None:
    write_json(str(run / artifact), record(artifact, str(run), **arguments))


def save_metrics(run, steps: int) -> None:
    lines = []
    for step in range(1, steps + 1):
        lines.append(json.dumps({"step": step, "loss": 1 / step, "mask_mean": 0.5, "mask_expected": 0.5,
                                 "mask_target": 1 - step / steps}) + "\n")
    (run / "train").mkdir(exist_ok=True)
    (run / "train" / "metrics.jsonl").write_text("".join(lines) + '{"step": 99')  # the last one is cut off


@pytest.fixture
def whole(tmp_path):
    run = tmp_path / "run"
    for artifact in SUMMARIES:
        save(run, artifact)
    save_metrics(run, 5)
    for picture in ("similarity.png", "groups.png", "train/curves.png"):
        (run / picture).write_bytes(PIXEL)
    return run


class Page(HTMLParser):
    """The page as parsed: text, ids, addresses, table cells. Every element is closed by its own name."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.ids, self.addresses, self.tags, self.open = "", [], [], [], []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        fetching = ("src", "href", "data", "action", "srcset", "xlink:href")
        self.addresses += [attributes[name] for name in fetching if name in attributes]
        assert not [name for name in attributes if name.startswith("on")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}" if self.open[-1:] != ["style"] else ""
        if self.open[-1:] in (["th"], ["td"]):
            self.rows[-1][-1] += data


def read(run) -> Page:
    path = report.write(str(run))
    assert path == str(run / "report.html")
    with open(path, encoding="utf-8") as file:
        return Page(file.read())


def test_answers_have_a_table_of_their_own():
    results = {name: {"tasks": {}, "kv_heads": 2, "answers": [f"{name} 1", f"{name} 2"]} for name in "ab"}
    figures, answers = score_tables(results, ["What?", "Why?"])
    assert answers.header == ("prompt", "a", "b")
    assert answers.rows == [("What?", "a 1", "b 1"), ("Why?", "a 2", "b 2")]
    assert [row[0] for row in figures.rows] == ["kv heads"]
    for odd in (None, 3, "What?"):
        assert len(score_tables(results, odd)) == 1


def test_the_table_of_paper_py_is_there_once_it_is_written(whole):
    assert "paper" not in read(whole).ids
    header, row = ["equation", "as printed", "ok"], ["Eq. 2: <key> cosine", "0.5; 0.25", "yes"]
    note = "- Eq. 2: <key> cosine: AUDIT.md:7"
    (whole / "paper.md").write_text(f"{markdown_table(header, [row])}\n\n{note}\n")
    page = read(whole)
    assert "paper" in page.ids and header in page.rows
    assert ["Eq. 2: &lt;key> cosine", "0.5; 0.25", "yes"] in page.rows and note[2:] in page.text


def leaves(value) -> list[str]:
    """The texts by which a summary's leaves are read on the page."""
    if isinstance(value, dict):
        return leaves(list(value.values()))
    if isinstance(value, list):
        return [text for item in value for text in leaves(item)]
    return [cell(value)]


def test_every_figure_of_every_stage_is_there(whole):
    page = read(whole)
    cells = {text for row in page.rows for text in row}
    for artifact, (stage, summary) in SUMMARIES.items():
        assert stage in page.text, artifact
        assert all(text in cells for text in leaves(summary)), artifact
    assert "Not run yet" not in page.text and "(missing)" not in page.text
    assert "<b>toy</b>: 4 → 2 key/value heads" in page.text and "50.0% of the bytes" in page.text
    assert ["new figure", "0.1234"] in page.rows and ["new flag", "yes"] in page.rows
    assert ["commit", "ef" * 6] in page.rows and ["sha256 of in.safetensors", "cd" * 6] in page.rows
    assert ["sha256 of gqa/model.safetensors", "98" * 6] in page.rows
    assert ["torch", "9.8.7"] in page.rows and ["date", "2026-01-02T03:04:05+00:00"] in page.rows


def test_figures_have_names_in_words():
    assert label("heldout_task_kl") == "held-out task KL" and label("mask_lr") == "mask learning rate"
    assert label("key.cos.before") == "key cosine before" and label("loss") == "loss"


def test_the_headline_says_what_the_conversion_cost(tmp_path):
    """Before stage 7 by the held-out loss; then by the scores of gqa/, whatever else was measured."""
    save(tmp_path, "train/stage.json")
    assert "→ 4" not in read(tmp_path).text
    trained = record("train/stage.json")
    trained["summary"] |= {"heldout_loss": 2.75, "heldout_teacher_loss": 2.5}
    write_json(str(tmp_path / "train/stage.json"), trained)
    assert "held-out loss 2.5 → 2.75 " in read(tmp_path).text
    measured = results("other", 0.1, 2) | results("teacher", 0.9876, 4) | results("gqa", 0.8764, 2)
    measured["gqa"] |= {"path": str(tmp_path / "gqa"), "perplexity": 8.25}
    evaluation = record("eval.json", str(tmp_path)) | {"results": measured}
    write_json(str(tmp_path / "eval.json"), evaluation)
    headline = "exact match 98.8 ± 1.2% → 87.6 ± 1.2%, perplexity 7.5 → 8.25 "
    assert headline in read(tmp_path).text
    del measured["gqa"]
    write_json(str(tmp_path / "eval.json"), evaluation)
    assert "exact match 9" not in read(tmp_path).text


def test_a_source_that_is_the_teacher_is_not_missing(tmp_path):
    save(tmp_path, "train/stage.json")
    assert "teacher (missing)" in read(tmp_path).text
    save(tmp_path, "train/stage.json", teacher="source")
    page = read(tmp_path)
    assert "teacher (missing)" not in page.text and "teacher" not in page.ids


def test_without_tasks_there_are_no_meters(whole):
    assert read(whole).tags.count("meter") == 2
    measured = record("eval.json")
    for figures in measured["results"].values():
        figures["tasks"] = {}
        for name in [name for name in figures if name.startswith(("micro", "macro"))]:
            del figures[name]
    write_json(str(whole / "eval.json"), measured)
    page = read(whole)
    assert "meter" not in page.tags
    assert ["checkpoint", "perplexity", "kv heads", "KV bytes per token"] in page.rows
    assert ["teacher", "7.5", "4", "4,096"] in page.rows


def test_scores_are_shown_by_task_and_checkpoint(whole):
    rows = read(whole).rows
    plus_minus = "\u00a0±\u00a0"
    assert ["", "questions", "chance", "teacher", "g<q>a"] in rows
    assert ["piqa", "8", "50.0%", f"98.8{plus_minus}2.3%", f"87.6{plus_minus}2.3%"] in rows
    averages = [f"98.8{plus_minus}1.2%", f"87.6{plus_minus}1.2%"]
    assert ["micro average, as published", "", "25.0%", *averages] in rows
    assert ["macro average", "", "12.5%", "44.4%", "44.4%"] in rows
    assert ["novel figure", "0.4321", "0.4321"] in rows  # what no other table shows
    assert ["teacher", f"98.8{plus_minus}1.2%", "", "7.5", "4", "4,096"] in rows


def test_figures_per_layer_are_rows(whole):
    rows = read(whole).rows
    assert ["layer", "score default", "score found", "groups"] in rows
    assert ["0", "-5.001", "-3.001", "0\u00a02 | 1\u00a03"] in rows
    assert ["layer", "key before", "key after", "value before", "value after"] in rows
    assert ["1", "0.2005", "0.2006", "0.2007", "0.2008"] in rows
    assert ["", "step 1", "step 5"] in rows and ["loss", "1", "0.2"] in rows


def test_the_page_is_self_contained(whole):
    save(whole / "inner", "groups.json")
    page = read(whole)
    assert "script" not in page.tags and "link" not in page.tags and "b" not in page.tags
    pictures = [address for address in page.addresses if address.startswith("data:image/png;base64,")]
    assert [base64.b64decode(picture.partition(",")[2]) for picture in pictures] == [PIXEL] * 3
    anchors = [address for address in page.addresses if address not in pictures]
    assert anchors and all(address.startswith("#") and address[1:] in page.ids for address in anchors)
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r"url\(|@import|https?:", (whole / "report.html").read_text())


def test_a_page_of_someone_else_is_kept_unless_forced(whole):
    path = whole / "report.html"
    path.write_text("<title>my notes</title>")
    with pytest.raises(UserError, match="report.html already exists; pass --force to replace it"):
        report.write(str(whole))
    assert path.read_text() == "<title>my notes</title>"
    report.write(str(whole), force=True)
    assert "my notes" not in path.read_text()


def test_only_files_of_the_run_are_embedded(whole):
    secret = whole.parent / "run directory of another.png"
    secret.write_bytes(b"secret")
    for name in ("similarity.png", "groups.png", "train/curves.png"):
        (whole / name).unlink()
    (whole / "similarity.png").symlink_to(secret)
    os.mkfifo(whole / "train" / "curves.png")
    os.mkfifo(whole / "teacher" / "metrics.jsonl")
    for part in ("groups.json", "eval.json"):
        (whole / part).unlink()
        os.mkfifo(whole / part)
    assert not any(address.startswith("data:") for address in read(whole).addresses)
    (whole / "similarity.png").unlink()
    (whole / "picture.png").write_bytes(PIXEL)
    (whole / "similarity.png").symlink_to("picture.png")
    linked = whole.with_name("linked")
    linked.symlink_to(whole)
    assert sum(address.startswith("data:") for address in read(linked).addresses) == 1


def test_a_half_finished_run(tmp_path):
    """Without pictures, killed in training: its step, the commands that are left."""
    run = tmp_path / "a run"
    for artifact in list(SUMMARIES)[:4]:
        save(run, artifact, teacher="elsewhere/teacher" if artifact == "aligned/stage.json" else None)
    save_metrics(run, 4)
    page = read(run)
    assert "Started, not finished: step 4." in page.text and "Taken from elsewhere/teacher." in page.text
    for stage in ("06_export.py", "07_eval.py"):
        assert f"python {stage} --run {shlex.quote(str(run))}" in page.text
    assert "similarity.png is missing" in page.text
    save_metrics(run, 1)
    assert "step 1." in read(run).text


def test_runs_inside_a_run(tmp_path):
    save(tmp_path, CALIBRATION)
    save(tmp_path / "rows" / "cos & dist", "groups.json", similarity="x")
    page = read(tmp_path)
    assert "rows/cos & dist/groups" in page.text and "score found" in page.text
    assert "In the runs inside this one: rows/cos & dist/." in page.text
    assert "#rows/cos%20%26%20dist/" in page.addresses and "rows/cos%20%26%20dist/groups" in page.ids
    (tmp_path / CALIBRATION).unlink()
    assert "score found" in read(tmp_path).text


def test_the_command_reproduces_the_arguments(tmp_path):
    """Read by the shell's rules and by argparse, it is what the record says."""
    parser = stage_parser("")
    for name, options in {"--text": {}, "--only": {"nargs": "+"}, "--lr": {"type": float},
                          "--refit": {"action": "store_true"}, "--steps": {"type": int},
                          "--limit": {"type": int}, "--chat": {"nargs": "+", "default": []}, "--tasks": {},
                          "--seed": {"type": int},
                          "--bos": {"action": argparse.BooleanOptionalAction}}.items():
        parser.add_argument(name, **options)
    arguments = {"tasks": "it's <a> $text", "seed": 3, "only": ["piqa", "siqa"], "chat": [], "lr": 1e-5,
                 "refit": True, "steps": 0, "limit": None, "bos": False}
    for artifact, launcher in (("gqa/stage.json", "python"), ("train/stage.json", "torchrun")):
        save(tmp_path, artifact, **arguments)
        report.write(str(tmp_path))
        page = (tmp_path / "report.html").read_text()
        commands = re.findall(r"<details>.*?<pre>(.*?)</pre>", page, re.DOTALL)
        words = shlex.split(html.unescape(next(text for text in commands if text.startswith(launcher))))
        parsed = vars(parser.parse_args(words[words.index(SUMMARIES[artifact][0]) + 1:]))
        recorded = record(artifact, str(tmp_path), **arguments)["arguments"]
        assert parsed == {"text": None, "force": False} | recorded


@pytest.mark.parametrize(("train_seconds", "total"), [
    (300, "300"),  # the student's command ran from 03:00:00 and made the teacher, which ended at 03:01:00
    (200, "260"),  # it began at 03:01:40, after the teacher
])
def test_a_teacher_made_by_the_same_command_is_counted_once(train_seconds, total, tmp_path):
    for name, seconds, end in (("teacher", 60, "01:00"), ("train", train_seconds, "05:00")):
        made = record(f"{name}/stage.json") | {"seconds": seconds, "date": f"2026-01-02T03:{end}+00:00"}
        write_json(str(tmp_path / name / "stage.json"), made)
    assert re.search(r"([\d,]+) s in all", read(tmp_path).text)[1] == total


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (True, "yes"), (False, "no"), (12345, "12,345"), (0.123456, "0.1235"), (12345.6, "12,346"),
    (float("nan"), "nan"), (float("inf"), "inf"), ("ab" * 32, "ab" * 6), ("abc", "abc"), ([], ""),
    ([1, 2], "1\u00a02"), ([[0, 2], [1, 3]], "0\u00a02 | 1\u00a03"), ([1, [2], {"a": None}], "1 | 2 | a: –"),
])
def test_any_value_is_shown_as_text(value, text):
    assert cell(value) == text


def test_rates_are_shown_in_percent_and_other_figures_as_they_are():
    assert rate({"exact_match": 0.5, "exact_match_stderr": 0.01}, "exact_match") == "50.0\u00a0±\u00a01.0%"
    assert rate({"loss": 0.5}, "loss") == "0.5" and rate({}, "exact_match") == "–"
    assert rate({"exact_match": "many"}, "exact_match") == "many"


# 17 values, a prime: fields at regular distances meet different ones. ... leaves the field out
ODD = [..., None, True, -1, 0, 1.5, float("nan"), 10**400, "text", "\ud800", "a\nb", "", [], [None], {},
       {"": [[]]}, {"a": {"b": 1}}]


def paths_in(value, path: tuple = ()):
    """The path of every field of a record, inner ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


def report_of_changed(artifact: str, path: tuple, odd, tmp_path) -> None:
    """A record with one field replaced, or left out (...), gives the page or one line, nothing else."""
    changed = record(artifact)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = odd
    if odd is ...:
        del target[path[-1]]
    (tmp_path / artifact).write_text(json.dumps(changed))
    try:
        report.write(str(tmp_path))
    except UserError as error:
        place = str(tmp_path / artifact).removesuffix("/stage.json")
        assert place in str(error), (path, odd)


@pytest.mark.parametrize("artifact", SUMMARIES)
def test_an_odd_record_gives_the_page_or_one_line(artifact, tmp_path):
    """Every field in turn is replaced by one odd value."""
    save(tmp_path, artifact)
    for index, path in enumerate(paths_in(record(artifact))):
        report_of_changed(artifact, path, ODD[index % len(ODD)], tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_a_damaged_record_is_named_in_one_line(content, tmp_path):
    save(tmp_path, "groups.json")
    (tmp_path / "groups.json").write_bytes(content)
    with pytest.raises(UserError, match="groups.json: .*expected"):
        report.write(str(tmp_path))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("figures", [
    {"step": 2, "loss": None, "mask_target": "x", "mask_expected": [1]},
    {"step": 10**30, "loss": 10**400},
])
def test_odd_metrics_are_shown_as_far_as_they_can_be(figures, tmp_path):
    save(tmp_path, "train/stage.json")
    save_metrics(tmp_path, 1)
    path = tmp_path / "train" / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 99', json.dumps(figures) + "\n"))
    assert "training steps" in read(tmp_path).text


def test_a_directory_without_artifacts_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a run directory with artifacts, found none"):
        report.write(str(tmp_path))
    assert not (tmp_path / "report.html").exists()
