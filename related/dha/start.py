"""Initial models without fusion: heads merged in groups, for pretrain.py, or aligned in them, for fuse.py.

Reads   RUN/searched/ and the model it was made from, RUN/calibration/ of that or RUN/rotated/calibration/
Writes  RUN/start-NAME/         a checkpoint, untrained except by --refit
        RUN/rotated/searched/   of --merge none: the function and the groups of RUN/searched/

    python -m related.dha.start                            # RUN/start-cold/: means of the source's heads
    python -m related.dha.start --weights searched         # RUN/start-unfused/: of those after search
    python -m related.dha.start --merge closed-form        # RUN/start-measured/, after related/dha/run.sh
    python -m related.dha.start --merge closed-form --counts search --groups search
    python 01_calibrate.py --run runs/dha/rotated --model runs/dha/searched
    python -m related.dha.start --merge none               # then fuse.py --run runs/dha/rotated

Means in search's groups are the paper's cold start (Figure 7), or Table 2's "w.o. linear heads fusion". The
closed form of stage 4 merges keys and values independently of each other, each in groups of their own. A
layer keeps as many heads as any other (--counts uniform), as search found, or as measured: the KL from the
source on --sequences training sequences, with one layer's keys or values merged to each number of heads; of
all numbers with the same cache, those with the least sum of KLs. A model that takes neither groups nor counts
from search does not cost its steps. --merge none rotates the heads of each group towards each other as stage
4 does (generalized Procrustes, "dist"), as fusion mixes the same channels of different heads.
"""

import itertools
import os
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from common.closed_form.keys import merge_rope_keys
from common.closed_form.layer import key_fit, merging_loss
from common.closed_form.values import merge_values, value_loss
from common.data.text import load_tokens
from common.method.grouping import anneal
from common.method.procrustes import align_layer
from common.method.stats import LayerGrams, group_blocks
from common.models.calibration import Calibration
from common.models.edits import fuse_layer, head_columns, head_rows
from common.models.equivalence import mean_kl
from common.models.families import allowed_kv_heads, key_context
from common.models.layers import Layers
from common.models.load import describe, load_model, load_tokenizer
from common.models.refit import Refit
from common.run import flags
from common.run.artifact import begin_stage, check_same_model, input_digests, read_record, verify_files
from common.run.errors import UserError, run_stage
from common.run.flags import positive, stage_parser
from common.run.progress import Progress
from related.dha import fusion
from related.dha.records import SEARCH, START, write_checkpoint
from related.dha.training import all_logits, relative_difference

KINDS = tuple(fusion.PROJECTIONS)
NAMES = {"source": "cold", "searched": "unfused"}  # of means: --weights -> name of the model
RESTARTS, SWAPS = 50, 1000  # of Algorithm 2, whose scores are those of pairs
REFITTED = 128  # training sequences for --refit: as many as stage 1 reads
CHECKED = 4, 64  # random sequences and their tokens whose logits rotations must not change


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    flag = parser.add_argument
    flag("--merge", choices=tuple(MERGES), default="mean", help="what becomes of a group")
    flag("--name", type=flags.name, help="the result is RUN/start-NAME (default: as above, or --counts)")
    flag("--weights", choices=tuple(NAMES), default="source",
         help="mean: of the source's heads, or of those of the model after search")
    parser.section("closed form")
    flag("--groups", choices=("energy", "search"), default="energy",
         help="groups of least energy lost, or those of search with its head counts")
    flag("--counts", choices=("measured", "search", "uniform"), default="measured",
         help="heads that each layer keeps")
    flag("--sequences", type=positive, default=32, help="training sequences to measure on")
    flag("--refit", choices=("output", "attention"), help="as --refit of 04_align.py")
    args = parser.parse_args()
    if args.groups == "search" and args.counts != "search":
        raise UserError(f"--groups search: expected --counts search with it, found {args.counts}")
    return replace(args, name=args.name or (NAMES[args.weights] if args.merge == "mean" else args.counts))


