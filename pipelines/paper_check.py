"""The table of paper.py: what the stages left in a run, against the paper's equations as printed.

Both sides of a row are computed on the same numbers; those where they differ most are shown. Where the stages
differ from print on purpose, the first number is as printed, the second what the stages mean to compute, and
a note names the line of AUDIT.md that says why.
"""

import common.waiting  # noqa: F401 - before torch
import copy
import math
import os
import re
from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from pipelines.paper_run import BATCH, Layer, Run
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import paper
from common.artifacts import read_layer
from common.cli import Clock, StageParser, UserError, non_negative
from common.data.rows import Sample
from common.files import write_text
from common.layers import return_freed_memory
from common.method import masks
from common.method.procrustes import align_layer, key_overlap, layer_similarity, value_overlap
from common.method.rope import to_matrix
from common.method.stats import CRITERIA, group_blocks, to_unit
from common.reporting.tables import markdown_table
from common.training.distill import distillation_loss
from common.training.metrics import METRICS, read_metrics
from common.training.packing import build_row
from common.training.sharding import Trainee
from common.weights import open_checkpoint

FLOAT32 = 1e-5  # sums of float32 products and float32 forward passes, relative to the largest number
BEHIND, AHEAD = 1e-4, 0.02  # of an objective, the printed one being the other: local optima differ by as much
ROUNDS, GAIN, STARTS = 50, 1e-6, 10  # of Algorithm 1; of Algorithm 2, whose 200 starts take minutes
STEP, STEPS = 10, 100  # of the masks' noise and target: T = 2/3
SMALL = 2e7  # layers x (heads x head_dim)^2 of models whose layers take less than a minute together
LARGE = 2048  # hidden size from which Eq. 30 and 31 are computed with the first layer alone


class Row(NamedTuple):
    equation: str
    printed: str = "-"
    stages: str = "-"
    difference: float = 0.0
    allowed: float = 0.0
    note: str = ""

    @property
    def ok(self) -> str:
        """yes, NO, or "-" for a row that does not apply."""
        return "-" if self.printed == "-" else "yes" if self.difference <= self.allowed else "NO"


def compare(equation: str, printed: torch.Tensor, stages: torch.Tensor, allowed: float, note: str = "", *,
            literal=None, whole=None, scale=None, further: float = -math.inf, ahead: float = 0.0) -> Row:
    """The row of two tensors of one shape, whose difference is relative to the largest number, or to `scale`.

    literal: as printed, where `printed` is what the stages mean. whole: the run's figures over all tokens.
    further: another difference to be within what is allowed. ahead: what the stages may be larger by.
    """
    printed, stages = (part.detach().double().flatten() for part in (printed, stages))
    difference = (printed - stages) / (scale or max(float(printed.abs().max()), 1e-30))
    difference = torch.where(difference < -ahead, -difference, difference)
    worst = int(difference.argmax())

    def shown(part):
        return f"{part.flatten()[worst].item():.6g}"

    first = shown(printed) if literal is None else f"{shown(literal)}; {shown(printed)}"
    second = shown(stages) if whole is None else f"{shown(stages)} (all tokens: {shown(whole)})"
    largest = float(difference[worst]) if further <= allowed else further  # also where it is NaN
    return Row(equation, first, second, largest, allowed, note)


def line_of_audit(start: str) -> str:
    """The line of AUDIT.md that begins so, as file:line."""
    with open(os.path.join(os.path.dirname(paper.__file__), "AUDIT.md"), encoding="utf-8") as file:
        return next(f"AUDIT.md:{number}" for number, text in enumerate(file, 1) if text.startswith(start))


TRANSPOSED = f"Phi Psi^T, not Psi Phi^T ({line_of_audit('| Eq. 6, 10, 21, Algorithm 1 |')})"
SQUARED = f"the distance squared ({line_of_audit('| Eq. 22 | mean distance |')})"
OPEN = f"P(z > 0) for z ({line_of_audit('| Eq. 29, z |')})"
TOKENS = f"KL on prompt tokens, BiLD on answer tokens ({line_of_audit('| Eq. 30 | KL + BiLD')})"
FLIPPED = f"keys between q_norm and k_norm may only be flipped ({line_of_audit('Qwen3 puts an RMS norm')})"


