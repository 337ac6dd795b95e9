"""Stage 5: train. First a teacher (SFT of the untouched model), then the student: L0 masks move each head from its own
key/value projection to its group's, while KL + BiLD keep it close to the teacher (Eq. 27-31).

Reads   RUN/aligned/, RUN/merged/ (of either --merge of 04_align.py), the model that stage 1 read, the eight tasks' training sets
Writes  RUN/teacher/   an ordinary checkpoint with the source's heads; skipped when it stands already
        RUN/train/     checkpoints step-N/ (sharded, the last two), metrics.jsonl, curves.png, tensorboard/ (where it is
                       installed); stage.json when it is done

    torchrun --nproc-per-node 8 05_prune_train.py --run-dir runs/llama2-7b     # one node of 8 GPUs
    torchrun --nproc-per-node 2 05_prune_train.py                              # the embedded model, minutes on two cores
    python 05_prune_train.py --run runs/tiny --steps 20 --teacher-steps 10     # a single process works too
    python 05_prune_train.py --run runs/llama2-7b --plan 8xA100-80GB           # what it will take; trains nothing

--masks off trains merged/ itself, without masks and the L0 term: the short way where merged/ is near its source already.
Where merging changed W_Q and W_O too (--merge closed-form), a mask blends its whole head: W_Q, W_K, W_V and W_O.

With torchrun --nnodes N, RUN lies on a disk that all nodes share; weights are sharded within a node and replicated over nodes.
After 80% of the steps the masks are gone: the student is saved, built anew as the GQA model it has become, and trained on.

The same command again goes on after the last whole checkpoint; a run that was killed ends as if it had not been, to
the bit, at the same number of processes. SIGTERM and Ctrl-C save at the end of the step (torchrun waits 30 s for that: give
it --shutdown-timeout 600 where a save takes longer). --force moves train/ and teacher/ aside (to train.old/, teacher.old/)
and begins anew; a teacher named by --teacher stays. Flags left out take the published values (Appendix A), or for the
embedded model values that suit its size.
"""

import argparse
import gc
import json
import math
import os
import re
import shutil
from dataclasses import asdict

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from common.artifacts import (
    RECORD,
    check_input,
    check_same_model,
    claim,
    read_record,
    record,
    verify_files,
    write_directory,
    write_json,
    write_record,
)
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.tasks import TASKS, load_task, tokenize
from common.method import masks
from common.method.losses import bild, chunked, cross_entropy, kl
from common.models import DEMO, DEMO_HOME, fingerprint, geometry, load_config, load_tokenizer, source_model
from common.reporting import plots
from common.training import budget, checkpoints
from common.training.engine import Phase, Plan, read_metrics, train
from common.training.sharding import build, joined_ranks

ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}  # the paper names none: the usual ones, no decay
# A mask's first gradients are sigmoid'(START) / (layers * heads), ~1e-7, so Adam's usual eps of 1e-8 would show. While z is
# exactly 1 they come from Eq. 29 alone and are as small again; with the usual memory of 1000 steps a mask that the loss
# once held open would then never close.
MASK_ADAM = {"betas": (0.9, 0.9), "eps": 1e-12, "weight_decay": 0.0}
SWITCH = 0.8  # share of the steps after which every mask is 0 and the student is a GQA model (Appendix A)
PUBLISHED = {"lr": 1e-5, "mask_lr": 1e-2, "l0_weight": 1.0, "batch": 64, "warmup": 32, "teacher_lr": 1e-5, "teacher_batch": 128, "teacher_warmup": 16}
EMBEDDED = {"lr": 2e-3, "mask_lr": 0.5, "l0_weight": 30.0, "batch": 16, "warmup": 20, "teacher_lr": 1e-3, "teacher_batch": 32, "teacher_warmup": 20,
            "steps": 350, "teacher_steps": 100}  # its masks have hundreds of steps to close in, not ten thousand: larger rate and weight


