"""Stage 5: fine-tune a teacher, then turn the aligned model into a GQA student with L0 masks.

The teacher is the source model after supervised fine-tuning (SFT). The student starts as the aligned model:
L0 masks move each head from its own key and value projections to its group's, while KL + BiLD keep it close
to the teacher (Eq. 27-31).

Reads   RUN/aligned/ and RUN/merged/ from stage 4, the source model, and what to train on
Writes  RUN/teacher/  an ordinary checkpoint with the source's heads; skipped if it already exists
        RUN/train/    checkpoints step-N/ (sharded, the last two and the best), metrics.jsonl, curves.png,
                      tensorboard/ (if installed); stage.json when training is complete
        RUN/tokens/   the tokens of --text, and held-out ones that are not measured here, for stage 7

    torchrun --nproc-per-node 8 05_prune_train.py --run-dir runs/llama2-7b --no-bos   # one node of 8 GPUs
    torchrun --nproc-per-node 2 05_prune_train.py                           # demo model, minutes on two cores
    python 05_prune_train.py --run runs/tiny --steps 20 --teacher-steps 10  # a single process works too
    python -m pipelines.plan --run runs/llama2-7b --on 8xA100-80GB          # estimate the cost; train nothing
    torchrun --nproc-per-node 8 05_prune_train.py --run-dir runs/llama2-7b --tasks none --text c4 \\
        --text-tokens 100000000                                             # the source is the teacher

Training samples come from the eight tasks, as in the paper, from chats and from texts, in one shuffled pool.
SFT learns the answers only (in a chat, the assistant's turns). In distillation answers get BiLD and all other
tokens KL, texts included; with --tasks none answers get both (--kl-on all). Texts and tasks' prompts begin
with the begin-of-sequence token if the tokenizer adds it to text (--bos, --no-bos). With --tasks none the
teacher is the untouched source. Nothing is random but the masks: dropout and routers' noise are off. Before
the first step and every --heldout-every steps student and teacher are compared on held-out samples.

After 80% of the steps every mask is set to 0: the student is saved, rebuilt as a plain GQA model and trained
on. Where merging also changed W_Q and W_O (--merge closed-form or --refit), a mask blends the entire head.
--masks off trains merged/ directly, without masks or L0 term: the shorter way, compared with masks in
bench/RESULTS.md.

One run directory can hold several trainings: --name NAME writes RUN/train-NAME/ instead. To train a
finished student further, export it and start from there: --name more --student RUN/gqa --masks off.

The same command resumes from the last intact checkpoint; with the same number of processes, a killed run ends
bit-identical to an uninterrupted one (without --compile; on GPUs with --deterministic). On SIGTERM, SIGUSR1,
Ctrl-C or a terminal that hangs up, it finishes the step, saves and exits with 75
(torchrun itself exits with 1), so "05 && 06" stops there. torchrun waits 30 s for that save: pass
--shutdown-timeout 600 if it takes longer. --force moves train/ and teacher/ aside (to train.old-1/, ...) and
starts over; repeat the command without it to resume. A teacher given by --teacher is left alone.

With torchrun --nnodes N, RUN must be on a disk shared by all nodes; weights are sharded within a node and
replicated across nodes. Flags left out default to the published values (Appendix A; masks and AdamW as in the
authors' code), with --tasks none to values for text, or for the demo model to values that suit its size.
"""

import argparse
import common.run.openmp  # noqa: F401 - before torch
import os
from dataclasses import replace

import torch

from common.data.data_sets import DATA_SET
from common.data.rows import TABLE_NAMES
from common.data.tasks import TASKS
from common.method.masks import l0_loss
from common.models.blending import blended_name, set_masks
from common.models.head import head_of
from common.models.load import fingerprint
from common.reporting import plots
from common.run import artifact, flags
from common.run.errors import UserError, run_stage
from common.run.flags import Cases, Choice, Flag, Switch, named, stage_parser
from common.run.kinds import SOURCE
from common.training import checkpoints, students
from common.training.chunked import distillation_loss
from common.training.conversion import STAGE, TrainingRun, read_conversion
from common.training.engine import FEWEST_STEPS, STOPPED, Job, Schedule, Step, steps
from common.training.flops import distillation_flops
from common.training.heldout import QUESTIONS
from common.training.lines import METRICS, OPEN_MASKS, outcome, read_metrics, summarize
from common.training.mask_state import MASKS, Masks, mask_metrics, switch_step
from common.training.settings import TEXT_LENGTH, Loss, Settings, settle
from common.training.sharding import free_memory, joined_ranks, sum_over_ranks
from common.training.teacher import build_teacher, train_teacher

