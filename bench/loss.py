"""The distillation loss in chunks and all at once: time and peak memory, side by side in one run.

    python -m bench.loss                         # 8192 tokens, vocabulary 32000; under 50 s on two cores
    python -m bench.loss --device cuda --hidden 4096 --dtype bfloat16

Both compute the same loss and gradients from the same hidden states: KL on prompt tokens and BiLD on answer
tokens, including the logits of student and teacher. The plain way forms all logits at once. Peak memory is
the increase during a pass: in the process's high-water mark on a CPU, in torch's allocator on a GPU. The last
line is JSON: medians of the ratios of paired passes.
"""

import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch

from bench.machine import machine, median_ratio, timed
from common.method.losses import bild, kl
from common.models.head import Head
from common.run.errors import run_stage
from common.run.flags import Parser
from common.training.chunked import chunked


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--tokens", type=int, default=8192)
    flags.add_argument("--vocab", type=int, default=32000)
    flags.add_argument("--hidden", type=int, default=128,
                       help="small on a CPU, so that the products with the head do not hide the rest")
    flags.add_argument("--answers", type=float, default=0.1, help="share of the tokens under BiLD")
    flags.add_argument("--chunk", type=int, default=512, help="as --loss-chunk of 05_prune_train.py")
    flags.add_argument("--pairs", type=int, default=3, help="paired passes, after one that is not counted")
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return flags.parse_args()


def memory_used(cuda: bool, peak: bool) -> int:
    """Bytes in use now, or at most since the peak was reset."""
    if cuda:
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmHWM" if peak else "VmRSS"].split()[0])


def peak_of(device: str, function, *arguments) -> tuple[float, float, int]:
    """The result of a call, its seconds, and the bytes that it adds at most to the memory in use before."""
    cuda = device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = memory_used(cuda, peak=False)
    result, seconds = timed(device, function, *arguments)
    return result, seconds, memory_used(cuda, peak=True) - before


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
        order = torch.randperm(args.tokens, generator=generator).to(args.device)
        answers = int(args.answers * args.tokens)
        self.kinds = [(kl, order[answers:].sort().values), (bild, order[:answers].sort().values)]

    def chunked(self) -> torch.Tensor:
        def loss(kind, at: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
            teacher = (self.teacher_hidden[at] @ self.head.detach().T).float()
            return kind(student.float(), teacher).sum() / self.tokens

        pieces = [(kind, at) for kind, tokens in self.kinds for at in tokens.split(self.chunk)]
        return chunked(loss, pieces, self.hidden, Head(SimpleNamespace(weight=self.head, bias=None)))

    def plain(self) -> torch.Tensor:
        student = (self.hidden @ self.head.T).float()
        teacher = (self.teacher_hidden @ self.head.detach().T).float()
        return sum(kind(student[at], teacher[at]).sum() for kind, at in self.kinds) / self.tokens


def forward_and_backward(way) -> float:
    """The loss of one way, which leaves its gradients in the problem's hidden states and head."""
    loss = way()
    loss.backward()
    return float(loss.detach())


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
            problem.hidden.grad = problem.head.grad = None
            losses[name], spent, peak = peak_of(args.device, forward_and_backward, way)
            gradients[name] = [problem.hidden.grad.float(), problem.head.grad.float()]
            if number:
                seconds[name].append(spent)
                peaks[name].append(peak)
                print(f"{name:8s} {spent:7.3f} s  peak {peak / 2**20:9.1f} MiB", flush=True)
    differences = map(relative_difference, gradients["chunked"], gradients["plain"])
    print(json.dumps({
        "loss_time_ratio": round(median_ratio(seconds["chunked"], seconds["plain"]), 3),
        "loss_memory_ratio": round(median_ratio(peaks["chunked"], peaks["plain"]), 4),
        "chunked_mib": round(statistics.median(peaks["chunked"]) / 2**20, 1),
        "plain_mib": round(statistics.median(peaks["plain"]) / 2**20, 1),
        "loss_difference": abs(losses["chunked"] - losses["plain"]),
        "gradient_difference": max(differences),
        "settings": vars(args), "machine": machine(args.device),
    }))


if __name__ == "__main__":
    run_stage(main)
