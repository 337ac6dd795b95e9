"""Stages 2 to 4 on Gram matrices against the same mathematics on stored caches, and what stage 1 adds to a forward pass.

    python -m bench.transform                    # one layer of 7B proportions; under 50 s on one core
    python -m bench.transform --device cuda --tokens 65536 --head-pairs 20 --calibrate-tokens 8192 --layers 4

The direct way keeps every head's vectors, [H, N, d] float32, and works on them pair by pair as the paper prints it: Eq. 2, 3, 7-10 and
18-22 for each two heads; Algorithm 2 with the whole score summed anew at each swap, one start after another; Algorithm 1 on the
vectors of each group. Ours begins where the Grams stand and does all pairs, all starts, all groups. Algorithm 1 runs --rounds
rounds in both, with no early end.

The paper's 128 x 2048 tokens are out of the direct way's reach in a minute. It is timed on --tokens tokens, --head-pairs pairs of heads, one
start and one round of one group, and scaled linearly to all pairs, starts, groups and rounds; what works on vectors is scaled to the
paper's tokens as well, decompositions of d x d matrices are not. transform_speedup is that ratio;
transform_speedup_at_measured_tokens scales no tokens; transform_speedup_with_grams counts making the Grams as ours.

calibrate_over_forward: forward passes of a random-weight Llama with stage 1's hooks over plain ones of the same tokens, median of
alternating pairs; what stage 1 does once (the Grams of W_O, the file) is not in it. Last line: JSON.
"""

import argparse
import copy
import importlib
import json
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import machine
from common.method.grouping import anneal, score
from common.method.procrustes import align_keys, align_values, key_similarity, value_similarity
from common.method.rope import to_complex
from common.method.stats import CRITERIA, LayerStats, unpack_half
from common.models import geometry

PUBLISHED_TOKENS = 128 * 2048


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU: one measures the same on a busy machine as on a quiet one, several do not")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    # the search and the alignment, of both ways
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=3000, help="swaps proposed per start")
    parser.add_argument("--rounds", type=int, default=50, help="of Algorithm 1")
    # how much of the direct way is timed
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head-pairs", type=int, default=4)
    # the forward pass
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--calibrate-tokens", type=int, default=512, help="one sequence")
    parser.add_argument("--pairs", type=int, default=3, help="paired passes of either half, after one of each that is not counted")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the forward pass")
    return parser.parse_args()


def timed(device: str, function, *arguments):
    """What the call returns, and its seconds, the device's work included."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    result = function(*arguments)
    wait()
    return result, time.perf_counter() - start


def random_cache(tokens: int, heads: int, size: int, seed: int, device: str) -> torch.Tensor:
    """Head vectors [N, H, d] that are partly maps of one another: a shared source through each head's map, and noise."""
    generator = torch.Generator().manual_seed(seed)
    source, maps = torch.randn(tokens, size, generator=generator), torch.randn(size, heads * size, generator=generator) / size
    noise = torch.randn(tokens, heads * size, generator=generator) / (2 * size) ** 0.5
    return (source @ maps + noise).view(tokens, heads, size).to(device)


class Ours:
    """Stages 2 to 4 of one layer from its Grams. similarities, grouping and rotations are called in that order."""

    def __init__(self, args, raw: dict):
        self.args, self.stats = args, LayerStats(args.heads, args.head_dim, args.device)
        self.grams_seconds = timed(args.device, self._sum_up, raw)[1]
        self.value = {kind: unpack_half(half, args.heads) for kind, half in self.stats.value.items()}

    def _sum_up(self, raw: dict) -> None:
        for key, value in zip(raw["key"].split(4096), raw["value"].split(4096), strict=True):
            self.stats.update_keys(key)
            self.stats.update_values(value)

    def similarities(self) -> list[torch.Tensor]:
        """[H, H] each: keys then values, cos then dist, before then after alignment."""
        return [matrix for grams, similarity in ((self.stats.key, key_similarity), (self.value, value_similarity))
                for criterion, kind in CRITERIA.items() for matrix in similarity(grams[kind], self.args.tokens, criterion)]

    def grouping(self, similarity: np.ndarray) -> np.ndarray:
        return anneal(similarity[None], self.args.kv_heads, self.args.restarts, self.args.iterations, 0)[0]

    def rotations(self, groups: torch.Tensor, rounds: int):
        """Q [G, D, d, d] and u [G, D, d/2] after `rounds` rounds."""
        within = groups[:, :, None], groups[:, None, :]
        return align_values(self.value["raw"][within], rounds, -1), align_keys(self.stats.key["raw"][within], rounds, -1)


