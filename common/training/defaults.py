"""What the flags of stage 5 mean where they are left out, and the schedules of its two trainings."""

import argparse
import math
import os

from transformers.utils import is_flash_attn_2_available

from common.cli import UserError
from common.data.demo import DEMO, default_sources
from common.data.generate import choose_chats
from common.data.text import is_generated, sequence_length
from common.records import SOURCE
from common.training.engine import Schedule
from common.training.pool import NONE, SPLIT, Pool
from common.training.students import Pair

EPOCHS = {2: 5, 4: 10, 8: 15}  # source kv heads per group -> passes over the training sets (Table 1)
TEACHER_EPOCHS = 2
FEWEST_STEPS, BATCHES = 250, (2, 64)  # the batch is chosen for so many steps within these limits
DEMO_STEPS, DEMO_TEACHER_STEPS = 350, 100
OF_LENGTH = ("batch", "warmup", "teacher_warmup")  # flags whose default make_schedules chooses
TEXT_LENGTH = 512  # tokens per sample of text, if the model has that many positions


def defaults_of(flags: dict[str, list], pair: Pair, tasks: str | None) -> dict:
    """Flag -> its value where it is left out, of those that depend on what is trained.

    flags: the table of stage 5. Without tasks: learning rates that suit small steps, highest for attention,
    which merging changed; measured on a model of 135M parameters, nothing larger. For the demo model: its
    masks must close within hundreds of steps, not ten thousand.
    """
    column = 1 if tasks == NONE else 2 if pair.model["name"] == DEMO else 0
    defaults = {flag.attribute: flag.default[column] for rows in flags.values() for flag in rows
                if isinstance(flag.default, list)}
    return defaults | ({"masks": "off"} if tasks == NONE and "o_proj" in pair.blended else {})


def with_defaults(args, defaults: dict, pair: Pair, positions: int) -> argparse.Namespace:
    """A copy of the flags with each that was left out, but for those that depend on the number of samples.

    defaults: from defaults_of. positions: of the source model. Raises UserError for flags that do not fit it
    or this machine.
    """
    demo = pair.model["name"] == DEMO
    filled = argparse.Namespace(**vars(args))
    for name, value in defaults.items():
        if getattr(filled, name) is None and name not in OF_LENGTH:
            setattr(filled, name, value)
    filled.tasks = args.tasks or default_sources(demo)[0]
    filled.text = args.text or ([DEMO] if demo else [])
    filled.text = [] if filled.text == [NONE] else filled.text
    filled.chat = choose_chats(args.chat, filled.text, pair.model["path"])
    if args.heldout_text is None:
        filled.heldout_text = DEMO if demo else "c4" if "c4" in filled.text else SPLIT
    teacher = args.teacher and os.path.normpath(args.teacher)  # DIR.train/ stands beside DIR, not in DIR/
    filled.teacher = teacher or (SOURCE if filled.tasks == NONE else None)
    filled.text_length = sequence_length(args.text_length, TEXT_LENGTH, positions, 2, "--text-length")
    if demo and filled.tasks != NONE and args.steps is None and args.epochs is None:
        filled.steps = DEMO_STEPS
    if demo and args.teacher_steps is None and args.teacher_epochs is None:
        filled.teacher_steps = DEMO_TEACHER_STEPS
    endless = [source for source in [*filled.text, *filled.chat] if source == "c4" or is_generated(source)]
    if endless and not args.text_tokens:
        raise UserError(f"{endless[0]}: expected --text-tokens N, the tokens to take of it, found none")
    if args.student and filled.masks != "off":
        raise UserError(f"--student: expected --masks off with it, found {filled.masks}")
    if args.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("--attention: flash_attention_2 needs the package flash-attn, found none that works")
    return filled


def published_epochs(group_size: int) -> int:
    """The paper's passes over the training sets. Raises UserError for a group size it does not cover."""
    if group_size not in EPOCHS:
        raise UserError(f"--epochs: no published value for groups of {group_size} kv heads (published: "
                        f"groups of {', '.join(map(str, EPOCHS))}); pass --epochs or --steps")
    return EPOCHS[group_size]


def batch_for(samples: int) -> int:
    """Samples per step where no flag says it: as many as leave FEWEST_STEPS, within BATCHES."""
    return min(max(samples // FEWEST_STEPS, BATCHES[0]), BATCHES[1])


def warmup_for(default: int, steps: int, share: int = 10) -> int:
    """Steps of warm-up where no flag says it: the default, but at most one in `share` steps."""
    return max(1, min(default, steps // share))


def epochs_to_steps(epochs: float, samples: int, batch: int) -> int:
    """Steps of `batch` samples in this many passes over the training sets; at least 1."""
    return max(1, math.ceil(epochs * samples / batch))


def make_schedules(
    args, defaults: dict, pair: Pair, pool: Pool, cuda: bool, has_teacher: bool
) -> dict[str, Schedule]:
    """The schedules of the "teacher" (unless it exists) and of the "student". args: with these defaults."""
    common = {"clip": args.clip, "seed": args.seed, "save_steps": args.save_steps,
              "save_minutes": args.save_minutes, "print_every": args.print_every, "reduce": args.reduce,
              "tokens_per_microbatch": args.tokens_per_microbatch or (4096 if cuda else 2048)}
    schedules = {}
    if not has_teacher:
        epochs, batch = args.teacher_epochs or TEACHER_EPOCHS, args.teacher_batch
        steps = args.teacher_steps or epochs_to_steps(epochs, len(pool.answered), batch)
        warmup = args.teacher_warmup or warmup_for(defaults["teacher_warmup"], steps, share=5)
        schedules["teacher"] = Schedule(steps, batch, warmup, **common)
    steps, batch = args.steps, args.batch or defaults["batch"] or batch_for(len(pool))
    if not steps:
        group_size = pair.model["kv_heads"] // pair.kv_heads
        epochs = args.epochs or (1 if args.tasks == NONE else published_epochs(group_size))
        steps = epochs_to_steps(epochs, len(pool), batch)
    if steps < 2 and args.masks != "off":
        raise UserError(f"--steps: expected at least 2 (the last fifth trains without masks), found {steps}")
    warmup = args.warmup or warmup_for(defaults["warmup"], steps)
    return schedules | {"student": Schedule(steps, batch, warmup, **common)}