def all_rows(run: Run, layers: list[int]) -> list[Row]:
    """All rows in the paper's order; of those of several layers, the worst."""
    per_layer = [layer_rows(run, index) for index in layers]
    same = zip(*per_layer, strict=True)  # a row in all layers
    worst = [max(row_by_layer, key=lambda row: (row.ok == "NO", row.difference)) for row_by_layer in same]
    return sorted([*worst, *text_rows(run), *recorded_rows(run)], key=place)


def layer_rows(run: Run, index: int) -> list[Row]:
    layer, rows = Layer(run, index), []
    for part in (similarity_rows, alignment_rows, fusion_rows, grouping_rows, merging_rows):
        rows += [row._replace(equation=f"{row.equation}, layer {index}") for row in part(run, layer)]
    return rows


def place(row: Row) -> int:
    """The first equation of a row, or that after which the paper has it."""
    name = re.match(r"Eq\. (\d+)|[^:,]+", row.equation)
    after = {"Algorithm 1": 6, "Algorithm 2": 24, "Section 3.5": 28, "Hard concrete": 28}
    return int(name[1]) if name[1] else after[name[0]]


SIMILARITIES = {  # in similarity.safetensors -> its row and note
    "key.cos.before": ("Eq. 2: key cosine", ""),
    "value.cos.before": ("Eq. 3: value cosine", ""),
    "key.cos.after": ("Eq. 18: key cosine, R of Eq. 14", ""),
    "value.cos.after": ("Eq. 19: value cosine, Q of Eq. 9, 10", TRANSPOSED),
    "value.dist.after": ("Eq. 22: value distance, P of Eq. 20, 21", f"{TRANSPOSED}; {SQUARED}"),
    "key.dist.after": ("Eq. 22: key distance, R of Eq. 14", SQUARED),
}


def similarity_rows(run: Run, layer: Layer):
    """Eq. 2 to 10 and 18 to 22; similarities are those of all pairs of heads."""
    K, V, printed, literal = layer.K, layer.V, defaultdict(list), defaultdict(list)
    K_hat, V_hat = [paper.eq_7(K_i) for K_i in K], [paper.eq_8(V_i) for V_i in V]
    unit = to_unit(torch.cat((layer.keys, layer.values), dim=1).double()).permute(1, 2, 0)
    yield compare("Eq. 7, 8: unit norm", torch.stack(K_hat + V_hat), unit, FLOAT32)
    i, j = torch.triu_indices(run.heads, run.heads, 1)
    for a, b in zip(i.tolist(), j.tolist(), strict=True):
        printed["key.cos.before"].append(paper.eq_2(K[a], K[b]))
        printed["value.cos.before"].append(paper.eq_3(V[a], V[b]))
        R = paper.key_rotation(K_hat[a], K_hat[b])
        printed["key.cos.after"].append(paper.eq_18(K_hat[a], K_hat[b], R))
        R = paper.key_rotation(K[a], K[b])
        literal["key.dist.after"].append(paper.eq_22(K[a], K[b], R))
        printed["key.dist.after"].append(paper.eq_22_squared(K[a], K[b], R))
        Phi, _, Psi = paper.eq_9(V_hat[a], V_hat[b])
        Q = paper.eq_10(Phi, Psi)
        literal["value.cos.after"].append(paper.eq_19(V_hat[a], V_hat[b], Q))
        printed["value.cos.after"].append(paper.eq_19(V_hat[a], V_hat[b], Q.T))
        Theta, _, Omega = paper.eq_20(V[a], V[b])
        P = paper.eq_21(Theta, Omega)
        literal["value.dist.after"].append(paper.eq_22(V[a], V[b], P))
        printed["value.dist.after"].append(paper.eq_22_squared(V[a], V[b], P.T))
    ours = layer_similarity(layer.sampled)
    Phi, _, Psi = paper.eq_5(V[1], V[0])
    errors = [paper.eq_4(Q, V[1], V[0]) for Q in (paper.minimizer(Phi, Psi), paper.eq_6(Phi, Psi))]
    least, energy = -len(layer.values) * ours["value.dist.after"][0, 1], float(V[0].square().sum())
    yield compare("Eq. 4-6: error of Procrustes, two heads", errors[0], least, FLOAT32, TRANSPOSED,
                  literal=errors[1], scale=energy)
    again = layer_similarity(layer.whole)
    for name, (title, note) in SIMILARITIES.items():
        if name.startswith("key") and name.endswith("after") and not layer.whole.free.all():
            yield Row(title, note=FLIPPED)
            continue
        vectors = layer.keys if name.startswith("key") else layer.values
        # a distance is the difference of energies, whose sums of float32 products are exact to their size
        scale = 1.0 if "cos" in name else float(vectors.double().square().sum(-1).mean())
        stored = run.similarity.get_tensor(name)[layer.index]
        further = compare("", again[name], stored, FLOAT32, scale=scale).difference
        first = torch.stack(literal[name]) if literal[name] else None
        yield compare(title, torch.stack(printed[name]), ours[name][i, j], FLOAT32, note, literal=first,
                      whole=stored[i, j], scale=scale, further=further)