class Direct:
    """The direct way. Seconds of decompositions are kept apart, since they do not grow with the tokens."""

    def __init__(self, device: str, raw: dict):
        self.device, self.decomposing = device, 0.0
        self.raw = {head: vectors.transpose(0, 1).contiguous() for head, vectors in raw.items()}  # [H, N, d]: a head's vectors side by side

    def timed(self, function, *arguments):
        """The result, its seconds that grow with the tokens, its seconds in decompositions."""
        self.decomposing = 0.0
        result, seconds = timed(self.device, function, *arguments)
        return result, seconds - self.decomposing, self.decomposing

    def polar(self, product: torch.Tensor) -> torch.Tensor:
        (left, _, right), seconds = timed(self.device, torch.linalg.svd, product)
        self.decomposing += seconds
        return left @ right

    def scale_to_unit(self) -> None:
        """Eq. 7, 8."""
        self.unit = {head: vectors / vectors.norm(dim=-1, keepdim=True) for head, vectors in self.raw.items()}

    def turned_value(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [N, d] under the orthogonal map that brings it nearest to x [N, d] (Eq. 9, 10, 20, 21)."""
        return y @ self.polar(x.T @ y).T

    def turned_key(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [N, d] with each RoPE pair turned by the angle that brings it nearest to x [N, d] (Eq. 14, 18)."""
        (x_real, x_imaginary), (y_real, y_imaginary) = x.chunk(2, -1), y.chunk(2, -1)
        angle = torch.atan2((x_imaginary * y_real - x_real * y_imaginary).sum(0), (x_real * y_real + x_imaginary * y_imaginary).sum(0))
        cosine, sine = angle.cos(), angle.sin()
        return torch.cat([cosine * y_real - sine * y_imaginary, sine * y_real + cosine * y_imaginary], -1)

    def similarities(self, i: int, j: int) -> list[float]:
        """Of heads i and j, in the order of Ours.similarities: mean cosine (Eq. 2, 3, 18, 19), minus mean squared distance (Eq. 22)."""
        found = []
        for head, turned in (("key", self.turned_key), ("value", self.turned_value)):
            x, y = self.unit[head][i], self.unit[head][j]
            found += [float((x * shape).sum(-1).mean()) for shape in (y, turned(x, y))]
            x, y = self.raw[head][i], self.raw[head][j]
            found += [-float((x - shape).square().sum(-1).mean()) for shape in (y, turned(x, y))]
        return found

    def align_round(self, group: list[int], value_maps: torch.Tensor, key_turns: torch.Tensor):
        """One round of Algorithm 1 for the D heads of a group, from Q [D, d, d] and u [D, d/2] to the next."""
        values, keys = ([self.raw[head][i] for i in group] for head in ("value", "key"))
        mean = sum(value @ q.T for value, q in zip(values, value_maps, strict=True)) / len(group)
        value_maps = torch.stack([self.polar(mean.T @ value) for value in values])
        pairs = [to_complex(key) for key in keys]
        mean = sum(pair * u for pair, u in zip(pairs, key_turns, strict=True)) / len(group)
        towards = torch.stack([(mean * pair.conj()).sum(0) for pair in pairs])
        return value_maps, towards / towards.abs()


def direct_score(similarity: np.ndarray, groups: np.ndarray) -> float:
    """Eq. 23, 24: similarity [H, H], groups [G, D]."""
    return (similarity[groups[:, :, None], groups[:, None, :]].sum() - np.trace(similarity)) / 2


def direct_start(similarity: np.ndarray, kv_heads: int, iterations: int, random) -> np.ndarray:
    """One start of Algorithm 2 as printed: [G, D]."""
    groups = random.permutation(len(similarity)).reshape(kv_heads, -1)
    best = direct_score(similarity, groups)
    for _ in range(iterations):
        first, second = random.choice(kv_heads, 2, replace=False)
        a, b = random.integers(groups.shape[1], size=2)
        proposed = groups.copy()
        proposed[first, a], proposed[second, b] = groups[second, b], groups[first, a]
        proposed_score = direct_score(similarity, proposed)
        if proposed_score > best:
            groups, best = proposed, proposed_score
    return groups


def largest_difference(first, second) -> float:
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(first, second, strict=True))


