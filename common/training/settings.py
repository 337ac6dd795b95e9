"""What a call of stage 5 trains, and how: its flags, model, data and machine settled into Settings."""

import os
from dataclasses import dataclass, fields, replace

import torch

from common.data.data_sets import COMMITS
from common.data.demo import DEMO, default_sources, training_defaults
from common.data.documents import NONE, parse_source
from common.data.pool import SPLIT, Pool, Sources, load_pool
from common.data.sources import DataContext, check_sources, choose_chats, hub_commits
from common.data.text import sequence_length
from common.models.families import OUTPUTS
from common.models.load import bos_prefix, load_config, load_tokenizer
from common.run.artifact import Started
from common.run.errors import UserError
from common.run.flags import Cases, Flag, named
from common.run.kinds import SOURCE
from common.training import checkpoints, engine, memory
from common.training.conversion import HUB_COMMITS, Conversion, TrainingRun
from common.training.engine import Schedule
from common.training.heldout import Heldout, heldout_texts, load_heldout
from common.training.memory import Phase, Student, Workload
from common.training.sharding import Execution
from common.training.students import Rates
from common.training.teacher import check_teacher, find_teacher

TEXT_LENGTH = 512  # tokens per sample of text, if the model has that many positions
TEACHER_EPOCHS, TEACHER_WARMUP = 2, 16  # published: epochs over samples with answers, steps
CLIP = 1.0  # maximum gradient norm
SHORTEST_ROW = {False: 2048, True: 4096}  # tokens of a packed row; on GPUs longer ones, where memory suffices
OF_LENGTH = ("batch", "warmup", "teacher_warmup")  # flags whose default make_schedules chooses


@dataclass(frozen=True)
class Loss:
    """The student's loss (Eq. 31)."""

    kl_on: str  # tokens of the KL term: "prompt" or "all"
    l0_weight: float


@dataclass(frozen=True)
class Samples:
    """What is trained on, and what is held out."""

    pool: Pool
    heldout: Heldout


@dataclass(frozen=True)
class Schedules:
    """The schedules of the trainings."""

    student: Schedule
    teacher: Schedule | None  # None: the teacher is there


@dataclass(frozen=True)
class Fitted:
    """The schedules, whose packed rows fit into memory, and the execution that does."""

    schedules: Schedules
    execution: Execution


@dataclass(frozen=True)
class Settings:
    """What flags, model, data and machine decide of a call: every value is filled in."""

    teacher: str | None  # as given: SOURCE, a directory, or None for RUN/teacher/
    masks: str  # a key of MASKS, or "off"
    train: str  # "all" or "attention"
    seed: int
    loss: Loss
    mask_lr: float
    rates: Rates
    teacher_rates: Rates
    schedules: Schedules
    execution: Execution
    force: bool
    resumed: dict[str, object]  # flags that must be the same to go on with a training


def defaults_of(flags: list[Flag], conversion: Conversion, tasks: str | None) -> dict:
    """Flag -> its value where it is left out, of those that depend on what is trained.

    Without tasks: learning rates that suit small steps, highest for attention, which merging changed;
    measured on a model of 135M parameters, nothing larger. For the demo model: its own.
    """
    case = "text" if tasks == NONE else "published"
    defaults = {"teacher_warmup": TEACHER_WARMUP} | {
        flag.attribute: getattr(flag.default, case) for flag in flags if isinstance(flag.default, Cases)}
    if conversion.model["name"] == DEMO:
        own = training_defaults()
        defaults |= own if tasks != NONE else {"teacher_steps": own["teacher_steps"]}
    whole_head = not {*OUTPUTS}.isdisjoint(conversion.blended)
    return defaults | ({"masks": "off"} if tasks == NONE and whole_head else {})


