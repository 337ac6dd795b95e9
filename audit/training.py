"""Stage 5's part of the audit: steps by its own functions and as printed, and what it recorded of its steps.

The masks are the paper's (--masks l0) and those of the authors' code (l0-released), transcribed here. The
steps are those of a model with one layer between embedding and head, on random tokens.
"""

import importlib
import math
import os
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.func import functional_call
from transformers import AutoModelForCausalLM

import paper
from common.data.rows import Sample
from common.method import masks
from common.models import blending
from common.models.load import load_config
from common.models.weights import open_checkpoint
from common.training import students
from common.training.attention import Trainee
from common.training.packing import rows_of_step
from common.training.sharding import Ranks, load_rows

stage5 = importlib.import_module("05_prune_train")

FLOAT32 = 1e-5  # sums of float32 products and float32 forward passes, relative to the largest number
STEPS, TAKEN = 100, range(10, 13)  # steps of a training, and those compared: at the first T = 2/3
MASK_LR = 0.1  # ten times the published learning rate, whose steps hardly show
SCHEDULE = stage5.Schedule(steps=STEPS, batch=3, warmup=1, clip=1.0, seed=0, tokens_per_microbatch=40,
                           save_steps=None, save_minutes=0.0, print_every=1, loss_chunk=16)
IDS = torch.randint(256, (64,), generator=torch.Generator().manual_seed(0)).tolist()
SAMPLES = [Sample(IDS[:20], IDS[20:28]), Sample(IDS[28:40], IDS[40:44]), Sample(IDS[44:])]
QUANTITIES = ("Eq. 27, 28: samples of the masks", "Eq. 27, 28: masks without noise",
           "Eq. 27, 28: log alpha after the step", "Eq. 29: sizes of the masks", "Eq. 29: loss of the masks",
           "Eq. 30: loss of a batch", "Eq. 30: loss of a batch, --kl-on all", "Eq. 31: gradient in log alpha")


def pulled(values: list[float], size: float, T: float, progress: float) -> list[float]:
    """The authors' code: the copy of log alpha that a step draws from, a number at a time.

    size: the masks' mean size in the step before; progress: the share of the masked steps done.
    """
    n, lead, bound = len(values), (size - T) * math.exp(math.sqrt(progress)), 10 / 3
    closing = min(int(n * (1 - T) + 1), n)
    limit, left = sorted(values)[closing - 1], max(0.6, min(0.999, 1 - lead))
    if size > T and limit > -bound:
        values = [max(-bound, (v + bound) * left - bound) if v <= limit else v for v in values]
    limit, left = sorted(values)[min(closing, n - 1)], min(0.999, 1 + lead)
    if closing + 1 < n and limit < bound:
        values = [min(bound, (v - bound) * left + bound) if v >= limit else v for v in values]
    return values


def released(u: torch.Tensor, log_alpha: torch.Tensor) -> torch.Tensor:
    """The authors' code: masks z, clipped; the gradient passes, itself clipped to +-1."""
    u = 0.4 + 0.2 * u
    stretched = 1.005 * (torch.sigmoid((u / (1 - u)).log() + 3 * log_alpha) - 0.5) + 0.5
    z = stretched + (stretched.clamp(0, 1) - stretched).detach()
    if z.requires_grad:
        z.register_hook(lambda slope: slope.clamp(-1, 1))
    return z


def released_size(log_alpha: torch.Tensor) -> torch.Tensor:
    """The authors' code: what stands for z in Eq. 29."""
    return torch.sigmoid(3 * log_alpha + math.log(0.995 / 0.005) / 3).clamp(1e-6, 1 - 1e-6)


KINDS = {  # by --masks: samples, masks without noise, sizes; AdamW's betas and eps; the bound of log alpha
    "l0": (paper.hard_concrete, paper.without_noise, paper.open_probability, (0.9, 0.9), 1e-12, 7.5),
    "l0-released": (released, lambda log_alpha: released(torch.full_like(log_alpha, 0.5), log_alpha),
                    released_size, (0.9, 0.95), 1e-11, 8.0),
}