# The flags of this stage. Cases: the published default, and the one with --tasks none. The demo model's own
# defaults are in common/data/demo_model/training.json.
FLAGS = {
    "data": [
        Flag("tasks", str, "directory of TASK.train.jsonl or .parquet files, hub or none (default: hub; for "
             "the demo model: its tasks)", metavar="DIR"),
        Choice("only", TASKS, f"some of {', '.join(TASKS)}", TASKS, nargs="+", metavar="TASK"),
        Flag("text", str, f"c4, demo, {DATA_SET} or .txt, {TABLE_NAMES} files with a column text, generated "
             "by the source model, generated:FILE, which continues FILE's documents, or none (default: none; "
             "for the demo model: demo)", nargs="+", metavar="SOURCE"),
        Flag("text-length", flags.positive, f"tokens per sample of text (default: {TEXT_LENGTH}, or the "
             "model's limit if lower)"),
        Switch("bos", argparse.BooleanOptionalAction, "begin every sample of text and every task's prompt "
               "with the begin-of-sequence token (default: if the tokenizer does so itself; the authors' "
               "code: no)"),
        Flag("text-tokens", flags.positive, "tokens to take from each source of text, and of chats that are "
             "generated or, at most, from the hub (default: all; c4, hf: and generated need this flag)"),
        Flag("chat", str, f"{DATA_SET} or {TABLE_NAMES} files with a column messages, for the tokenizer's "
             "chat template, cut at the model's limit; generated; or none (default: generated if --text is "
             "and the model has a chat template)", nargs="+", metavar="SOURCE"),
    ],
    "teacher and student": [
        Flag("teacher", str, "SFT teacher, to share between runs, trained if missing; or source, the "
             "untouched model (default: RUN/teacher; with --tasks none: source)", metavar="DIR"),
        Flag("name", flags.name, "write RUN/train-NAME/ instead of RUN/train/"),
        Flag("student", str, "start from this exported student instead of merged/ (with --masks off)",
             metavar="DIR"),
        Choice("masks", (*MASKS, "off"), "l0-released: as in the authors' code, which moves them along a "
               "schedule, not by gradients alone; l0: by Eq. 29 alone; off: train merged/ directly, also the "
               "default with --tasks none where merging changed W_Q and W_O",
               Cases(published="l0-released", text="l0-released"), resumed=True),
        Choice("train", ("all", "attention"), "the student's weights to train; attention: the others get no "
               "gradients and no optimizer state", "all", resumed=True),
    ],
    "length of training": [
        Flag("teacher-steps", flags.positive, "SFT steps (published: 2 epochs over samples with answers)"),
        Flag("epochs", flags.epochs, "pruning epochs (published: 5, 10, 15 for groups of 2, 4, 8 kv heads; "
             "other group sizes need this flag or --steps; 1 with --tasks none)"),
        Flag("steps", flags.positive, "instead of --epochs"),
    ],
    "optimization": [
        Flag("lr", flags.rate, "student's peak learning rate", Cases(published=1e-5, text=2e-4),
             resumed=True),
        Flag("merged-lr-factor", flags.factor, "factor on --lr for the shared projections (the authors' "
             "code: 2)", 1.0, resumed=True),
        Flag("rest-lr-factor", flags.factor, "factor on --lr for all weights outside attention",
             Cases(published=1.0, text=0.25), resumed=True),
        Flag("mask-lr", flags.rate, "learning rate of log alpha", Cases(published=1e-2, text=1e-2),
             resumed=True),
        Flag("l0-weight", flags.non_negative_float, "L0 weight", Cases(published=1.0, text=1.0),
             resumed=True),
        Flag("batch", flags.batch, f"samples per step over all ranks; with --tasks none for {FEWEST_STEPS} "
             "steps, within 2 to 64", Cases(published=64, text=None)),
        Flag("warmup", flags.positive, "warm-up steps, by default at most a tenth of all steps",
             Cases(published=32, text=32)),
        Flag("teacher-lr", flags.rate, "SFT peak learning rate", Cases(published=1e-5, text=1e-5)),
        Flag("teacher-batch", flags.batch, "SFT samples per step", Cases(published=128, text=128)),
        Flag("beta2", flags.beta, "of AdamW", Cases(published=0.95, text=0.95), resumed=True),
        Flag("weight-decay", flags.probability, "of AdamW; norms, biases, masks and the shared projections "
             "have none", Cases(published=1e-4, text=1e-4), resumed=True),
        Choice("kl-on", ("prompt", "all"), "tokens of the KL term: prompt, as in the authors' code; all: "
               "answers, too", Cases(published="prompt", text="all"), resumed=True),
        Flag("seed", flags.seed, "random seed for batches and mask noise", 0, resumed=True),
    ],
    "held-out measurement: KL to the teacher, next-token loss, top-1 agreement": [
        Flag("heldout-text", str, "c4, demo or hf:... (their held-out parts), a file or generated as for "
             "--text, split (the held-out parts of --text), or none (default: c4 if --text has it; demo for "
             "the demo model; else split)", metavar="SOURCE"),
        Flag("heldout-sequences", flags.positive, "number of texts to measure, of --text-length tokens each, "
             "and of chats, of the held-out parts of --chat; as many others are kept for stage 7; fewer "
             "where held-out parts are short; of what is generated, a tenth of what is trained on", 32),
        Flag("heldout-questions", flags.non_negative, "first N of each task's validation split (default: "
             f"{QUESTIONS}, of tasks that have one)"),
        Flag("heldout-every", flags.positive, "steps between measurements; merged/, the first and the last "
             "step are measured, too", 50),
    ],
    "execution": [
        Flag("tokens-per-microbatch", flags.positive, "tokens per packed row (default: 2048 on a CPU; on "
             "GPUs a rank's share of a batch, at least 4096, as far as memory suffices)"),
        Flag("loss-chunk", flags.positive, "tokens per chunk of logits", 512),
        Choice("dtype", ("float32", "bfloat16"), "of the computation; weights and optimizer state are "
               "float32 (default: bfloat16 on GPUs, float32 on CPUs)"),
        Switch("recompute", argparse.BooleanOptionalAction, "activation checkpointing of every layer "
               "(default: on GPUs whose memory does not suffice without it)"),
        Switch("compile", "store_true", "torch.compile every decoder layer: faster on GPUs, after a minute "
               "or more"),
        Switch("deterministic", "store_true", "on GPUs: only kernels that give the same bits each time, "
               "slower"),
        Choice("reduce", ("step", "row"), "reduce gradients over ranks once a step, or after every packed "
               "row: more traffic, but no rank holds its rows' gradients complete", "step"),
        Flag("save-minutes", flags.non_negative_float, "maximum minutes between checkpoints", 20),
        Flag("save-steps", flags.positive, "also save every so many steps"),
        Flag("print-every", flags.positive, "steps between printed lines; metrics.jsonl has every step", 1),
    ],
}


