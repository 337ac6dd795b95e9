"""Stages 2 to 4 on Gram matrices against the same mathematics on stored caches, and what calibrating costs.

    python -m bench.transform                    # one layer of 7B proportions; three minutes on one core
    python -m bench.transform --device cuda --tokens 65536 --head-pairs 20 --calibrate-tokens 8192 --layers 4

The direct way is paper.py on every head's vectors, [d, N] float32: Eq. 2, 3, 7-10 and 18-22 for each two
heads; Algorithm 2 with the entire score summed again at each swap, one restart after another; --rounds rounds
of Algorithm 1 on the vectors of each group, which real values need ten times over. Ours begins with the
Grams, does all pairs, all restarts and all groups at once, and aligns until it has settled.

The paper's 128 x 2048 tokens are out of the direct way's reach in a minute. It is timed on --tokens tokens,
--head-pairs pairs of heads, one restart and one round of one group, and scaled linearly to all pairs,
restarts, groups and rounds; work on vectors is scaled to the paper's tokens as well, decompositions of d x d
matrices are not. transform_speedup is that ratio; ..._at_measured_tokens scales no tokens; ..._with_grams
counts making the Grams as ours.

align_speedup: seconds to align until settled, of the printed update on vectors with the layer's Grams over
ours on these; it stops at 500 rounds or when a round gains no more than 1e-10 of the objective sum_n |sum_i
Q_i v_i|^2. align_objective_gain is the least of any group: our objective over the printed update's, minus
one. calibrate_over_forward: forward passes of a random Llama with stage 1's hooks over plain ones of the same
tokens. The last line is JSON: medians of paired passes.
"""

import copy
import json
import statistics
from functools import partial

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import paper
from bench.machine import machine, timed
from common.method.grouping import anneal
from common.method.merge import mean_merge
from common.method.procrustes import (
    align_layer,
    key_overlap,
    layer_similarity,
    value_overlap,
    within_group_cosine,
)
from common.method.stats import LayerGrams, LayerStats, group_blocks
from common.models.calibration import Collector
from common.models.edits import fuse_layer, merged_state
from common.models.families import RopePairs, geometry
from common.models.proof import attach_pairs
from common.reporting.tables import markdown_table
from common.run.errors import run_stage
from common.run.flags import Parser

PAPER_TOKENS = 128 * 2048
ROUNDS, GAIN = 500, 1e-10  # at which the printed update ends


def parse():
    flags = Parser(__doc__)
    flags.add_argument("--device", default="cpu", help="cpu or cuda")
    flags.add_argument("--threads", type=int, default=1,
                       help="of the CPU: one is as fast on a busy machine as on a quiet one")
    flags.add_argument("--heads", type=int, default=32)
    flags.add_argument("--head-dim", type=int, default=128)
    flags.add_argument("--kv-heads", type=int, default=8)
    # the search and the alignment, both ways
    flags.add_argument("--restarts", type=int, default=200)
    flags.add_argument("--iterations", type=int, default=3000, help="swaps proposed per restart")
    flags.add_argument("--rounds", type=int, default=50, help="of the direct way's Algorithm 1")
    # the part of the direct way that is timed
    flags.add_argument("--tokens", type=int, default=8192)
    flags.add_argument("--head-pairs", type=int, default=4)
    # the forward pass
    flags.add_argument("--intermediate", type=int, default=11008)
    flags.add_argument("--layers", type=int, default=1)
    flags.add_argument("--calibrate-tokens", type=int, default=4096, help="one sequence")
    flags.add_argument("--pairs", type=int, default=3, help="paired passes, after one not counted")
    flags.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"),
                       help="of the forward pass")
    return flags.parse_args()