def by_head(parts: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[G, D, ...] in the order of `groups` [G, D] -> [H, ...] in the order of the heads."""
    return parts.flatten(0, 1)[groups.flatten().argsort()]


@torch.no_grad()
def rotate_layer(attention, grams: LayerGrams, key_groups: list, value_groups: list) -> None:
    """Rotate each head towards the others of its key group and of its value group, in place.

    The function of the layer is unchanged, and so is the order of its heads.
    """
    value_members, key_members = torch.tensor(value_groups), torch.tensor(key_groups)
    value_rotation, _ = align_layer(grams, value_members, "dist")
    _, key_rotation = align_layer(grams, key_members, "dist")
    fuse_layer(attention, list(range(grams.source_kv_heads)),
               by_head(value_rotation, value_members), by_head(key_rotation, key_members))


def energy_losses(grams: LayerGrams, context: int) -> dict[str, np.ndarray]:
    """What merging two heads loses, as shares of the layer's energy: "key" and "value", each [H, H]."""
    value = value_loss(grams.value("raw"), grams.output)
    return {"key": (merging_loss(grams, context) - value).numpy(), "value": value.numpy()}


def energy_groups(losses: list[np.ndarray], counts: list[int]) -> list[list[list[int]]]:
    """Groups of least loss for each layer. losses: of each layer [H, H]; counts: its number of groups."""
    groups = [None] * len(counts)
    for count in set(counts):  # all layers with as many groups at once
        layers = [index for index, number in enumerate(counts) if number == count]
        similarity = -np.stack([losses[index] for index in layers])
        for index, chosen in zip(layers, anneal(similarity, count, RESTARTS, SWAPS, seed=0), strict=True):
            groups[index] = chosen.tolist()
    return groups


@torch.no_grad()
def merge_heads(state: dict, prefix: str, kind: str, grams: LayerGrams, groups: list, context: int) -> dict:
    """The parameters that change when one layer's keys or values are merged within `groups`, by name.

    state: the source's tensors; prefix: "model.layers.N.self_attn.". Keys change W_K and W_Q, values W_V and
    W_O. In float64, returned in each tensor's dtype.
    """
    members, size, merged = torch.tensor(groups), grams.frequencies.numel() * 2, {}
    if kind == "key":
        combine, read = merge_rope_keys(key_fit(grams, members, None, context))
    else:
        combine, read = merge_values(group_blocks(grams.value("raw"), members), grams.output[members])
    read = by_head(read, members)
    for name in (name for name in state if name.startswith(prefix)):
        tensor, projection = state[name], name.removeprefix(prefix)
        if projection.startswith(fusion.PROJECTIONS[kind]):
            blocks = torch.einsum("gjab,gjbn->gan", combine, head_rows(tensor, size)[members])
        elif projection.startswith("q_proj") and kind == "key":
            blocks = read.mT @ head_rows(tensor, size)
        elif projection == "o_proj.weight" and kind == "value":  # its bias belongs to no head
            blocks = torch.einsum("oha,hab->ohb", head_columns(tensor, size), read)
        else:
            continue
        rows = len(tensor) if projection == "o_proj.weight" else -1
        merged[name] = blocks.reshape(rows, *tensor.shape[1:]).to(tensor.dtype)
    return merged


class Source:
    """The source model with its Grams: merged to any groups, layer by layer."""

    def __init__(self, layers: Layers, grams_of, context: int):
        self.layers, self.grams_of, self.context = layers, grams_of, context
        self.config, self.state = layers.config, layers.model.state_dict()
        self.single = [[head] for head in range(self.config.num_attention_heads)]

    def merged(self, groups: dict[str, list]):
        """The DHA model of these groups, [G, D] heads of each layer by kind; unmerged where D is 1."""
        state = dict(self.state)
        for kind, index in itertools.product(KINDS, range(self.config.num_hidden_layers)):
            if len(groups[kind][index]) < len(self.single):
                state |= merge_heads(self.state, f"model.layers.{index}.self_attn.", kind,
                                     self.grams_of(index), groups[kind][index], self.context)
        return fusion.fused_model(self.config, state, groups)

    @torch.no_grad()
    def refit(self, model, tokens: torch.Tensor, attention: bool) -> list[dict]:
        """Refit a merged model in place, a layer at a time; returns the metrics of the layers."""
        targets, inputs = (self.layers.embed(tokens.split(1), None) for _ in range(2))
        fit = Refit(self.layers.model, targets, inputs, attention=attention)
        pairs = zip(self.layers.model.model.layers, model.model.layers, strict=True)
        for original, merged in Progress(list(pairs), desc="refitting", unit="layer"):
            fit.layer(original, merged)
        return fit.metrics


def cheapest_counts(costs: list[dict[int, float]], total: int) -> list[int]:
    """One number of heads from each of `costs` (number -> cost), of sum `total` and least total cost.

    Exact, by dynamic programming over the sum so far.
    """
    best = {0: (0.0, [])}
    for choices in costs:
        following = {}
        for (so_far, (cost, chosen)), (heads, more) in itertools.product(best.items(), choices.items()):
            if so_far + heads <= total:
                candidate = cost + more, [*chosen, heads]
                following[so_far + heads] = min(following.get(so_far + heads, candidate), candidate)
        best = following
    return best[total][1]


def measure_counts(source: Source, losses: dict, total: int, tokens) -> tuple[dict, dict]:
    """Head counts of least measured KL, by kind, and the KL with each layer's keys or values merged alone.

    The latter: kind -> layer -> heads -> nats per token.
    """
    logits, layers = all_logits(source.layers.model, tokens), range(source.config.num_hidden_layers)
    costs = {kind: [{len(source.single): 0.0} for _ in layers] for kind in KINDS}
    merges = allowed_kv_heads(len(source.single))
    for kind, heads in Progress(list(itertools.product(KINDS, merges)), desc="measuring", unit="merge"):
        for index, groups in enumerate(energy_groups(losses[kind], [heads] * len(layers))):
            alone = {kind: [source.single] * len(layers) for kind in KINDS}
            alone[kind][index] = groups
            costs[kind][index][heads] = mean_kl(logits, all_logits(source.merged(alone), tokens))
    chosen = cheapest_counts([*costs["key"], *costs["value"]], total)
    return {"key": chosen[: len(layers)], "value": chosen[len(layers) :]}, costs


def choose_groups(args, source: Source, search: dict, tokens: torch.Tensor) -> tuple[dict, dict]:
    """Groups of every layer by kind, and the numbers behind them."""
    if args.groups == "search":
        return search["groups"], {}
    layers, kv_heads = search["model"]["layers"], search["summary"]["kv_heads"]
    by_layer = [energy_losses(source.grams_of(index), source.context) for index in range(layers)]
    losses = {kind: [loss[kind] for loss in by_layer] for kind in KINDS}
    counts, metrics = {kind: [kv_heads] * layers for kind in KINDS}, {}
    if args.counts == "measured":
        counts, costs = measure_counts(source, losses, 2 * kv_heads * layers, tokens)
        metrics = {"measured_kl": costs}
    elif args.counts == "search":
        counts = {kind: search["summary"][kind]["heads"] for kind in KINDS}
    return {kind: energy_groups(losses[kind], counts[kind]) for kind in KINDS}, metrics


def averaged(args, path: str, search: dict, grams_of) -> tuple:
    """The model whose key (value) heads are the means of their groups, and its metrics."""
    source, groups = load_model(path), search["groups"]
    operators = fusion.starting_operators(groups, source.config.head_dim)
    model = fusion.fused_model(source.config, source.state_dict(), groups, operators)
    return model, {"steps_so_far": search["summary"]["steps_so_far"]}


def in_closed_form(args, path: str, search: dict, grams_of) -> tuple:
    """The model of heads merged in closed form, and its metrics."""
    data, tokenizer = search["summary"]["data"], load_tokenizer(path)
    tokens, text = load_tokens(data["text"], tokenizer, args.sequences, data["length"])
    print(f"reads   {text}")
    layers = Layers(path, torch.float32, "cpu")
    source = Source(layers, grams_of, key_context(None, layers.config.max_position_embeddings))
    groups, metrics = choose_groups(args, source, search, tokens)
    model = source.merged(groups)
    if args.refit:
        more, _ = load_tokens(data["text"], tokenizer, REFITTED, data["length"])
        metrics["refit"] = source.refit(model, more, args.refit == "attention")
    metrics["kl"] = mean_kl(all_logits(layers.model, tokens), all_logits(model, tokens))
    print(f"KL      {metrics['kl']:.4f} from {path} on {tokens.numel()} training tokens")
    searched = "search" in (args.groups, args.counts)
    return model, metrics | {"steps_so_far": search["summary"]["steps_so_far"] if searched else 0}


def aligned(args, path: str, search: dict, grams_of) -> tuple:
    """The model after search with its heads rotated towards those of their groups, and its metrics."""
    model, groups = Layers(path, torch.float32, "cpu").model, search["groups"]  # with its RoPE pairs
    tokens = torch.randint(model.config.vocab_size, CHECKED, generator=torch.Generator().manual_seed(0))
    expected = all_logits(model, tokens)
    for index, layer in enumerate(model.model.layers):
        rotate_layer(layer.self_attn, grams_of(index), groups["key"][index], groups["value"][index])
    difference = relative_difference(expected, all_logits(model, tokens), "rotated heads")
    print(f"checked rotated heads: relative logit difference {difference:.1e}")
    return model, search["summary"]


MERGES = {"mean": averaged, "closed-form": in_closed_form, "none": aligned}


def main():
    args = parse()
    none, searched = args.merge == "none", os.path.join(args.run, "searched")
    home, name = ("rotated", "searched") if none else ("", f"start-{args.name}")
    output, calibration = (os.path.join(args.run, home, part) for part in (name, "calibration"))
    stage = SEARCH if none else START
    search = read_record(searched, SEARCH)
    path = searched if none or args.weights == "searched" else search["model"]["path"]
    read_from = [searched] if args.merge == "mean" else [searched, calibration]
    started = begin_stage(stage, args, output, inputs=input_digests(args.run, read_from))
    print(f"reads   {path}, {', '.join(read_from)}")
    if path == searched:
        verify_files(searched, search)
    grams_of = None
    if args.merge != "mean":
        calibrated = Calibration(calibration)
        check_same_model(calibration, describe(path), calibrated.model)
        grams_of = partial(calibrated.grams, "cpu")  # of a layer
    model, metrics = MERGES[args.merge](args, path, search, grams_of)
    heads = fusion.head_counts(model.config)
    summary = metrics | {"heads": heads, "stock": model.config.model_type == "llama"}
    groups = {"groups": search["groups"]} if none else {}
    write_checkpoint(output, model, path, started.record(search["model"], summary, **groups))
    print(f"cache   key heads {heads['key']}, value heads {heads['value']}\nwrote   {output}\n"
          f"start: heads of {path}, --merge {args.merge}, in {started.clock()} s")


if __name__ == "__main__":
    run_stage(main)