def parse():
    parser = stage_parser(__doc__)
    for title, section in FLAGS.items():
        parser.section(title)
        for flag in section:
            parser.add_flag(flag)
    args = parser.parse_args()
    if args.compile and args.deterministic:  # a resumed run begins with other rows
        raise UserError("--deterministic: expected no --compile, whose kernels depend on earlier rows' sizes")
    return args


def distill(step: Step, teacher, loss: Loss) -> None:
    """Eq. 30: the gradients of KL + BiLD, accumulated over this rank's packed samples."""
    student, head = step.job.trainee, head_of(teacher.net)
    for row in step.rows:
        with torch.no_grad():
            hidden = teacher(row)  # [tokens, hidden]; logits are formed in the loss, a chunk at a time
        total, terms = distillation_loss(
            student, row, hidden, head, loss.kl_on, step.schedule.loss_chunk)
        step.backward(total, **terms)


def masked_step(step: Step, masks: Masks, teacher, loss: Loss) -> None:
    """Eq. 31: Eq. 30 for the student that the masks blend, plus the L0 term, which closes them."""
    student = step.job.trainee
    drawn = masks.draw(step.number)  # z of Eq. 27, 28 [layers, kv heads], the same on every rank
    z = drawn.detach().requires_grad_()  # a leaf: all packed rows of all ranks add up their dL/dz in it
    set_masks(student.net, z)
    distill(step, teacher, loss)
    sum_over_ranks([z])
    size, target = masks.expected(), masks.target(step.number)
    l0 = l0_loss(size.mean(), target)  # Eq. 29
    torch.autograd.backward([drawn, loss.l0_weight * l0], [z.grad, None])  # into log_alpha
    step.update(l0=l0.detach(), mask_target=target, **mask_metrics(size, z))  # clip, then AdamW
    masks.after_update(step.number)
    noiseless = masks.noiseless()
    set_masks(student.net, noiseless)  # for the held-out measurement
    if step.number + 1 == switch_step(step.schedule.steps):
        step.metrics[OPEN_MASKS] = int((noiseless > 0).sum())


