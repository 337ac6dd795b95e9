"""Compare a run with the paper's equations as printed, one by one.

    python -m audit --run runs/demo                     # 10 seconds; `make audit` makes the demo first
    python -m audit --run runs/llama2-7b --layer 0 7    # of a 7B model: half a minute and 4 GiB a layer

On one side are the equations of paper.py, on the other the stages' files in RUN and what their functions
compute from the same numbers: similarities and alignments of the vectors in calibration/, heads in aligned/
and merged/, steps of stage 5. What is printed is written to RUN/paper.md, too: the run, a legend, and a table
with a row per claim. Exit code: 0, 1 if a row is off, 2 for bad input.
"""

import common.run.openmp  # noqa: F401 - before torch
import itertools
import os
import re
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import paper
from audit.training import FLOAT32, recorded_rows, step_rows
from common.method.grouping import anneal, score
from common.method.procrustes import align_layer, key_overlap, layer_similarity, value_overlap
from common.method.rope import to_matrix
from common.method.stats import CRITERIA, LayerGrams, LayerStats, group_blocks, to_unit
from common.models.blending import BlendedProjection
from common.models.calibration import Calibration
from common.models.edits import head_columns, head_rows
from common.models.layers import return_freed_memory
from common.models.load import load_config, source_model
from common.models.weights import open_checkpoint
from common.reporting.report import command
from common.reporting.tables import markdown_table, markdown_text
from common.run.artifact import RECORD, read_record, read_tensors
from common.run.errors import UserError, printable
from common.run.files import read_text, write_text
from common.run.flags import StageParser, non_negative
from common.run.progress import Clock
from common.training.conversion import STAGE as STAGE_5

CHECKED = ("llama", "mistral", "qwen2", "qwen3")  # of one layout, with Llama's norms
BEHIND, AHEAD = 1e-4, 0.02  # of an objective, the printed one being the other: local optima differ by as much
ROUNDS, GAIN, STARTS = 50, 1e-6, 10  # of Algorithm 1; of Algorithm 2, whose 200 restarts take minutes
SMALL = 2e7  # layers x (heads x head_dim)^2 of models whose layers take less than a minute together

HEADER = "equation", "as printed", "what the stages computed", "difference", "allowed", "ok"
TITLE = "# The paper's equations as printed, and what the stages computed"
FLAGS = {  # stage -> those that decide what the table compares, or whether a row applies
    "01_calibrate.py": ("model", "text", "sequences", "length", "dtype"),
    "03_group.py": ("kv_heads", "by", "criterion", "restarts", "iterations", "seed"),
    "04_align.py": ("rotate", "merge", "refit"),
    STAGE_5: ("masks", "kl_on", "l0_weight", "steps", "epochs"),
}
LEGEND = """Each row of the table is a claim of the paper, in the compared layer where it holds least.

- *as printed* and *what the stages computed*: of the numbers that are compared, the one that differs most.
- *difference*: how far these are apart, relative to the largest of the numbers. For a search (Algorithms 1
  and 2) it is the share of the objective by which the printed one is ahead, since searches may end in
  different optima.
- *allowed*: the rounding of the dtypes involved; for a search, by how much its end may vary.
- *ok*: yes; NO, the row is off; -, it does not apply to this run, for the reason below the table.

Some rows have two numbers as printed. Eq. 6, 10 and 21, and Algorithm 1, which uses them, print the transpose
of the rotation that minimizes Eq. 4. The first number is that of the printed rotation, the second that of the
minimizer, which the stages compute and the difference is of (AUDIT.md: where the paper and its code differ).
Rows with a --masks are of steps that the audit takes by itself, with either kind of masks; "recorded steps"
are those of this run's training."""


class Row(NamedTuple):
    equation: str
    printed: str = "-"
    stages: str = "-"
    difference: float = 0.0
    allowed: float = 0.0
    ok: str = "-"  # yes, NO, or that it does not apply
    note: str = ""