def agreement(Y: list[torch.Tensor]) -> torch.Tensor:
    """|sum_i Y_i|^2, which Algorithm 1 raises, as a share of what equal heads have."""
    return sum(Y).square().sum() / (len(Y) * sum(Y_i.square().sum() for Y_i in Y)).clamp(min=1e-30)


def alignment_rows(run: Run, layer: Layer):
    """Algorithm 1 on the sampled vectors of each group.

    Further, the rotations read back from aligned/ must be as good on all tokens as those found again.
    """
    criterion, groups = run.alignment["summary"]["rotate"], layer.groups
    if criterion == "none":
        yield Row("Algorithm 1", note="--rotate none")
        return
    K, V, kind = layer.K, layer.V, CRITERIA[criterion]
    if kind == "unit":
        K, V = [paper.eq_7(K_i) for K_i in K], [paper.eq_8(V_i) for V_i in V]
    Q, R = (torch.stack(part).unflatten(0, groups.shape) for part in (layer.Q, layer.R))  # of aligned/
    cosine, sine = R[..., : run.size // 2].chunk(2, dim=-2)
    u = torch.complex(cosine.diagonal(dim1=-2, dim2=-1), sine.diagonal(dim1=-2, dim2=-1))
    found_Q, found_u = align_layer(layer.sampled, groups, criterion)
    best_Q, best_u = align_layer(layer.whole, groups, criterion)

    def aligned(vectors, *options):
        shapes = ([vectors[i].mT for i in group] for group in groups.tolist())
        return torch.stack([agreement(paper.algorithm_1(X, *options, ROUNDS, GAIN)) for X in shapes])

    def rotated(vectors, rotations):
        return torch.stack([agreement([(Q_i @ vectors[i]).T for i, Q_i in zip(group, part, strict=True)])
                            for group, part in zip(groups.tolist(), rotations, strict=True)])

    def shortfall(overlap, gram, stored, best):
        reached, possible = (overlap(group_blocks(gram, groups), part).sum((1, 2)) for part in (stored, best))
        return float(((possible - reached) / possible.clamp(min=1e-30)).max())

    lost = shortfall(value_overlap, layer.whole.value(kind), Q, best_Q)
    yield compare("Algorithm 1: values of a group", aligned(V, paper.minimizer), rotated(V, found_Q), BEHIND,
                  TRANSPOSED, literal=aligned(V, paper.eq_6), whole=rotated(V, Q), further=lost, ahead=AHEAD)
    if layer.whole.free.all():
        lost = shortfall(key_overlap, layer.whole.key(kind), u, best_u)
        printed = aligned([paper.pairs(K_i) for K_i in K], paper.rotation_2d)
        yield compare("Algorithm 1: keys of a group", printed, rotated(K, to_matrix(found_u)), BEHIND,
                      whole=rotated(K, R), further=lost, ahead=AHEAD)
    else:
        yield Row("Algorithm 1: keys of a group", note=FLIPPED)


def fusion_rows(run: Run, layer: Layer):
    """Eq. 11 to 17: heads of aligned/ are those of the source rotated by some Q and R, and do the same."""
    old, new, rounding = layer.old, layer.new, run.rounding("aligned")
    for title, letter, rotations, equation in (
        ("Eq. 12: W_V", "v", layer.Q, paper.eq_12),
        ("Eq. 13: W_O", "o", layer.Q, lambda Q, W_O: paper.eq_13(W_O, Q)),
        ("Eq. 14, 15: W_Q", "q", layer.R, paper.eq_15),
        ("Eq. 16: W_K", "k", layer.R, paper.eq_16),
    ):
        printed = torch.stack([equation(*pair) for pair in zip(rotations, old[letter], strict=True)])
        yield compare(f"{title} of aligned/", printed, torch.stack(new[letter]), rounding)
    random = torch.Generator().manual_seed(0)
    X, x, x_s, x_t = (torch.randn(old[letter][0].shape[1], count, dtype=torch.float64, generator=random)
                      for letter, count in (("k", 16), ("q", 1), ("q", 1), ("k", 1)))
    q, k, v = (torch.stack(new[letter]) @ part for letter, part in (("q", x), ("k", X), ("v", X)))
    attended = torch.stack(new["o"]) @ scaled_dot_product_attention(q.mT, k.mT, v.mT).mT
    output = paper.eq_11(*(old[letter] for letter in "qkvo"), X, x)
    yield compare("Eq. 11: attention to random tokens", output, attended.sum(0), 16 * rounding)
    R_s, R_t = paper.rope(layer.theta, 200), paper.rope(layer.theta, 3)
    weights = zip(old["q"], old["k"], strict=True)
    scores = torch.cat([paper.eq_17(W_Q, W_K, x_s, x_t, R_s, R_t) for W_Q, W_K in weights])
    angles = torch.tensor([200, 3])[:, None] * torch.cat((layer.theta, layer.theta))
    states = torch.stack((torch.stack(new["q"]) @ x_s, torch.stack(new["k"]) @ x_t)).mT  # [2, H, 1, d_H]
    (q_s, k_t), _ = apply_rotary_pos_emb(states, states, angles.cos()[:, None], angles.sin()[:, None])
    yield compare("Eq. 17: scores under RoPE", scores, q_s @ k_t.mT, 16 * rounding)


def grouping_rows(run: Run, layer: Layer):
    """Eq. 23 or 24 of the run's groups, and the score that Algorithm 2 finds."""
    summary, options = run.grouping["summary"], run.grouping["arguments"]
    by, A = summary["by"], run.grouping["groups"][layer.index]
    if by not in ("key", "value"):
        yield Row("Eq. 23, 24, Algorithm 2", note=f"--by {by}")
        return
    Sim = run.similarity.get_tensor(f"{by}.{summary['criterion']}.after")[layer.index].numpy()
    found = torch.tensor(summary["score_found"][layer.index], dtype=torch.float64)
    number, score = (23, paper.eq_23) if by == "key" else (24, paper.eq_24)
    yield compare(f"Eq. {number}: score of the groups", torch.tensor(score(A, Sim)), found, 1e-8)
    starts, random = min(STARTS, options["restarts"]), np.random.default_rng(0)
    _, best = paper.algorithm_2(options["iterations"], starts, Sim, len(A), random)
    yield compare(f"Algorithm 2: best score, {starts} starts", torch.tensor(best), found, BEHIND, ahead=AHEAD)


def merging_rows(run: Run, layer: Layer):
    """Eq. 25 to 28: the heads of merged/, and their blends with those of aligned/."""
    merged, summary = run.attention("merged", layer.index), run.alignment["summary"]
    for title, letter, equation in (("Eq. 25: W_K", "k", paper.eq_25), ("Eq. 26: W_V", "v", paper.eq_26)):
        if summary["merge"] != "mean" or summary["refit"]:
            yield Row(title, note=f"--merge {summary['merge']}{' --refit' if summary['refit'] else ''}")
            continue
        means = torch.stack([equation(layer.new[letter], g + 1, run.members) for g in range(run.kv_heads)])
        yield compare(f"{title} of merged/", means, torch.stack(merged[letter]), run.rounding("merged"))
    projection = masks.BlendedProjection(None, None, run.size)
    projection.z = z = torch.linspace(0, 1, run.heads)
    for title, letter, equation in (("Eq. 27: W_K", "k", paper.eq_27), ("Eq. 28: W_V", "v", paper.eq_28)):
        heads, shared = ([W.float() for W in part[letter]] for part in (layer.new, merged))
        printed = torch.cat([equation(z, heads, shared, j + 1, run.members) for j in range(run.heads)])
        ours = projection.blend(torch.cat(heads), torch.cat(shared))
        yield compare(f"{title} blended", printed, ours, FLOAT32)


def text_rows(run: Run) -> list[Row]:
    """The rows that need the calibration's text."""
    try:
        tokens = run.tokens()
    except (UserError, ImportError) as error:
        return [Row(title, note=f"no calibration text: {error}") for title in ("Eq. 1", "Eq. 29-31")]
    return [cache_row(run, tokens), *batch_rows(run, tokens)]


def cache_row(run: Run, tokens: torch.Tensor) -> Row:
    """Eq. 1 of the first layer, whose input is known without running the model."""
    stored, sampled = open_checkpoint(run.path("source")), read_layer(run.path("calibration"), 0)
    summary = run.calibration["summary"]
    at = torch.linspace(0, summary["tokens"] - 1, summary["sampled_tokens"]).long()
    tokens = tokens[at[at < len(tokens)]].tolist()
    embedding, norm = stored["model.embed_tokens.weight"], stored["model.layers.0.input_layernorm.weight"]
    X = torch.cat([embedding[token : token + 1] for token in tokens]).double().T
    X = X / (X.square().mean(0) + run.config.rms_norm_eps).sqrt() * norm[:].double()[:, None]
    heads = run.attention("source", 0)
    X = torch.cat((X, torch.ones(1, len(tokens))))[: heads["k"][0].shape[1]]  # the ones are for biases
    printed = [head for letter in "kv" for head in paper.eq_1(torch.cat(heads[letter]) @ X, run.heads)]
    eps = torch.finfo(getattr(torch, run.calibration["arguments"]["dtype"])).eps
    stages = torch.cat((sampled["sample.key"], sampled["sample.value"]), dim=1)[: len(tokens)]
    stages = stages.permute(1, 2, 0)
    return compare("Eq. 1: keys before RoPE and values, layer 0", torch.stack(printed), stages, 64 * eps)


def networks(run: Run) -> tuple:
    """The source, aligned/, and aligned/ with masks that blend in merged/; of a LARGE model the first layer.

    In float32, frozen; what is not attention is in memory once.
    """
    config = copy.deepcopy(run.config)
    if config.hidden_size >= LARGE:
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "packed"}
    source = AutoModelForCausalLM.from_pretrained(run.path("source"), trust_remote_code=False, **options)
    source.requires_grad_(False)
    shared = {id(parameter): parameter for parameter in source.parameters()}
    aligned, stored = copy.deepcopy(source, shared), open_checkpoint(run.path("aligned"))
    names = [name for name in source.state_dict() if ".self_attn." in name]
    aligned.load_state_dict({name: stored[name][:].float() for name in names}, strict=False, assign=True)
    shared = {id(parameter): parameter for parameter in aligned.parameters()}
    masked, stored = copy.deepcopy(aligned, shared), open_checkpoint(run.path("merged"))
    masks.patch(masked, run.kv_heads)
    shared = {masks.blended_name(name): stored[name][:].float()
              for name in names if re.search("[kv]_p", name)}
    masked.load_state_dict(shared, strict=False)
    return source, aligned.requires_grad_(False), masked.requires_grad_(False)


