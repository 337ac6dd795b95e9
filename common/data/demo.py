"""The demo model, `--model demo`: a small multi-head-attention Llama, its text and tasks, built on first use.

Nothing is downloaded and no text is bundled. `build_demo` writes three directories:

  model/   a LlamaForCausalLM checkpoint with as many key/value heads as query heads, and its tokenizer
  text/    train.txt and heldout.txt, the source code of the running Python's standard library
  tasks/   eight generated multiple-choice tasks (common/data/demo_tasks.py)
"""

import json
import os
import random
import sysconfig
from pathlib import Path

from filelock import FileLock

from common.data.demo_model import STEPS, make_tokenizer, train_model
from common.data.demo_tasks import task_rows
from common.data.tasks import example_from_row
from common.files import write_directory
from common.models import DEMO, DEMO_HOME, local_model

TRAIN_CHARS, HELDOUT_CHARS = 3_000_000, 500_000  # minimum, since files are not split
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__",
           "encodings"}


def resolve_model(name: str) -> str:
    """A local directory for `name`: "demo" (built on first use), a directory, or a hub repository."""
    if name != DEMO:
        return local_model(name)
    with FileLock(f"{DEMO_HOME}.lock"):  # a second process waits for the first to build it
        if not os.path.isdir(DEMO_HOME):
            build_demo(DEMO_HOME)
    return os.path.join(DEMO_HOME, "model")


def build_demo(directory, *, steps: int = STEPS, seed: int = 0) -> None:
    """Write the demo's model, text and tasks to `directory`, atomically."""
    print(f"demo: building text, tasks and a small model in {directory} (once; two minutes on two cores)")
    with write_directory(str(directory)) as aside:
        home = Path(aside)
        for part in ("text", "tasks"):
            (home / part).mkdir()
        train_text, heldout_text = read_corpus(seed)
        for split, text in (("train", train_text), ("heldout", heldout_text)):
            (home / "text" / f"{split}.txt").write_text(text, encoding="utf-8", newline="")
        examples = []
        for (task, split), rows in task_rows(seed).items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (home / "tasks" / f"{task}.{split}.jsonl").write_text(lines, encoding="utf-8")
            if split == "train":
                examples.append([example_from_row(task, row) for row in rows])

        texts = [train_text]
        for task_examples in examples:
            texts += [f"{example.prompt}{example.answer}\n" for example in task_examples]
        tokenizer = make_tokenizer(texts)
        model = train_model(tokenizer, train_text, examples, steps, seed)
        model.save_pretrained(home / "model")
        tokenizer.save_pretrained(home / "model")
    print(f"demo: wrote {directory}, {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


def read_corpus(seed: int) -> tuple[str, str]:
    """(train, heldout): the standard library's source files, split between the two."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    paths = [path for path in paths if not SKIPPED.intersection(path.relative_to(root).parts)]
    random.Random(seed).shuffle(paths)
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