def compare(equation: str, printed, stages, allowed: float, literal=(), ahead: float = 0.0) -> Row:
    """The row of two lists of numbers. literal: the first to the letter; ahead: what the stages may gain."""
    literal, printed, stages = (
        torch.cat([torch.as_tensor(part, dtype=torch.float64).detach().flatten() for part in (*side, [])])
        for side in (literal, printed, stages)
    )
    printed = printed.expand(len(stages))
    difference = (printed - stages) / printed.abs().max().clamp(min=1e-30)
    difference = torch.where(difference < -ahead, -difference, difference)
    largest, worst = float(difference.max()), int(difference[: len(literal) or None].argmax())  # NaN, if any
    *first, second = (f"{float(side[worst]):.6g}" for side in (literal, printed, stages) if len(side))
    return Row(equation, "; ".join(first), second, largest, allowed, "yes" if largest <= allowed else "NO")


class Run:
    """A run directory after stage 4 or later."""

    def __init__(self, directory: str):
        self.directory = directory
        self.calibration = Calibration(self.path("calibration"))
        self.model = source_model(self.calibration.record, directory)
        measured = read_record(self.path("similarity"), "02_similarity.py", self.model)
        self.similarity = read_tensors(self.path("similarity"), "similarity.safetensors", measured)
        self.grouping = read_record(self.path("groups"), "03_group.py", self.model)
        self.alignment = read_record(self.path("aligned"), "04_align.py", self.model)
        trained = os.path.exists(os.path.join(self.path("train"), RECORD))
        self.training = read_record(self.path("train"), STAGE_5, self.model) if trained else None
        self.config = load_config(self.path("source"))
        if self.config.model_type not in CHECKED:
            raise UserError(f"{directory}: expected one of {list(CHECKED)}, found {self.config.model_type}")
        self.heads, self.size = self.model["kv_heads"], self.model["head_dim"]
        self.groups = torch.tensor(self.alignment["groups"])  # [layers, G, D]
        self.kv_heads, self.members = self.groups.shape[1:]

    def path(self, name: str) -> str:
        return self.model["path"] if name == "source" else os.path.join(self.directory, name)

    def rounding(self, name: str) -> float:
        """The relative error of a checkpoint's weights, which are rounded to their dtype."""
        return torch.finfo(load_config(self.path(name)).dtype).eps

    def attention(self, name: str, layer: int) -> dict[str, torch.Tensor]:
        """W_Q, W_K, W_V [H, d_H, d] and W_O [H, d, d_H] of all key/value heads by letter, float64.

        A bias is one more column, but for that of W_O, which belongs to no head. Query heads that share a
        key/value head are side by side: W_Q [H, d_H, 2 d], W_O [H, 2 d, d_H].
        """
        stored, prefix, heads = open_checkpoint(self.path(name)), f"model.layers.{layer}.self_attn.", {}
        for letter in "qkv":
            names = (f"{prefix}{letter}_proj.{part}" for part in ("weight", "bias"))
            parts = [head_rows(stored[part][:], self.size) for part in names if part in stored]
            heads[letter] = torch.cat(parts, dim=-1)
        W_O = head_columns(stored[prefix + "o_proj.weight"][:], self.size).transpose(0, 1)
        shape = len(heads["k"]), -1
        heads["q"] = torch.cat(heads["q"].unflatten(0, shape).unbind(1), dim=-1)
        return heads | {"o": W_O.unflatten(0, shape).flatten(1, 2)}


class Layer:
    """A layer's sampled vectors, its heads in the source and in aligned/, and the rotations between them."""

    def __init__(self, run: Run, index: int):
        tensors = run.calibration.layer(index)
        self.index, self.groups, self.theta = index, run.groups[index], tensors["rope.frequencies"]
        self.keys, self.values = tensors["sample.key"], tensors["sample.value"]  # [N, H, d_H]
        caches = (vectors.double().flatten(1).T for vectors in (self.keys, self.values))
        self.K, self.V = (paper.eq_1(cache, run.heads) for cache in caches)  # [d_H, N] of each head
        stats = LayerStats(run.heads, run.size)
        stats.update_keys(self.keys)
        stats.update_values(self.values)
        self.sampled = LayerGrams(stats.tensors() | {"key.free": tensors["key.free"]}, run.heads)
        self.whole = run.calibration.grams("cpu", index)  # of all tokens
        source, self.new = (run.attention(name, index) for name in ("source", "aligned"))
        self.old = {letter: heads[self.groups.flatten()] for letter, heads in source.items()}
        values = (torch.cat((heads["v"], heads["o"].mT), dim=2) for heads in (self.old, self.new))
        keys = (torch.cat((heads["k"], heads["q"]), dim=2) for heads in (self.new, self.old))
        self.Q = paper.minimizer(*paper.eq_5(*values)[::2])
        self.R = torch.stack(list(map(paper.key_rotation, *keys)))