def batch_rows(run: Run, tokens: torch.Tensor):
    """Eq. 29 to 31 on two questions and a text, cut from the calibration's; the source is the teacher."""
    if run.alignment["summary"]["merge"] == "closed-form" or run.alignment["summary"]["refit"]:
        yield Row("Eq. 29-31", note="closed-form merges and refits blend W_Q and W_O, too")
        return
    ids, (teacher, aligned, masked) = tokens.tolist(), networks(run)
    samples = [Sample(ids[:20], ids[20:28]), Sample(ids[28:40], ids[40:44]), Sample(ids[44:BATCH])]
    shape = len(masked.model.layers), run.heads
    start = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))

    # as the stages have it: one packed row, logits in chunks, the masks as a leaf between two backward passes
    log_alpha, row = start.clone().requires_grad_(), build_row(samples, len(samples))
    drawn = masks.draw(log_alpha, 0, STEP)
    leaf = drawn.detach().requires_grad_()
    masks.set_masks(masked, leaf)
    with torch.no_grad():
        hidden = Trainee(teacher)(row)
    loss, _, _ = distillation_loss(Trainee(masked), row, hidden, teacher.lm_head, "prompt", 1.0, 16)
    loss.backward()
    l0 = masks.l0_loss(masks.expected(log_alpha).mean(), masks.target(STEP, STEPS))
    torch.autograd.backward([drawn, l0], [leaf.grad, None])
    gradient = log_alpha.grad

    # as printed: blended weights, one sample at a time
    log_alpha, weights, D = start.clone().requires_grad_(), {}, run.members
    z = paper.hard_concrete(masks.uniform(start, 0, STEP), log_alpha)
    for b, layer in enumerate(masked.model.layers):
        for name, equation in (("k_proj", paper.eq_27), ("v_proj", paper.eq_28)):
            module = getattr(layer.self_attn, name)
            for part, W in module.original.named_parameters():
                heads, shared = W.split(run.size), module.merged.get_parameter(part).split(run.size)
                blended = [equation(z[b], heads, shared, j + 1, D) for j in range(run.heads)]
                weights[f"model.layers.{b}.self_attn.{name}.{part}"] = torch.cat(blended)
    L_KL = L_BiLD = 0
    for sample in samples:
        inputs = {"input_ids": torch.tensor([sum(sample.segments, [])]), "use_cache": False}
        student, target = (functional_call(network, changed, kwargs=inputs).logits[0, :-1]
                           for network, changed in ((aligned, weights), (teacher, {})))
        asked = len(sample.prompt) - 1  # predicted tokens of the prompt
        L_KL = L_KL + paper.kl(student[:asked], target[:asked]).mean() / len(samples)
        answer = [paper.bild(*logits) for logits in zip(student[asked:], target[asked:], strict=True)]
        L_BiLD = L_BiLD + sum(answer) / max(1, len(answer)) / len(samples)
    distill, T = paper.eq_30(L_KL, L_BiLD), paper.target_size(STEP, STEPS)
    yield compare("Eq. 30: loss of a batch", distill, loss, FLOAT32, TOKENS)
    if run.masks != "l0":
        yield Row("Hard concrete, Eq. 29, 31", note=f"--masks {run.masks}")
        return
    size = paper.open_probability(log_alpha)
    L_L0 = paper.eq_29(size, T)
    L = paper.eq_31(distill, L_L0)
    deterministic = paper.without_noise(start), masks.deterministic(start)
    yield compare("Hard concrete: samples", z, drawn, FLOAT32)
    yield compare("Hard concrete: P(z > 0)", size, masks.expected(start), FLOAT32)
    yield compare("Hard concrete: without noise", *deterministic, FLOAT32)
    yield compare("Eq. 29: loss of the masks", L_L0, l0, FLOAT32, OPEN, literal=paper.eq_29(z, T))
    yield compare("Eq. 31: loss of a batch", L, loss + l0, FLOAT32)
    L.backward()
    yield compare("Eq. 31: gradient in log alpha", log_alpha.grad, gradient, 100 * FLOAT32)


