"""Stages 2 to 4 on Gram matrices against the same mathematics on stored caches, and what calibrating costs.

    python -m bench.transform                    # one layer of 7B proportions; three minutes on one core
    python -m bench.transform --device cuda --tokens 65536 --head-pairs 20 --calibrate-tokens 8192 --layers 4

The direct way is paper.py: it keeps every head's vectors, [d, N] float32, and works on them pair by pair as
the paper prints it: Eq. 2, 3, 7-10 and 18-22 for each two heads; Algorithm 2 with the whole score summed anew
at each swap, one start after another; --rounds rounds of Algorithm 1 on the vectors of each group, which real
values need ten times over. Ours begins with the Grams, does all pairs, all starts and all groups at once, and
aligns until it has settled.

The paper's 128 x 2048 tokens are out of the direct way's reach in a minute. It is timed on --tokens tokens,
--head-pairs pairs of heads, one start and one round of one group, and scaled linearly to all pairs, starts,
groups and rounds; work on vectors is scaled to the paper's tokens as well, decompositions of d x d matrices
are not. transform_speedup is that ratio; transform_speedup_at_measured_tokens scales no tokens;
transform_speedup_with_grams counts making the Grams as ours.

align_speedup: seconds to align the layer's values and keys until they have settled: the printed update on
vectors with the layer's Grams (bench/alignment.py) over ours on these. align_objective_gain is the least of
any group: objective of ours over the printed update's, minus one. stages_2_to_4_s_per_7b_layer: similarities
without energies, the grouping, rotations with the cosines that stage 4 prints, fusing them into the weights,
and the mean merge.

refit_s_per_7b_layer: the sums of stage 4's refit of W_O over --refit-tokens tokens, and its least squares.

calibrate_over_forward: forward passes of a random-weight Llama with stage 1's sums in hooks over plain ones
of the same tokens, median of alternating pairs. What stage 1 does once (the Grams of W_O, the files) is not
in it. The last line is JSON.
"""

import argparse
import copy
import json
import statistics

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import paper
from bench.alignment import objective_gain, printed_alignment, vectors_of
from bench.machine import machine, timed
from common.method.grouping import anneal, score
from common.method.merge import fuse_layer, mean_merge, merged_state
from common.method.procrustes import align_layer, layer_similarity, within_group_cosine
from common.method.refit import Moments, best_fit
from common.method.stats import LayerGrams, LayerStats, group_blocks

PAPER_TOKENS = 128 * 2048


def parse():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1,
                        help="of the CPU: one is as fast on a busy machine as on a quiet one")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    # the search and the alignment, both ways
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=3000, help="swaps proposed per start")
    parser.add_argument("--rounds", type=int, default=50, help="of the direct way's Algorithm 1")
    # the part of the direct way that is timed
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--head-pairs", type=int, default=4)
    # the forward pass
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--calibrate-tokens", type=int, default=4096, help="one sequence")
    parser.add_argument("--pairs", type=int, default=3, help="paired passes, after one not counted")
    parser.add_argument("--refit-tokens", type=int, default=2048, help="of stage 4's refit of W_O")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"),
                        help="of the forward pass")
    return parser.parse_args()


def random_cache(tokens: int, heads: int, size: int, seed: int, device: str) -> torch.Tensor:
    """Head vectors [N, H, d] that are partly maps of one another: a shared source, mapped, and noise."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(tokens, size, generator=generator)
    maps = torch.randn(size, heads * size, generator=generator) / size
    noise = torch.randn(tokens, heads * size, generator=generator) / (2 * size) ** 0.5
    return (source @ maps + noise).view(tokens, heads, size).to(device)


class Ours:
    """Stages 2 to 4 of one layer from its Grams: similarities, grouping, rotations, called in that order."""

    def __init__(self, args, raw: dict):
        self.args = args
        stats, self.grams_seconds = timed(args.device, self._sum_up, raw)
        free = {"key.free": torch.ones(args.head_dim // 2, dtype=torch.bool)}
        tensors = {name: tensor.to(args.device) for name, tensor in (stats.tensors() | free).items()}
        self.grams = LayerGrams(tensors, args.heads)

    def _sum_up(self, raw: dict) -> LayerStats:
        stats = LayerStats(self.args.heads, self.args.head_dim, self.args.device)
        for key, value in zip(raw["key"].split(4096), raw["value"].split(4096), strict=True):
            stats.update_keys(key)
            stats.update_values(value)
        return stats

    def similarities(self) -> list[torch.Tensor]:
        """[H, H] each: keys then values, cos then dist, before then after alignment."""
        measured = layer_similarity(self.grams)
        return [measured[f"{name}.{when}"] for name in ("key.cos", "key.dist", "value.cos", "value.dist")
                for when in ("before", "after")]

    def grouping(self, similarity: np.ndarray) -> np.ndarray:
        """[G, D] from similarity [H, H]."""
        args = self.args
        return anneal(similarity[None], args.kv_heads, args.restarts, args.iterations, 0)[0]

    def rotations(self, groups: torch.Tensor):
        """Q [G, D, d, d] and u [G, D, d/2] of settled groups."""
        return align_layer(self.grams, groups, "dist")

    def blocks(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The groups' Grams of values [G, D, D, d, d] and of keys [G, D, D, d/2]."""
        return group_blocks(self.grams.value("raw"), groups), group_blocks(self.grams.key("raw"), groups)