def over(heads: list, equation, *turns) -> torch.Tensor:
    """An equation of each pair of heads, and perhaps of the rotation of the second."""
    pairs = zip(itertools.combinations(heads, 2), *turns, strict=True)
    return torch.stack([equation(*pair, *turn) for pair, *turn in pairs])


def similarity_rows(run: Run, layer: Layer):
    """Eq. 2 to 10 and 18 to 22 of all pairs of heads: of the sampled vectors, and of all tokens as in RUN."""
    K, V, pairs = layer.K, layer.V, torch.combinations(torch.arange(run.heads))
    K_hat, V_hat = list(map(paper.eq_7, K)), list(map(paper.eq_8, V))
    ours, again = layer_similarity(layer.sampled), layer_similarity(layer.whole)
    ours = {name: matrix[*pairs.T] for name, matrix in ours.items()}
    found, u = (rotation[:, 1] for rotation in align_layer(layer.sampled, pairs[: len(K) - 1], "dist"))
    for name, X, turns in (("key", K, to_matrix(u)), ("value", V, found)):  # of the first head and each other
        ours[name] = torch.stack(list(map(paper.eq_22, itertools.repeat(X[0]), X[1:], turns)))

    def row(title, name, printed, literal=()):
        count, allowed = len(ours[name]), FLOAT32
        sides = [printed[:count]], [ours[name]]
        if name in again:  # all but the lengths of Eq. 22, which are in no file
            sides = [printed, again[name]], [ours[name], run.similarity[name][layer.index]]
        if "dist" in name:  # differences of sums of squares, whose float32 products are exact to their size
            vectors = layer.keys if name.startswith("key") else layer.values
            allowed *= float(vectors.double().square().sum(-1).mean() / printed.abs().max())
        return compare(title, *sides, allowed, literal[:count])

    unit = to_unit(torch.cat((layer.keys, layer.values), dim=1).double()).permute(1, 2, 0)
    yield compare("Eq. 7, 8: unit norm", K_hat + V_hat, unit, FLOAT32)
    R, R_hat = over(K, paper.key_rotation), over(K_hat, paper.key_rotation)
    Q = over(V_hat, lambda V_i, V_j: paper.eq_10(*paper.eq_9(V_i, V_j)[::2]))
    P = over(V, lambda V_i, V_j: paper.eq_21(*paper.eq_20(V_i, V_j)[::2]))
    yield row("Eq. 2: key cosine", "key.cos.before", over(K, paper.eq_2))
    yield row("Eq. 3: value cosine", "value.cos.before", over(V, paper.eq_3))
    yield row("Eq. 18: key cosine, R of Eq. 14", "key.cos.after", over(K_hat, paper.eq_18, R_hat))
    cosines = over(V_hat, paper.eq_19, Q.mT), over(V_hat, paper.eq_19, Q)
    yield row("Eq. 19: value cosine, Q of Eq. 9, 10", "value.cos.after", *cosines)
    forms = ("Eq. 22", "", paper.eq_22), ("Eq. 22 squared", ".dist.after", paper.eq_22_squared)
    for title, suffix, equation in forms:
        yield row(f"{title}: key distance, R of Eq. 14", "key" + suffix, over(K, equation, R))
        distances = over(V, equation, P.mT), over(V, equation, P)
        yield row(f"{title}: value distance, P of Eq. 20, 21", "value" + suffix, *distances)
    Phi, _, Psi = paper.eq_5(V[1], V[0])
    least, literal = ([paper.eq_4(Q, V[1], V[0])] for Q in (paper.minimizer(Phi, Psi), paper.eq_6(Phi, Psi)))
    found = [-len(layer.values) * ours["value.dist.after"][:1]]
    allowed = FLOAT32 * float(V[0].square().sum() / least[0])
    yield compare("Eq. 4-6: error of Procrustes, two heads", least, found, allowed, literal)


