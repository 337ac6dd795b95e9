"""A pruning step of stage 5 against a lower bound, and packed rows against one sample per row.

    python -m bench.train_step                        # a small Llama on a CPU, under 50 s on two cores
    python -m bench.train_step --shape 1.3b --device cuda --tokens-per-microbatch 8192 --batch 128
    python -m bench.train_step --shape 7b --layers 8 --device cuda     # fewer layers if they do not fit

The floor is the least that distillation needs, in plain transformers on the same packed rows: the teacher's
forward pass, forward and backward of the unpatched model with cross-entropy, and the optimizer step. Ours is
the complete step: sampling masks, blended projections, KL + BiLD, gradients of masks and weights, clipping,
and the optimizer step. step_over_floor is measured with masks; gqa_step_over_floor is for the last fifth of
training. Samples are as long as the paper's, 126 tokens on average. packed_over_single compares samples/s;
of the samples, --singles run alone in a packed row. Then one masked step runs under torch's profiler, whose
table says where its time goes. On a GPU its memory and time are compared with the plan's. --by-layer: FSDP2
as where memory does not suffice for the weights in one unit. The last line is JSON: medians of paired steps.
"""

import bisect
import copy
import importlib
import json
import os
import statistics
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import machine, median_ratio, timed
from common.data.rows import Sample
from common.method import masks
from common.models import blending
from common.run.errors import UserError, run_stage
from common.run.flags import Parser
from common.training import students
from common.training.checkpoints import of_first_rank
from common.training.engine import Job, Schedule, Step
from common.training.flops import distillation_flops, peak_flops
from common.training.mask_state import Masks
from common.training.memory import USABLE, Cluster, StepMemory, Student, Workload, size
from common.training.packing import build_row, pack
from common.training.sharding import Execution, build, joined_ranks, reduce_gradients
from common.training.students import Rates
from common.training.teacher import build_teacher
from pipelines.cost import HARDWARE, step_cost

stage5 = importlib.import_module("05_prune_train")

SHAPES = {  # hidden, intermediate, layers, heads, vocabulary
    "demo": (128, 256, 4, 8, 1280),
    "small": (256, 688, 6, 8, 2000),
    "1.3b": (2048, 5504, 24, 16, 32000),
    "7b": (4096, 11008, 32, 32, 32000),
}
STEP, STEPS = 150, 1000  # the step that is timed, of that many
STATE = 12  # bytes per parameter of a student between steps: float32 weight and Adam's two moments
COPY = 2  # and, where a process shards nothing, the copy that it computed with


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--shape", choices=SHAPES, default="small")
    flags.add_argument("--device", default="cpu", help="cpu or cuda (bfloat16)")
    flags.add_argument("--tokens-per-microbatch", type=int, default=2048)
    flags.add_argument("--batch", type=int, default=16, help="samples per step")
    flags.add_argument("--pairs", type=int, default=5, help="paired steps, after one that is not counted")
    flags.add_argument("--loss-chunk", type=int, default=512)
    flags.add_argument("--recompute", action="store_true", help="activation checkpointing of every layer")
    flags.add_argument("--layers", type=int, help="instead of the shape's; fewer if a GPU cannot hold them")
    flags.add_argument("--compile", action="store_true", help="torch.compile every decoder layer")
    flags.add_argument("--by-layer", action="store_true", help="FSDP2 gathers each layer, not all at once")
    flags.add_argument("--singles", type=int, default=16, help="samples per step of one sample per row")
    return flags.parse_args()


def model_config(args) -> LlamaConfig:
    """The source model's config."""
    hidden, inner, layers, heads, vocab = SHAPES[args.shape]
    return LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=args.layers or layers,
                       num_attention_heads=heads, num_key_value_heads=heads, vocab_size=vocab)