def vectors_of(gram: torch.Tensor) -> list[torch.Tensor]:
    """X_i of each of D heads [..., D d, d] whose Gram is C [..., D, D, d, d].

    Of keys, whose Gram is c [..., D, D, d/2]: the RoPE pairs of each, X_i [..., d/2, D, 2].
    """
    size = 1 if gram.is_complex() else gram.shape[-1]
    moment = gram.movedim(-1, -3) if size == 1 else gram.transpose(-3, -2).flatten(-2).flatten(-3, -2)
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.clamp(min=0).sqrt()[..., None, :]).mH  # its square is the moment
    heads = root.split(size, dim=-1)
    return [torch.view_as_real(head[..., 0].resolve_conj()) for head in heads] if size == 1 else list(heads)


def printed_alignment(gram: torch.Tensor) -> list[torch.Tensor]:
    """Algorithm 1 as printed, but for the transpose in its update, on vectors with this Gram."""
    rotation = paper.rotation_2d if gram.is_complex() else paper.minimizer
    return paper.algorithm_1(vectors_of(gram), rotation, ROUNDS, GAIN)


def objective_gain(gram: torch.Tensor, ours: torch.Tensor, printed: list[torch.Tensor]) -> torch.Tensor:
    """[G] objective of our rotations over that of the printed update's Y_i, minus one; values or keys."""
    overlap = key_overlap if gram.is_complex() else value_overlap
    return overlap(gram, ours).sum((-2, -1)) / sum(printed).square().flatten(1).sum(1) - 1


