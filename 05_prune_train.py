"""Stage 5: train. First a teacher (SFT of the untouched model), then the student: L0 masks move each head from its own
key/value projection to its group's, while KL + BiLD keep it close to the teacher (Eq. 27-31).

Reads   RUN/aligned/, RUN/merged/, the model that stage 1 read, the eight tasks' training sets
Writes  RUN/teacher/   an ordinary MHA checkpoint; skipped when it stands already
        RUN/train/     checkpoints step-N/ (sharded, the last two), metrics.jsonl, curves.png; stage.json when it is done

    torchrun --nproc-per-node 8 05_prune_train.py --run-dir runs/llama2-7b     # one node of 8 GPUs
    torchrun --nproc-per-node 2 05_prune_train.py                              # the embedded model, minutes on two cores
    python 05_prune_train.py --run runs/tiny --steps 20 --teacher-steps 10     # a single process works too

The same command again goes on after the last checkpoint; a run that was killed ends as if it had not been, to the
bit, at the same number of processes. SIGTERM and Ctrl-C save at the end of the step. --force moves train/ and teacher/
aside (to train.old/, teacher.old/) and begins anew; a teacher named by --teacher stays. Flags left out take the published
values (Appendix A), or for the embedded model values that suit its size.
"""

import json
import os
import shutil
from dataclasses import asdict

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from common import checkpoints, masks, plots
from common.artifacts import (
    RECORD,
    check_same_model,
    read_record,
    record,
    write_directory,
    write_json,
)
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.engine import Phase, Plan, read_metrics, train
from common.losses import bild, chunked, cross_entropy, kl
from common.models import DEMO, DEMO_HOME, fingerprint, load_config, load_tokenizer, source_model
from common.sharding import build, init_ranks
from common.tasks import TASKS, load_task, tokenize

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
    # what is trained on what
    parser.add_argument("--tasks", default=None, metavar="DIR", help="TASK.train.jsonl files, or hub (default: hub; the embedded tasks for demo)")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, metavar="TASK", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--teacher", default=None, metavar="DIR", help="an SFT teacher to share between runs (default: RUN/teacher, made if missing)")
    # length of the two phases
    parser.add_argument("--teacher-epochs", type=float, default=2, help="SFT passes over the training sets")
    parser.add_argument("--teacher-steps", type=positive, default=None, help="instead of --teacher-epochs")
    parser.add_argument("--epochs", type=float, default=None, help="pruning passes (default: 5, 10, 15 for half, a quarter, an eighth of the heads)")
    parser.add_argument("--steps", type=positive, default=None, help="instead of --epochs")
    # optimization
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
    # how it runs
    parser.add_argument("--tokens-per-microbatch", type=positive, default=None, help="tokens packed into one row (default: 4096; 512 on a CPU)")
    parser.add_argument("--loss-chunk", type=positive, default=1024, help="tokens whose logits exist at a time")
    parser.add_argument("--save-steps", type=positive, default=200, help="steps between checkpoints")
    parser.add_argument("--print-every", type=positive, default=20, help="steps between printed lines; metrics.jsonl has all")
    return parser.parse_args()


class Sft(Phase):
    """Supervised fine-tuning: cross-entropy on answer tokens, averaged per sample, then over the batch."""

    def __init__(self, trainee, chunk: int):
        self.trainee, self.chunk = trainee, chunk

    def row_loss(self, row):
        def head_loss(hidden, lm_head):
            at = row.answer_weight.nonzero()[:, 0]

            def per_chunk(hidden, targets, weight):
                return (cross_entropy(lm_head(hidden).float(), targets) * weight).sum()

            return chunked(per_chunk, self.chunk, hidden[at], row.targets[at], row.answer_weight[at])

        return self.trainee(row, head_loss), {}


