"""Stage 5: fine-tune a teacher, then turn the aligned model into a GQA student with L0 masks.

The teacher is the source model after supervised fine-tuning (SFT). The student starts as the aligned model:
L0 masks move each head from its own key and value projections to its group's, while KL + BiLD keep it close
to the teacher (Eq. 27-31).

Reads   RUN/aligned/ and RUN/merged/ from stage 4, the source model, and what to train on
Writes  RUN/teacher/  an ordinary checkpoint with the source's heads; skipped if it already exists
        RUN/train/    checkpoints step-N/ (sharded, the last two and the best), metrics.jsonl, curves.png,
                      tensorboard/ (if installed), heldout.npy (held-out text that is not measured here,
                      for stage 7); stage.json when training is complete
        RUN/tokens/   the tokens of --text

    torchrun --nproc-per-node 8 05_prune_train.py --run-dir runs/llama2-7b --no-bos   # one node of 8 GPUs
    torchrun --nproc-per-node 2 05_prune_train.py                           # demo model, minutes on two cores
    python 05_prune_train.py --run runs/tiny --steps 20 --teacher-steps 10  # a single process works too
    python 05_prune_train.py --run runs/llama2-7b --plan 8xA100-80GB        # estimate the cost; train nothing
    torchrun --nproc-per-node 8 05_prune_train.py --run-dir runs/llama2-7b --tasks none --text c4 \\
        --text-tokens 100000000                                             # the source is the teacher

Training samples come from the eight tasks, as in the paper, from chats and from texts, in one shuffled pool.
SFT learns the answers only (in a chat, the assistant's turns). In distillation answers get BiLD and all other
tokens KL, texts included; with --tasks none answers get both (--kl-on all). Texts and tasks' prompts begin
with the begin-of-sequence token if the tokenizer adds it to text (--bos, --no-bos). With --tasks none the
teacher is the untouched source. Dropout is off, whatever the config says. Before the first step and every
--heldout-every steps student and teacher are compared on held-out text and questions.

After 80% of the steps every mask is set to 0: the student is saved, rebuilt as a plain GQA model and trained
on. Where merging also changed W_Q and W_O (--merge closed-form or --refit), a mask blends the entire head.
--masks off trains merged/ directly, without masks or L0 term: the shorter way, compared with masks in
bench/RESULTS.md.

One run directory can hold several trainings: --name NAME writes RUN/train-NAME/ instead. To train a
finished student further, export it and start from there: --name more --student RUN/gqa --masks off.

The same command resumes from the last intact checkpoint; with the same number of processes, a killed run ends
bit-identical to an uninterrupted one (without --compile; on GPUs with --deterministic). On SIGTERM, SIGUSR1,
Ctrl-C, a terminal that hangs up or output that is closed, it finishes the step, saves and exits with 75
(torchrun itself exits with 1), so "05 && 06" stops there. torchrun waits 30 s for that save: pass
--shutdown-timeout 600 if it takes longer. --force moves train/ and teacher/ aside (to train.old-1/, ...) and
starts over; the same command, repeated, resumes the new training. A teacher given by --teacher is left alone.

With torchrun --nnodes N, RUN must be on a disk shared by all nodes; weights are sharded within a node and
replicated across nodes. Flags left out default to the published values (Appendix A; masks and AdamW as in the
authors' code), with --tasks none to values for text, or for the demo model to values that suit its size.
"""

import argparse
import common.waiting  # noqa: F401 - before torch
import json
import os
from dataclasses import fields, replace

import torch
from transformers.utils import is_flash_attn_2_available

from common import cli
from common.artifacts import RECORD, Claim, claim, input_digests, read_record, verify_files, write_record
from common.cli import Flag, run_stage, stage_parser
from common.data.corpus import SPLIT, Pool, Sources, load_pool
from common.data.demo import DEMO, default_sources
from common.data.generate import Origin, choose_chats
from common.data.rows import TABLE_NAMES
from common.data.tasks import TASKS
from common.data.text import NONE, is_generated, sequence_length
from common.errors import UserError
from common.method.losses import distillation_loss
from common.method.masks import blended_name, l0_loss, set_masks
from common.models import bos_prefix, fingerprint, load_config, load_tokenizer
from common.records import SOURCE
from common.reporting import plots
from common.training import checkpoints, engine, hardware, plan, students
from common.training.engine import FEWEST_STEPS, STOPPED, Job, Schedule, Step, steps
from common.training.heldout import QUESTIONS, heldout_texts, load_heldout
from common.training.metrics import METRICS, outcome, read_metrics, summarize
from common.training.sharding import Execution, free_memory, joined_ranks, sum_over_ranks
from common.training.students import MASKS, STAGE, Masks, Pair, Run, frozen, mask_figures, switch_step