class Direct:
    """The direct way, by the equations of paper.py."""

    def __init__(self, args, raw: dict):
        self.args = args
        self.raw = {kind: paper.eq_1(vectors.flatten(1).T.contiguous(), args.heads)
                    for kind, vectors in raw.items()}  # [d, N] each

    def decomposition(self) -> float:
        """Seconds that a singular value decomposition of d x d takes, which do not grow with the tokens."""
        matrix = self.raw["key"][0] @ self.raw["value"][0].T
        return statistics.median(timed(self.args.device, torch.linalg.svd, matrix)[1] for _ in range(5))

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


def printed_rotations(shapes: list[tuple], rounds: int) -> list[torch.Tensor]:
    """Of values [D, d, d] and keys [D, d/2, 2, 2], after rounds of Algorithm 1."""
    rotations = []
    for X, rotation in shapes:
        turned = zip(X, paper.algorithm_1(X, rotation, rounds, -1), strict=True)
        rotations.append(torch.stack([rotation(*paper.eq_5(X_i.mT, Y_i.mT)[::2]) for X_i, Y_i in turned]))
    return rotations


def largest_difference(first, second) -> float:
    return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(first, second, strict=True))


def one_pass(args, ours: Ours, direct: Direct, pairs: list, random) -> tuple[dict, dict]:
    """Both ways once. Seconds per part: ours; of the direct way for a layer, growing with the tokens and not.

    Also the differences between the two ways' results.
    """
    matrices, our_similarity = timed(args.device, ours.similarities)
    matrix = matrices[-1].cpu().numpy()  # values, dist, after alignment: the default of 03_group.py
    groups, our_grouping = timed(args.device, ours.grouping, matrix)
    on_device = torch.from_numpy(groups).to(args.device)
    _, our_alignment = timed(args.device, ours.rotations, on_device)

    decomposition = direct.decomposition()
    _, scaling = timed(args.device, direct.scale_to_unit)
    rows, spent = timed(args.device, lambda: [direct.similarities(i, j) for i, j in pairs])
    decomposing = min(2 * len(pairs) * decomposition, spent)
    share = args.heads * (args.heads - 1) / 2 / len(pairs)
    seconds = {"similarity": (our_similarity, scaling + (spent - decomposing) * share, decomposing * share)}
    search = args.iterations, 1, matrix, args.kv_heads, random
    _, searching = timed(args.device, paper.algorithm_2, *search)
    seconds["grouping"] = our_grouping, 0.0, searching * args.restarts
    shapes = direct.shapes(groups[0].tolist())
    _, spent = timed(args.device, lambda: [paper.algorithm_1(*shape, 1, -1) for shape in shapes])
    decomposing, share = min(len(groups[0]) * decomposition, spent), args.kv_heads * args.rounds
    seconds["alignment"] = our_alignment, (spent - decomposing) * share, decomposing * share

    names = (0, 1, 3, 4, 5, 7)  # of ours, without distances before alignment
    ours_of_pairs = [torch.stack([matrices[name][i, j] for name in names]) for i, j in pairs]
    grams = [vectors_of(gram[0]) for gram in ours.blocks(on_device[:1])]
    on_grams = [(X, rotation) for X, (_, rotation) in zip(grams, shapes, strict=True)]
    rotations = [printed_rotations(way, 3) for way in (shapes, on_grams)]
    differences = {
        "similarity_difference": largest_difference([torch.tensor(row) for row in rows], ours_of_pairs),
        "score_difference": abs(paper.eq_24(groups, matrix) - float(score(matrix[None], groups[None])[0])),
        "rotation_difference": largest_difference(*rotations)}
    return seconds, differences