def alignment_rows(run: Run, layer: Layer):
    """Algorithm 1 on the sampled vectors of each group: |sum_i Y_i|^2, as a share of what equal heads have.

    Further, the rotations in aligned/ must be as good on all tokens as those found again.
    """
    criterion, groups, half = run.alignment["summary"]["rotate"], layer.groups, run.size // 2
    if criterion == "none":
        yield Row("Algorithm 1 of Eq. 6", note="--rotate none")
        return
    K = list(map(paper.eq_7, layer.K)) if criterion == "cos" else layer.K
    V = list(map(paper.eq_8, layer.V)) if criterion == "cos" else layer.V
    u = torch.complex(*(part.diagonal(dim1=1, dim2=2) for part in layer.R[..., :half].chunk(2, dim=1)))
    found, best = (align_layer(grams, groups, criterion) for grams in (layer.sampled, layer.whole))

    def aligned(X, rotation):
        for Y in (paper.algorithm_1([X[i] for i in group], rotation, ROUNDS, GAIN) for group in groups):
            yield sum(Y).square().sum() / sum(Y_i.square().sum() for Y_i in Y) / len(Y)

    def reached(overlap, gram, rotation):
        within = overlap(group_blocks(gram, groups), rotation)  # [G, D, D]
        return within.sum((1, 2)) / within.diagonal(dim1=1, dim2=2).sum(1) / run.members

    for at, (title, kind, X, rotation, overlap, stored) in enumerate((
        ("values", "value", [V_i.mT for V_i in V], paper.minimizer, value_overlap, layer.Q),
        ("keys, R of Eq. 14", "key", [paper.pairs(K_i).mT for K_i in K], paper.rotation_2d, key_overlap, u),
    )):
        sampled, whole = (getattr(grams, kind)(CRITERIA[criterion]) for grams in (layer.sampled, layer.whole))
        printed = [*aligned(X, rotation), reached(overlap, whole, best[at])]
        stored = reached(overlap, whole, stored.unflatten(0, groups.shape))
        ours, literal = [reached(overlap, sampled, found[at]), stored], aligned(X, paper.eq_6)
        yield compare(f"Algorithm 1 of Eq. 6: {title}", printed, ours, BEHIND, literal, AHEAD)


def fusion_rows(run: Run, layer: Layer):
    """Eq. 11 to 17: heads of aligned/ are those of the source rotated by some Q and R, and do the same."""
    old, new, rounding = layer.old, layer.new, run.rounding("aligned")
    yield compare("Eq. 12: W_V of aligned/", paper.eq_12(layer.Q, old["v"]), new["v"], rounding)
    yield compare("Eq. 13: W_O of aligned/", paper.eq_13(old["o"], layer.Q), new["o"], rounding)
    yield compare("Eq. 14, 15: W_Q of aligned/", paper.eq_15(layer.R, old["q"]), new["q"], rounding)
    yield compare("Eq. 16: W_K of aligned/", paper.eq_16(layer.R, old["k"]), new["k"], rounding)
    random = torch.Generator().manual_seed(0)
    X, x, x_s, x_t = (torch.randn(old[letter].shape[2], count, dtype=torch.float64, generator=random)
                      for letter, count in (("k", 16), ("q", 1), ("q", 1), ("k", 1)))
    q, k, v = new["q"] @ x, new["k"] @ X, new["v"] @ X
    attended = new["o"] @ scaled_dot_product_attention(q.mT, k.mT, v.mT).mT
    output = paper.eq_11(*(old[letter] for letter in "qkvo"), X, x)
    yield compare("Eq. 11: attention to random tokens", output, attended.sum(0), 16 * rounding)
    R_s, R_t = paper.rope(layer.theta, 200), paper.rope(layer.theta, 3)
    scores = paper.eq_17(old["q"], old["k"], x_s, x_t, R_s, R_t)
    angles = torch.tensor([200, 3])[:, None] * torch.cat((layer.theta, layer.theta))
    states = torch.stack((new["q"] @ x_s, new["k"] @ x_t)).mT  # [2, H, 1, d_H]
    (q_s, k_t), _ = apply_rotary_pos_emb(states, states, angles.cos()[:, None], angles.sin()[:, None])
    yield compare("Eq. 17: scores under RoPE", scores, q_s @ k_t.mT, 16 * rounding)


