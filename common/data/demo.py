"""The demo model, `--model demo`: a small multi-head-attention Llama, its text and its tasks.

The trained model is part of the repository: common/data/demo_model/, made by pipelines/demo_model.py. On
first use, `build_demo` writes three directories to runs/demo-model/:

  model/   a copy of it, a LlamaForCausalLM with as many key/value heads as query heads
  text/    train.txt and heldout.txt, the source code of the running Python's standard library
  tasks/   eight generated multiple-choice tasks (common/data/demo_tasks.py)
"""

import json
import os
import random
import shutil
import sysconfig
from pathlib import Path

from filelock import FileLock

from common.data.demo_tasks import SEED, task_rows
from common.files import write_directory
from common.models import DEMO, DEMO_HOME, local_model

CHECKPOINT = Path(__file__).parent / "demo_model"
TRAIN_CHARS, HELDOUT_CHARS = 3_000_000, 500_000  # minimum, since files are not split
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__",
           "encodings"}


def resolve_model(name: str) -> str:
    """A local directory for `name`: "demo" (written on first use), a directory, or a hub repository."""
    if name != DEMO:
        return local_model(name)
    with FileLock(f"{DEMO_HOME}.lock") as lock:  # a second process waits for the first to write it
        try:
            if not os.path.isdir(DEMO_HOME):
                build_demo(DEMO_HOME)
        finally:
            os.remove(lock.lock_file)
    return os.path.join(DEMO_HOME, "model")


def build_demo(directory) -> None:
    """Write the demo's model, text and tasks to `directory`, atomically."""
    with write_directory(str(directory)) as aside:
        home = Path(aside)
        shutil.copytree(CHECKPOINT, home / "model")
        for part in ("text", "tasks"):
            (home / part).mkdir()
        for split, text in zip(("train", "heldout"), read_corpus(), strict=True):
            (home / "text" / f"{split}.txt").write_text(text, encoding="utf-8", newline="")
        for (task, split), rows in task_rows().items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (home / "tasks" / f"{task}.{split}.jsonl").write_text(lines, encoding="utf-8")
    print(f"wrote   {directory}: the demo model, its text and tasks")


def read_corpus() -> tuple[str, str]:
    """(train, heldout): the standard library's source files, split between the two.

    Another Python has other files and splits them differently: see demo_model/README.md.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    paths = [path for path in paths if not SKIPPED.intersection(path.relative_to(root).parts)]
    random.Random(SEED).shuffle(paths)
    train, heldout, train_chars, heldout_chars = [], [], 0, 0
    for path in paths:
        try:
            content = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if heldout_chars < HELDOUT_CHARS:
            heldout.append(content)
            heldout_chars += len(content)
        elif train_chars < TRAIN_CHARS:
            train.append(content)
            train_chars += len(content)
    return "".join(train), "".join(heldout)