class Distillation(Phase):
    """Eq. 31: KL + BiLD to the teacher, and the L0 term that moves the masks from 1 to 0."""

    def __init__(self, student, teacher, steps: int, args):
        self.student, self.teacher, self.steps = student, teacher, steps
        self.kl_on, self.chunk, self.seed, self.l0_weight = args.kl_on, args.loss_chunk, args.seed, args.l0_weight
        self.switch = int(SWITCH * steps)

    def begin_step(self, step: int) -> None:
        """Draw this step's masks; from the switch on, the shared projections alone."""
        if step >= self.switch:
            self.z = None
            masks.switch_to_merged(self.student.net)
        else:
            self.drawn = masks.draw(self.student.log_alpha, self.seed, step)
            self.z = self.drawn.detach().requires_grad_()  # a leaf: rows add up its gradient, end_step passes it on
            masks.set_masks(self.student.net, self.z)

    def row_loss(self, row):
        with torch.no_grad():
            teacher_hidden = self.teacher(row)
        teacher_head = self.teacher.net.lm_head

        def head_loss(hidden, lm_head):
            def term(loss, weight):
                at = weight.nonzero()[:, 0]

                def per_chunk(student, teacher, weight):
                    with torch.no_grad():
                        teacher_logits = teacher_head(teacher).float()
                    return (loss(lm_head(student).float(), teacher_logits) * weight).sum()

                return chunked(per_chunk, self.chunk, hidden[at], teacher_hidden[at], weight[at])

            kl_weight = row.prompt_weight if self.kl_on == "prompt" else row.all_weight
            return term(kl, kl_weight), term(bild, row.answer_weight)

        kl_loss, bild_loss = self.student(row, head_loss)
        return kl_loss + bild_loss, {"kl": kl_loss, "bild": bild_loss}

    def end_step(self, step: int) -> dict:
        """Pass the masks' gradient, summed over ranks, and that of Eq. 29 on to log_alpha."""
        if self.z is None:
            return {}
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


def make_optimizer(trainee, lr: float, merged_factor: float = 1.0, mask_lr: float | None = None) -> torch.optim.AdamW:
    """AdamW over the model's weights, the new shared projections and the masks, each with its learning rate."""
    named = list(trainee.net.named_parameters())
    merged = [p for name, p in named if ".merged." in name]
    groups = [{"params": [p for name, p in named if ".merged." not in name], "initial_lr": lr, **ADAM}]
    if merged:
        groups.append({"params": merged, "initial_lr": lr * merged_factor, **ADAM})
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
    settings = {name: value for name, value in asdict(plan).items() if name not in ("save_steps", "print_every")} | more
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


