"""What the flags of stage 5 mean where they are left out, and the schedules of its two trainings."""

import argparse
import math

from transformers.utils import is_flash_attn_2_available

from common.cli import UserError
from common.data.text import sequence_length
from common.models import DEMO, default_sources
from common.records import SOURCE
from common.training.engine import Schedule
from common.training.pool import NONE, Pool
from common.training.students import Pair

EPOCHS = {2: 5, 4: 10, 8: 15}  # source kv heads per group -> passes over the training sets (Table 1)
TEACHER_EPOCHS = 2
PUBLISHED = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32,
             "teacher_lr": 1e-5, "teacher_batch": 128, "teacher_warmup": 16,
             "beta2": 0.95, "weight_decay": 1e-4, "masks": "l0-released"}  # as in the authors' code
# The demo's masks must close within hundreds of steps, not ten thousand: hence the higher rate and weight.
OF_DEMO = {"lr": 2e-3, "mask_lr": 0.5, "l0_weight": 30.0, "batch": 16, "warmup": 20,
           "teacher_lr": 1e-3, "teacher_batch": 32, "teacher_warmup": 20,
           "beta2": 0.999, "weight_decay": 0.0, "masks": "l0"}
DEMO_STEPS, DEMO_TEACHER_STEPS = 350, 100
TEXT_LENGTH = 512  # tokens per sample of text, if the model has that many positions


def with_defaults(args, demo: bool, positions: int) -> argparse.Namespace:
    """A copy of the flags with each that was left out: the published value, or the demo model's.

    positions: of the source model. Raises UserError for flags that do not fit it or this machine.
    """
    given = vars(args)
    filled = argparse.Namespace(**given)
    for name, value in (OF_DEMO if demo else PUBLISHED).items():
        setattr(filled, name, value if given[name] is None else given[name])
    filled.tasks = args.tasks or default_sources(demo)[0]
    filled.text = args.text or ([DEMO] if demo else [])
    filled.text = [] if filled.text == [NONE] else filled.text
    if args.heldout_text is None:
        with_heldout_part = [DEMO] if demo else [source for source in filled.text if source == "c4"]
        filled.heldout_text = with_heldout_part[0] if with_heldout_part else NONE
    filled.teacher = args.teacher or (SOURCE if filled.tasks == NONE else None)
    filled.text_length = sequence_length(args.text_length, TEXT_LENGTH, positions, 2, "--text-length")
    if demo and args.steps is None and args.epochs is None:
        filled.steps = DEMO_STEPS
    if demo and args.teacher_steps is None and args.teacher_epochs is None:
        filled.teacher_steps = DEMO_TEACHER_STEPS
    if args.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("--attention: flash_attention_2 needs the package flash-attn, found none that works")
    return filled


def published_epochs(group_size: int) -> int:
    """The paper's passes over the training sets. Raises UserError for a group size it does not cover."""
    if group_size not in EPOCHS:
        raise UserError(f"--epochs: no published value for groups of {group_size} kv heads (published: "
                        f"groups of {', '.join(map(str, EPOCHS))}); pass --epochs or --steps")
    return EPOCHS[group_size]


def epochs_to_steps(epochs: float, samples: int, batch: int) -> int:
    """Steps of `batch` samples in this many passes over the training sets; at least 1."""
    return max(1, math.ceil(epochs * samples / batch))


def make_schedules(args, pair: Pair, pool: Pool, cuda: bool, has_teacher: bool) -> dict[str, Schedule]:
    """The schedules of the "teacher" (unless it exists) and of the "student". args: with defaults."""
    common = {"clip": args.clip, "seed": args.seed, "save_steps": args.save_steps,
              "save_minutes": args.save_minutes, "print_every": args.print_every, "reduce": args.reduce,
              "tokens_per_microbatch": args.tokens_per_microbatch or (4096 if cuda else 2048)}
    schedules = {}
    if not has_teacher:
        epochs, batch = args.teacher_epochs or TEACHER_EPOCHS, args.teacher_batch
        steps = args.teacher_steps or epochs_to_steps(epochs, len(pool.answered), batch)
        schedules["teacher"] = Schedule(steps, batch, args.teacher_warmup, **common)
    steps = args.steps
    if not steps:
        group_size = pair.model["kv_heads"] // pair.kv_heads
        epochs = args.epochs or (1 if args.tasks == NONE else published_epochs(group_size))
        steps = epochs_to_steps(epochs, len(pool), args.batch)
    if steps < 2 and args.masks != "off":
        raise UserError(f"--steps: expected at least 2 (the last fifth trains without masks), found {steps}")
    return schedules | {"student": Schedule(steps, args.batch, args.warmup, **common)}