def random_cache(tokens: int, heads: int, size: int, seed: int, device: str) -> torch.Tensor:
    """Head vectors [N, H, d] that are partly maps of one another: a shared source, mapped, and noise."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(tokens, size, generator=generator)
    maps = torch.randn(size, heads * size, generator=generator) / size
    noise = torch.randn(tokens, heads * size, generator=generator) / (2 * size) ** 0.5
    return (source @ maps + noise).view(tokens, heads, size).to(device)


def grams_of(args, raw: dict[str, torch.Tensor]) -> LayerGrams:
    """The Grams of a layer as stage 1 makes them. raw: "key" and "value" vectors [N, H, d]."""
    stats = LayerStats(args.heads, args.head_dim, args.device)
    for key, value in zip(raw["key"].split(4096), raw["value"].split(4096), strict=True):
        stats.update_keys(key)
        stats.update_values(value)
    tensors = stats.tensors() | {"key.free": torch.ones(args.head_dim // 2, dtype=torch.bool)}
    return LayerGrams({name: tensor.to(args.device) for name, tensor in tensors.items()}, args.heads)


class Ours:
    """Stages 2 to 4 of a layer from its Grams, once, on float32 weights of hidden size heads * d."""

    def __init__(self, args, grams: LayerGrams):
        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=args.heads * args.head_dim, num_attention_heads=args.heads)
        with torch.device(args.device):
            attention = LlamaAttention(config, 0)
        attention.rope_pairs = RopePairs(None, None, torch.zeros(args.head_dim // 2))
        self.device, self.seconds = args.device, {}
        self.measured = self.clock("similarities", layer_similarity, grams)
        self.similarity = self.measured["value.dist.after"].cpu().numpy()  # the default of stage 3
        search = args.kv_heads, args.restarts, args.iterations, 0
        groups = self.clock("grouping", anneal, self.similarity[None], *search)[0]
        self.groups = torch.from_numpy(groups).to(args.device)
        self.rotations = self.clock("alignment", align_layer, grams, self.groups, "dist")
        self.clock("cosines", within_group_cosine, grams, self.groups, *self.rotations)
        turned = [rotation.flatten(0, 1) for rotation in self.rotations]
        self.clock("fusing", fuse_layer, attention, self.groups.flatten().tolist(), *turned)
        merge = mean_merge(grams, self.groups, *self.rotations)
        self.clock("merging", merged_state, attention, merge)

    def clock(self, step: str, function, *arguments):
        result, self.seconds[step] = timed(self.device, function, *arguments)
        return result


class Direct:
    """The direct way, by the equations of paper.py."""

    def __init__(self, args, raw: dict):
        self.args = args
        self.raw = {kind: paper.eq_1(vectors.flatten(1).T.contiguous(), args.heads)
                    for kind, vectors in raw.items()}  # [d, N] each

    def scale_to_unit(self) -> None:
        self.unit = {"key": [paper.eq_7(K_i) for K_i in self.raw["key"]],
                     "value": [paper.eq_8(V_i) for V_i in self.raw["value"]]}

    def similarities(self, i: int, j: int) -> list[float]:
        """Of heads i and j: key cosine before and after alignment, distance squared after; of values, too."""
        (K_i, K_j), (V_i, V_j) = ([self.raw[kind][head] for head in (i, j)] for kind in ("key", "value"))
        P, R = paper.minimizer(*paper.eq_20(V_i, V_j)[::2]), paper.key_rotation(K_i, K_j)
        distances = paper.eq_22_squared(K_i, K_j, R), paper.eq_22_squared(V_i, V_j, P)
        (K_i, K_j), (V_i, V_j) = ([self.unit[kind][head] for head in (i, j)] for kind in ("key", "value"))
        Q, R = paper.minimizer(*paper.eq_9(V_i, V_j)[::2]), paper.key_rotation(K_i, K_j)
        keys = paper.eq_2(K_i, K_j), paper.eq_18(K_i, K_j, R), distances[0]
        values = paper.eq_3(V_i, V_j), paper.eq_19(V_i, V_j, Q), distances[1]
        return [float(number) for number in (*keys, *values)]

    def shapes(self, group: list[int]) -> list[tuple]:
        """What Algorithm 1 aligns in a group: values [N, d] and keys [d/2, N, 2], each with its rotation."""
        return [([self.raw["value"][head].T for head in group], paper.minimizer),
                ([paper.pairs(self.raw["key"][head]).mT for head in group], paper.rotation_2d)]

    def seconds(self, similarity: np.ndarray, group: list[int]) -> dict[str, tuple[float, float]]:
        """Part -> seconds of a layer: those that grow with the tokens, and those that do not."""
        args, parts = self.args, {}
        matrix = self.raw["key"][0] @ self.raw["value"][0].T
        svd = statistics.median(timed(args.device, torch.linalg.svd, matrix)[1] for _ in range(5))
        _, scaling = timed(args.device, self.scale_to_unit)
        pairs = head_pairs(args)
        _, spent = timed(args.device, lambda: [self.similarities(i, j) for i, j in pairs])
        fixed, share = min(2 * len(pairs) * svd, spent), args.heads * (args.heads - 1) / 2 / len(pairs)
        parts["similarities"] = scaling + (spent - fixed) * share, fixed * share
        search = args.iterations, 1, similarity, args.kv_heads, np.random.default_rng(0)
        _, spent = timed(args.device, paper.algorithm_2, *search)
        parts["grouping"] = 0.0, spent * args.restarts
        shapes = self.shapes(group)
        _, spent = timed(args.device, lambda: [paper.algorithm_1(*shape, 1, -1) for shape in shapes])
        fixed, share = min(len(group) * svd, spent), args.kv_heads * args.rounds
        parts["alignment"] = (spent - fixed) * share, fixed * share
        return parts


def head_pairs(args) -> list[tuple[int, int]]:
    return [(i, args.heads - 1 - i) for i in range(min(args.head_pairs, args.heads // 2))]


def blocks(grams: LayerGrams, groups: torch.Tensor) -> list[torch.Tensor]:
    """The groups' Grams of values [G, D, D, d, d] and of keys [G, D, D, d/2]."""
    return [group_blocks(gram, groups) for gram in (grams.value("raw"), grams.key("raw"))]


def speedup(passes: list[tuple], factor: float = 1.0, grams: float = 0.0) -> float:
    """Median of the direct way's seconds, vectors scaled by `factor`, over ours plus `grams` seconds."""
    ratios = [sum(growing * factor + fixed for growing, fixed in direct.values())
              / (sum(ours[part] for part in direct) + grams) for ours, direct in passes]
    return round(statistics.median(ratios), 1)