def parse():
    parser = stage_parser(__doc__)
    parser.section("what is trained on what")
    parser.add_argument("--tasks", default=None, metavar="DIR", help="TASK.train.jsonl files, or hub (default: hub; the embedded tasks for demo)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--teacher", default=None, metavar="DIR", help="the SFT teacher, to share between runs; made there if missing (default: RUN/teacher)")
    parser.add_argument("--masks", choices=("l0", "off"), default="l0", help="l0: as the paper; off: train the merged model directly")
    parser.section("length of the two phases")
    parser.add_argument("--teacher-epochs", type=float, default=2, help="SFT passes over the training sets")
    parser.add_argument("--teacher-steps", type=positive, default=None, help="instead of --teacher-epochs")
    parser.add_argument("--epochs", type=float, default=None, help="pruning passes (default: 5, 10, 15 for half, a quarter, an eighth of the kv heads)")
    parser.add_argument("--steps", type=positive, default=None, help="instead of --epochs")
    parser.section("optimization")
    parser.add_argument("--lr", type=float, default=None, help="student's initial learning rate (published: 1e-5)")
    parser.add_argument("--merged-lr-factor", type=float, default=1.0, help="of the new shared projections, times --lr (the authors' code: 2)")
    parser.add_argument("--mask-lr", type=float, default=None, help="learning rate of log alpha (published: 1e-2)")
    parser.add_argument("--l0-weight", type=float, default=None, help="weight of Eq. 29 in Eq. 31 (published: 1)")
    parser.add_argument("--batch", type=positive, default=None, help="samples per pruning step, all ranks together (published: 64)")
    parser.add_argument("--warmup", type=positive, default=None, help="learning-rate warm-up steps of pruning (published: 32)")
    parser.add_argument("--teacher-lr", type=float, default=None, help="published: 1e-5")
    parser.add_argument("--teacher-batch", type=positive, default=None, help="published: 128")
    parser.add_argument("--teacher-warmup", type=positive, default=None, help="published: 16")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient norm, 0 = off")
    parser.add_argument("--kl-on", choices=("prompt", "all"), default="prompt", help="tokens of the KL term: prompt, as the authors' code; all, as Eq. 30 reads")
    parser.add_argument("--seed", type=int, default=0, help="of batches and mask noise")
    parser.section("how it runs")
    parser.add_argument("--tokens-per-microbatch", type=positive, default=None, help="tokens packed into one row (default: 4096; 2048 on a CPU)")
    parser.add_argument("--loss-chunk", type=positive, default=512, help="tokens whose logits exist at a time")
    parser.add_argument("--attention", choices=("packed", "sdpa", "eager", "flash_attention_2"), default="packed", help="packed: torch's fused kernel sample by sample; the others are transformers'")
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=None, help="keep only the input of each layer for the backward pass (default: on GPUs)")
    parser.add_argument("--save-minutes", type=float, default=20, help="longest time between checkpoints")
    parser.add_argument("--save-steps", type=positive, default=None, help="steps between checkpoints, beside --save-minutes (default: none)")
    parser.add_argument("--print-every", type=positive, default=1, help="steps between printed lines; metrics.jsonl has all")
    parser.add_argument("--plan", default=None, metavar="COUNTxDEVICE", help=f"print memory, operations and time on that hardware, and leave ({', '.join(budget.HARDWARE)})")
    return parser.parse_args()


def row_flops(config, row, predicted: int) -> float:
    """Of one forward pass over a row; a token attends to those of its sample up to itself."""
    return budget.forward_flops(config, row.input_ids.numel(), int((row.position_ids + 1).sum()), predicted)


class Sft(Phase):
    """Supervised fine-tuning: cross-entropy on answer tokens, averaged per sample, then over the batch."""

    def __init__(self, trainee, chunk: int):
        self.trainee, self.chunk = trainee, chunk

    def row_loss(self, row):
        def loss(kind, at, logits):
            return (cross_entropy(logits.float(), row.targets[at]) * row.answer_weight[at]).sum()

        pieces = [("answer", at) for at in row.answer_at.split(self.chunk)]
        return self.trainee(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), {}

    def flops(self, row):
        return 3 * row_flops(self.trainee.net.config, row, len(row.answer_at))


