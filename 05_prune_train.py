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
tokens KL, texts included. Texts and tasks' prompts begin with the begin-of-sequence token if the tokenizer
adds it to text (--bos, --no-bos). With --tasks none the teacher is the untouched source. Dropout is off,
whatever the config says. Before the first step and every --heldout-every steps student and teacher are
compared on held-out text and questions.

After 80% of the steps every mask is set to 0: the student is saved, rebuilt as a plain GQA model and trained
on. Where merging also changed W_Q and W_O (--merge closed-form or --refit), a mask blends the whole head.
--masks off trains merged/ directly, without masks or L0 term: the shorter way, and at a rate that suits the
start no worse where both were measured (bench/RESULTS.md).

Several trainings can stand in one run directory: --name NAME writes RUN/train-NAME/ instead. To train a
finished student further, export it and start from there: --name more --student RUN/gqa --masks off.

The same command resumes from the last intact checkpoint; with the same number of processes, a killed run ends
bit-identical to an uninterrupted one (on GPUs that takes --deterministic, not yet run on one). On SIGTERM,
Ctrl-C, a terminal that hangs up or output that is closed it finishes the step, saves and exits with 75
(torchrun itself exits with 1), so "05 && 06" stops there. torchrun waits 30 s for that save: pass
--shutdown-timeout 600 if it takes longer. --force moves train/ and teacher/ aside (to train.old-1/, ...) and
starts over; the same command, repeated, resumes the new training. A teacher given by --teacher is left alone.