def networks(run) -> tuple:
    """The source's network, of one layer, and a student's that blends in merged/ and shares its embedding."""
    config = load_config(run.path("source"))
    config.num_hidden_layers = 1
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "packed"}
    source = AutoModelForCausalLM.from_pretrained(run.path("source"), trust_remote_code=False, **options)
    shared = (source.model.embed_tokens.weight, source.lm_head.weight)
    student = deepcopy(source, {id(weight): weight for weight in shared})
    blending.patch(student, run.kv_heads)
    load_rows(student, students.start_of_masked(run.path("aligned"), run.path("merged")))
    return source.requires_grad_(False), student.requires_grad_(False)


def staged(source, blended, kind: str, start: torch.Tensor) -> list[tuple]:
    """QUANTITIES of the steps TAKEN, by stage 5 with masks of a kind in KINDS. start: log alpha, [1, H]."""
    replicated = stage5.MASKS[kind].start(start.shape, seed=0) | {"log_alpha": start}
    student, teacher, ranks = Trainee(blended, replicated), Trainee(source), Ranks(0, 1, torch.device("cpu"))
    student.set_requires_gradient_sync = lambda last: None  # there is nothing to reduce
    held, gradients, metrics = stage5.MASKS[kind](student.replicated, STEPS, seed=0), [], []
    optimizer = students.masked_optimizer(student, students.Rates(MASK_LR, 0.95, 0.0), kind, MASK_LR)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(held.log_alpha.grad.clone()))
    job = stage5.Job(student, optimizer, "", ranks)
    for number in TAKEN:
        job.step, rows = number, rows_of_step(SAMPLES, number, SCHEDULE, ranks)
        every, prompt = (stage5.Step(job, SCHEDULE, rows, SAMPLES) for _ in range(2))
        z, sizes = held.draw(number), held.expected()
        blending.set_masks(student.net, z.detach().requires_grad_())
        stage5.distill(every, teacher, stage5.Loss("all", l0_weight=1.0))
        stage5.masked_step(prompt, held, teacher, stage5.Loss("prompt", l0_weight=1.0))
        noiseless = student.net.model.layers[0].self_attn.k_proj.z
        metrics.append((z, noiseless, held.log_alpha.clone(), sizes, prompt.metrics["l0"],
                        prompt.metrics["loss"], every.totals["loss"], gradients[-1]))
    return metrics


def printed(student, kind: str, start: torch.Tensor, gradients: list[torch.Tensor]) -> list[tuple]:
    """The same as printed, but that AdamW takes the gradients of stage 5, one of each step."""
    draw, noiseless, measure, betas, eps, bound = KINDS[kind]
    log_alpha, metrics, size, share = start.double(), [], 1.0, 1 / paper.masked_steps(STEPS)
    optimizer = torch.optim.AdamW([log_alpha], MASK_LR, betas, eps, weight_decay=0)
    for number, gradient in zip(TAKEN, gradients, strict=True):
        T, copy = paper.target_size(number, STEPS), log_alpha.clone()
        if kind == "l0-released":
            copy[0] = torch.tensor(pulled(copy[0].tolist(), size, T, number * share))
        leaf = copy.clone().requires_grad_()
        z, sizes = draw(masks.uniform(leaf, 0, number).double(), leaf), measure(leaf)
        (loss, every), l0 = student.losses(z), paper.eq_29(sizes, T)
        paper.eq_31(loss, l0).backward()
        log_alpha.grad = gradient.double()
        optimizer.step()
        if kind == "l0-released":
            size = sizes.mean().item()
            far = abs(size - paper.target_size(number + 1, STEPS))
            weight = min(1, max(0.002, ((number + 1) * share) ** 5 / 2, far))
            log_alpha.copy_(weight * copy + (1 - weight) * log_alpha)
        log_alpha.clamp_(-bound, bound)
        metrics.append((z, noiseless(log_alpha), log_alpha.clone(), sizes, l0, loss, every, leaf.grad))
    return metrics