TEXT_LENGTH = 512  # tokens per sample of text, if the model has that many positions
ATTENTIONS = ("packed", "sdpa", "eager", "flash_attention_2")

# The flags of this stage, one an entry: kind, help, default, and whether it must be the same to go on with a
# training. A default in brackets is [published, with --tasks none, for the demo model].
FLAGS = {
    "data": [
        Flag("tasks", str, "directory of TASK.train.jsonl or .parquet files, hub or none (default: hub; for "
             "the demo model: its tasks)", metavar="DIR"),
        Flag("only", TASKS, f"some of {', '.join(TASKS)}", TASKS, nargs="+", metavar="TASK"),
        Flag("text", str, f"c4, demo, .txt, {TABLE_NAMES} files with a column text, generated by the source "
             "model, generated:FILE, which continues FILE's documents, or none (default: none; for the demo "
             "model: demo)", nargs="+", metavar="SOURCE"),
        Flag("text-length", cli.positive, f"tokens per sample of text (default: {TEXT_LENGTH}, or the "
             "model's limit if lower)"),
        Flag("bos", bool, "begin every sample of text and every task's prompt with the begin-of-sequence "
             "token (default: if the tokenizer does so itself; the authors' code: no)"),
        Flag("text-tokens", cli.positive, "tokens to take from each source of text, and of generated chats "
             "(default: all; c4 and generated need this flag)"),
        Flag("chat", str, f"{TABLE_NAMES} files with a column messages, for the tokenizer's chat template, "
             "cut at the model's limit; generated; or none (default: generated if --text is and the model "
             "has a chat template)", nargs="+", metavar="SOURCE"),
    ],
    "teacher and student": [
        Flag("teacher", str, "SFT teacher, to share between runs, trained if missing; or source, the "
             "untouched model (default: RUN/teacher; with --tasks none: source)", metavar="DIR"),
        Flag("name", cli.name, "write RUN/train-NAME/ instead of RUN/train/"),
        Flag("student", str, "start from this exported student instead of merged/ (with --masks off)",
             metavar="DIR"),
        Flag("masks", (*MASKS, "off"), "l0-released: as in the authors' code, which moves them along a "
             "schedule, not by gradients alone; l0: by Eq. 29 alone; off: train merged/ directly, also the "
             "default with --tasks none where merging changed W_Q and W_O",
             ["l0-released", "l0-released", "l0"], resumed=True),
        Flag("train", ("all", "attention"), "the student's weights to train; attention: the others get no "
             "gradients and no optimizer state", "all", resumed=True),
    ],
    "length of training": [
        Flag("teacher-epochs", cli.epochs, "SFT epochs over samples with answers (published: 2)"),
        Flag("teacher-steps", cli.positive, "instead of --teacher-epochs"),
        Flag("epochs", cli.epochs, "pruning epochs (published: 5, 10, 15 for groups of 2, 4, 8 kv heads; "
             "other group sizes need this flag or --steps; 1 with --tasks none)"),
        Flag("steps", cli.positive, "instead of --epochs"),
    ],
    "optimization": [
        Flag("lr", cli.rate, "student's peak learning rate", [1e-5, 2e-4, 2e-3], resumed=True),
        Flag("merged-lr-factor", cli.factor, "factor on --lr for the shared projections (the authors' code: "
             "2)", 1.0, resumed=True),
        Flag("rest-lr-factor", cli.factor, "factor on --lr for all weights outside attention",
             [1.0, 0.25, 1.0], resumed=True),
        Flag("mask-lr", cli.rate, "learning rate of log alpha", [1e-2, 1e-2, 0.5], resumed=True),
        Flag("l0-weight", cli.non_negative_float, "L0 weight", [1.0, 1.0, 30.0], resumed=True),
        Flag("batch", cli.batch, f"samples per step over all ranks; with --tasks none for {FEWEST_STEPS} "
             "steps, within 2 to 64", [64, None, 16]),
        Flag("warmup", cli.positive, "warm-up steps, by default at most a tenth of all steps", [32, 32, 20]),
        Flag("teacher-lr", cli.rate, "SFT peak learning rate", [1e-5, 1e-5, 1e-3]),
        Flag("teacher-batch", cli.batch, "SFT samples per step", [128, 128, 32]),
        Flag("teacher-warmup", cli.positive, "SFT warm-up steps, by default at most a fifth of all steps",
             [16, 16, 20]),
        Flag("beta2", cli.beta, "of AdamW", [0.95, 0.95, 0.999], resumed=True),
        Flag("weight-decay", cli.probability, "of AdamW; norms, biases, masks and the shared projections "
             "have none", [1e-4, 1e-4, 0.0], resumed=True),
        Flag("clip", cli.non_negative_float, "maximum gradient norm; 0: no clipping", 1.0),
        Flag("kl-on", ("prompt", "all"), "tokens of the KL term: prompt, as in the authors' code; all: "
             "answers, too", ["prompt", "all", "prompt"], resumed=True),
        Flag("temperature", cli.factor, "of the KL term", 1.0, resumed=True),
        Flag("seed", cli.seed, "random seed for batches and mask noise", 0, resumed=True),
    ],
    "held-out measurement: KL to the teacher, next-token loss, top-1 agreement": [
        Flag("heldout-text", str, "c4 or demo (their held-out parts), a file or generated as for --text, "
             "split (the held-out parts of --text), or none (default: c4 if --text has it; demo for the "
             "demo model; else split)", metavar="SOURCE"),
        Flag("heldout-sequences", cli.positive, "number of texts to measure, of --text-length tokens each; "
             "as many others are written to heldout.npy, for stage 7; with split, fewer where the held-out "
             "parts are short; of generated text, a tenth of what is trained on", 32),
        Flag("heldout-chats", cli.non_negative, "number of chats to measure, of the held-out parts of "
             "--chat; of generated ones, a tenth of what is trained on", 32),
        Flag("heldout-questions", cli.non_negative, "first N of each task's validation split (default: "
             f"{QUESTIONS}, of tasks that have one)"),
        Flag("heldout-every", cli.positive, "steps between measurements; merged/, the first and the last "
             "step are measured, too", 50),
    ],
    "execution": [
        Flag("tokens-per-microbatch", cli.positive, "tokens per packed row (default: 4096; 2048 on a CPU)"),
        Flag("loss-chunk", cli.positive, "tokens per chunk of logits", 512),
        Flag("attention", ATTENTIONS, "packed: torch's fused kernels on samples as they are packed; the "
             "others are transformers'", "packed"),
        Flag("dtype", ("float32", "bfloat16"), "of the computation; weights and optimizer state are float32 "
             "(default: bfloat16 on GPUs, float32 on CPUs)"),
        Flag("recompute", bool, "activation checkpointing of every layer (default: on GPUs whose memory "
             "does not suffice without it, by --plan)"),
        Flag("compile", True, "torch.compile every decoder layer: faster on GPUs, after a minute or more"),
        Flag("deterministic", True, "on GPUs: only kernels that give the same bits each time, slower"),
        Flag("reduce", ("step", "row"), "reduce gradients over ranks once a step, or after every packed "
             "row: more traffic, but no rank holds its rows' gradients complete", "step"),
        Flag("save-minutes", cli.non_negative_float, "maximum minutes between checkpoints", 20),
        Flag("save-steps", cli.positive, "also save every so many steps"),
        Flag("print-every", cli.positive, "steps between printed lines; metrics.jsonl has every step", 1),
        Flag("plan", str, f"only print memory, FLOPs and time on {', '.join(hardware.HARDWARE)} or, as "
             f"1x{hardware.CPU}, on this machine's", metavar="[NODESx]COUNTxDEVICE"),
    ],
}
DEMO_STEPS, DEMO_TEACHER_STEPS = 350, 100
TEACHER_EPOCHS = 2
OF_LENGTH = ("batch", "warmup", "teacher_warmup")  # flags whose default make_schedules chooses
RESUMED = [flag.attribute for flags in FLAGS.values() for flag in flags if flag.resumed]
# how --force recognizes the training that it started, with the samples and the initial checkpoints
FORCED_BY = [*RESUMED, *(flag.attribute for title in ("length of training", "optimization")
                         for flag in FLAGS[title] if not flag.resumed)]


