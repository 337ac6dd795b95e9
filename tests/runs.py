"""Commands and their run directories: how they run, what they read and write, and where they keep it."""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import os
import pydoc
import random
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from filelock import FileLock

from common.models.calibration import Calibration
from common.reporting import plots
from common.run.artifact import FORMAT
from common.run.errors import run_stage
from common.training import engine
from common.training.checkpoints import saved_checkpoints, whole_weights
from common.training.sharding import init_ranks
from models import save_tiny
from torchrun import ROOT, kill, launcher

torch.set_num_threads(1)

TRAINING = """--steps 10 --teacher-steps 4 --batch 8 --teacher-batch 8 --lr 1e-3 --teacher-lr 1e-3 --mask-lr 2
              --warmup 1 --save-steps 3 --masks l0""".split()
GROUPING = ["--kv-heads", 2, "--restarts", 20, "--iterations", 300]
STAGE = "05_prune_train.py"
# of metrics.jsonl, what depends on the machine, and the memory's peak, which starts anew with a process
MEASURED = {"seconds", "tokens_per_s", "heldout_seconds", "start_heldout_seconds", "memory_gib"}
LAYERS, HEADS, SIZE = 3, 8, 8
STAGES = {path.name[:2]: path.name for path in ROOT.glob("0*_*.py")}
SMALL_MODEL = {"name": "m", "path": "models/m", "fingerprint": "ab" * 32, "layers": 2, "heads": 8,
               "kv_heads": 4, "head_dim": 8, "hidden": 64}


def task_rows(count: int, seed: int) -> dict[str, list[dict]]:
    """Rows of all eight tasks in their original schemas; the answer repeats a word of the question."""
    draw, rows = random.Random(seed), {}
    words = "red blue green cat dog cup pen tree door fish".split()
    for _ in range(count):
        w, k = draw.sample(words, 4), draw.randrange(4)
        arc_choices = [{"text": word, "label": letter} for word, letter in zip(w, "ABCD", strict=True)]
        arc = {"question": {"stem": w[k], "choices": arc_choices}, "answerKey": "ABCD"[k]}
        example = {
            "boolq": {"question": f"is it {w[0]}", "passage": f"It is {w[k % 2]}.", "label": k % 2 == 0},
            "piqa": {"goal": w[k % 2], "sol1": w[0], "sol2": w[1], "label": k % 2},
            "hellaswag": {"ctx": w[k], "endings": w, "label": str(k)},
            "winogrande": {"sentence": f"{w[k % 2]} is _", "option1": w[0], "option2": w[1],
                           "answer": str(k % 2 + 1)},
            "arc_easy": arc,
            "arc_challenge": arc,
            "openbookqa": {"question_stem": w[k], "choices": {"text": w, "label": list("ABCD")},
                           "answerKey": "ABCD"[k]},
            "siqa": {"context": w[k % 3], "question": "what?", "answerA": w[0], "answerB": w[1],
                     "answerC": w[2], "label": str(k % 3 + 1)},
        }
        for task, row in example.items():
            rows.setdefault(task, []).append(row)
    return rows


