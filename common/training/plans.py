"""What the flags of stage 5 mean where they are left out, and the plans of its phases."""

import math

from transformers.utils import is_flash_attn_2_available

from common.cli import UserError
from common.data.text import sequence_length
from common.models import DEMO, default_sources, load_config
from common.training import budget
from common.training.engine import Plan
from common.training.inputs import NONE, SOURCE, Pair, Pool, Run

EPOCHS = {2: 5, 4: 10, 8: 15}  # source kv heads per group -> passes over the training sets (Table 1)
TEACHER_EPOCHS = 2
PUBLISHED_SETTINGS = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32,
                      "teacher_lr": 1e-5, "teacher_batch": 128, "teacher_warmup": 16,
                      "beta2": 0.95, "weight_decay": 1e-4, "masks": "l0-released"}  # as in the authors' code
# The demo's masks must close within hundreds of steps, not ten thousand: hence the higher rate and weight.
DEMO_SETTINGS = {"lr": 2e-3, "mask_lr": 0.5, "l0_weight": 30.0, "batch": 16, "warmup": 20,
                 "teacher_lr": 1e-3, "teacher_batch": 32, "teacher_warmup": 20,
                 "beta2": 0.999, "weight_decay": 0.0, "masks": "l0"}
DEMO_STEPS, DEMO_TEACHER_STEPS = 350, 100
TEXT_LENGTH = 512  # tokens per sample of text, if the model has that many positions


def set_defaults(args, demo: bool, positions: int) -> None:
    """Fill in each flag that was left out: the published value, or the demo model's."""
    for name, value in (DEMO_SETTINGS if demo else PUBLISHED_SETTINGS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.tasks = args.tasks or default_sources(demo)[0]
    args.text = args.text or ([DEMO] if demo else [NONE])
    args.text = [] if args.text == [NONE] else args.text
    if args.heldout_text is None:
        with_heldout_part = [DEMO] if demo else [source for source in args.text if source == "c4"]
        args.heldout_text = with_heldout_part[0] if with_heldout_part else NONE
    args.teacher = args.teacher or (SOURCE if args.tasks == NONE else None)
    args.text_length = sequence_length(args.text_length, TEXT_LENGTH, positions, 2, "--text-length")
    if demo and args.steps is None and args.epochs is None:
        args.steps = DEMO_STEPS
    if demo and args.teacher_steps is None and args.teacher_epochs is None:
        args.teacher_steps = DEMO_TEACHER_STEPS
    if args.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("--attention: flash_attention_2 needs the package flash-attn, found none that works")


def published_epochs(group_size: int) -> int:
    """The paper's passes over the training sets. Raises UserError for a group size it does not cover."""
    if group_size not in EPOCHS:
        raise UserError(f"--epochs: no published value for groups of {group_size} kv heads (published: "
                        f"groups of {', '.join(map(str, EPOCHS))}); pass --epochs or --steps")
    return EPOCHS[group_size]


def epochs_to_steps(epochs: float, samples: int, batch: int) -> int:
    """Steps of `batch` samples in this many passes over the training sets; at least 1."""
    return max(1, math.ceil(epochs * samples / batch))


def make_plans(args, pair: Pair, pool: Pool, cuda: bool, has_teacher: bool) -> dict[str, Plan]:
    """The plans of both phases, "teacher" (unless it exists) and "student"."""
    common = {"clip": args.clip, "seed": args.seed, "save_steps": args.save_steps,
              "save_minutes": args.save_minutes, "print_every": args.print_every, "reduce": args.reduce,
              "tokens_per_microbatch": args.tokens_per_microbatch or (4096 if cuda else 2048)}
    plans = {}
    if not has_teacher:
        epochs, batch = args.teacher_epochs or TEACHER_EPOCHS, args.teacher_batch
        steps = args.teacher_steps or epochs_to_steps(epochs, len(pool.answered), batch)
        plans["teacher"] = Plan(steps, batch, args.teacher_warmup, **common)
    steps = args.steps
    if not steps:
        group_size = pair.model["kv_heads"] // pair.kv_heads
        epochs = args.epochs or (1 if args.tasks == NONE else published_epochs(group_size))
        steps = epochs_to_steps(epochs, len(pool), args.batch)
    if steps < 2 and args.masks != "off":
        raise UserError(f"--steps: expected at least 2 (the last fifth trains without masks), found {steps}")
    return plans | {"student": Plan(steps, args.batch, args.warmup, **common)}


def print_plan(run: Run, plans: dict[str, Plan]) -> None:
    """Print what both phases need on --plan's hardware. Raises UserError if one does not fit."""
    args, pair, config = run.args, run.pair, load_config(run.pair.model["path"])
    student = budget.Student(pair.kv_heads, pair.blended if args.masks != "off" else (), args.train)
    phases = []
    for name, plan in plans.items():
        samples = run.pool.answered if name == "teacher" else run.pool
        work = budget.Workload.of(config, samples, args.loss_chunk, run.execution.recompute)
        title = name if name == "teacher" else f"pruning {pair.title}"
        phases.append((title, work, None if name == "teacher" else student, plan))
    hours = budget.print_phases(phases, args.plan)
    if run.heldout:
        samples = [sample for samples in run.heldout.sets.values() for sample in samples]
        work = budget.Workload.of(config, samples, args.loss_chunk, run.execution.recompute)
        hours += budget.print_heldout(work, run.heldout.measurements(plans["student"].steps), args.plan)
    print(f"05_prune_train: {hours:.2g} h on {args.plan}{', including the teacher' * (len(plans) > 1)}")