def parse():
    parser = stage_parser(__doc__)
    for title, flags in FLAGS.items():
        parser.section(title)
        for flag in flags:
            parser.add_flag(flag)
    args = parser.parse_args()
    if args.compile and args.deterministic:  # a resumed run begins with other rows
        raise UserError("--deterministic: expected no --compile, whose kernels depend on earlier rows' sizes")
    if args.plan:
        hardware.parse_hardware(args.plan)  # before text is tokenized
        if args.dtype == "float32" and hardware.on_gpus(args.plan, None):
            raise UserError("--plan: expected --dtype bfloat16, which it assumes, found float32")
    return args


def defaults_of(pair: Pair, tasks: str | None) -> dict:
    """Flag -> its value where it is left out, of those that depend on what is trained.

    Without tasks: learning rates that suit small steps, highest for attention, which merging changed;
    measured on a model of 135M parameters, nothing larger. For the demo model: its masks must close within
    hundreds of steps, not ten thousand.
    """
    column = 1 if tasks == NONE else 2 if pair.model["name"] == DEMO else 0
    defaults = {flag.attribute: flag.default[column] for rows in FLAGS.values() for flag in rows
                if isinstance(flag.default, list)}
    return defaults | ({"masks": "off"} if tasks == NONE and "o_proj" in pair.blended else {})