class Distillation(Phase):
    """Eq. 30: KL + BiLD to the teacher, for a student without masks."""

    def __init__(self, student, teacher, args):
        self.student, self.teacher, self.kl_on, self.chunk = student, teacher, args.kl_on, args.loss_chunk

    def row_loss(self, row):
        with torch.no_grad():
            teacher_hidden = self.teacher(row)
        teacher_head = self.teacher.net.lm_head
        kl_weight = row.prompt_weight if self.kl_on == "prompt" else row.all_weight
        parts = {name: torch.zeros((), device=row.targets.device) for name in ("kl", "bild")}

        def loss(kind, at, student):
            with torch.no_grad():
                teacher = teacher_head(teacher_hidden[at]).float()
            total, student = 0, student.float()
            for name, per_token, weight in (("kl", kl, kl_weight), ("bild", bild, row.answer_weight)):
                if name == kind or (name == "kl" and self.kl_on == "all"):
                    part = (per_token(student, teacher) * weight[at]).sum()
                    parts[name] += part.detach()
                    total = total + part
            return total

        pieces = [("kl", at) for at in row.prompt_at.split(self.chunk)] + [("bild", at) for at in row.answer_at.split(self.chunk)]
        return self.student(row, lambda hidden, lm_head: chunked(loss, pieces, hidden, lm_head.weight)), parts

    def flops(self, row):
        predicted = len(row.prompt_at) + len(row.answer_at)
        return 3 * row_flops(self.student.net.config, row, predicted) + row_flops(self.teacher.net.config, row, predicted)


class MaskedDistillation(Distillation):
    """Eq. 31: the same, with the L0 term that moves the masks from 1 to 0."""

    def __init__(self, student, teacher, steps: int, args):
        super().__init__(student, teacher, args)
        self.steps, self.seed, self.l0_weight = steps, args.seed, args.l0_weight

    def begin_step(self, step: int) -> None:
        """Draw this step's masks."""
        self.drawn = masks.draw(self.student.log_alpha, self.seed, step)
        self.z = self.drawn.detach().requires_grad_()  # a leaf: rows add up its gradient, end_step passes it on
        masks.set_masks(self.student.net, self.z)

    def end_step(self, step: int) -> dict:
        """Pass the masks' gradient, summed over ranks, and that of Eq. 29 on to log_alpha."""
        goal = masks.target(step, self.steps)
        dist.all_reduce(self.z.grad)
        world = dist.get_world_size()  # row losses were scaled by it for FSDP's mean
        l0 = masks.l0_loss(self.student.log_alpha, goal)
        torch.autograd.backward([self.drawn, self.l0_weight * l0], [self.z.grad / world, None])
        size = masks.expected(self.student.log_alpha.detach())
        return {"l0": float(l0.detach()), "mask_target": goal, "mask_expected": float(size.mean()), "mask_mean": float(self.z.detach().mean()),
                "mask_per_layer": [round(number, 5) for number in size.mean(1).tolist()]}

    def after_update(self, step: int) -> None:
        masks.clamp(self.student.log_alpha)


def make_optimizer(trainee, lr: float, shared: str | None = None, shared_lr: float = 0.0, mask_lr: float = 0.0) -> torch.optim.AdamW:
    """AdamW over the weights, those whose name matches `shared`, and the masks where there are any, each with its learning rate."""
    named = list(trainee.net.named_parameters())
    chosen = [p for name, p in named if shared and re.search(shared, name)]
    rest = [p for name, p in named if not (shared and re.search(shared, name))]
    groups = [{"params": rest, "initial_lr": lr, **ADAM}]
    if chosen:
        groups.append({"params": chosen, "initial_lr": shared_lr, **ADAM})
    if trainee.log_alpha is not None:
        groups.append({"params": [trainee.log_alpha], "initial_lr": mask_lr, **MASK_ADAM})
    return torch.optim.AdamW(groups, lr=lr)