def grouping_rows(run: Run, layer: Layer):
    """Eq. 23 and 24 of the run's groups, and the best score by Algorithm 2: as computed now and as in RUN."""
    summary, options = run.grouping["summary"], run.grouping["arguments"]
    A, iterations = np.array(run.grouping["groups"][layer.index]), options["iterations"]
    for title, head, equation in (("Eq. 23", "key", paper.eq_23), ("Eq. 24", "value", paper.eq_24)):
        Sim = run.similarity[f"{head}.{options['criterion']}.after"][layer.index].numpy()
        recorded = [summary["score_found"][layer.index]] if summary["by"] == head else []
        found = [score(Sim[None], A[None]), *recorded]
        yield compare(f"{title}: {head} score of the groups", [equation(A, Sim)], found, 1e-8)
        if head == ("key" if summary["by"] == "key" else "value"):
            starts, random = min(STARTS, options["restarts"]), np.random.default_rng(0)
            _, best = paper.algorithm_2(iterations, starts, Sim, len(A), random)
            groups = anneal(Sim[None], len(A), options["restarts"], iterations, options["seed"])
            found = [score(Sim[None], groups), *recorded]
            title = f"Algorithm 2 of {title}: best score of {starts} starts"
            yield compare(title, [best], found, BEHIND, ahead=AHEAD)


def merging_rows(run: Run, layer: Layer):
    """Eq. 25 to 28: the heads of merged/, and their blends with those of aligned/."""
    merged, summary = run.attention("merged", layer.index), run.alignment["summary"]
    projection = BlendedProjection(None, None, run.size)
    projection.z = z = torch.linspace(0, 1, run.heads)
    equations = ("k", 25, paper.eq_25, paper.eq_27), ("v", 26, paper.eq_26, paper.eq_28)
    for letter, number, mean, blend in equations:
        own, shared, title = layer.new[letter], merged[letter], f"Eq. {number}: W_{letter.upper()}"
        if summary["merge"] == "mean" and not summary["refit"]:
            means = [mean(own, g + 1, run.members) for g in range(run.kv_heads)]
            yield compare(f"{title} of merged/", means, shared, run.rounding("merged"))
        else:
            yield Row(title, note=f"--merge {summary['merge']}{' --refit' if summary['refit'] else ''}")
        blended = [blend(z, own, shared, j + 1, run.members) for j in range(run.heads)]
        ours = projection.blend(*(heads.flatten(0, 1).float() for heads in (own, shared)))
        yield compare(f"Eq. {number + 2}: W_{letter.upper()} blended", blended, ours, FLOAT32)


def cache_rows(run: Run):
    """Eq. 1 of the first layer, whose input is known without running the model."""
    summary = run.calibration.summary
    at = torch.linspace(0, summary["tokens"] - 1, summary["sampled_tokens"]).long()
    tokens = run.calibration.tokens().flatten()[at]
    stored = open_checkpoint(run.path("source"))
    norm = stored["model.layers.0.input_layernorm.weight"][:].double()
    X = stored["model.embed_tokens.weight"][:][tokens].double()
    X = rms_norm(X, norm.shape, norm, run.config.rms_norm_eps).T
    heads, sampled = run.attention("source", 0), run.calibration.layer(0)
    X = torch.cat((X, torch.ones(1, len(tokens))))[: heads["k"].shape[2]]  # the ones are for biases
    printed = [head for letter in "kv" for head in paper.eq_1(heads[letter].flatten(0, 1) @ X, run.heads)]
    vectors = [sampled[name][: len(tokens)].permute(1, 2, 0) for name in ("sample.key", "sample.value")]
    rounding = torch.finfo(getattr(torch, run.calibration.arguments["dtype"])).eps
    yield compare("Eq. 1: keys before RoPE and values", printed, vectors, 64 * rounding)