def with_defaults(args, defaults: dict, pair: Pair, positions: int) -> argparse.Namespace:
    """A copy of the flags with each that was left out, except those that depend on the number of samples.

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
    teacher = args.teacher and os.path.normpath(args.teacher)  # DIR.train/ lies next to DIR, not in DIR/
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


def make_schedules(args, defaults: dict, pair: Pair, pool: Pool, cuda: bool, has_teacher: bool) -> dict:
    """The schedules of the "teacher" (unless it is given) and of the "student". args: with these defaults."""
    common = {"clip": args.clip, "seed": args.seed, "save_steps": args.save_steps,
              "save_minutes": args.save_minutes, "print_every": args.print_every, "reduce": args.reduce,
              "tokens_per_microbatch": args.tokens_per_microbatch or (4096 if cuda else 2048)}
    schedules = {}
    if not (has_teacher and args.teacher):
        epochs, batch = args.teacher_epochs or TEACHER_EPOCHS, args.teacher_batch
        steps = args.teacher_steps or engine.epochs_to_steps(epochs, len(pool.answered), batch)
        warmup = args.teacher_warmup or engine.warmup_for(defaults["teacher_warmup"], steps, share=5)
        schedules["teacher"] = Schedule(steps, batch, warmup, **common)
    steps, batch = args.steps, args.batch or defaults["batch"] or engine.batch_for(len(pool))
    if not steps:
        group_size = pair.model["kv_heads"] // pair.kv_heads
        epochs = args.epochs or (1 if args.tasks == NONE else engine.published_epochs(group_size))
        steps = engine.epochs_to_steps(epochs, len(pool), batch)
    if steps < 2 and args.masks != "off":
        raise UserError(f"--steps: expected at least 2 (the last fifth trains without masks), found {steps}")
    warmup = args.warmup or engine.warmup_for(defaults["warmup"], steps)
    return schedules | {"student": Schedule(steps, batch, warmup, **common)}


def distill(step: Step, teacher, args) -> None:
    """Eq. 30: the gradients of KL + BiLD, accumulated over this rank's packed samples."""
    student, head = step.job.trainee, teacher.net.lm_head
    for row in step.rows:
        with torch.no_grad():
            hidden = teacher(row)  # [tokens, hidden]; logits are formed in the loss, a chunk at a time
        loss, terms = distillation_loss(
            student, row, hidden, head, args.kl_on, args.temperature, args.loss_chunk)
        step.backward(loss, **terms)