def with_defaults(args, defaults: dict, conversion: Conversion, positions: int, bos: bool):
    """The flags with each that was left out, except those that depend on the number of samples.

    defaults: from defaults_of. positions: of the source model. bos: whether texts and prompts begin with the
    begin-of-sequence token. Raises UserError for flags that do not fit the model or this machine.
    """
    demo = conversion.model["name"] == DEMO
    tasks, text = args.tasks or default_sources(demo)[0], args.text or ([DEMO] if demo else [])
    text = [] if text == [NONE] else text
    chat = choose_chats(args.chat, text, conversion.model["path"])
    endless = [source for source in [*text, *chat] if parse_source(source).endless]
    if endless and not args.text_tokens:
        raise UserError(f"{endless[0]}: expected --text-tokens N, the tokens to take of it, found none")
    teacher = args.teacher and os.path.normpath(args.teacher)  # DIR.train/ lies next to DIR, not in DIR/
    length = sequence_length(args.text_length, TEXT_LENGTH, positions, 2, "--text-length")
    settled = OF_LENGTH if args.epochs is None else (*OF_LENGTH, "steps")
    left_out = {name: value for name, value in defaults.items()
                if name not in settled and getattr(args, name) is None}
    filled = replace(args, bos=bos, tasks=tasks, text=text, chat=chat, text_length=length, **left_out,
                     teacher=teacher or (SOURCE if tasks == NONE else None),
                     heldout_text=args.heldout_text or (DEMO if demo else "c4" if "c4" in text else SPLIT))
    if filled.student and filled.masks != "off":
        raise UserError(f"--student: expected --masks off with it, found {filled.masks}")
    return filled


def read_samples(sources: Sources, context: DataContext, every: int, begun: dict) -> Samples:
    """What is trained on and what is held out, tokenized for the checkpoint context.model. Raises UserError.

    every: steps between measurements. begun: the settings of the training that goes on, if one does: it reads
    the commits that it began with.
    """
    ranks = context.ranks
    COMMITS.update(begun.get(HUB_COMMITS, {}))
    if ranks.first and not begun:
        check_sources(sources.text, sources.chat)
    named = [*sources.text, *sources.chat, sources.heldout_text]
    COMMITS.update(checkpoints.of_first_rank(hub_commits(named) if ranks.first else None))
    texts = heldout_texts(sources, context)  # first: if it is refused, not after --text is tokenized
    pool = load_pool(sources, context)
    return Samples(pool, load_heldout(sources, context, texts, every))


def make_schedules(args, defaults: dict, conversion: Conversion, pool: Pool, row: int) -> Schedules:
    """The schedules of both trainings. args: the flags, with these defaults. row: tokens of a packed one."""
    common = {"clip": CLIP, "seed": args.seed, "save_steps": args.save_steps,
              "save_minutes": args.save_minutes, "print_every": args.print_every, "reduce": args.reduce,
              "tokens_per_microbatch": row, "loss_chunk": args.loss_chunk}
    batch = args.teacher_batch
    steps = args.teacher_steps or engine.epochs_to_steps(TEACHER_EPOCHS, len(pool.answered), batch)
    warmup = engine.warmup_for(defaults["teacher_warmup"], steps, share=5)
    teacher = Schedule(steps, batch, warmup, **common)
    steps, batch = args.steps, args.batch or defaults["batch"] or engine.batch_for(len(pool))
    if not steps:
        group_size = conversion.model["kv_heads"] // conversion.kv_heads
        epochs = args.epochs or (1 if args.tasks == NONE else engine.published_epochs(group_size))
        steps = engine.epochs_to_steps(epochs, len(pool), batch)
    if steps < 2 and args.masks != "off":
        raise UserError(f"--steps: expected at least 2 (the last fifth trains without masks), found {steps}")
    warmup = args.warmup or engine.warmup_for(defaults["warmup"], steps)
    return Schedules(Schedule(steps, batch, warmup, **common), teacher)


def choose_by_memory(args, conversion: Conversion, pool: Pool, schedules: Schedules, ranks,
                     rows: bool) -> Fitted:
    """What only costs or saves memory, by that of the ranks' devices, as memory.fit says.

    args: the flags, with their defaults. rows: on GPUs choose the tokens of packed rows, too.
    """
    cuda, compute = ranks.device.type == "cuda", getattr(torch, args.dtype)
    execution = Execution(compute=compute, recompute=bool(args.recompute), compile=args.compile)
    phases, cluster = phases_of(args, conversion, pool, execution, schedules), memory.cluster_of(ranks)
    phases = memory.fit(phases, cluster, cuda and args.recompute is None, cuda and rows)
    _, work, _, student = phases["student"]
    if work.recompute and not args.recompute:
        ranks.say("layers are recomputed: their activations do not fit on these devices otherwise")
    if cuda:
        gathered = f", weights gathered {'once a row' if work.whole else 'layer by layer'}"
        ranks.say(f"rows    of up to {student.tokens_per_microbatch} tokens" + gathered * (cluster.ranks > 1))
    teacher = phases["teacher"].schedule if schedules.teacher else None
    return Fitted(Schedules(student, teacher), replace(execution, recompute=work.recompute, whole=work.whole))