def converge(args, ours: Ours) -> dict:
    """Seconds until the rotations of a layer have settled, ours against the printed update."""
    groups = torch.arange(args.heads, device=args.device).view(args.kv_heads, -1)
    value, key = ours.blocks(groups)

    spent = [timed(args.device, ours.rotations, groups) for _ in range(args.pairs)]
    expected, printed_seconds = timed(args.device, lambda: [printed_alignment(gram) for gram in (value, key)])
    spent += [timed(args.device, ours.rotations, groups) for _ in range(args.pairs)]
    seconds = statistics.median(seconds for _, seconds in spent)
    gains = [objective_gain(*pair) for pair in zip((value, key), spent[0][0], expected, strict=True)]
    figures = {"align_speedup": round(printed_seconds / seconds, 1), "align_seconds": round(seconds, 3),
               "align_seconds_printed": round(printed_seconds, 3),
               "align_objective_gain": float(torch.cat(gains).min())}
    print("alignment until settled: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    return figures


@torch.no_grad()
def whole_layer(args, ours: Ours) -> dict:
    """Stages 2 to 4 of a layer, on float32 weights of hidden size heads * d: median seconds of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=args.heads * args.head_dim, num_attention_heads=args.heads)
    with torch.device(args.device):
        attention = LlamaAttention(config, 0)
    steps = {"similarities": [], "grouping": [], "alignment": [], "fusing": [], "merging": []}
    for _ in range(args.pairs):
        matrices, seconds = timed(args.device, ours.similarities)
        steps["similarities"].append(seconds)
        groups, seconds = timed(args.device, ours.grouping, matrices[-1].cpu().numpy())
        steps["grouping"].append(seconds)
        groups = torch.from_numpy(groups).to(args.device)

        def align(groups=groups):
            rotations = ours.rotations(groups)
            within_group_cosine(ours.grams, groups, *rotations)
            return rotations

        (value_rotation, key_rotation), seconds = timed(args.device, align)
        steps["alignment"].append(seconds)
        parts = groups.flatten().tolist(), value_rotation.flatten(0, 1), key_rotation.flatten(0, 1)
        steps["fusing"].append(timed(args.device, fuse_layer, attention, *parts)[1])
        merge = mean_merge(args.heads, args.kv_heads, args.head_dim)
        steps["merging"].append(timed(args.device, merged_state, attention, merge)[1])
    medians = {name: round(statistics.median(seconds), 3) for name, seconds in steps.items()}
    row = ", ".join(f"{name} {spent}" for name, spent in medians.items())
    print(f"stages 2 to 4, seconds of a layer: {row}", flush=True)
    return {"stages_2_to_4_s_per_7b_layer": round(sum(medians.values()), 3), "stages_2_to_4_s": medians}


def speedup(passes: list[dict], factor: float = 1.0, grams: float = 0.0) -> float:
    """Median of the direct way's seconds, vectors scaled by `factor`, over ours plus `grams` seconds."""
    ratios = []
    for seconds in passes:
        direct = sum(growing * factor + fixed for _, growing, fixed in seconds.values())
        ratios.append(direct / (sum(ours for ours, _, _ in seconds.values()) + grams))
    return round(statistics.median(ratios), 1)


def transform(args) -> dict:
    """Both ways of stages 2 to 4 on one layer."""
    raw = {kind: random_cache(args.tokens, args.heads, args.head_dim, seed, args.device)
           for seed, kind in enumerate(("key", "value"))}
    Ours(args, {kind: vectors[:512] for kind, vectors in raw.items()})  # not counted
    ours, direct, random = Ours(args, raw), Direct(args, raw), np.random.default_rng(0)
    pairs = [(i, args.heads - 1 - i) for i in range(min(args.head_pairs, args.heads // 2))]
    one_pass(argparse.Namespace(**vars(args) | {"rounds": 1}), ours, direct, pairs, random)  # not counted
    passes = []
    for _ in range(args.pairs):
        seconds, differences = one_pass(args, ours, direct, pairs, random)
        passes.append(seconds)

    factor = PAPER_TOKENS / args.tokens
    all_pairs = args.heads * (args.heads - 1) // 2
    print(f"direct way: timed on {args.tokens} tokens, {len(pairs)} of {all_pairs} pairs of heads, 1 of "
          f"{args.restarts} starts, 1 of {args.rounds} rounds of 1 of {args.kv_heads} groups; scaled to all")
    columns = f"{args.tokens} tokens", f"{PAPER_TOKENS} tokens", "ours"
    print(f"{'seconds, one layer':20s} {columns[0]:>16s} {columns[1]:>16s} {columns[2]:>9s}")
    ours_seconds = 0.0
    for part in passes[0]:
        columns = zip(*(seconds[part] for seconds in passes), strict=True)
        spent, growing, fixed = (statistics.median(column) for column in columns)
        ours_seconds += spent
        print(f"{part:20s} {growing + fixed:16.1f} {growing * factor + fixed:16.1f} {spent:9.3f}")
    print(f"not in ours: making the Grams, {ours.grams_seconds:.1f} s for {args.tokens} tokens, "
          f"{ours.grams_seconds * factor:.1f} s for {PAPER_TOKENS}")
    print("both ways: " + ", ".join(f"{name} {value:.1e}" for name, value in differences.items()), flush=True)
    figures = {"transform_speedup": speedup(passes, factor),
               "transform_speedup_at_measured_tokens": speedup(passes),
               "transform_speedup_with_grams": speedup(passes, factor, ours.grams_seconds * factor),
               "transform_seconds": round(ours_seconds, 3)} | differences
    return figures | whole_layer(args, ours) | converge(args, ours)


def refit(args) -> dict:
    """Seconds of the refit of one layer, its forward passes aside."""
    width = args.heads * args.head_dim
    inputs, outputs = (random_cache(args.refit_tokens, args.heads, args.head_dim, seed, args.device)
                       .flatten(1) for seed in (2, 3))
    empty = torch.zeros(width, width, dtype=torch.float64, device=args.device)
    fit, judge = (Moments(empty.clone(), empty.clone()) for _ in range(2))
    _, adding = timed(args.device, fit.add, inputs, outputs)
    judge.add(inputs[:512], outputs[:512])
    identity = torch.eye(width).to(empty)
    _, solving = timed(args.device, best_fit, identity, fit, judge)
    return {"refit_s_per_7b_layer": round(adding + solving, 3), "refit_sums_s": round(adding, 3)}


def hook_statistics(model, head_dim: int, device: str) -> None:
    """Sum every layer's queries, keys and values in hooks, as stage 1 does."""
    for layer in model.model.layers:
        attention = layer.self_attn
        stats = LayerStats(attention.k_proj.out_features // head_dim, head_dim, device)
        updates = {attention.q_proj: stats.update_queries, attention.k_proj: stats.update_keys,
                   attention.v_proj: stats.update_values}
        for module, update in updates.items():
            def hook(module, inputs, output, update=update):
                heads = output.detach().view(-1, output.shape[-1] // head_dim, head_dim)
                if not torch.isfinite(heads.sum(dtype=torch.float32)):
                    raise ValueError("NaN or Inf in the forward pass")
                update(heads)

            module.register_forward_hook(hook)


@torch.no_grad()
def calibrate(args) -> dict:
    """Forward passes with the statistics of stage 1 over plain ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=args.heads * args.head_dim, intermediate_size=args.intermediate,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, vocab_size=1000)
    with torch.device(args.device):
        plain = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    hooked = copy.deepcopy(plain, {id(weight): weight for weight in plain.parameters()})  # the same weights
    hook_statistics(hooked, args.head_dim, args.device)
    tokens = torch.randint(0, 1000, (1, args.calibrate_tokens), device=args.device)
    seconds = {"plain": [], "calibrating": []}
    for number in range(args.pairs + 1):
        for name, model in (("plain", plain), ("calibrating", hooked)):
            _, spent = timed(args.device, lambda model=model: model.model(input_ids=tokens, use_cache=False))
            if number:  # the first is not counted
                seconds[name].append(spent)
        if number:
            print("  ".join(f"{name} {spent[-1]:.3f} s" for name, spent in seconds.items()), flush=True)
    ratios = [a / b for a, b in zip(seconds["calibrating"], seconds["plain"], strict=True)]
    return {"calibrate_over_forward": round(statistics.median(ratios), 3),
            "forward_seconds": round(statistics.median(seconds["plain"]), 3)}


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    figures = transform(args) | calibrate(args) | refit(args)
    print(json.dumps(figures | {"settings": vars(args), "machine": machine(args.device)}))


if __name__ == "__main__":
    main()