def gqa_step(step: Step, teacher, loss: Loss) -> None:
    """Eq. 30 for a student without masks."""
    distill(step, teacher, loss)
    step.update()


def train_masked(run: TrainingRun, settings: Settings, teacher, saved: str | None) -> bool:
    """The first 80 % of the steps: masks close, heads move from their own projections to their group's.

    saved: the checkpoint to resume from. Returns False if a signal stopped it.
    """
    conversion, schedule, kind = run.conversion, settings.schedules.student, settings.masks
    until = switch_step(schedule.steps)
    student = students.masked_student(
        conversion, run.ranks, settings.execution, kind, settings.seed, fresh=not saved, train=settings.train)
    optimizer = students.masked_optimizer(student, settings.rates, kind, settings.mask_lr)
    flops = distillation_flops(student, teacher, settings.train)
    job = Job(student, optimizer, run.directory, run.ranks, flops)
    checkpoints.load(job, saved)
    masks = MASKS[kind](student.replicated, schedule.steps, settings.seed)
    set_masks(student.net, torch.zeros_like(masks.noiseless()))

    for step in steps(job, schedule, run.pool, until):  # each saves, and stops on a signal, as scheduled
        run.heldout.measure_start(step, teacher)  # merged/, before the first step
        masked_step(step, masks, teacher, settings.loss)
        run.heldout.measure(step, teacher)  # every --heldout-every steps
    if job.stopped:
        return False
    ends = masks.noiseless()
    run.ranks.say(f"switch  after step {until}: masks, {float(ends.mean()):.3f} on average, set to 0; "
                  f"rebuilt with {conversion.kv_heads} kv heads")
    if step.metrics[OPEN_MASKS]:
        run.ranks.say(f"warning: {step.metrics[OPEN_MASKS]} of {ends.numel()} masks had not closed: these "
                      "heads change at once, which the last steps may not repair; more --steps let masks "
                      "close")
    return True


def train_gqa(run: TrainingRun, settings: Settings, teacher, saved: str | None, switched: bool) -> bool:
    """The last 20 % of the steps, or all with --masks off: the student is a plain GQA model.

    saved: the checkpoint to resume from; switched: it is the masked student's last, whose masks are all set
    to 0 by reading only the shared projections and what no mask blends. Returns False if a signal stopped
    it.
    """
    conversion, blended = run.conversion, run.conversion.blended
    student = students.gqa_student(
        conversion, run.ranks, settings.execution, fresh=not saved, train=settings.train)
    optimizer = students.student_optimizer(student, settings.rates, blended)
    names = (lambda name: blended_name(name, blended)) if switched else (lambda name: name)
    flops = distillation_flops(student, teacher, settings.train)
    job = Job(student, optimizer, run.directory, run.ranks, flops)
    checkpoints.load(job, saved, names)

    for step in steps(job, settings.schedules.student, run.pool):
        run.heldout.measure_start(step, teacher)
        gqa_step(step, teacher, settings.loss)
        run.heldout.measure(step, teacher)
    return not job.stopped


def train_student(run: TrainingRun, settings: Settings) -> bool:
    """Distill from the teacher, with masks and then as a GQA model. Returns False if a signal stopped it."""
    ranks, conversion, schedule = run.ranks, run.conversion, settings.schedules.student
    recorded = settings_to_resume(run, settings)
    checkpoints.begin(run.directory, recorded, ranks)
    if checkpoints.of_first_rank(os.path.exists(os.path.join(run.directory, artifact.RECORD))):
        ranks.say(f"05_prune_train: {run.directory} is complete; --force starts over")
        return True
    read = [run.teacher] if settings.teacher != SOURCE else []
    read += [os.path.dirname(run.pool.texts.path)] if run.pool.texts else []
    inputs = conversion.inputs | artifact.input_digests(run.started.args.run, read)
    ranks.say(f"pruning {conversion.title}: {schedule.steps} steps of {schedule.batch} samples on {ranks}")
    teacher = build_teacher(run.teacher, ranks, settings.execution)
    saved = checkpoints.newest(run.directory, ranks)
    start = checkpoints.step_of(saved) if saved else 0
    switch = switch_step(schedule.steps) if settings.masks != "off" else 0

    if start < switch:
        if not train_masked(run, settings, teacher, saved):
            return False
        free_memory(ranks)
        start, saved = switch, checkpoints.path_of(run.directory, switch)
    done = train_gqa(run, settings, teacher, saved, switched=bool(switch) and start == switch)
    if done and ranks.first:
        write_student(run, schedule, recorded, inputs)
    return done