def all_rows(run: Run, layers: list[int]) -> list[Row]:
    """All rows in the paper's order; of those of several layers, the worst."""
    rows, per_layer = [*cache_rows(run), *itertools.starmap(compare, recorded_rows(run))], []
    if run.alignment["summary"]["merge"] == "closed-form" or run.alignment["summary"]["refit"]:
        rows.append(Row("Eq. 29-31", note="closed-form merges and refits blend W_Q and W_O, too"))
    else:
        rows += itertools.starmap(compare, step_rows(run))
    parts = similarity_rows, alignment_rows, fusion_rows, grouping_rows, merging_rows
    for index in layers:
        layer = Layer(run, index)
        found = [row for part in parts for row in part(run, layer)]
        found = [row if layer.whole.free.all() or "R of Eq. 14" not in row.equation else
                 Row(row.equation, note="keys under q_norm and k_norm may only be flipped") for row in found]
        per_layer.append([row._replace(equation=f"{row.equation}, layer {index}") for row in found])
        return_freed_memory()
    for same in zip(*per_layer, strict=True):  # a row in all layers
        rows.append(max(same, key=lambda row: (row.ok == "NO", row.difference)))
    return sorted(rows, key=lambda row: int(re.search(r"Eq\. (\d+)", row.equation)[1]))


def heading(run: Run, layers: list[int]) -> str:
    """What the page begins with: the run, the flags of its stages, and how to read the table."""
    records = run.calibration.record, run.grouping, run.alignment, run.training
    commands = []
    for record in filter(None, records):
        given = record["arguments"]
        flags = {name: given[name] for name in FLAGS[record["stage"]] if name in given}
        commands.append(f"    {printable(command(record['stage'], flags))}")
    model, directory = run.model, os.path.basename(os.path.abspath(run.directory))
    text = (f"Run {directory}: {model['name']}, {model['layers']} layers, {model['heads']} query heads, "
            f"{run.heads} -> {run.kv_heads} kv heads. Compared layers: {', '.join(map(str, layers))}.")
    return "\n\n".join((TITLE, markdown_text(text), "\n".join(commands), LEGEND))


def choose_layers(requested: list[int] | None, run: Run) -> list[int]:
    """The requested layers, or the default. Raises UserError for one out of range."""
    count = run.model["layers"]
    if requested and max(requested) >= count:
        raise UserError(f"--layer: expected layers from 0 to {count - 1}, found {max(requested)}")
    small = count * (run.heads * run.size) ** 2 < SMALL
    return requested or (list(range(count)) if small else [count // 2])


def main() -> int:
    clock, parser = Clock(), StageParser(__doc__)
    parser.section("flags")
    parser.add_argument("--run", default="runs/demo", metavar="DIR", help="run directory, from stage 4 on")
    parser.add_argument("--layer", type=non_negative, nargs="+", metavar="LAYER",
                        help="layers to compare (default: all; of a large model the middle one)")
    parser.add_argument("-h", "--help", action="help", help="show this page")
    args = parser.parse_args()
    path = os.path.join(args.run, "paper.md")
    if os.path.exists(path) and not read_text(path).startswith(TITLE):
        raise UserError(f"{path}: expected nothing or an earlier page, found another file; move it away")
    run = Run(args.run)
    layers = choose_layers(args.layer, run)
    rows = all_rows(run, layers)
    cells = [(*row[:3], f"{row.difference:.1e}", f"{row.allowed:.1e}", row.ok) if row.ok != "-" else
             (row.equation, *"-----") for row in rows]
    notes = "\n".join(f"- {row.equation}: {row.note}" for row in rows if row.note)
    text = "\n\n".join(filter(None, (heading(run, layers), markdown_table(HEADER, cells), notes))) + "\n"
    write_text(path, text)
    off = [row.equation for row in rows if row.ok == "NO"]
    print(f"{text}\nwrote   {path}")
    print(f"paper: {len(rows)} rows, {len(layers)} layers, {clock()} s, off: {'; '.join(off) or 'none'}")
    return 1 if off else 0
