"""The distillation loss in chunks and all at once: time and peak memory, side by side in one run.

    python -m bench.loss                         # 8192 tokens, vocabulary 32000; under 50 s on two cores
    python -m bench.loss --device cuda --hidden 4096 --dtype bfloat16

Both compute the same loss and gradients from the same hidden states: KL on prompt tokens and BiLD on answer
tokens, including the logits of student and teacher. The plain way forms all logits at once. Peak memory is
the increase during a pass: in the process's high-water mark on a CPU, in torch's allocator on a GPU. The last
line is JSON: medians of the ratios of paired passes.
"""

import argparse
import json
import statistics
import time

import torch

from bench.machine import machine
from common.method.losses import bild, chunked, kl

PER_TOKEN = {"kl": kl, "bild": bild}


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument(
        "--hidden", type=int, default=128,
        help="small on a CPU, so that the products with the head do not hide the rest",
    )
    parser.add_argument("--answers", type=float, default=0.1, help="share of the tokens under BiLD")
    parser.add_argument("--chunk", type=int, default=512, help="as --loss-chunk of 05_prune_train.py")
    parser.add_argument("--pairs", type=int, default=3, help="paired passes, after one that is not counted")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


class Peak:
    """Seconds that a block takes, and the bytes that it adds at most to the memory in use at its start."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")

    def _used(self, peak: bool) -> int:
        if self.cuda:
            return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * int(lines["VmHWM" if peak else "VmRSS"].split()[0])

    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the high-water mark
        self.before, self.start = self._used(peak=False), time.perf_counter()
        return self

    def __exit__(self, *error):
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds, self.bytes = time.perf_counter() - self.start, self._used(peak=True) - self.before


class Problem:
    """Hidden states and heads of a student and a teacher, and the two ways to the loss between them."""

    def __init__(self, args):
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(args.device, getattr(torch, args.dtype))

        self.tokens, self.chunk = args.tokens, args.chunk
        self.hidden = random(args.tokens, args.hidden).requires_grad_()
        self.head = (random(args.vocab, args.hidden) / 8).requires_grad_()
        self.teacher_hidden = self.hidden.detach() + 0.3 * random(args.tokens, args.hidden)
        self.teacher_head = self.head.detach()
        order = torch.randperm(args.tokens, generator=generator).to(args.device)
        count = int(args.answers * args.tokens)
        self.answers, self.prompts = order[:count].sort().values, order[count:].sort().values

    def chunked(self) -> torch.Tensor:
        def loss(kind: str, at: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                teacher = (self.teacher_hidden[at] @ self.teacher_head.T).float()
            return PER_TOKEN[kind](student.float(), teacher).sum() / self.tokens

        pieces = [("kl", at) for at in self.prompts.split(self.chunk)]
        pieces += [("bild", at) for at in self.answers.split(self.chunk)]
        return chunked(loss, pieces, self.hidden, self.head)

    def plain(self) -> torch.Tensor:
        student = (self.hidden @ self.head.T).float()
        with torch.no_grad():
            teacher = (self.teacher_hidden @ self.teacher_head.T).float()
        prompt_loss = kl(student[self.prompts], teacher[self.prompts]).sum()
        answer_loss = bild(student[self.answers], teacher[self.answers]).sum()
        return (prompt_loss + answer_loss) / self.tokens

    def measure(self, way, device: str) -> tuple[Peak, float, list[torch.Tensor]]:
        """Forward and backward pass of one way: its cost, loss and gradients."""
        self.hidden.grad = self.head.grad = None
        with Peak(device) as peak:
            loss = way()
            loss.backward()
        return peak, float(loss.detach()), [self.hidden.grad.float(), self.head.grad.float()]


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def main():
    args = parse()
    problem = Problem(args)
    ways = {"chunked": problem.chunked, "plain": problem.plain}
    seconds, peaks = ({name: [] for name in ways} for _ in range(2))
    losses, gradients = {}, {}
    for number in range(args.pairs + 1):
        for name, way in ways.items():
            peak, losses[name], gradients[name] = problem.measure(way, args.device)
            if number:
                seconds[name].append(peak.seconds)
                peaks[name].append(peak.bytes)
                print(f"{name:8s} {peak.seconds:7.3f} s  peak {peak.bytes / 2**20:9.1f} MiB", flush=True)
    differences = map(relative_difference, gradients["chunked"], gradients["plain"])
    print(json.dumps({
        "loss_time_ratio": round(median_ratio(seconds["chunked"], seconds["plain"]), 3),
        "loss_memory_ratio": round(median_ratio(peaks["chunked"], peaks["plain"]), 4),
        "chunked_mib": round(statistics.median(peaks["chunked"]) / 2**20, 1),
        "plain_mib": round(statistics.median(peaks["plain"]) / 2**20, 1),
        "loss_difference": abs(losses["chunked"] - losses["plain"]),
        "gradient_difference": max(differences),
        "settings": vars(args),
        "machine": machine(args.device),
    }))


if __name__ == "__main__":
    main()