def random_samples(count: int, vocab: int) -> list[Sample]:
    """Lengths spread as those of the eight tasks: 126 tokens in the mean, a few of many hundreds, short
    answers.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(count).exponential_(1 / 96, generator=generator) + 24
    answers = torch.randint(2, 13, (count,), generator=generator)

    def ids(size):
        return tuple(torch.randint(0, vocab, (int(size),), generator=generator).tolist())

    pairs = zip(lengths, answers, strict=True)
    return [Sample(ids(min(length, 480)), ids(answer)) for length, answer in pairs]


def lay_out(samples: list[Sample], capacity: int, device) -> list:
    """The samples as rows of at most `capacity` tokens."""
    packed = pack([len(sample) for sample in samples], capacity)
    return [build_row([samples[i] for i in row], len(samples)).to(device) for row in packed]


class Models:
    """The teacher and three students from random checkpoints: masked, plain and GQA, each with its
    optimizer.
    """

    def __init__(self, args, ranks, config):
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        compute = torch.bfloat16 if args.device == "cuda" else torch.float32
        execution = Execution(compute=compute, recompute=args.recompute, compile=args.compile,
                              whole=not args.by_layer)
        grouped = copy.deepcopy(config)
        grouped.num_key_value_heads = heads // 4
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as home:
            home = of_first_rank(home)
            mha, gqa = os.path.join(home, "mha"), os.path.join(home, "gqa")
            for path, shape in ((mha, config), (gqa, grouped)) if ranks.first else ():
                with torch.device(ranks.device):
                    LlamaForCausalLM(copy.deepcopy(shape)).to(compute).save_pretrained(path)
            dist.barrier()
            self.teacher = build_teacher(mha, ranks, execution)
            self.masked = build(
                config, ranks, execution, students.start_of_masked(mha, gqa),
                lambda model: blending.patch(model, heads // 4),
                {"log_alpha": masks.start((layers, heads), 0)})
            self.plain = build(config, ranks, execution, lambda name: (mha, name))
            self.gqa = build(grouped, ranks, execution, lambda name: (gqa, name))
            dist.barrier()  # before the directory goes
        self.loss = stage5.Loss(kl_on="prompt", l0_weight=1.0)
        self.schedule = Schedule(
            STEPS, args.batch, warmup=32, clip=1.0, seed=0, save_steps=None, save_minutes=20,
            tokens_per_microbatch=args.tokens_per_microbatch, loss_chunk=args.loss_chunk, print_every=1)
        self.masks = Masks(self.masked.replicated, STEPS, seed=0)
        rates = Rates(1e-5, beta2=0.999, weight_decay=0.0)
        optimizers = {
            self.masked: students.masked_optimizer(self.masked, rates, "l0", mask_lr=1e-2),
            self.plain: students.student_optimizer(self.plain, rates),
            self.gqa: students.student_optimizer(self.gqa, rates, blending.KEY_VALUE)}
        self.jobs = {trainee: Job(trainee, optimizer, "", ranks,
                                  distillation_flops(trainee, self.teacher, "all"), step=STEP)
                     for trainee, optimizer in optimizers.items()}

    def masked_step(self, rows: list, samples: list[Sample]) -> None:
        """A complete step with masks."""
        step = Step(self.jobs[self.masked], self.schedule, rows, samples)
        stage5.masked_step(step, self.masks, self.teacher, self.loss)

    def gqa_step(self, rows: list, samples: list[Sample]) -> None:
        """A complete step after the switch."""
        step = Step(self.jobs[self.gqa], self.schedule, rows, samples)
        stage5.gqa_step(step, self.teacher, self.loss)

    def floor(self, rows: list) -> None:
        """The teacher's forward pass, and a training step of the plain model."""
        optimizer = self.jobs[self.plain].optimizer
        for number, row in enumerate(rows, 1):
            reduce_gradients(self.plain, last=number == len(rows), every_row=False)

            def loss(hidden, lm_head, row=row):
                return torch.nn.functional.cross_entropy(lm_head(hidden).float(), row.targets)

            with torch.no_grad():
                self.teacher(row, lambda hidden, lm_head: lm_head(hidden))
            self.plain(row, loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def time_pairs(ways: dict, pairs: int, device: str) -> dict[str, list[float]]:
    """Seconds of each way, taken in turn; the first round is not counted."""
    taken = {name: [] for name in ways}
    for number in range(pairs + 1):
        for name, way in ways.items():
            _, seconds = timed(device, way)
            if number:
                taken[name].append(seconds)
        if number:
            print("  ".join(f"{name} {times[-1]:.3f} s" for name, times in taken.items()), flush=True)
    return taken


def evenly_spread(samples: list[Sample], count: int) -> list[Sample]:
    """At most `count` of the samples, from the shortest to the longest."""
    count, by_length = min(count, len(samples)), sorted(samples, key=len)
    return [by_length[(2 * i + 1) * len(samples) // (2 * count)] for i in range(count)]


def ratios(taken: dict[str, list[float]], single_share: float) -> dict[str, float]:
    """Medians of paired steps. single_share: of the samples that the single rows have."""
    single = [seconds / single_share for seconds in taken["single"]]
    values = {"step_over_floor": median_ratio(taken["masked"], taken["floor"]),
              "gqa_step_over_floor": median_ratio(taken["gqa"], taken["floor"]),
              "packed_over_single": median_ratio(single, taken["masked"])}
    return {name: round(value, 3) for name, value in values.items()}


def student_of(config) -> Student:
    """The masked student."""
    return Student(config.num_key_value_heads // 4)


def others_bytes(config, whole: bool) -> int:
    """Bytes that the plain and the GQA student hold between steps, over all ranks."""
    grouped = Student(config.num_key_value_heads // 4, ())
    return (STATE + COPY * whole) * (size(config).whole + size(config, grouped).whole)


def planned(config, samples: list, rows: list, args, world: int) -> dict[str, float]:
    """What the plan expects of a masked step: GiB per rank and, on a GPU of known speed, seconds."""
    cuda = args.device == "cuda"
    work = Workload.of(config, samples, args.loss_chunk, args.recompute, 2 if cuda else 4, not args.by_layer)
    longest = max(sum(row.lengths) for row in rows)
    step = StepMemory(work, student_of(config), world, longest, len(rows) > 1, reduced=world > 1)
    expected = {"memory_gib": round(step.fullest()["total"] / 2**30, 2)}
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    if peak:
        hardware = next(device for device in HARDWARE.values() if device.flops_per_s == peak)
        schedule = SimpleNamespace(batch=args.batch * world, tokens_per_microbatch=args.tokens_per_microbatch,
                                   reduce="step")
        cost = step_cost(work, student_of(config), schedule, Cluster(world, hardware))
        expected["step_seconds"] = round(cost.seconds, 4)
    return expected


def fit_layers(config, samples: list, args, memory: float):
    """The config with as many of its layers as a GPU of `memory` bytes holds in all models of this benchmark.

    Raises UserError if not even one fits.
    """
    config = copy.deepcopy(config)
    row = max(args.tokens_per_microbatch, *map(len, samples))

    def need(layers: int) -> float:
        config.num_hidden_layers = layers
        work = Workload.of(config, samples, args.loss_chunk, args.recompute, 2, not args.by_layer)
        masked = StepMemory(work, student_of(config), 1, row, reduced=False).fullest()["total"]
        return masked + others_bytes(config, not args.by_layer)

    counts = range(1, config.num_hidden_layers + 1)
    fitting = bisect.bisect_right(counts, USABLE * memory, key=need)
    if not fitting:
        least = need(1) / USABLE
        raise UserError(f"--device cuda: expected memory for one layer, {least / 2**30:.1f} GiB, "
                        f"found {memory / 2**30:.1f} GiB")
    config.num_hidden_layers = fitting
    return config


def print_profile(step, device: str) -> None:
    """The operations of one call of step() that take the longest; on a GPU, by the time of their kernels."""
    activities, order = [ProfilerActivity.CPU], "self_cpu_time_total"
    if device == "cuda":
        activities, order = [*activities, ProfilerActivity.CUDA], "self_device_time_total"
    with profile(activities=activities) as profiler:
        timed(device, step)
    print(profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=60), flush=True)


def peak_memory(step, others: float) -> dict[str, float]:
    """GiB that tensors and torch's allocator take at most during step(), without `others` bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    tensors, allocator = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"memory_gib": round((tensors - others) / 2**30, 2),
            "reserved_gib": round((allocator - others) / 2**30, 2)}


def measure(args, ranks) -> dict:
    """What the last line says."""
    config, cuda = model_config(args), args.device == "cuda"
    samples = random_samples(args.batch, config.vocab_size)
    if cuda:
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        config = fit_layers(config, samples, args, memory)
    models = Models(args, ranks, config)
    packed = lay_out(samples, args.tokens_per_microbatch, ranks.device)
    single = lay_out(evenly_spread(samples, args.singles), 1, ranks.device)
    ways = {"floor": lambda: models.floor(packed), "masked": lambda: models.masked_step(packed, samples),
            "gqa": lambda: models.gqa_step(packed, samples),
            "single": lambda: models.masked_step(single, samples)}
    taken = time_pairs(ways, args.pairs, args.device)

    seconds = {name: statistics.median(times) for name, times in taken.items()}
    rates = {"packed": args.batch / seconds["masked"], "single": len(single) / seconds["single"]}
    flops = sum(map(models.jobs[models.masked].flops, packed)) / seconds["masked"]
    values = ratios(taken, len(single) / args.batch) | {
        "samples_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "tokens_per_s": round(sum(map(len, samples)) / seconds["masked"]), "rows": len(packed),
        "layers": config.num_hidden_layers, "step_seconds": round(seconds["masked"], 4),
        "tflops_per_s": round(flops / 1e12, 3)}
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    if peak:
        values["mfu"] = round(flops / peak, 3)
    if cuda:
        values |= peak_memory(ways["masked"], others_bytes(config, not args.by_layer) / ranks.world)
    values["planned"] = planned(config, samples, packed, args, ranks.world)
    print_profile(ways["masked"], args.device)
    return values | {"settings": vars(args), "machine": machine(args.device)}


def main():
    args = parse()
    with joined_ranks() as ranks:
        if ranks.device.type != args.device:
            raise UserError(f"--device {args.device}: expected such a device, found {ranks.device}")
        values = measure(args, ranks)
        ranks.say(json.dumps(values))


if __name__ == "__main__":
    run_stage(main)
