"""The distillation loss, chunk by chunk against the plain way: time and peak memory, side by side in one run.

    python -m bench.loss                         # 8192 tokens, vocabulary 32000; under 50 s on two cores
    python -m bench.loss --device cuda --hidden 4096 --dtype bfloat16

Both ways give the same loss and gradients from the same hidden states: KL on prompt tokens, BiLD on answer tokens, logits of
student and teacher included. Plain forms them for all tokens at once. Peak memory is what a pass adds to what was held before
it: of the process (its high-water mark) on a CPU, of torch's allocator on a GPU. Last line: JSON, medians of paired passes.
"""

import argparse
import json
import statistics
import time

import torch

from bench.machine import machine
from common.method.losses import bild, chunked, kl


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=128, help="small on a CPU, so that the head's products do not hide the rest")
    parser.add_argument("--answers", type=float, default=0.1, help="share of tokens under BiLD")
    parser.add_argument("--chunk", type=int, default=512, help="as 05_prune_train.py --loss-chunk")
    parser.add_argument("--pairs", type=int, default=3, help="paired passes, after one of each that is not counted")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


class Peak:
    """Bytes that a block adds at its highest to what was held when it began; seconds it took."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")

    def _held(self, peak: bool) -> int:
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
                file.write("5")  # the high-water mark starts again from here
        self.before, self.start = self._held(peak=False), time.perf_counter()
        return self

    def __exit__(self, *error):
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds, self.bytes = time.perf_counter() - self.start, self._held(peak=True) - self.before


def main():
    args = parse()
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(args.device, getattr(torch, args.dtype))

    hidden, head = random(args.tokens, args.hidden).requires_grad_(), (random(args.vocab, args.hidden) / 8).requires_grad_()
    teacher_hidden, teacher_head = hidden.detach() + 0.3 * random(args.tokens, args.hidden), head.detach()
    order = torch.randperm(args.tokens, generator=generator).to(args.device)
    answers, prompts = order[: int(args.answers * args.tokens)].sort().values, order[int(args.answers * args.tokens) :].sort().values
    per_token = {"kl": kl, "bild": bild}

    def loss(kind, at, student):
        with torch.no_grad():
            teacher = (teacher_hidden[at] @ teacher_head.T).float()
        return per_token[kind](student.float(), teacher).sum() / args.tokens

    def ours():
        pieces = [("kl", at) for at in prompts.split(args.chunk)] + [("bild", at) for at in answers.split(args.chunk)]
        return chunked(loss, pieces, hidden, head)

    def plain():
        student = (hidden @ head.T).float()
        with torch.no_grad():
            teacher = (teacher_hidden @ teacher_head.T).float()
        return (kl(student[prompts], teacher[prompts]).sum() + bild(student[answers], teacher[answers]).sum()) / args.tokens

    taken = {"chunked": [], "plain": []}
    results = {}
    for number in range(args.pairs + 1):
        for name, way in (("chunked", ours), ("plain", plain)):
            hidden.grad = head.grad = None
            with Peak(args.device) as peak:
                value = way()
                value.backward()
            results[name] = (float(value.detach()), hidden.grad.float(), head.grad.float())
            del value
            if number:
                taken[name].append((peak.seconds, peak.bytes))
                print(f"{name:8s} {peak.seconds:7.3f} s  {peak.bytes / 2**20:9.1f} MiB at its highest", flush=True)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(results["chunked"][1:], results["plain"][1:], strict=True))
    seconds, peaks = ({name: [pair[i] for pair in pairs] for name, pairs in taken.items()} for i in (0, 1))
    print(json.dumps({
        "loss_time_ratio": round(statistics.median(a / b for a, b in zip(seconds["chunked"], seconds["plain"], strict=True)), 3),
        "loss_memory_ratio": round(statistics.median(a / b for a, b in zip(peaks["chunked"], peaks["plain"], strict=True)), 4),
        "chunked_mib": round(statistics.median(peaks["chunked"]) / 2**20, 1), "plain_mib": round(statistics.median(peaks["plain"]) / 2**20, 1),
        "loss_difference": abs(results["chunked"][0] - results["plain"][0]), "gradient_difference": difference,
        "settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    main()
