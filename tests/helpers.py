"""Shared by the tests: a tiny random checkpoint with a byte tokenizer, tiny tasks, running a command."""

import contextlib
import io
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from unittest import mock

# read when the packages below are imported
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from common.calibration import Calibration
from common.cli import run_stage
from common.proof import attach_pairs
from common.reporting import plots
from common.training.sharding import init_ranks

torch.set_num_threads(1)
pytest.register_assert_rewrite("training_runs")  # its assertions say what differs, as a test's do
ROOT = Path(__file__).parent.parent
END = 256  # end-of-sequence id of the byte tokenizer
TRAINING = """--steps 10 --teacher-steps 4 --batch 8 --teacher-batch 8 --lr 1e-3 --teacher-lr 1e-3 --mask-lr 2
              --warmup 1 --save-steps 3 --masks l0""".split()
GROUPING = ["--kv-heads", 2, "--restarts", 20, "--iterations", 300]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<eos>": END}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def tiny_model(seed: int = 0, bias: bool = False, model_type: str = "llama", **changes):
    """A random 3-layer, 8-head model; by default a Llama with MHA. Norm weights and biases are random too, so
    that none of them is trivial."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 260, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 256,
        "attention_bias": bias, "bos_token_id": None, "eos_token_id": END, "pad_token_id": END,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(model_type, **(settings | changes))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    attach_pairs(model)
    return model


def save_tiny(path, dtype: torch.dtype = torch.float32, **options) -> str:
    tiny_model(**options).to(dtype).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


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
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        launcher += ["--local-addr", "127.0.0.1"]  # where the machine's own name cannot be looked up
        script = ["-m", module_name(command)] if "/" in command else [str(ROOT / command)]
        words = [sys.executable, *(launcher if processes else []), *script, *map(str, arguments)]
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
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    scopes = (contextlib.chdir(ROOT), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors),
              mock.patch.dict(os.environ), mock.patch.object(sys, "argv", [command, *arguments]),
              torch.random.fork_rng(devices=[]), warnings.catch_warnings())
    code = 0
    try:
        with contextlib.ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(scope)
            if "mutmut" in sys.modules:  # which knows functions by the names of their modules
                run_stage(runpy.run_path(command, run_name=module_name(command))["main"])
            elif "/" in command:
                warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
                runpy.run_module(module_name(command), run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(command, run_name="__main__")
    except SystemExit as ended:
        code = ended.code or 0
    except Exception:
        code = 1
        traceback.print_exc(file=errors)
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        for number, handler in handlers.items():
            signal.signal(number, handler)
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
    for name in real:
        setattr(plots, name, plots.drawing(lambda pyplot, *_, **__: pyplot.figure(figsize=(1, 1))))
    yield real
    for name, draw in real.items():
        setattr(plots, name, draw)


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
        (home / "text.txt").write_text(Path(random.__file__).read_text())
        save_tiny(home / "model", bias=True)
        save_tasks(home / "tasks")

    home = build_once(tmp_path_factory, "inputs", build)
    return {"model": str(home / "model"), "text": str(home / "text.txt"), "tasks": str(home / "tasks")}


@pytest.fixture(scope="session")
def aligned_run(inputs, tmp_path_factory) -> Path:
    """A run directory after stages 1-4. Tests that change it copy it first."""

    def build(home):
        run("01_calibrate.py", "--run", home, *calibrate_arguments(inputs))
        run("02_similarity.py", "--run", home, "--energy")
        run("03_group.py", "--run", home, *GROUPING)
        run("04_align.py", "--run", home)

    return build_run(tmp_path_factory, "aligned", build)


def finish(home: Path, aligned_run: Path, inputs: dict[str, str], processes: int) -> None:
    """Stages 5-7 in a copy of aligned_run."""
    copy_run(aligned_run, home)
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=processes)
    run("06_export.py", "--run", home)
    run("07_eval.py", "--run", home, *evaluate_arguments(inputs))


@pytest.fixture(scope="session")
def finished_run(aligned_run, inputs, tmp_path_factory) -> Path:
    """A run directory after all seven stages, each in one process."""
    return build_run(tmp_path_factory, "finished", lambda home: finish(home, aligned_run, inputs, 0))


@pytest.fixture(scope="session")
def distributed_run(aligned_run, inputs, tmp_path_factory) -> Path:
    """A run directory after all seven stages, trained on two processes: for slow tests."""
    return build_run(tmp_path_factory, "distributed", lambda home: finish(home, aligned_run, inputs, 2))


@pytest.fixture
def group_of_one():
    """This process as the only rank."""
    ranks = init_ranks()
    yield ranks
    torch.distributed.destroy_process_group()


def calibrated_layer(calibration, index: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer in a calibration directory."""
    return Calibration(str(calibration)).layer(index)


def all_groupings(heads: list[int], size: int):
    """Yield all ways to split heads into groups of a size, in canonical order."""
    if not heads:
        yield []
        return
    for others in itertools.combinations(heads[1:], size - 1):
        rest = [head for head in heads[1:] if head not in others]
        for groups in all_groupings(rest, size):
            yield [[heads[0], *others], *groups]


def copy_run(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