class Student:
    """transformers' network of the source, the teacher; as a student, with heads of aligned/ and merged/."""

    def __init__(self, run, source):
        source.set_attn_implementation("eager")
        stored, names = open_checkpoint(run.path("aligned")), source.state_dict()
        own, shared = (run.attention(name, 0) for name in ("aligned", "merged"))
        self.net, self.members = source, run.members
        self.weights = {name: stored[name][:].float() for name in names if ".self_attn." in name}
        self.heads = {letter: (own[letter].float(), shared[letter].float()) for letter in "kv"}
        self.targets = [self.logits(sample, {}) for sample in SAMPLES]

    def logits(self, sample: Sample, weights: dict) -> torch.Tensor:
        """Those of the predicted tokens of a sample, [T - 1, V], with these weights of aligned/."""
        inputs = {"input_ids": torch.tensor([sum(sample.segments, [])]), "use_cache": False}
        return functional_call(self.net, weights, kwargs=inputs).logits[0, :-1]

    def losses(self, z: torch.Tensor) -> list[torch.Tensor]:
        """Eq. 30 of --kl-on prompt and all, with keys and values that z [1, H] blends; a sample at a time."""
        weights, L_KL, L_BiLD = dict(self.weights), [0, 0], 0
        for letter, equation in (("k", paper.eq_27), ("v", paper.eq_28)):
            name, heads = f"model.layers.0.self_attn.{letter}_proj.", range(1, z.numel() + 1)
            rows = torch.cat([equation(z[0], *self.heads[letter], j, self.members) for j in heads])
            weights[name + "weight"] = rows[:, : self.net.config.hidden_size]
            if name + "bias" in weights:
                weights[name + "bias"] = rows[:, -1]
        for sample, teacher in zip(SAMPLES, self.targets, strict=True):
            student, asked = self.logits(sample, weights), len(sample.prompt) - 1  # predicted of the prompt
            answers = [paper.bild(*pair) for pair in zip(student[asked:], teacher[asked:], strict=True)]
            L_BiLD += sum(answers) / max(1, len(answers)) / len(SAMPLES)
            for at, end in enumerate((asked, None)):
                L_KL[at] += paper.kl(student, teacher)[:end].mean() / len(SAMPLES)
        return [paper.eq_30(KL, L_BiLD) for KL in L_KL]


def step_rows(run):
    """compare's arguments for the QUANTITIES of steps of stage 5, with either kind of masks."""
    start = 2 * torch.randn(1, run.heads, generator=torch.Generator().manual_seed(0))
    source, blended = networks(run)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        steps = {kind: staged(source, blended, kind, start) for kind in KINDS}
    finally:
        dist.destroy_process_group()
    student = Student(run, source)
    for kind, ours in steps.items():
        sides = printed(student, kind, start, [step[-1] for step in ours]), ours
        for title, *columns in zip(QUANTITIES, *(zip(*side, strict=True) for side in sides), strict=True):
            yield f"{title}, --masks {kind}", *columns, 10 * FLOAT32


def recorded_rows(run):
    """compare's arguments for Eq. 29 and 30 in the steps that stage 5 recorded, and for its switch."""
    steps, directory, masked = STEPS, run.path("train"), []
    if run.training:
        steps = run.training["summary"]["steps"]
        lines = stage5.read_metrics(os.path.join(directory, stage5.METRICS))
        column = {name: torch.tensor([line[name] for line in lines if name in line], dtype=torch.float64)
                  for name in ("kl", "bild", "loss", "mask_expected", "mask_target", "l0")}
        yield "Eq. 30: recorded steps", paper.eq_30(column["kl"], column["bild"]), column["loss"], FLOAT32
        if len(column["l0"]):
            masked = [len(column["l0"])]
            T = [paper.target_size(step, steps) for step in range(*masked)]
            losses = map(paper.eq_29, column["mask_expected"], column["mask_target"])
            yield "Eq. 29: T of recorded steps", T, column["mask_target"], FLOAT32
            yield "Eq. 29: recorded steps", losses, column["l0"], FLOAT32
    masked = [stage5.switch_step(steps), *masked]
    yield "Appendix A, Eq. 29: steps with masks", [paper.masked_steps(steps)], masked, 0.0
    if os.path.isdir(run.path("gqa")):
        heads = len(run.attention("gqa", 0)["k"])
        yield "Section 3.5, Eq. 28: heads left in gqa/", [run.heads // run.members], [heads], 0.0
