"""The lines of metrics.jsonl: their names, reading them, and what they say of a training."""

import os

from common.data.rows import parse_object
from common.models.equivalence import COMPARED
from common.run.errors import UserError

METRICS = "metrics.jsonl"
# prefixes of metrics of held-out samples
TEXT_SET, CHAT_SET, TASK_SET = SETS = ("heldout", "heldout_chat", "heldout_task")
CONTENT = dict(zip(SETS, ("text", "chats", "questions"), strict=True))  # of such a set
MEASURED = tuple(f"{prefix}_{name}" for prefix in SETS for name in COMPARED)
START = "start"  # prefix of the metrics before the first step
# number of masks that had not closed when they were removed: in the line of that step, then in the records of
# the training and of its export
OPEN_MASKS = "open_masks"
CHATS, TEXT = "chat_", ""  # prefixes of stage 7's metrics on answers of chats, and on every token of texts


def read_metrics(path: str) -> list[dict]:
    """The lines of a metrics.jsonl, without a truncated last line, which a killed run may leave.

    Raises UserError for a line that is not a JSON object with a step.
    """
    if not os.path.isfile(path):
        return []
    lines = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            metrics = parse_object(line, f"{path} line {number}")
            if not isinstance(metrics.get("step"), int):
                raise UserError(f"{path} line {number}: expected a step's metrics, found {line[:40]!r}")
            lines.append(metrics)
    return lines


def summarize(lines: list[dict]) -> dict:
    """The last loss and held-out metrics of a phase, its tokens, and the masks that had not closed, from the
    lines of its metrics.jsonl.
    """
    summary = {"loss": lines[-1]["loss"], "tokens": int(sum(line["tokens"] for line in lines))}
    untrained = {name: lines[0][name] for name in lines[0] if name.startswith(f"{START}_")}
    for line in lines:
        if OPEN_MASKS in line:
            summary[OPEN_MASKS] = line[OPEN_MASKS]
    return summary | {name: lines[-1][name] for name in MEASURED if name in lines[-1]} | untrained


def heldout_kls(metrics: dict, prefix: str = "") -> dict[str, float]:
    """A step's held-out KL on each set that was measured, by what is in it: text, chats, questions."""
    return {CONTENT[kind]: metrics[name] for kind in CONTENT if (name := f"{prefix}{kind}_kl") in metrics}


def heldout_kl(metrics: dict) -> float | None:
    """Mean of a step's held-out KLs on text and on chats, by which a checkpoint is chosen; None if neither
    was measured. Questions do not count: stage 7 evaluates students on them.
    """
    kls = [kl for kind, kl in heldout_kls(metrics).items() if kind != CONTENT[TASK_SET]]
    return sum(kls) / len(kls) if kls else None


def outcome(lines: list[dict]) -> str:
    """What training did, in words: the held-out KLs from merged/ to the end, or else the loss."""
    before, after = heldout_kls(lines[0], f"{START}_"), heldout_kls(lines[-1])
    if not before:
        return f"distillation loss {lines[0]['loss']:.3f} at the start, {lines[-1]['loss']:.3f} as GQA"
    changes = [f"{kind} {kl:.4f} before, {after[kind]:.4f} after" for kind, kl in before.items()]
    better = any(after[kind] < kl for kind, kl in before.items())
    verdict = "" if better else " (no better than before: lower --lr, or train on more text)"
    return f"held-out KL of {'; of '.join(changes)}{verdict}"