def table(args, medians: dict[str, float], passes: list[tuple]) -> str:
    """Seconds of a layer by step: the direct way's on its tokens and on the paper's, and ours; medians."""
    lines = []
    for step, spent in medians.items():
        cells = ["", ""]
        if step in passes[0][1]:
            timings = zip(*(direct[step] for _, direct in passes), strict=True)
            growing, fixed = map(statistics.median, timings)
            cells = [f"{growing * factor + fixed:.1f}" for factor in (1, PAPER_TOKENS / args.tokens)]
        lines.append([step, *cells, f"{spent:.3f}"])
    header = ["seconds", f"direct, {args.tokens} tokens", f"direct, {PAPER_TOKENS} tokens", "ours"]
    return markdown_table(header, lines)


def transform(args) -> dict:
    """Both ways of stages 2 to 4 on one layer."""
    raw = {kind: random_cache(args.tokens, args.heads, args.head_dim, seed, args.device)
           for seed, kind in enumerate(("key", "value"))}
    grams_of(args, {kind: vectors[:512] for kind, vectors in raw.items()})  # not counted
    grams, grams_seconds = timed(args.device, grams_of, args, raw)
    direct, passes = Direct(args, raw), []
    for _ in range(1 + args.pairs):
        ours = Ours(args, grams)
        passes.append((ours.seconds, direct.seconds(ours.similarity, ours.groups[0].tolist())))
    passes = passes[1:]  # the first is not counted
    medians = {step: statistics.median(seconds[step] for seconds, _ in passes) for step in ours.seconds}
    factor = PAPER_TOKENS / args.tokens
    print(f"direct way: timed on {len(head_pairs(args))} pairs of heads, 1 of {args.restarts} restarts, 1 of "
          f"{args.rounds} rounds of 1 of {args.kv_heads} groups; scaled to a layer")
    print(table(args, medians, passes))
    print(f"not in ours: making the Grams, {grams_seconds:.1f} s for {args.tokens} tokens, "
          f"{grams_seconds * factor:.1f} s for {PAPER_TOKENS}", flush=True)
    pair = blocks(grams, ours.groups)
    printed, printed_seconds = timed(args.device, lambda: [printed_alignment(gram) for gram in pair])
    gains = [objective_gain(*kind).min() for kind in zip(pair, ours.rotations, printed, strict=True)]
    return {"transform_speedup": speedup(passes, factor),
            "transform_speedup_at_measured_tokens": speedup(passes),
            "transform_speedup_with_grams": speedup(passes, factor, grams_seconds * factor),
            "stages_2_to_4_s_per_7b_layer": round(sum(medians.values()), 3), "stages_2_to_4_s": medians,
            "align_speedup": round(printed_seconds / medians["alignment"], 1),
            "align_seconds_printed": round(printed_seconds, 3), "align_objective_gain": float(min(gains))}


def calibrate(args) -> dict:
    """Forward passes with the statistics of stage 1 over plain ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.heads * args.head_dim, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, vocab_size=1000)
    with torch.device(args.device):
        plain = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    hooked = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})  # the same weights
    attach_pairs(hooked)
    for index, layer in enumerate(hooked.model.layers):
        nothing_sampled = torch.arange(0)
        Collector(layer, str(index), geometry(config), nothing_sampled, args.device).begin(0, 0)
    tokens = torch.randint(0, 1000, (1, args.calibrate_tokens), device=args.device)
    ratios, forward = [], []
    for _ in range(1 + args.pairs):
        plain_seconds, hooked_seconds = (timed(args.device, partial(model.model, use_cache=False), tokens)[1]
                                         for model in (plain, hooked))
        print(f"plain {plain_seconds:.3f} s  calibrating {hooked_seconds:.3f} s", flush=True)
        ratios.append(hooked_seconds / plain_seconds)
        forward.append(plain_seconds)
    return {"calibrate_over_forward": round(statistics.median(ratios[1:]), 3),
            "forward_seconds": round(statistics.median(forward[1:]), 3)}


@torch.no_grad()
def main():
    args = parse()
    torch.set_num_threads(args.threads)
    values = transform(args) | calibrate(args)
    print(json.dumps(values | {"settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    run_stage(main)