def transform(args) -> dict:
    """Both ways of stages 2 to 4 on one layer."""
    raw = {head: random_cache(args.tokens, args.heads, args.head_dim, seed, args.device) for seed, head in enumerate(("key", "value"))}
    Ours(args, {head: vectors[:512] for head, vectors in raw.items()})  # not counted
    ours, direct, random = Ours(args, raw), Direct(args.device, raw), np.random.default_rng(0)
    all_pairs = args.heads * (args.heads - 1) // 2
    pairs = [(i, args.heads - 1 - i) for i in range(min(args.head_pairs, args.heads // 2))]
    passes = []  # each: part -> seconds of ours; of the direct way for the whole layer, growing with the tokens and not
    for number in range(args.pairs + 1):
        matrices, our_similarity = timed(args.device, ours.similarities)
        matrix = matrices[-1].cpu().numpy()  # values, dist, after alignment: the default of 03_group.py
        groups, our_grouping = timed(args.device, ours.grouping, matrix)
        on_device = torch.from_numpy(groups).to(args.device)
        _, our_alignment = timed(args.device, ours.rotations, on_device, args.rounds if number else 1)

        _, scaling, _ = direct.timed(direct.scale_to_unit)
        found, on_vectors, decomposing = direct.timed(lambda: [direct.similarities(i, j) for i, j in pairs])
        share = all_pairs / len(pairs)
        similarity = scaling + on_vectors * share, decomposing * share
        started, searching, _ = direct.timed(direct_start, matrix, args.kv_heads, args.iterations, random)
        second, third = (ours.rotations(on_device[:1], rounds) for rounds in (2, 3))
        state = second[0][0].float(), second[1][0].to(torch.complex64)
        turned, on_vectors, decomposing = direct.timed(direct.align_round, groups[0].tolist(), *state)
        share = args.kv_heads * args.rounds
        if number:  # the first is not counted
            passes.append({"similarity": (our_similarity, *similarity), "grouping": (our_grouping, 0.0, searching * args.restarts),
                           "alignment": (our_alignment, on_vectors * share, decomposing * share)})

    factor = PUBLISHED_TOKENS / args.tokens
    median = {part: [statistics.median(one[part][i] for one in passes) for i in range(3)] for part in passes[0]}
    print(f"direct way: timed on {args.tokens} tokens, {len(pairs)} of {all_pairs} pairs of heads, 1 of {args.restarts} starts, "
          f"1 of {args.rounds} rounds of 1 of {args.kv_heads} groups; scaled to all of them")
    print(f"{'seconds, one layer':20s} {f'{args.tokens} tokens':>16s} {f'{PUBLISHED_TOKENS} tokens':>16s} {'ours':>9s}")
    for part, (spent, growing, fixed) in median.items():
        print(f"{part:20s} {growing + fixed:16.1f} {growing * factor + fixed:16.1f} {spent:9.3f}")
    print(f"not in ours: making the Grams, {ours.grams_seconds:.1f} s of {args.tokens} tokens, {ours.grams_seconds * factor:.1f} s of {PUBLISHED_TOKENS}")
    differences = {
        "similarity_difference": largest_difference([torch.tensor(row) for row in found], [torch.stack([matrix[i, j] for matrix in matrices]) for i, j in pairs]),
        "score_difference": abs(direct_score(matrix, groups) - float(score(matrix[None], groups[None])[0])),
        "rotation_difference": largest_difference(turned, (third[0][0], third[1][0]))}
    print(f"both ways: {', '.join(f'{name} {value:.1e}' for name, value in differences.items())}; "
          f"score found {direct_score(matrix, groups):.5f}, by one start of the direct way {direct_score(matrix, started):.5f}", flush=True)

    def ratio(factor: float, grams: float = 0.0) -> float:
        return round(statistics.median(sum(growing * factor + fixed for _, growing, fixed in one.values()) /
                                       (sum(spent for spent, _, _ in one.values()) + grams) for one in passes), 1)

    return {"transform_speedup": ratio(factor), "transform_speedup_at_measured_tokens": ratio(1.0),
            "transform_speedup_with_grams": ratio(factor, ours.grams_seconds * factor),
            "transform_seconds": round(sum(spent for spent, _, _ in median.values()), 3)} | differences


@torch.no_grad()
def calibrate(args) -> dict:
    """Stage 1's pass over the plain one."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=args.heads * args.head_dim, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
                         num_attention_heads=args.heads, vocab_size=1000)
    with torch.device(args.device):
        plain = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    hooked = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})  # the same weights, its own hooks
    tokens = torch.randint(0, 1000, (1, args.calibrate_tokens), device=args.device)
    sampled = torch.linspace(0, tokens.numel() - 1, 256).long()
    for index, layer in enumerate(hooked.model.layers):
        collector = importlib.import_module("01_calibrate").Collector(layer, index, geometry(config), sampled, args.device)
        collector.begin(0, tokens.numel())
    taken = {"plain": [], "calibrating": []}
    for number in range(args.pairs + 1):
        for name, model in (("plain", plain), ("calibrating", hooked)):
            _, seconds = timed(args.device, lambda model=model: model.model(input_ids=tokens, use_cache=False))
            if number:
                taken[name].append(seconds)
        if number:
            print("  ".join(f"{name} {seconds[-1]:.3f} s" for name, seconds in taken.items()), flush=True)
    ratios = [a / b for a, b in zip(taken["calibrating"], taken["plain"], strict=True)]
    return {"calibrate_over_forward": round(statistics.median(ratios), 3), "forward_seconds": round(statistics.median(taken["plain"]), 3)}


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    figures = transform(args) | calibrate(args)
    print(json.dumps(figures | {"settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    main()