def masked_step(step: Step, masks: Masks, teacher, args) -> None:
    """Eq. 31: Eq. 30 for the student that the masks blend, plus the L0 term, which closes them."""
    student = step.job.trainee
    drawn = masks.draw(step.number)  # z of Eq. 27, 28 [layers, kv heads], the same on every rank
    z = drawn.detach().requires_grad_()  # a leaf: all packed rows of all ranks add up their dL/dz in it
    set_masks(student.net, z)
    distill(step, teacher, args)
    sum_over_ranks([z])
    size, target = masks.expected(), masks.target(step.number)
    l0 = l0_loss(size.mean(), target)  # Eq. 29
    torch.autograd.backward([drawn, args.l0_weight * l0], [z.grad, None])  # into log_alpha
    step.update(l0=l0.detach(), mask_target=target, **mask_figures(size, z))  # clip, then AdamW
    masks.settle(step.number)
    set_masks(student.net, masks.noiseless())  # for the held-out measurement


def gqa_step(step: Step, teacher, args) -> None:
    """Eq. 30 for a student without masks."""
    distill(step, teacher, args)
    step.update()


def train_masked(run: Run, args, schedule: Schedule, teacher, saved: str | None) -> bool:
    """The first 80 % of the steps: masks close, heads move from their own projections to their group's.

    saved: the checkpoint to resume from. Returns False if a signal stopped it.
    """
    pair, until = run.pair, switch_step(schedule.steps)
    student = students.masked_student(
        pair, run.ranks, run.execution, args.masks, args.seed, fresh=not saved, train=args.train)
    optimizer = students.masked_optimizer(student, student_rates(args), args.masks, args.mask_lr)
    flops = plan.distillation_flops(student, teacher, args.train)
    job = Job(student, optimizer, run.directory, run.ranks, flops)
    if saved:
        checkpoints.load(job, saved)
    masks = MASKS[args.masks](student.replicated, schedule.steps, args.seed)
    closed = torch.zeros_like(masks.noiseless())

    for step in steps(job, schedule, run.pool, until):  # each saves, and stops on a signal, as scheduled
        set_masks(student.net, closed)
        run.heldout.measure_start(step, teacher, run.chunk)  # merged/, before the first step
        masked_step(step, masks, teacher, args)
        run.heldout.measure(step, teacher, run.chunk)  # every --heldout-every steps
    if job.stopped:
        return False
    ends = masks.noiseless()
    run.ranks.say(f"switch  after step {until}: masks, {float(ends.mean()):.3f} on average, set to 0; "
                  f"rebuilt with {pair.kv_heads} kv heads")
    if ends.any():
        run.ranks.say(f"warning: {int((ends > 0).sum())} of {ends.numel()} masks had not closed: these heads "
                      "change at once, which the last steps may not repair; more --steps let masks close")
    return True


def train_gqa(run: Run, args, schedule: Schedule, teacher, saved: str | None, switched: bool) -> bool:
    """The last 20 % of the steps, or all with --masks off: the student is a plain GQA model.

    saved: the checkpoint to resume from; switched: it is the masked student's last, whose masks are all set
    to 0 by reading only the shared projections and what no mask blends. Returns False if a signal stopped
    it.
    """
    pair = run.pair
    student = students.gqa_student(pair, run.ranks, run.execution, fresh=not saved, train=args.train)
    optimizer = students.student_optimizer(student, student_rates(args), pair.blended)
    flops = plan.distillation_flops(student, teacher, args.train)
    job = Job(student, optimizer, run.directory, run.ranks, flops)
    if saved:
        names = (lambda name: blended_name(name, pair.blended)) if switched else (lambda name: name)
        checkpoints.load(job, saved, names)

    for step in steps(job, schedule, run.pool):
        run.heldout.measure_start(step, teacher, run.chunk)  # merged/, before the first step
        gqa_step(step, teacher, args)
        run.heldout.measure(step, teacher, run.chunk)
    return not job.stopped