def save_tasks(directory: Path) -> str:
    directory.mkdir()
    for split, count in (("train", 12), ("validation", 5)):
        for task, rows in task_rows(count, count).items():
            (directory / f"{task}.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def run(command: str, *arguments, processes: int = 0, fails: bool = False, fresh: bool = False, code=0):
    """Run a command (`01_calibrate.py`, or `related/dha/search.py` as a module) from the repository root.

    It runs in this process, which spares the imports; in a new one if `fresh`, under torchrun if `processes`
    are given. It must exit with `code`; with `fails` it must exit with 2 and print exactly one line `error:
    ...` (torchrun then exits with 1 and adds a report of its own). Returns subprocess.CompletedProcess.
    """
    if processes or fresh:
        script = ["-m", module_name(command)] if "/" in command else [str(ROOT / command)]
        words = [*launcher(processes), *script, *map(str, arguments)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    else:
        done = run_in_process(command, [str(argument) for argument in arguments])
    output = done.stdout + done.stderr
    if not fails:
        assert done.returncode == code, output
        return done
    assert done.returncode == (1 if processes else 2), output
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1, output
    assert processes or "Traceback" not in done.stderr, output
    return done


def module_name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def run_in_process(command: str, arguments: list[str]) -> subprocess.CompletedProcess:
    """The command's exit code and output. What it changes in this process is restored."""
    assert "RANK" not in os.environ and not torch.distributed.is_initialized()
    output, errors = io.StringIO(), io.StringIO()
    scopes = (contextlib.chdir(ROOT), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors),
              mock.patch.dict(os.environ), mock.patch.object(sys, "argv", [command, *arguments]),
              torch.random.fork_rng(devices=[]), warnings.catch_warnings())
    code = 0
    try:
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            script = runpy.run_path(command, run_name=module_name(command))  # by which mutmut knows functions
            run_stage(script["main"])
    except SystemExit as ended:
        code = ended.code or 0
    except Exception:
        code = 1
        traceback.print_exc(file=errors)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return subprocess.CompletedProcess([command, *arguments], code, output.getvalue(), errors.getvalue())


def expect_error(message: str, command: str, *arguments, **options) -> None:
    """The command must refuse with one line that contains `message`."""
    done = run(command, *arguments, fails=True, **options)
    assert message in done.stderr, done.stderr


def recipe(name: str, *arguments, **settings) -> subprocess.CompletedProcess:
    """pipelines/NAME with these arguments and environment variables."""
    environment = os.environ | {"PYTHON": sys.executable}
    environment |= {key: str(value) for key, value in settings.items()}
    command = ["bash", f"pipelines/{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def build_once(factory, name: str, build) -> Path:
    """A directory that build(path) makes once for all pytest-xdist workers. Nobody may change it."""
    root = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    complete = root / f"{name}.complete"
    with FileLock(root / f"{name}.lock"):
        if not complete.exists():
            build(root / name)
            complete.touch()
    return root / name


def build_run(factory, name: str, build) -> Path:
    """This worker's copy of a run directory that is built once: stages lock the one they work in."""
    return copy_run(build_once(factory, name, build), factory.mktemp(name) / "run")


def calibrate_arguments(inputs: dict[str, str]) -> list:
    return ["--model", inputs["model"], "--text", inputs["text"], "--sequences", 8, "--length", 64,
            "--sample-tokens", 512]


def evaluate_arguments(inputs: dict[str, str]) -> list:
    return ["--tasks", inputs["tasks"], "--text", inputs["text"], "--length", 64, "--sequences", 4]


@pytest.fixture(scope="session", autouse=True)
def drawings():
    """Stages that run in this process write empty pictures: others would take longer than all they compute.

    Yields the functions that draw, by name.
    """
    real = {name: getattr(plots, name) for name in ("heatmaps", "pairs", "curves", "frontier")}
    empty = plots.drawing(lambda pyplot, *_, **__: pyplot.figure(figsize=(1, 1)))
    with mock.patch.multiple(plots, **dict.fromkeys(real, empty)):
        yield real


@pytest.fixture
def pictures(drawings, monkeypatch):
    """For tests of pictures: what the functions draw."""
    for name, draw in drawings.items():
        monkeypatch.setattr(plots, name, draw)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> dict[str, str]:
    """Paths of a tiny model with biases, a text and tasks."""

    def build(home):
        home.mkdir()
        (home / "text.txt").write_text(Path(pydoc.__file__).read_text())
        save_tiny(home / "model", bias=True)
        save_tasks(home / "tasks")

    home = build_once(tmp_path_factory, "inputs", build)
    return {"model": str(home / "model"), "text": str(home / "text.txt"), "tasks": str(home / "tasks")}


def align(home, inputs: dict[str, str]) -> Path:
    """Stages 1-4 in a run directory."""
    run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs))
    run("02_similarity.py", "--run", home, "--energy")
    run("03_group.py", "--run", home, *GROUPING)
    run("04_align.py", "--run", home)
    return home


@pytest.fixture(scope="session")
def aligned_run(inputs, tmp_path_factory) -> Path:
    """A run directory after stages 1-4. Tests that change it copy it first."""
    return build_run(tmp_path_factory, "aligned", lambda home: align(home, inputs))


@pytest.fixture(scope="session")
def finished_run(aligned_run, inputs, tmp_path_factory) -> Path:
    """A run directory after all seven stages. Tests that change it copy it first."""

    def build(home):
        copy_run(aligned_run, home)
        train(home, inputs)
        run("06_export.py", "--run", home)
        run("07_eval.py", "--run", home, *evaluate_arguments(inputs))

    return build_run(tmp_path_factory, "finished", build)


@pytest.fixture
def group_of_one():
    """This process as the only rank."""
    ranks = init_ranks()
    yield ranks
    torch.distributed.destroy_process_group()