def settings_to_resume(run: TrainingRun, settings: Settings) -> dict:
    """Everything that must match on resume: flags, samples and the checkpoints the student starts from."""
    conversion = run.conversion
    starts = {"aligned": conversion.aligned, "merged": conversion.merged, "teacher": run.teacher}
    starts |= {"student": conversion.exported} if conversion.exported else {}
    starts = checkpoints.of_first_rank({name: fingerprint(path) for name, path in starts.items()}
                                       if run.ranks.first else None)
    shared = {"merge": conversion.merge, "kv_heads": conversion.kv_heads}
    return (settings.schedules.student.to_resume() | settings.resumed | shared | run.computation
            | run.pool.description() | starts)


def write_student(run: TrainingRun, schedule: Schedule, recorded: dict, inputs: dict[str, str]) -> None:
    """Write curves.png and then the record, which marks training as complete."""
    conversion, directory = run.conversion, run.directory
    lines = read_metrics(os.path.join(directory, METRICS))
    summary = recorded | summarize(lines)
    plots.curves(os.path.join(directory, "curves.png"), lines, conversion.title)
    started = replace(run.started, inputs=inputs)
    record = started.record(conversion.model, summary, heldout=run.heldout.left)
    artifact.write_record(directory, record)
    print(f"wrote   {directory}")
    print(f"05_prune_train: {schedule.steps} steps, {summary['tokens']} tokens, {outcome(lines)}, in "
          f"{run.started.clock()} s")


def is_made_by(started: artifact.Started, directory: str) -> bool:
    """Whether a training is complete, by this command and from these inputs: then nothing else is read, and
    no data set of the hub is asked for. Raises UserError if its files are not as it wrote them.
    """
    record = artifact.load_record(directory)
    if record is None or artifact.difference(started, record):
        return False
    artifact.verify_files(directory, record)
    return True


def prune_train(args, started: artifact.Started, ranks) -> int:
    """Load the samples, then train teacher and student or resume either. Returns the exit code."""
    conversion = read_conversion(args.run, ranks, args.student)
    directory = os.path.join(args.run, named("train", args.name))
    known = replace(started, inputs=conversion.inputs)
    if checkpoints.of_first_rank(ranks.first and not args.force and is_made_by(known, directory)):
        ranks.say(f"found   {directory}: complete, by this command and from these inputs; --force starts "
                  "over")
        return 0
    table = [flag for section in FLAGS.values() for flag in section]
    settings, run = settle(args, table, conversion, started, ranks)
    if settings.force:
        earlier = [] if settings.teacher else [run.teacher, run.teacher + ".train"]
        checkpoints.start_anew([run.directory, *earlier], ranks)
    checkpoints.refuse_foreign(run.directory, ranks)  # before hours of the teacher's
    return train(run, settings)


def train(run: TrainingRun, settings: Settings) -> int:
    """Train the teacher, if there is a schedule for it, then the student. Returns the exit code."""
    schedule = settings.schedules.teacher
    if schedule is None:
        title = "the source" if settings.teacher == SOURCE else "the teacher"
        run.ranks.say(f"reads   {run.teacher}: {title}")
    else:
        if settings.teacher:  # shared: another run may be training it, too
            parent, name = os.path.split(os.path.abspath(run.teacher))
            artifact.begin_stage(name, replace(run.started.args, run=parent))
        if not train_teacher(run, schedule, settings.teacher_rates, settings.execution):
            return STOPPED
    free_memory(run.ranks)  # of the teacher that was trained
    return 0 if train_student(run, settings) else STOPPED


def main() -> int:
    args = parse()
    started = artifact.begin_stage(STAGE, args)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums in the switch, in any order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no kernel here reads any
    with joined_ranks() as ranks:
        return prune_train(args, started, ranks)


if __name__ == "__main__":
    run_stage(main)