def train_student(run: Run, args, schedule: Schedule) -> bool:
    """Distill from the teacher, with masks and then as a GQA model. Returns False if a signal stopped it."""
    ranks, pair = run.ranks, run.pair
    settings = student_settings(run, args, schedule)
    checkpoints.begin(run.directory, settings, ranks)
    if checkpoints.of_first_rank(os.path.exists(os.path.join(run.directory, RECORD))):
        record = read_record(run.directory, STAGE, pair.model)
        if ranks.first:
            verify_files(run.directory, record)
        ranks.say(f"05_prune_train: {run.directory} is complete; --force starts over")
        return True
    read = [run.teacher] if args.teacher != SOURCE else []
    read += [run.pool.texts.path] if run.pool.texts else []
    inputs = pair.inputs | input_digests(args.run, read)
    ranks.say(f"pruning {pair.title}: {schedule.steps} steps of {schedule.batch} samples on {ranks}")
    if ranks.first:
        run.heldout.write_text(run.directory)
    teacher = frozen(run.teacher, ranks, run.execution)
    saved = checkpoints.newest(run.directory, ranks)
    start = checkpoints.step_of(saved) if saved else 0
    switch = switch_step(schedule.steps) if args.masks != "off" else 0

    if start < switch:
        if not train_masked(run, args, schedule, teacher, saved):
            return False
        free_memory(ranks)
        start, saved = switch, checkpoints.path_of(run.directory, switch)
    if not train_gqa(run, args, schedule, teacher, saved, switched=bool(switch) and start == switch):
        return False
    if ranks.first:
        write_student(run, schedule, settings, inputs)
    return True


def teacher_rates(args) -> students.Rates:
    return students.Rates(args.teacher_lr, args.beta2, args.weight_decay)


def student_rates(args) -> students.Rates:
    return students.Rates(args.lr, args.beta2, args.weight_decay, args.merged_lr_factor,
                          args.rest_lr_factor)


def student_settings(run: Run, args, schedule: Schedule) -> dict:
    """Everything that must match on resume: flags, samples and the checkpoints the student starts from."""
    pair = run.pair
    tuned = {name: getattr(args, name) for name in RESUMED}
    shared = {"merge": pair.merge, "kv_heads": pair.kv_heads}
    starts = {"aligned": pair.aligned, "merged": pair.merged, "teacher": run.teacher}
    starts |= {"student": pair.exported} if pair.exported else {}
    starts = {name: fingerprint(path) for name, path in starts.items()}
    return schedule.to_resume() | tuned | shared | run.computation | run.pool.description() | starts


def write_student(run: Run, schedule: Schedule, settings: dict, inputs: dict[str, str]) -> None:
    """Write curves.png and then the record, which marks training as complete."""
    pair, directory = run.pair, run.directory
    lines = read_metrics(os.path.join(directory, METRICS))
    summary = settings | summarize(lines)
    plots.curves(os.path.join(directory, "curves.png"), lines, pair.title)
    record = replace(run.started, inputs=inputs).record(pair.model, summary)
    write_record(directory, record, of=checkpoints.own_files(directory, checkpoints.OF_STUDENT))
    print(f"wrote   {directory}")
    print(f"05_prune_train: {schedule.steps} steps, {summary['tokens']} tokens, {outcome(lines)}, in "
          f"{run.started.clock()} s")


def phases_of(run: Run, args, schedules: dict[str, Schedule]) -> list[tuple]:
    """(title, work, student, schedule) of each training, for plan."""
    pair = run.pair
    student = plan.Student(pair.kv_heads, pair.blended if args.masks != "off" else (), args.train)
    phases = [(f"pruning {pair.title}", workload(run, run.pool), student, schedules["student"])]
    if "teacher" in schedules:
        phases.insert(0, ("teacher", workload(run, run.pool.answered), None, schedules["teacher"]))
    return phases


def workload(run: Run, samples) -> plan.Workload:
    execution = run.execution.recompute, run.execution.compute.itemsize
    return plan.Workload.of(load_config(run.pair.model["path"]), samples, run.chunk, *execution)


def print_plan(run: Run, args, schedules: dict[str, Schedule]) -> None:
    """Print what training needs on --plan's hardware. Raises UserError if a phase does not fit."""
    phases = phases_of(run, args, schedules)
    hours = plan.print_phases(phases, args.plan)
    if run.heldout.sets:
        work = workload(run, [sample for samples in run.heldout.sets.values() for sample in samples])
        times = 1 + run.heldout.measurements(schedules["student"].steps)  # merged/ first
        hours += plan.print_heldout(work, times, args.plan)
    generates = any(map(is_generated, (*args.text, *args.chat, args.heldout_text)))
    print(f"05_prune_train: {plan.duration(hours)} on {args.plan}"
          f"{', including the teacher' * (len(phases) > 1)}{', besides generating text' * generates}")