def calibrated_layer(calibration, index: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer in a calibration directory."""
    return Calibration(str(calibration)).layer(index)


def copy_run(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def flags(*words) -> argparse.Namespace:
    """The parsed flags of a command line."""
    with mock.patch.object(sys, "argv", [STAGE, *words]):
        return importlib.import_module("05_prune_train").parse()


def metrics(home) -> list[dict]:
    return [json.loads(line) for line in (home / "train" / "metrics.jsonl").read_text().splitlines()]


def final_weights(home) -> dict[str, torch.Tensor]:
    return whole_weights(saved_checkpoints(str(home / "train"))[-1])


def assert_same_training(home, other) -> None:
    # BiLD is not continuous: rounding may swap a student's 16th and 17th logits, of which it takes only one
    tolerances = {"loss": 1e-4, "bild": 1e-4, "kl": 1e-5, "mask_mean": 1e-5, "mask_expected": 1e-5,
                  "heldout_task_kl": 1e-4, "grad_norm": 1e-3}
    for ours, theirs in zip(metrics(home), metrics(other), strict=True):
        for name, tolerance in tolerances.items():
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=tolerance), (ours["step"], name)
    expected = final_weights(other)
    for name, tensor in final_weights(home).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


def assert_same_bits(home, other) -> None:
    ours, theirs = final_weights(home), final_weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    figures = [[{name: line[name] for name in line.keys() - MEASURED} for line in metrics(each)]
               for each in (home, other)]
    assert figures[0] == figures[1]


def with_teacher(source, trained, home):
    """A copy of an aligned run with the teacher of a trained one."""
    copy_run(source, home)
    shutil.copytree(trained / "teacher", home / "teacher")
    return home


def train_arguments(home, inputs, *flags) -> list[str]:
    """The words after stage 5's name: TRAINING on the tasks, and more flags."""
    return [*map(str, ("--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, *flags))]


def train(home, inputs, *flags, **options) -> subprocess.CompletedProcess:
    """Stage 5, TRAINING on the tasks. flags: more of them; options: of run."""
    return run(STAGE, *train_arguments(home, inputs, *flags), **options)


def interrupt(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal during a training step."""
    rate = engine.Schedule.rate

    def interrupting(schedule, now):
        if now == step:
            signal.raise_signal(number)
        return rate(schedule, now)

    monkeypatch.setattr(engine.Schedule, "rate", interrupting)


def stop(step: int, *arguments, number: int = signal.SIGTERM) -> subprocess.CompletedProcess:
    """Stage 5 with a signal during a step (from 0), after which it must exit with 75."""
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, step, number)
        return run(STAGE, *arguments, code=75)


def start(home, inputs, *flags, processes: int = 2, options=()) -> subprocess.Popen:
    """The same in the background, under torchrun with these options if there are processes."""
    command = [*launcher(processes, *options), str(ROOT / STAGE), *train_arguments(home, inputs, *flags)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def train_on_two_nodes(home, inputs, *flags, processes: int, visible=("", "")) -> None:
    """The same under two launchers of so many processes, each of which sees its own GPUs, or none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1",
             "--master-port", port, "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
    command, nodes = [str(ROOT / STAGE), *train_arguments(home, inputs, *flags)], []
    for node, gpus in enumerate(visible):
        nodes.append(subprocess.Popen([*words, "--node-rank", str(node), *command], cwd=ROOT,
                                      env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus},
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        for node in nodes:
            output, _ = node.communicate(timeout=200)
            assert node.returncode == 0, output
    finally:
        for node in nodes:
            if node.poll() is None:
                kill(node)


@contextlib.contextmanager
def full_disk(size: int):
    """Context manager: the kernel refuses files of more than so many bytes, also to new processes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # whose signal Python ignores
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def wait_for_step(home, step: int) -> None:
    path, limit = home / "train" / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count("\n") >= step):
        assert time.monotonic() < limit, "the run did not get that far"
        time.sleep(0.01)


def saved_files(home) -> list[list[Path]]:
    """The tensor files of each checkpoint, oldest first."""
    return [sorted(Path(path).glob("shard-*")) for path in saved_checkpoints(str(home / "train"))]


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def digests(path: Path) -> dict[str, str]:
    """sha256 of an artifact's tensors, or of what groups/ says."""
    if path.name == "groups":
        return {"groups": str(read(path / "stage.json")["groups"])}
    tensors = [file for file in sorted(path.rglob("*")) if file.suffix == ".safetensors"]
    return {file.name: tensors_digest(file) for file in tensors}


def checkpoint_digests(home: Path) -> list[dict[str, str]]:
    """Of what stage 4 has written."""
    return [digests(home / name) for name in ("aligned", "merged")]


def tensors_digest(file: Path) -> str:
    """sha256 of a safetensors file, whatever the order of its metadata, which is any."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:start]), sort_keys=True)
    return hashlib.sha256(header.encode() + content[start:]).hexdigest()


def messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def save_chats(path, *chats) -> str:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return str(path)


def contents(directory) -> dict[str, str]:
    """Relative path -> text of every file."""
    found = (path for path in Path(directory).rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text(errors="replace") for path in found}


def valid_record(stage: str) -> dict:
    """A record that every stage accepts, of files that it does not have."""
    return {"format": FORMAT, "stage": stage, "flags": {"seed": 0}, "arguments": {"run": "r"}, "read": [],
            "model": dict(SMALL_MODEL), "inputs": {}, "packages": {"torch": "2"}, "commit": None,
            "seconds": 1.5, "date": "2026-01-02T03:04:05+00:00", "files": {}, "summary": {}}


def save_lines(path, documents) -> str:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return str(path)


def last_line(completed) -> dict:
    return json.loads(completed.stdout.splitlines()[-1])
