"""A pruning step of stage 5 against its floor, and packed rows against one sample per row, side by side in
one run.

    python -m bench.train_step                        # a small Llama on a CPU, under 50 s on two cores
    python -m bench.train_step --shape 1.3b --device cuda --tokens-per-microbatch 8192

The floor is what no distillation can do without, as plain transformers does it on the same packed rows: the
teacher's forward pass, forward and backward of the unpatched model under its own cross-entropy, and the
optimizer. Ours is the whole step: the masks drawn, blended projections, KL + BiLD, gradients of masks and
weights, clipping, the optimizer. step_over_floor is taken with masks; gqa_step_over_floor is that of the
last fifth of training. Samples are as long as the paper's: 126 tokens in the mean. Last line: JSON, medians
of paired steps.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import machine
from common.data.tasks import Sample
from common.method import masks
from common.training import distill
from common.training.budget import peak_flops
from common.training.engine import clip_gradients
from common.training.packing import build_row, pack
from common.training.sharding import Execution, build, joined_ranks, sum_over_ranks

SHAPES = {  # hidden, intermediate, layers, heads, vocabulary
    "demo": (128, 256, 4, 8, 1280),
    "small": (256, 688, 6, 8, 2000),
    "1.3b": (2048, 5504, 24, 16, 32000),
    "7b": (4096, 11008, 32, 32, 32000),
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (bfloat16, layers recomputed)")
    parser.add_argument("--attention", default="packed", help="of all models measured, as 05_prune_train.py --attention")
    parser.add_argument("--tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--pairs", type=int, default=5, help="paired steps, after one of each that is not counted")
    parser.add_argument("--loss-chunk", type=int, default=512)
    return parser.parse_args()


def random_samples(count: int, vocab: int) -> list[Sample]:
    """Lengths spread as those of the eight tasks: 126 tokens in the mean, a few of many hundreds, short
    answers.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(count).exponential_(1 / 96, generator=generator) + 24
    answers = torch.randint(2, 13, (count,), generator=generator)

    def ids(size):
        return tuple(torch.randint(0, vocab, (int(size),), generator=generator).tolist())

    return [Sample(ids(min(length, 480)), ids(answer)) for length, answer in zip(lengths, answers, strict=True)]


def rows_of(samples: list[Sample], capacity: int, device) -> list:
    return [build_row([samples[i] for i in row], len(samples)).to(device) for row in pack([len(s) for s in samples], capacity)]


class Timed:
    """Seconds of a call, the device's work included."""

    def __init__(self, cuda: bool):
        self.wait = torch.cuda.synchronize if cuda else lambda: None

    def __call__(self, function) -> float:
        self.wait()
        start = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - start


def measure(args, ranks) -> dict:
    """The figures of the last line."""
    assert ranks.device.type == args.device, f"--device {args.device}, but the device here is {ranks.device}"
    cuda = args.device == "cuda"
    hidden, inner, layers, heads, vocab = SHAPES[args.shape]

    def config(kv_heads: int) -> LlamaConfig:
        return LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                           num_key_value_heads=kv_heads, vocab_size=vocab)

    compute = torch.bfloat16 if cuda else torch.float32
    execution = Execution(compute=compute, recompute=cuda, attention=args.attention)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as home:
        configs = {"mha": config(heads), "gqa": config(heads // 4)}
        for name in configs:
            with torch.device(ranks.device):
                LlamaForCausalLM(configs[name]).to(compute).save_pretrained(os.path.join(home, name))
        mha, gqa_start = os.path.join(home, "mha"), os.path.join(home, "gqa")
        teacher = build(configs["mha"], ranks, replace(execution, weights=compute, recompute=False), lambda name: (mha, name))
        teacher.eval().requires_grad_(False)
        student = build(configs["mha"], ranks, execution, distill.start_of_masked(mha, gqa_start),
                        lambda model: masks.patch(model, heads // 4), distill.start_masks(layers, heads))
        plain = build(configs["mha"], ranks, execution, lambda name: (mha, name))
        gqa = build(configs["gqa"], ranks, execution, lambda name: (gqa_start, name))
    settings = distill.Settings(lr=1e-5, loss_chunk=args.loss_chunk)
    masked_phase = distill.MaskedDistillation(student, teacher, 1000, settings)
    gqa_phase = distill.Distillation(gqa, teacher, settings)
    optimizers = {id(student): distill.masked_optimizer(student, settings), id(plain): distill.teacher_optimizer(plain, 1e-5),
                  id(gqa): distill.gqa_optimizer(gqa, settings, masks.KEY_VALUE)}
    samples = random_samples(args.batch, vocab)
    packed, single = (rows_of(samples, capacity, ranks.device) for capacity in (args.tokens_per_microbatch, 1))
    tokens = sum(map(len, samples))

    def update(trainee):
        optimizers[id(trainee)].step()
        optimizers[id(trainee)].zero_grad(set_to_none=True)

    def step(phase, trainee, rows):
        phase.begin_step(150)
        for row in rows:
            phase.row_loss(row)[0].backward()
        sum_over_ranks(phase.leaves(trainee))
        phase.end_step(150)
        clip_gradients(trainee, 1.0)
        update(trainee)
        phase.after_update(150)

    def floor(rows):
        for row in rows:
            def cross_entropy(hidden, lm_head, row=row):
                return torch.nn.functional.cross_entropy(lm_head(hidden).float(), row.targets)

            with torch.no_grad():
                teacher(row, lambda hidden, lm_head: lm_head(hidden))
            plain(row, cross_entropy).backward()
        update(plain)

    ways = {"floor": lambda: floor(packed), "masked": lambda: step(masked_phase, student, packed), "gqa": lambda: step(gqa_phase, gqa, packed),
            "single": lambda: step(masked_phase, student, single)}
    timed, taken = Timed(cuda), {name: [] for name in ways}
    for number in range(args.pairs + 1):
        for name, way in ways.items():
            seconds = timed(way)
            if number:
                taken[name].append(seconds)
        if number:
            print("  ".join(f"{name} {times[-1]:.3f} s" for name, times in taken.items()), flush=True)

    def ratio(above, below):
        return round(statistics.median(a / b for a, b in zip(taken[above], taken[below], strict=True)), 3)

    medians = {name: statistics.median(times) for name, times in taken.items()}
    figures = {"step_over_floor": ratio("masked", "floor"), "gqa_step_over_floor": ratio("gqa", "floor"), "packed_over_single": ratio("single", "masked"),
               "samples_per_s": {"packed": round(args.batch / medians["masked"], 2), "single": round(args.batch / medians["single"], 2)},
               "tokens_per_s": round(tokens / medians["masked"]), "rows": len(packed)}
    flops = sum(map(masked_phase.flops, packed))
    figures["tflops_per_s"] = round(flops / medians["masked"] / 1e12, 3)
    peak = peak_flops(torch.cuda.get_device_name()) if cuda else None
    if peak:
        figures |= {"mfu": round(flops / medians["masked"] / peak, 3), "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    return figures | {"settings": vars(args), "machine": machine(args.device)}


def main():
    args = parse()
    with joined_ranks() as ranks:
        figures = measure(args, ranks)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