def prune_train(args, started: Claim, ranks) -> int:
    """Load the samples, then train teacher and student or resume either. Returns the exit code."""
    pair = students.read_pair(args.run, ranks, args.student)
    source = pair.model["path"]
    defaults = defaults_of(pair, args.tasks)
    args = with_defaults(args, defaults, pair, load_config(source).max_position_embeddings)
    args.bos = bool(bos_prefix(load_tokenizer(source), args.bos))
    sources = Sources(**{field.name: getattr(args, field.name) for field in fields(Sources)})
    origin = Origin(source, args.run, ranks.device, ranks, plan=bool(args.plan))
    texts = heldout_texts(sources, origin)  # first: if it is refused, not after --text is tokenized
    pool = load_pool(sources, origin)
    heldout = load_heldout(sources, origin, texts, args.heldout_every)
    cuda = hardware.on_gpus(args.plan, ranks)
    dtype = args.dtype or ("bfloat16" if cuda else "float32")
    execution = Execution(compute=getattr(torch, dtype), attention=args.attention,
                          recompute=bool(args.recompute), compile=args.compile)
    directory = os.path.join(args.run, cli.named("train", args.name))
    teacher = source if args.teacher == SOURCE else args.teacher or os.path.join(args.run, "teacher")
    run = Run(directory, teacher, pair, pool, heldout, ranks, execution, args.loss_chunk,
              replace(started, args=args))
    forced = what_force_began(run, args)
    args.force = args.force and not checkpoints.begun(directory, forced)
    has_teacher = students.find_teacher(run, args.teacher, args.force)  # before anything is moved
    schedules = make_schedules(args, defaults, pair, pool, cuda, has_teacher)
    if has_teacher and "teacher" in schedules:
        students.check_teacher(run, schedules.pop("teacher"), teacher_rates(args))
    if args.recompute is None and cuda:  # eager attention's matrices are not in the plan
        phases = phases_of(run, args, schedules)
        if args.attention == "eager" or plan.too_large(phases, args.plan, ranks):
            run = replace(run, execution=replace(execution, recompute=True))
            ranks.say("layers are recomputed: their activations do not fit on these devices otherwise")
    if args.plan:
        if ranks.first:
            print_plan(run, args, schedules)
        return 0
    if args.force:
        earlier = [] if args.teacher else [teacher, teacher + ".train"]
        checkpoints.start_anew(directory, earlier, forced, ranks)
    checkpoints.refuse_foreign(directory)  # before hours of the teacher's
    return train(run, args, schedules)


def train(run: Run, args, schedules: dict[str, Schedule]) -> int:
    """Train the teacher, if there is a schedule for it, then the student. Returns the exit code."""
    if "teacher" not in schedules:
        title = "the source" if args.teacher == SOURCE else "the teacher"
        run.ranks.say(f"reads   {run.teacher}: {title}")
    else:
        if args.teacher:  # shared: another run may be training it, too
            parent, name = os.path.split(os.path.abspath(run.teacher))
            claim(name, argparse.Namespace(run=parent))
        if not students.train_teacher(run, schedules["teacher"], teacher_rates(args)):
            return STOPPED
    free_memory(run.ranks)  # of the teacher that was trained
    return 0 if train_student(run, args, schedules["student"]) else STOPPED


def what_force_began(run: Run, args) -> dict:
    """How --force recognizes the training that it started: by flags, samples, aligned/ and merged/."""
    flags = {name: getattr(args, name) for name in FORCED_BY}
    starts = {"starts": [fingerprint(path) for path in (run.pair.aligned, run.pair.merged)]}
    return json.loads(json.dumps(flags | run.pool.description() | starts))


def main() -> int:
    args = parse()
    started = claim(STAGE, args)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums in the switch, in any order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no kernel here reads any
    with joined_ranks() as ranks:
        return prune_train(args, started, ranks)


if __name__ == "__main__":
    run_stage(main)
