"""The demo model, `--model demo`: a small multi-head-attention Llama, its text and its tasks.

They are part of the repository: common/data/demo_model/, whose README.md says how they were made. On
first use, `demo_home` writes them to runs/demo-model/: model/; text/ with train.txt and heldout.txt; and
tasks/ with TASK.train.jsonl and TASK.validation.jsonl of eight generated multiple-choice tasks.
"""

import gzip
import os
import shutil
from pathlib import Path

from filelock import FileLock

from common.models.load import local_model
from common.run.artifact import write_directory
from common.run.files import read_json

DEMO = "demo"
DEMO_HOME = os.path.join("runs", "demo-model")  # where the demo model is copied on first use
SHIPPED = Path(__file__).parent / "demo_model"  # the model; its text and tasks, compressed


def default_sources(demo: bool) -> tuple[str, str]:
    """Where tasks and text come from by default: the demo model's own, or the hub and C4."""
    return (os.path.join(DEMO_HOME, "tasks"), DEMO) if demo else ("hub", "c4")


def training_defaults() -> dict:
    """Flag of stage 5 -> its value for the demo model, where it is left out.

    The model's masks must close within hundreds of steps, not ten thousand.
    """
    return read_json(SHIPPED / "training.json")


def resolve_model(name: str) -> str:
    """A local directory for `name`: "demo" (written on first use), a directory, or a hub repository."""
    return os.path.join(demo_home(), "model") if name == DEMO else local_model(name)


def demo_home() -> str:
    """The directory of the demo's model, text and tasks, written on first use."""
    if os.path.isdir(DEMO_HOME):
        return DEMO_HOME
    with FileLock(f"{DEMO_HOME}.lock"):  # a second process waits for the first to write it
        if not os.path.isdir(DEMO_HOME):
            build_demo(DEMO_HOME)
    return DEMO_HOME


def build_demo(directory) -> None:
    """Write the demo's model, text and tasks to `directory`, atomically."""
    with write_directory(str(directory)) as aside:
        home = Path(aside)
        others = shutil.ignore_patterns("text", "tasks", "training.json")
        shutil.copytree(SHIPPED, home / "model", ignore=others)
        for part in ("text", "tasks"):
            (home / part).mkdir()
            for path in (SHIPPED / part).glob("*.gz"):
                (home / part / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    print(f"wrote   {directory}: the demo model, its text and tasks")