def recorded_rows(run: Run):
    """Eq. 29 and 30 of every step that stage 5 recorded, and the heads left after pruning."""
    if run.training:
        lines = read_metrics(os.path.join(run.path("train"), METRICS))
        column = {name: torch.tensor([line[name] for line in lines if name in line], dtype=torch.float64)
                  for name in ("kl", "bild", "loss", "mask_expected", "mask_target", "l0")}
        distill = paper.eq_30(column["kl"], column["bild"])
        yield compare("Eq. 30: recorded steps", distill, column["loss"], FLOAT32)
        if len(column["l0"]):
            steps = run.training["summary"]["steps"]
            T = [paper.target_size(step, steps) for step in range(len(column["l0"]))]
            sizes = zip(column["mask_expected"], column["mask_target"], strict=True)
            printed = torch.stack([paper.eq_29(size, target) for size, target in sizes])
            yield compare("Eq. 29: T of recorded steps", torch.tensor(T), column["mask_target"], FLOAT32)
            yield compare("Eq. 29: recorded steps", printed, column["l0"], FLOAT32)
    if os.path.isdir(run.path("gqa")):
        heads = torch.tensor(len(run.attention("gqa", 0)["k"]))
        yield compare("Section 3.5: heads left in gqa/", torch.tensor(run.heads // run.members), heads, 0)


def parse():
    parser = StageParser(paper.__doc__)
    parser.section("flags")
    parser.add_argument("--run", default="runs/demo", metavar="DIR",
                        help="run directory, after stage 4 or later")
    parser.add_argument("--layer", type=non_negative, nargs="+", metavar="LAYER",
                        help="layers to compare (default: all; of a large model the middle one)")
    parser.add_argument("-h", "--help", action="help", help="show this page")
    return parser.parse_args()


def choose_layers(requested: list[int] | None, run: Run) -> list[int]:
    """The requested layers, or the default. Raises UserError for one out of range."""
    count = run.model["layers"]
    for layer in requested or []:
        if layer >= count:
            raise UserError(f"--layer: expected layers from 0 to {count - 1}, found {layer}")
    small = count * (run.heads * run.size) ** 2 < SMALL
    return requested or (list(range(count)) if small else [count // 2])


def main() -> int:
    args, clock = parse(), Clock()
    return_freed_memory()
    run = Run(args.run)
    layers = choose_layers(args.layer, run)
    rows, path = all_rows(run, layers), os.path.join(args.run, "paper.md")
    cells = [(*row[:3], f"{row.difference:.1e}", f"{row.allowed:.1e}", row.ok) if row.ok != "-" else
             (row.equation, *"-----") for row in rows]
    header = "equation", "as printed", "what the stages computed", "difference", "allowed", "ok"
    notes = "\n".join(f"- {row.equation}: {row.note}" for row in rows if row.note)
    text = f"{markdown_table(header, cells)}\n\n{notes}\n"
    write_text(path, text)
    off = [row.equation for row in rows if row.ok == "NO"]
    print(f"{text}\nwrote   {path}")
    print(f"paper: {len(rows)} rows, {len(layers)} layers, {clock()} s, off: {'; '.join(off) or 'none'}")
    return 1 if off else 0
