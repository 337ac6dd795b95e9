"""What the tests share: a tiny random-weight checkpoint with a byte tokenizer, tiny tasks, and running a stage."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from common.training.sharding import init_ranks

ROOT = Path(__file__).parent.parent
END = 256  # end-of-sequence id of the byte tokenizer
TRAINING = "--steps 10 --teacher-steps 4 --batch 8 --teacher-batch 8 --lr 1e-3 --teacher-lr 1e-3 --mask-lr 2 --warmup 1 --save-steps 3".split()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"<eos>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def tiny_model(seed: int = 0, bias: bool = False, model_type: str = "llama", **changes):
    """A random 3-layer, 8-head model, a Llama with MHA if nothing else is said. Norm weights and biases are drawn too, so that
    none of them is trivial."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
             "num_key_value_heads": 8, "head_dim": 8, "max_position_embeddings": 256, "attention_bias": bias,
             "bos_token_id": None, "eos_token_id": END, "pad_token_id": END, "initializer_range": 0.2}
    config, kind = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
                    "qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[model_type]
    model = kind(config(**(shape | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save_tiny(path, dtype: torch.dtype = torch.float32, **options) -> str:
    tiny_model(**options).to(dtype).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


def task_rows(count: int, seed: int) -> dict[str, list[dict]]:
    """Rows of all eight tasks in the original releases' schemas; the answer repeats a word of the question."""
    draw, rows = random.Random(seed), {}
    words = "red blue green cat dog cup pen tree door fish".split()
    for _ in range(count):
        w, k = draw.sample(words, 4), draw.randrange(4)
        arc = {"question": {"stem": w[k], "choices": [{"text": x, "label": y} for x, y in zip(w, "ABCD", strict=True)]}, "answerKey": "ABCD"[k]}
        for task, row in {
            "boolq": {"question": f"is it {w[0]}", "passage": f"It is {w[k % 2]}.", "label": k % 2 == 0},
            "piqa": {"goal": w[k % 2], "sol1": w[0], "sol2": w[1], "label": k % 2},
            "hellaswag": {"ctx": w[k], "endings": w, "label": str(k)},
            "winogrande": {"sentence": f"{w[k % 2]} is _", "option1": w[0], "option2": w[1], "answer": str(k % 2 + 1)},
            "arc_easy": arc,
            "arc_challenge": arc,
            "openbookqa": {"question_stem": w[k], "choices": {"text": w, "label": list("ABCD")}, "answerKey": "ABCD"[k]},
            "siqa": {"context": w[k % 3], "question": "what?", "answerA": w[0], "answerB": w[1], "answerC": w[2], "label": str(k % 3 + 1)},
        }.items():
            rows.setdefault(task, []).append(row)
    return rows


def save_tasks(directory: Path) -> str:
    directory.mkdir()
    for split, count in (("train", 12), ("validation", 5)):
        for task, rows in task_rows(count, count).items():
            (directory / f"{task}.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def run(command: str, *arguments, processes: int = 0, fails: bool = False) -> subprocess.CompletedProcess:
    """Run a stage as a user would; processes > 0 under torchrun. fails: it must exit with 2 and one line (torchrun
    itself then exits with 1 and adds its own report)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    script = ["-m", command.removesuffix(".py").replace("/", ".")] if "/" in command else [str(ROOT / command)]
    done = subprocess.run([sys.executable, *launcher, *script, *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    if fails:
        assert done.returncode == (1 if processes else 2), done.stdout + done.stderr
        assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1, done.stderr
        assert processes or "Traceback" not in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> dict[str, str]:
    """Paths of a tiny model with biases, a text and tasks."""
    home = tmp_path_factory.mktemp("inputs")
    text = home / "text.txt"
    text.write_text(Path(random.__file__).read_text())
    return {"model": save_tiny(home / "model", bias=True), "text": str(text), "tasks": save_tasks(home / "tasks")}


@pytest.fixture(scope="session")
def aligned_run(inputs, tmp_path_factory) -> Path:
    """A run directory after stages 1-4. Tests that change it copy it first."""
    home = tmp_path_factory.mktemp("run")
    calibrate = ["--model", inputs["model"], "--text", inputs["text"], "--sequences", 8, "--length", 64, "--sample-tokens", 512]
    for command, arguments in (("01_calibrate.py", calibrate), ("02_similarity.py", []),
                               ("03_group.py", ["--kv-heads", 2, "--restarts", 20, "--iterations", 300]), ("04_align.py", [])):
        run(command, "--run", home, *arguments)
    return home


@pytest.fixture(scope="session")
def finished_run(aligned_run, inputs, tmp_path_factory) -> Path:
    """A run directory after all seven stages, trained on two processes."""
    home = copy_run(aligned_run, tmp_path_factory.mktemp("finished") / "run")
    run("05_prune_train.py", "--run-dir", home, "--tasks", inputs["tasks"], *TRAINING, processes=2)
    run("06_export.py", "--run", home)
    run("07_eval.py", "--run", home, "--tasks", inputs["tasks"], "--text", inputs["text"], "--length", 64, "--sequences", 4)
    return home


@pytest.fixture
def group_of_one():
    """This process as the only rank."""
    ranks = init_ranks()
    yield ranks
    torch.distributed.destroy_process_group()


def copy_run(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target