def main():
    args, clock = parse(), Clock()
    ranks = init_ranks()
    aligned, merged = (os.path.join(args.run, name) for name in ("aligned", "merged"))
    aligned_record, merged_record = (read_record(path, "04_align.py") for path in (aligned, merged))
    if aligned_record["inputs"] != merged_record["inputs"]:
        raise UserError(f"{merged}: expected the groups of {aligned}, found others; run 04_align.py again with --force")
    described = source_model(aligned_record)
    source, kv_heads = described["path"], aligned_record["summary"]["kv_heads"]
    demo = described["name"] == DEMO
    for name, value in (PUBLISHED | (EMBEDDED if demo else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)

    teacher, training = args.teacher or os.path.join(args.run, "teacher"), os.path.join(args.run, "train")
    if args.teacher or (os.path.isdir(teacher) and not args.force):
        check_same_model(teacher, described, read_record(teacher, "05_prune_train.py")["model"])
    if args.force and ranks.first:
        for path in (training, *(() if args.teacher else (teacher, teacher + ".train"))):
            if os.path.exists(path):  # days of training may be in there: moved aside, not deleted
                shutil.rmtree(path + ".old", ignore_errors=True)
                os.rename(path, path + ".old")
    dist.barrier()

    tokenizer = load_tokenizer(source)
    samples = load_samples(args.only, args.tasks or (os.path.join(DEMO_HOME, "tasks") if demo else "hub"), tokenizer, ranks)
    cuda = ranks.device.type == "cuda"
    compute = torch.bfloat16 if cuda else torch.float32
    capacity = args.tokens_per_microbatch or (4096 if cuda else 512)
    common = {"clip": args.clip, "seed": args.seed, "tokens_per_microbatch": capacity, "save_steps": args.save_steps, "print_every": args.print_every}

    if not os.path.isdir(teacher):
        steps = args.teacher_steps or max(1, int(args.teacher_epochs * len(samples) / args.teacher_batch))
        plan = Plan(steps=steps, batch=args.teacher_batch, warmup=args.teacher_warmup, **common)
        if not train_teacher(args, described, samples, plan, teacher, tokenizer, compute, ranks, clock):
            return
    else:
        ranks.say(f"reads   {teacher}: the teacher stands")

    epochs = args.epochs or 5 * (described["heads"] // kv_heads).bit_length() - 5  # 5, 10, 15 for groups of 2, 4, 8
    steps = args.steps or max(1, int(epochs * len(samples) / args.batch))
    plan = Plan(steps=steps, batch=args.batch, warmup=args.warmup, **common)
    settings = begin(training, plan, {"lr": args.lr, "mask_lr": args.mask_lr, "l0_weight": args.l0_weight, "merged_lr_factor": args.merged_lr_factor,
                                      "kl_on": args.kl_on, "kv_heads": kv_heads, "samples": len(samples),
                                      "aligned": fingerprint(aligned), "merged": fingerprint(merged), "teacher": fingerprint(teacher)}, ranks)
    if os.path.exists(os.path.join(training, RECORD)):
        ranks.say(f"05_prune_train: {training} is finished; --force begins anew")
        return
    student = build_student(aligned, merged, kv_heads, compute, ranks)
    frozen = build(load_config(teacher), ranks, compute, compute, lambda name: (teacher, name)).eval().requires_grad_(False)
    optimizer = make_optimizer(student, args.lr, args.merged_lr_factor, args.mask_lr)
    ranks.say(f"pruning {described['heads']} -> {kv_heads} kv heads: {steps} steps of {plan.batch} samples on {ranks.world} {ranks.device.type}")
    phase = Distillation(student, frozen, steps, args)
    if not train(student, optimizer, phase, samples, plan, training, ranks):
        return
    if ranks.first:
        lines = read_metrics(os.path.join(training, "metrics.jsonl"))
        plots.curves(os.path.join(training, "curves.png"), lines, f"{described['heads']} -> {kv_heads} kv heads")
        summary = settings | {"loss": lines[-1]["loss"], "tokens": int(sum(line["tokens"] for line in lines))}
        inputs = [os.path.join(path, RECORD) for path in (aligned, merged, teacher)]
        written = record("05_prune_train.py", args, described, inputs, summary, clock())
        write_json(os.path.join(training, RECORD), written)
        print(f"wrote   {training}")
        print(f"05_prune_train: {steps} steps, {summary['tokens']} tokens, distillation loss {lines[0]['loss']:.3f} at z = 1, "
              f"{lines[-1]['loss']:.3f} as GQA, in {clock()} s")


def build_student(aligned: str, merged: str, kv_heads: int, compute, ranks):
    """The aligned model with every k/v projection blended towards merged/, masks at 1."""

    def sources(name: str) -> tuple[str, str]:
        return (merged if ".merged." in name else aligned), name.replace(".merged.", ".").replace(".original.", ".")

    config = load_config(aligned)
    student = build(config, ranks, torch.float32, compute, sources, lambda model: masks.patch(model, kv_heads),
                    (config.num_hidden_layers, config.num_attention_heads), recompute=ranks.device.type == "cuda")
    torch.nn.init.constant_(student.log_alpha, masks.START)
    return student


def train_teacher(args, described, samples, plan, teacher, tokenizer, compute, ranks, clock) -> bool:
    """SFT of the untouched source model; writes teacher/ and removes its checkpoints. False when stopped by a signal."""
    source, directory = described["path"], teacher + ".train"
    config = load_config(source)
    trainee = build(config, ranks, torch.float32, compute, lambda name: (source, name), recompute=ranks.device.type == "cuda")
    optimizer = make_optimizer(trainee, args.teacher_lr)
    ranks.say(f"teacher {source}: {plan.steps} steps of {plan.batch} samples on {ranks.world} {ranks.device.type}")
    settings = begin(directory, plan, {"lr": args.teacher_lr, "samples": len(samples)}, ranks)
    if not train(trainee, optimizer, Sft(trainee, args.loss_chunk), samples, plan, directory, ranks):
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
            write_json(os.path.join(aside, RECORD), record("05_prune_train.py", args, described, [], summary, clock()))
        shutil.rmtree(directory)
        print(f"wrote   {teacher}: loss on answers {lines[0]['loss']:.3f} -> {lines[-1]['loss']:.3f}")
    dist.barrier()
    return True


if __name__ == "__main__":
    run_stage(main)