def phases_of(args, conversion: Conversion, pool: Pool, execution: Execution,
              schedules: Schedules) -> dict[str, Phase]:
    """The phases "teacher", if it has a schedule, and "student". args: the flags, with their defaults."""
    config, compute = load_config(conversion.model["path"]), execution.compute.itemsize
    student = Student(conversion.kv_heads, conversion.blended if args.masks != "off" else (), args.train)
    phases = {}
    for name, samples, trained in (("teacher", pool.answered, None), ("student", pool, student)):
        if schedule := getattr(schedules, name):
            work = Workload.of(config, samples, schedule.loss_chunk, execution.recompute, compute)
            title = f"pruning {conversion.title}" if trained else name
            phases[name] = Phase(title, work, trained, schedule)
    return phases


def rates_of(args) -> tuple[Rates, Rates]:
    """AdamW's hyperparameters of the student and of the teacher. args: the flags, with their defaults."""
    student = Rates(args.lr, args.beta2, args.weight_decay, args.merged_lr_factor, args.rest_lr_factor)
    return student, Rates(args.teacher_lr, args.beta2, args.weight_decay)


def settle(args, flags: list[Flag], conversion: Conversion, started: Started,
           ranks) -> tuple[Settings, TrainingRun]:
    """Read the samples, make the schedules and choose by memory. Raises UserError for what does not fit.

    args: the flags as given. flags: the stage's table of them.
    """
    source, defaults = conversion.model["path"], defaults_of(flags, conversion, args.tasks)
    positions, cuda = load_config(source).max_position_embeddings, ranks.device.type == "cuda"
    defaults["dtype"] = "bfloat16" if cuda else "float32"
    bos = bool(bos_prefix(load_tokenizer(source, args.bos)))
    args = with_defaults(args, defaults, conversion, positions, bos)
    directory = os.path.join(args.run, named("train", args.name))
    teacher = source if args.teacher == SOURCE else args.teacher or os.path.join(args.run, "teacher")
    # --force was obeyed before torchrun restarted the ranks
    force = args.force and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    begun = {} if force else checkpoints.of_first_rank(
        checkpoints.read_settings(directory) or checkpoints.read_settings(f"{teacher}.train"))

    sources = Sources(**{field.name: getattr(args, field.name) for field in fields(Sources)})
    context = DataContext(source, args.run, ranks.device, ranks, bos=bos)
    samples = read_samples(sources, context, args.heldout_every, begun)
    run = TrainingRun(directory, teacher, conversion, samples.pool, samples.heldout, ranks, args.dtype,
                      replace(started, args=args))

    row = args.tokens_per_microbatch or begun.get("tokens_per_microbatch")
    schedules = make_schedules(args, defaults, conversion, samples.pool, row or SHORTEST_ROW[cuda])
    rates, teacher_rates = rates_of(args)
    if find_teacher(run, args.teacher, force):
        if not args.teacher:
            check_teacher(run, schedules.teacher, teacher_rates)
        schedules = replace(schedules, teacher=None)

    fitted = choose_by_memory(args, conversion, samples.pool, schedules, ranks, rows=not row)
    resumed = {flag.attribute: getattr(args, flag.attribute) for flag in flags if flag.resumed}
    settings = Settings(
        teacher=args.teacher, masks=args.masks, train=args.train, seed=args.seed,
        loss=Loss(args.kl_on, args.l0_weight), mask_lr=args.mask_lr, rates=rates, teacher_rates=teacher_rates,
        schedules=fitted.schedules, execution=fitted.execution, force=force, resumed=resumed)
    return settings, run