With torchrun --nnodes N, RUN must be on a disk shared by all nodes; weights are sharded within a node and
replicated across nodes. Flags left out default to the published values (Appendix A; masks and AdamW as in the
authors' code), with --tasks none to values for text, or for the demo model to values that suit its size.
"""

import common.waiting  # noqa: F401 - before torch
import os
from dataclasses import replace

import torch

from common import cli
from common.artifacts import RECORD, Claim, claim, input_digests, read_record, verify_files, write_record
from common.cli import Flag, UserError, run_stage, stage_parser
from common.data.tasks import TASKS
from common.method.masks import blended_name, l0_loss, set_masks
from common.models import bos_prefix, fingerprint, load_config, load_tokenizer
from common.records import SOURCE
from common.reporting import plots
from common.training import checkpoints, students
from common.training.defaults import FEWEST_STEPS, TEXT_LENGTH, defaults_of, make_schedules, with_defaults
from common.training.distill import (
    MASKS,
    Masks,
    distillation_flops,
    distillation_loss,
    mask_figures,
    switch_step,
)
from common.training.engine import STOPPED, Job, Schedule, Step, steps
from common.training.hardware import CPU, HARDWARE, on_gpus
from common.training.heldout import QUESTIONS, heldout_texts, load_heldout
from common.training.metrics import METRICS, outcome, read_metrics, summarize
from common.training.plan import must_recompute
from common.training.pool import load_pool
from common.training.run import STAGE, Run, start_anew, was_forced
from common.training.sharding import Execution, free_memory, joined_ranks, sum_over_ranks
from common.training.teacher import find_teacher, frozen, train_teacher

ATTENTIONS = ("packed", "sdpa", "eager", "flash_attention_2")

# The flags of this stage, one a row: kind, help, default, and whether it must be the same to go on with a
# training. A default in brackets is [published, with --tasks none, for the demo model].
FLAGS = {
    "data": [
        Flag("tasks", str, "directory of TASK.train.jsonl or .parquet files, hub or none (default: hub; for "
             "the demo model: its tasks)", metavar="DIR"),
        Flag("only", TASKS, f"some of {', '.join(TASKS)}", TASKS, nargs="+", metavar="TASK"),
        Flag("text", str, "c4, demo, .txt, .jsonl, .json, .json.gz or .parquet files with a column text, "
             "generated by the source model, generated:FILE, which continues FILE's documents, or none "
             "(default: none; for the demo model: demo)", nargs="+", metavar="SOURCE"),
        Flag("text-length", cli.positive, f"tokens per sample of text (default: {TEXT_LENGTH}, or the "
             "model's limit if lower)"),
        Flag("bos", bool, "begin every sample of text and every task's prompt with the begin-of-sequence "
             "token (default: if the tokenizer does so itself; the authors' code: no)"),
        Flag("text-tokens", cli.positive, "tokens to take from each source of text, and of generated chats "
             "(default: all; c4 and generated need this flag)"),
        Flag("chat", str, ".jsonl, .json, .json.gz or .parquet files with a column messages, for the "
             "tokenizer's chat template, cut at the model's limit; generated; or none (default: generated "
             "if --text is and the model has a chat template)", nargs="+", metavar="SOURCE"),
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
        Flag("teacher-epochs", cli.passes, "SFT epochs over samples with answers (published: 2)"),
        Flag("teacher-steps", cli.positive, "instead of --teacher-epochs"),
        Flag("epochs", cli.passes, "pruning epochs (published: 5, 10, 15 for groups of 2, 4, 8 kv heads; "
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
        Flag("batch", cli.positive, f"samples per step over all ranks; with --tasks none for {FEWEST_STEPS} "
             "steps, within 2 to 64", [64, None, 16]),
        Flag("warmup", cli.positive, "warm-up steps, by default at most a tenth of all steps", [32, 32, 20]),
        Flag("teacher-lr", cli.rate, "SFT peak learning rate", [1e-5, 1e-5, 1e-3]),
        Flag("teacher-batch", cli.positive, "SFT samples per step", [128, 128, 32]),
        Flag("teacher-warmup", cli.positive, "SFT warm-up steps, by default at most a fifth of all steps",
             [16, 16, 20]),
        Flag("beta2", cli.beta, "of AdamW", [0.95, 0.95, 0.999], resumed=True),
        Flag("weight-decay", cli.probability, "of AdamW; norms, biases, masks and the shared projections "
             "have none", [1e-4, 1e-4, 0.0], resumed=True),
        Flag("clip", cli.non_negative_float, "maximum gradient norm; 0: no clipping", 1.0),
        Flag("kl-on", ("prompt", "all"), "tokens of the KL term: prompt, as in the authors' code; all: "
             "answers, too", "prompt", resumed=True),
        Flag("temperature", cli.factor, "of the KL term", 1.0, resumed=True),
        Flag("seed", cli.seed, "random seed for batches and mask noise", 0, resumed=True),
    ],
    "held-out measurement: KL to the teacher, next-token loss, top-1 agreement": [
        Flag("heldout-text", str, "c4 or demo (their held-out parts), a file or generated as for --text, "
             "split (samples of --text, which are not trained on), or none (default: c4 if --text has it; "
             "demo for the demo model; else split)", metavar="SOURCE"),
        Flag("heldout-sequences", cli.positive, "number of texts to measure, of --text-length tokens each; "
             "as many others are written to heldout.npy, for stage 7; with split, a tenth of all at "
             "most", 32),
        Flag("heldout-chats", cli.non_negative, "number of chats kept out of training, a tenth of them at "
             "most", 32),
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
        Flag("deterministic", True, "on GPUs: only kernels that give the same bits each time, slower"),
        Flag("reduce", ("step", "row"), "reduce gradients over ranks once a step, or after every packed "
             "row: more traffic, but no rank holds its rows' gradients complete", "step"),
        Flag("save-minutes", cli.non_negative_float, "maximum minutes between checkpoints", 20),
        Flag("save-steps", cli.positive, "also save every so many steps"),
        Flag("print-every", cli.positive, "steps between printed lines; metrics.jsonl has every step", 1),
        Flag("plan", str, f"only print memory, FLOPs and time on {', '.join(HARDWARE)} or, as 1x{CPU}, on "
             "this machine's", metavar="[NODESx]COUNTxDEVICE"),
    ],
}
RESUMED = [flag.attribute for flags in FLAGS.values() for flag in flags if flag.resumed]
# what --force knows its own training by, beside the samples and where it starts
FORCED_BY = [*RESUMED, *(flag.attribute for title in ("length of training", "optimization")
                         for flag in FLAGS[title] if not flag.resumed)]


def parse():
    parser = stage_parser(__doc__)
    for title, flags in FLAGS.items():
        parser.section(title)
        for flag in flags:
            parser.add_flag(flag)
    args = parser.parse_args()
    if args.plan and args.dtype == "float32" and on_gpus(args.plan, None):
        raise UserError("--plan: expected --dtype bfloat16, which it assumes, found float32")
    return args


def distill(step: Step, teacher, args) -> None:
    """Eq. 30: the gradients of KL + BiLD, accumulated over this rank's packed samples."""
    student, head = step.job.trainee, teacher.net.lm_head
    for row in step.rows:
        with torch.no_grad():
            hidden = teacher(row)  # [tokens, hidden]; logits are formed in the loss, a chunk at a time
        loss, kl, bild = distillation_loss(
            student, row, hidden, head, args.kl_on, args.temperature, args.loss_chunk)
        step.backward(loss, kl=kl, bild=bild)


def masked_step(step: Step, masks: Masks, teacher, args) -> None:
    """Eq. 31: Eq. 30 for the student that the masks blend, plus the L0 term, which closes them."""
    student = step.job.trainee
    drawn = masks.draw(step.number)  # z of Eq. 27, 28 [layers, kv heads], the same on every rank
    z = drawn.detach().requires_grad_()  # a leaf: all rows of all ranks add up their dL/dz in it
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


def train_masked(run: Run, schedule: Schedule, teacher, saved: str | None) -> bool:
    """The first 80 % of the steps: masks close, heads move from their own projections to their group's.

    saved: the checkpoint to resume from. Returns False if a signal stopped it.
    """
    args, pair, until = run.args, run.pair, switch_step(schedule.steps)
    student = students.masked_student(
        pair, run.ranks, run.execution, args.masks, args.seed, fresh=not saved, train=args.train)
    optimizer = students.masked_optimizer(student, student_rates(args), args.masks, args.mask_lr)
    job = Job(student, optimizer, run.directory, run.ranks, distillation_flops(student, teacher, args.train))
    if saved:
        checkpoints.load(job, saved)
    masks = MASKS[args.masks](student.replicated, schedule.steps, args.seed)
    closed = torch.zeros_like(masks.noiseless())

    for step in steps(job, schedule, run.pool, until):  # each saves, and stops on a signal, as scheduled
        set_masks(student.net, closed)
        run.heldout.measure_start(step, teacher, args.loss_chunk)  # merged/, before the first step
        masked_step(step, masks, teacher, args)
        run.heldout.measure(step, teacher, args.loss_chunk)  # every --heldout-every steps
    if job.stopped:
        return False
    run.ranks.say(f"switch  after step {until}: masks, {float(masks.noiseless().mean()):.3f} on average, "
                  f"set to 0; rebuilt with {pair.kv_heads} kv heads")
    return True


def train_gqa(run: Run, schedule: Schedule, teacher, saved: str | None, switched: bool) -> bool:
    """The last 20 % of the steps, or all with --masks off: the student is a plain GQA model.

    saved: the checkpoint to resume from; switched: it is the masked student's last, whose masks are all set
    to 0 by reading the shared projections alone, and what no mask blends. Returns False if a signal stopped
    it.
    """
    args, pair = run.args, run.pair
    student = students.gqa_student(pair, run.ranks, run.execution, fresh=not saved, train=args.train)
    optimizer = students.gqa_optimizer(student, student_rates(args), pair.blended)
    job = Job(student, optimizer, run.directory, run.ranks, distillation_flops(student, teacher, args.train))
    if saved:
        names = (lambda name: blended_name(name, pair.blended)) if switched else (lambda name: name)
        checkpoints.load(job, saved, names)

    for step in steps(job, schedule, run.pool):
        run.heldout.measure_start(step, teacher, args.loss_chunk)  # merged/, before the first step
        gqa_step(step, teacher, args)
        run.heldout.measure(step, teacher, args.loss_chunk)
    return not job.stopped


def train_student(run: Run, schedule: Schedule) -> bool:
    """Distill from the teacher, with masks and then as a GQA model. Returns False if a signal stopped it."""
    args, ranks, pair = run.args, run.ranks, run.pair
    settings = student_settings(run, schedule)
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
    saved = checkpoints.resume_from(run.directory, schedule, ranks)
    start = checkpoints.step_of(saved) if saved else 0
    switch = switch_step(schedule.steps) if args.masks != "off" else 0

    if start < switch:
        if not train_masked(run, schedule, teacher, saved):
            return False
        free_memory(ranks)
        start, saved = switch, checkpoints.path_of(run.directory, switch)
    if not train_gqa(run, schedule, teacher, saved, switched=bool(switch) and start == switch):
        return False
    if ranks.first:
        write_student(run, schedule, settings, inputs)
    return True


def student_rates(args) -> students.Rates:
    return students.Rates(args.lr, args.beta2, args.weight_decay, args.merged_lr_factor,
                          args.rest_lr_factor)


def student_settings(run: Run, schedule: Schedule) -> dict:
    """Everything that must match on resume: flags, samples and the checkpoints the student starts from."""
    pair = run.pair
    tuned = {name: getattr(run.args, name) for name in RESUMED}
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
    write_record(directory, record, of=checkpoints.own_files(directory))
    print(f"wrote   {directory}")
    print(f"05_prune_train: {schedule.steps} steps, {summary['tokens']} tokens, {outcome(lines)}, in "
          f"{run.started.clock()} s")


def prune_train(args, started: Claim, ranks) -> int:
    """Load the samples, then train teacher and student or resume either. Returns the exit code."""
    pair = students.read_pair(args.run, ranks, args.student)
    source = pair.model["path"]
    defaults = defaults_of(FLAGS, pair, args.tasks)
    args = with_defaults(args, defaults, pair, load_config(source).max_position_embeddings)
    args.bos = bool(bos_prefix(load_tokenizer(source), args.bos))
    texts = heldout_texts(args, source, ranks)  # first: if it is refused, not after --text is tokenized
    pool = load_pool(args, source, ranks)
    heldout = load_heldout(args, source, pool, texts, ranks)
    cuda = on_gpus(args.plan, ranks)
    dtype = args.dtype or ("bfloat16" if cuda else "float32")
    execution = Execution(compute=getattr(torch, dtype), attention=args.attention,
                          recompute=bool(args.recompute))
    run = Run(args, ranks, pair, pool, heldout, execution, replace(started, args=args))
    args.force = args.force and not was_forced(run, FORCED_BY)
    has_teacher = find_teacher(run)  # refuses one before anything is moved
    schedules = make_schedules(args, defaults, pair, pool, cuda, has_teacher)
    if args.recompute is None and cuda and must_recompute(run, schedules):
        run = replace(run, execution=replace(execution, recompute=True))
        ranks.say("layers are recomputed: their activations do not fit on these devices otherwise")
    if args.plan:
        from common.training.plan import print_plan

        if ranks.first:
            print_plan(run, schedules)
        return 0
    if args.force:
        start_anew(run, FORCED_BY)
    if has_teacher:
        ranks.say(f"reads   {run.teacher}: {'the source' if args.teacher == SOURCE else 'the teacher'}")
    elif not train_teacher(run, schedules["teacher"]):
        return STOPPED
    free_memory(ranks)  # of the teacher that was trained
    return 0 if train_student(run, schedules["student"]) else STOPPED


def main() -> int:
    args = parse()
    started = claim(STAGE, args)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums in the switch, in any order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no kernel here reads any
    with joined_ranks() as ranks:
        try:
            return prune_train(args, started, ranks)
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(" GPU ")[0]  # the rest is advice on the allocator
            raise UserError(f"{reason} Lower --tokens-per-microbatch or --loss-chunk, or pass --recompute; "
                            "the last checkpoint is kept") from error


if __name__ == "__main__":
    run_stage(main)