def load_samples(tasks, source: str, tokenizer, ranks) -> list:
    """The training sets of the tasks, tokenized, one task after another."""
    samples = []
    for task in tasks:
        examples, read = load_task(task, "train", source)
        samples += [tokenize(example, tokenizer) for example in examples]
        ranks.say(f"reads   {read}: {len(examples)} samples")
    return samples


def begin(directory: str, plan: Plan, more: dict, ranks) -> dict:
    """Make the phase's directory and return its settings; one begun with other settings is refused, not continued."""
    settings = {name: value for name, value in asdict(plan).items() if name not in ("save_steps", "save_minutes", "print_every")} | more
    path = os.path.join(directory, "plan.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            before = json.load(file)
        changed = [f"{name} {before.get(name)} -> {settings.get(name)}" for name in settings if before.get(name) != settings[name]]
        if changed:
            raise UserError(f"{directory} was begun with other settings ({', '.join(changed)}): give the same, or --force to begin anew")
    elif ranks.first:
        write_json(path, settings)
    dist.barrier()
    return settings


def resume(directory: str, steps: int, ranks) -> tuple[str | None, int]:
    """The checkpoint to go on from, and its step; (None, 0) at the beginning."""
    path = checkpoints.newest(directory, ranks)
    step = checkpoints.step_of(path) if path else 0
    if path:
        ranks.say(f"resumes {directory} after step {step} of {steps}")
    return path, step


def train_teacher(args, described, samples, plan, teacher, tokenizer, how, ranks, clock) -> bool:
    """SFT of the untouched source model; writes teacher/ and removes its checkpoints. False when stopped by a signal."""
    source, directory = described["path"], teacher + ".train"
    config = load_config(source)
    ranks.say(f"teacher {source}: {plan.steps} steps of {plan.batch} samples on {ranks.world} {ranks.device.type}")
    settings = begin(directory, plan, {"lr": args.teacher_lr, "samples": len(samples)}, ranks)
    saved, start = resume(directory, plan.steps, ranks)
    trainee = build(config, ranks, torch.float32, sources=None if saved else lambda name: (source, name), **how)
    optimizer = make_optimizer(trainee, args.teacher_lr)
    if saved:
        checkpoints.load(saved, trainee, optimizer)
    if not train(trainee, optimizer, Sft(trainee, args.loss_chunk), samples, plan, directory, ranks, start):
        return False
    if ranks.first:
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        model.load_state_dict(checkpoints.whole_weights(checkpoints.steps_saved(directory)[-1]))
        lines = read_metrics(os.path.join(directory, "metrics.jsonl"))
        summary = settings | {"loss": lines[-1]["loss"], "tokens": int(sum(line["tokens"] for line in lines))}
        with write_directory(teacher) as aside:
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            shutil.copy(os.path.join(directory, "metrics.jsonl"), aside)
            write_record(aside, record("05_prune_train.py", args, described, [], summary, clock()))
        shutil.rmtree(directory)
        print(f"wrote   {teacher}: loss on answers {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
    dist.barrier()
    return True


def train_masked(args, aligned, merged, kv_heads, blended, frozen, samples, plan, switch, directory, saved, how, ranks) -> bool:
    """The first 80%: the aligned model, every `blended` projection on its way to that of merged/, masks from 1 to 0."""

    def sources(name: str) -> tuple[str, str]:
        return (merged if ".merged." in name else aligned), name.replace(".merged.", ".").replace(".original.", ".")

    config = load_config(aligned)
    student = build(config, ranks, torch.float32, sources=None if saved else sources, prepare=lambda model: masks.patch(model, kv_heads, blended),
                    masks=(config.num_hidden_layers, geometry(config).kv_heads), **how)
    torch.nn.init.constant_(student.log_alpha, masks.START)
    optimizer = make_optimizer(student, args.lr, r"\.merged\.", args.lr * args.merged_lr_factor, args.mask_lr)
    start = checkpoints.load(saved, student, optimizer) if saved else 0
    return train(student, optimizer, MaskedDistillation(student, frozen, plan.steps, args), samples, plan, directory, ranks, start, switch)


def train_gqa(args, merged, blended, frozen, samples, plan, switch, directory, saved, how, ranks) -> bool:
    """The rest: the GQA model that the student is with every mask at 0. What masks needed is neither read nor held."""
    student = build(load_config(merged), ranks, torch.float32, sources=None if saved else lambda name: (merged, name), **how)
    optimizer = make_optimizer(student, args.lr, rf"\.({'|'.join(blended)})\.", args.lr * args.merged_lr_factor)
    start = checkpoints.step_of(saved) if saved else 0
    if saved:
        checkpoints.load(saved, student, optimizer, lambda name: masks.blended_name(name, blended) if start == switch else name)
    return train(student, optimizer, Distillation(student, frozen, args), samples, plan, directory, ranks, start)


def print_plan(args, described, kv_heads, blended, samples, plans, recompute) -> None:
    """What both phases take on --plan's hardware, from configs alone. Raises UserError when one does not fit."""
    world, hardware = budget.parse_hardware(args.plan)
    config = load_config(described["path"])
    lengths, answers = [len(sample) for sample in samples], [len(sample.answer) for sample in samples]
    fits, hours = True, 0.0
    student = budget.Student(kv_heads, blended if args.masks == "l0" else ())
    for title, kind, plan in (("teacher", None, plans[0]), (f"pruning {described['kv_heads']} -> {kv_heads} kv heads", student, plans[1])):
        lines, taken, fit = budget.report(title, config, kind, lengths, answers, plan, args.loss_chunk, recompute, world, hardware)
        print("\n".join(lines))
        fits, hours = fits and fit, hours + taken
    if not fits:
        raise UserError(f"--plan: expected {args.plan} to hold both phases, found that it does not; see above")
    print(f"05_prune_train: {hours:.2g} h on {args.plan}, the teacher included")


def teach_and_prune(args, clock: Clock, ranks) -> None:
    """Both phases, each from where it was left."""
    aligned, merged = (os.path.join(args.run, name) for name in ("aligned", "merged"))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    check_input(merged_record, aligned)
    if ranks.first:
        verify_files(aligned, aligned_record)
        verify_files(merged, merged_record)
    if args.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UserError("--attention: expected the package flash-attn for flash_attention_2, found none that works here")
    described = source_model(aligned_record)
    source, alignment = described["path"], aligned_record["summary"]
    kv_heads, merge = alignment["kv_heads"], alignment.get("merge", "mean")
    whole = merge == "closed-form" or alignment.get("refit", False)  # merging changed W_Q and W_O too
    blended = masks.WHOLE_HEAD if whole else masks.KEY_VALUE
    demo = described["name"] == DEMO
    for name, value in (PUBLISHED | (EMBEDDED if demo else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    tokenizer = load_tokenizer(source)
    samples = load_samples(args.only, args.tasks or (os.path.join(DEMO_HOME, "tasks") if demo else "hub"), tokenizer, ranks)
    cuda = ranks.device.type == "cuda" or bool(args.plan)
    recompute = cuda if args.recompute is None else args.recompute
    how = {"compute": torch.bfloat16 if cuda else torch.float32, "recompute": recompute, "attention": args.attention}
    common = {"clip": args.clip, "seed": args.seed, "tokens_per_microbatch": args.tokens_per_microbatch or (4096 if cuda else 2048),
              "save_steps": args.save_steps, "save_minutes": args.save_minutes, "print_every": args.print_every}
    teacher_steps = args.teacher_steps or max(1, math.ceil(args.teacher_epochs * len(samples) / args.teacher_batch))
    teacher_plan = Plan(steps=teacher_steps, batch=args.teacher_batch, warmup=args.teacher_warmup, **common)
    epochs = args.epochs or 5 * (described["kv_heads"] // kv_heads).bit_length() - 5  # 5, 10, 15 for groups of 2, 4, 8
    steps = args.steps or math.ceil(epochs * len(samples) / args.batch)
    if steps < 2 and args.masks == "l0":
        raise UserError(f"--steps: expected at least 2 (the last fifth trains without masks), found {steps}")
    plan = Plan(steps=steps, batch=args.batch, warmup=args.warmup, **common)
    if args.plan:
        return print_plan(args, described, kv_heads, blended, samples, (teacher_plan, plan), recompute)

    teacher, training = args.teacher or os.path.join(args.run, "teacher"), os.path.join(args.run, "train")
    if os.path.isdir(teacher) and (args.teacher or not args.force):
        check_same_model(teacher, described, read_record(teacher, "05_prune_train.py")["model"])
    if args.force and ranks.first:
        for path in (training, *(() if args.teacher else (teacher, teacher + ".train"))):
            if os.path.exists(path):  # days of training may be in there: moved aside, not deleted
                shutil.rmtree(path + ".old", ignore_errors=True)
                os.rename(path, path + ".old")
    dist.barrier()
    if os.path.isdir(teacher):
        ranks.say(f"reads   {teacher}: the teacher stands")
    elif not train_teacher(args, described, samples, teacher_plan, teacher, tokenizer, how, ranks, clock):
        return

    settings = begin(training, plan, {"lr": args.lr, "mask_lr": args.mask_lr, "l0_weight": args.l0_weight, "merged_lr_factor": args.merged_lr_factor,
                                      "kl_on": args.kl_on, "masks": args.masks, "merge": merge, "kv_heads": kv_heads, "samples": len(samples),
                                      "aligned": fingerprint(aligned), "merged": fingerprint(merged), "teacher": fingerprint(teacher)}, ranks)
    if os.path.exists(os.path.join(training, RECORD)):
        ranks.say(f"05_prune_train: {training} is finished; --force begins anew")
        return
    ranks.say(f"pruning {described['kv_heads']} -> {kv_heads} kv heads: {steps} steps of {plan.batch} samples on {ranks.world} {ranks.device.type}")
    switch = max(1, int(SWITCH * steps)) if args.masks == "l0" else 0
    saved, start = resume(training, steps, ranks)
    frozen = build(load_config(teacher), ranks, how["compute"], sources=lambda name: (teacher, name), **(how | {"recompute": False}))
    frozen.eval().requires_grad_(False)
    if start < switch:
        if not train_masked(args, aligned, merged, kv_heads, blended, frozen, samples, plan, switch, training, saved, how, ranks):
            return
        gc.collect()  # modules refer to themselves: the masked student and its optimizer go now, not some time later
        if cuda:
            torch.cuda.empty_cache()
        saved = checkpoints.steps_saved(training)[-1]
        ranks.say(f"switch  after step {switch}: every mask is 0; built anew with {kv_heads} kv heads from {saved}")
    if not train_gqa(args, merged, blended, frozen, samples, plan, switch, training, saved, how, ranks):
        return
    if ranks.first:
        lines = read_metrics(os.path.join(training, "metrics.jsonl"))
        plots.curves(os.path.join(training, "curves.png"), lines, f"{described['kv_heads']} -> {kv_heads} kv heads")
        summary = settings | {"loss": lines[-1]["loss"], "tokens": int(sum(line["tokens"] for line in lines))}
        inputs = [os.path.join(path, RECORD) for path in (aligned, merged, teacher)]
        written = record("05_prune_train.py", args, described, inputs, summary, clock())
        write_record(training, written)
        print(f"wrote   {training}")
        print(f"05_prune_train: {steps} steps, {summary['tokens']} tokens, distillation loss {lines[0]['loss']:.3f} at the start, "
              f"{lines[-1]['loss']:.3f} as GQA, in {clock()} s")


def main():
    args, clock = parse(), Clock()
    claim("05_prune_train.py", args)
    with joined_ranks() as ranks:
        teach_and_prune(args, clock, ranks)


if __name__ == "__main__":
    run_stage(main)
