"""What a run directory holds at its fullest, by purpose, from configs alone; --plan prints it.

Not counted are tokens, 4 bytes each, and what is small: tokenizers, groups, similarities, metrics, pictures.
"""

import torch

from common.method.stats import LayerStats
from common.models.calibration import SAMPLED
from common.models.families import geometry, norm_kind
from common.models.load import empty_model, weight_dtype
from common.training.checkpoints import KEPT
from common.training.plan import Student, size


def calibration_bytes(config, sampled: int = SAMPLED) -> int:
    """Bytes of a layer's file of stage 1, with the raw head vectors of so many tokens."""
    shape = geometry(config)
    attention = empty_model("", config, torch.float32).model.layers[0].self_attn
    sums = LayerStats(shape.kv_heads, shape.head_dim, "meta", norm_kind(attention) == "head").sums
    grams = sum(tensor.nbytes for tensor in (*sums.values(), sums["query.gram"]))  # that of W_O is as large
    return grams + 2 * 4 * sampled * shape.kv_heads * shape.head_dim


def checkpoint_bytes(config, student: Student | None) -> int:
    """Bytes of a training checkpoint: float32 weights and AdamW's moments; frozen weights as stored."""
    model = size(config, student)
    trained, *_ = model.trained(student)
    return 12 * trained + weight_dtype("source", config).itemsize * (model.whole - trained)


def disk_bytes(phases: list[tuple], kv_heads: int, teacher: bool, best: bool) -> dict[str, int]:
    """Bytes of a run directory by purpose; "total" is their sum.

    phases: (title, work, student, schedule) of each training, the student's last. teacher: whether the run
    has one of its own; best: whether the best checkpoint is kept besides the last KEPT. The checkpoints are
    those of the largest training, with the one that is being written: a fine-tuned teacher's are removed
    before the student's are written, and the masked student's as the GQA student's take their place.
    """
    _, work, student, _ = phases[-1]
    config, stored = work.config, weight_dtype("source", work.config).itemsize
    source, merged = (stored * size(config, each).whole for each in (None, Student(kv_heads, ())))
    trainings = [(each, KEPT + 1) for _, _, each, _ in phases]
    trainings.append((Student(kv_heads, (), student.train), KEPT + 1 + best))  # as GQA
    parts = {"calibration": config.num_hidden_layers * calibration_bytes(config), "aligned": source,
             "merged": merged, "teacher": source * teacher,
             "checkpoints": max(count * checkpoint_bytes(config, each) for each, count in trainings),
             "gqa": merged}
    return parts | {"total": sum(parts.values())}


def gigabytes(number: float) -> str:
    """Bytes as one reads them in GB: "0.23", "13.5", "1,402"."""
    return f"{number / 1e9:.3g}" if number < 1e11 else f"{number / 1e9:,.0f}"


def print_disk(phases: list[tuple], kv_heads: int, teacher: bool, best: bool) -> None:
    """Print disk_bytes on one line."""
    parts = disk_bytes(phases, kv_heads, teacher, best).items()
    print("GB on disk: " + " | ".join(f"{name} {gigabytes(number)}" for name, number in parts))
