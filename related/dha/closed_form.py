"""DHA's heads in closed form: keys and values merged in groups of their own, as many as a layer needs.

Reads   RUN/search.json (source model, text, mean number of heads), RUN/calibration/ of the source
Writes  RUN/start-NAME/   a checkpoint to continue with pretrain.py, untrained but for --refit

    python -m related.dha.closed_form --name measured                        # after related/dha/run.sh
    python -m related.dha.closed_form --name searched --counts search        # search's budgets of the layers
    python -m related.dha.closed_form --name groups --counts search --groups search

The closed form of stage 4 replaces keys through W_Q and values through W_O, independently of each other, so
each may have its own groups. Groups of least energy lost (--groups energy) need no search. --counts says how
many heads a layer keeps: every layer as many (uniform), as search found (Algorithm 5), or as measured: the KL
from the source on --sequences training sequences, with one layer's keys or values merged to each number of
heads. Of all numbers with the same cache, those with the least sum of these KLs are chosen. Only --groups
search and --counts search cost the steps of search.
"""

import itertools
import os
from functools import partial

import numpy as np
import torch

from common import companions
from common.artifacts import (
    check_same_model,
    claim,
    input_digests,
    make_record,
    read_calibration,
    read_grams,
    write_record,
)
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.text import load_tokens
from common.evaluate import mean_kl
from common.files import write_directory
from common.layers import Layers
from common.method.closed_form import key_context, key_fit, merging_loss
from common.method.grouping import anneal, check_kv_heads
from common.method.low_rank import merge_values, value_loss
from common.method.merge import head_columns, head_rows
from common.method.refit import Refit
from common.method.rope_merge import merge_rope_keys
from common.method.stats import LayerGrams, group_blocks
from common.models import load_config, load_tokenizer
from common.progress import Progress
from related.dha import export
from related.dha.records import CLOSED_FORM, SEARCH, read, row_name
from related.dha.training import all_logits

KINDS = ("key", "value")
RESTARTS, SWAPS = 50, 1000  # of Algorithm 2, whose scores are those of pairs


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--name", type=row_name, default="measured", help="the result is RUN/start-NAME")
    parser.add_argument("--groups", choices=("energy", "search"), default="energy",
                        help="groups of least energy lost, or those of search with its head counts")
    parser.add_argument("--counts", choices=("measured", "search", "uniform"), default="measured",
                        help="heads that each layer keeps")
    parser.add_argument("--ladder", type=positive, nargs="+", default=None, metavar="N",
                        help="measured: numbers of heads to choose from (default: all divisors)")
    parser.add_argument("--sequences", type=positive, default=32, help="training sequences to measure on")
    parser.add_argument("--refit", choices=("output", "attention"), help="as --refit of 04_align.py")
    parser.add_argument("--refit-sequences", type=positive, default=128, help="to refit on, of training text")
    args = parser.parse_args()
    if args.groups == "search" and args.counts != "search":
        raise UserError(f"--groups search: expected --counts search with it, found {args.counts}")
    return args


def energy_losses(grams: LayerGrams, context: int) -> dict[str, np.ndarray]:
    """What merging two heads loses, as shares of the layer's energy: "key" and "value", each [H, H]."""
    value = value_loss(grams.value("raw"), grams.output)
    return {"key": (merging_loss(grams, context) - value).numpy(), "value": value.numpy()}


def energy_groups(losses: list[np.ndarray], counts: list[int], seed: int = 0) -> list[list[list[int]]]:
    """Groups of least loss for each layer. losses: of each layer [H, H]; counts: its number of groups."""
    groups = [None] * len(counts)
    for count in set(counts):  # all layers with as many groups at once
        layers = [index for index, number in enumerate(counts) if number == count]
        similarity = -np.stack([losses[index] for index in layers])
        for index, chosen in zip(layers, anneal(similarity, count, RESTARTS, SWAPS, seed), strict=True):
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
    for part, name in itertools.product(("weight", "bias"), ("k_proj", "q_proj", "v_proj", "o_proj")):
        key = f"{prefix}{name}.{part}"
        if key not in state or (name in ("k_proj", "q_proj")) != (kind == "key"):
            continue
        if name in ("k_proj", "v_proj"):
            heads = head_rows(state[key], size)[members]
            blocks = torch.einsum("gjab,gjbn->gan", combine, heads)
        elif name == "q_proj":
            blocks = head_rows(state[key], size)
            blocks[members] = read.mT @ blocks[members]
        elif part == "weight":
            blocks = head_columns(state[key], size)
            blocks[:, members] = torch.einsum("ogja,gjab->ogjb", blocks[:, members], read)
        else:
            continue  # W_O's bias belongs to no head
        rows = len(state[key]) if name == "o_proj" else -1
        shape = (rows, *state[key].shape[1:]) if part == "weight" else (-1,)
        merged[key] = blocks.reshape(shape).to(state[key].dtype)
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
                prefix = f"model.layers.{index}.self_attn."
                state |= merge_heads(self.state, prefix, kind, self.grams_of(index), groups[kind][index],
                                     self.context)
        return export.fused_model(self.config, state, groups)

    def measured(self, kind: str, index: int, groups: list, tokens: torch.Tensor, logits: list) -> float:
        """KL from the source, nats per token, with one layer's keys or values merged."""
        every = {kind: [self.single] * self.config.num_hidden_layers for kind in KINDS}
        every[kind] = [*every[kind][:index], groups, *every[kind][index + 1 :]]
        return mean_kl(logits, all_logits(self.merged(every), tokens))


def cheapest_counts(costs: list[dict[int, float]], total: int) -> list[int]:
    """One number of heads from each of `costs` (number -> cost), of sum `total` and least total cost.

    Exact, by dynamic programming over the sum so far. Raises UserError if no numbers sum to the total.
    """
    best = {0: (0.0, [])}
    for choices in costs:
        following = {}
        for (so_far, (cost, chosen)), (heads, more) in itertools.product(best.items(), choices.items()):
            if so_far + heads <= total:
                candidate = cost + more, [*chosen, heads]
                following[so_far + heads] = min(following.get(so_far + heads, candidate), candidate)
        best = following
    if total not in best:
        raise UserError(f"--ladder: expected numbers of heads that sum to {total}, found {list(costs[0])}")
    return best[total][1]


def measure_counts(source: Source, losses: dict, ladder: list[int], total: int, tokens) -> tuple[dict, dict]:
    """Head counts of least measured KL, by kind, and the measured KL: kind -> layer -> heads -> nats."""
    logits, layers = all_logits(source.layers.model, tokens), range(source.config.num_hidden_layers)
    costs = {kind: [{len(source.single): 0.0} for _ in layers] for kind in KINDS}
    merges = [heads for heads in ladder if heads < len(source.single)]
    for kind, heads in Progress(list(itertools.product(KINDS, merges)), desc="measuring", unit="merge"):
        for index, groups in enumerate(energy_groups(losses[kind], [heads] * len(layers))):
            costs[kind][index][heads] = source.measured(kind, index, groups, tokens, logits)
    chosen = cheapest_counts([*costs["key"], *costs["value"]], total)
    return {"key": chosen[: len(layers)], "value": chosen[len(layers) :]}, costs


@torch.no_grad()
def refit(source: Source, model, tokens: torch.Tensor, attention: bool) -> list[dict]:
    """Refit the merged model in place, a layer at a time; returns the figures of the layers."""
    batches = tokens.split(1)
    targets, inputs = (source.layers.embed(batches, None) for _ in range(2))
    fit = Refit(source.layers.run, targets, inputs, attention=attention)
    pairs = zip(source.layers.model.model.layers, model.model.layers, strict=True)
    for original, merged in Progress(list(pairs), desc="refitting", unit="layer"):
        fit.layer(original, merged)
    return fit.figures


def choose_groups(args, source: Source, search: dict, tokens: torch.Tensor) -> tuple[dict, dict]:
    """Groups of every layer by kind, and the figures behind them."""
    if args.groups == "search":
        return search["groups"], {}
    layers, heads = search["model"]["layers"], search["model"]["heads"]
    kv_heads = search["summary"]["kv_heads"]
    check_kv_heads(heads, kv_heads)
    by_layer = [energy_losses(source.grams_of(index), source.context) for index in range(layers)]
    losses = {kind: [loss[kind] for loss in by_layer] for kind in KINDS}
    figures = {}
    if args.counts == "measured":
        ladder = args.ladder or [number for number in range(1, heads + 1) if heads % number == 0]
        if any(heads % number for number in ladder):
            raise UserError(f"--ladder: expected divisors of {heads} heads, found {ladder}")
        counts, costs = measure_counts(source, losses, sorted(ladder), 2 * kv_heads * layers, tokens)
        figures = {"measured_kl": costs}
    elif args.counts == "search":
        counts = {kind: search["summary"][kind]["heads"] for kind in KINDS}
    else:
        counts = {kind: [kv_heads] * layers for kind in KINDS}
    return {kind: energy_groups(losses[kind], counts[kind]) for kind in KINDS}, figures


def main():
    args, clock = parse(), Clock()
    output, calibration = os.path.join(args.run, f"start-{args.name}"), os.path.join(args.run, "calibration")
    search_path = os.path.join(args.run, "search.json")
    search = read(search_path, SEARCH)
    claim(CLOSED_FORM, args, output)
    calibrated = read_calibration(calibration)
    check_same_model(calibration, search["model"], calibrated["model"])
    path, data = search["model"]["path"], search["summary"]["data"]
    tokenizer = load_tokenizer(path)
    tokens, text = load_tokens(data["text"], tokenizer, args.sequences, data["length"])
    print(f"reads   {search_path}, {calibration}, {path}\nreads   {text}")
    context = key_context(None, load_config(path).max_position_embeddings)
    grams_of = partial(read_grams, calibration, search["model"]["kv_heads"], "cpu")
    source = Source(Layers(path, torch.float32, "cpu"), grams_of, context)
    groups, figures = choose_groups(args, source, search, tokens)
    counts = {kind: [len(layer_groups) for layer_groups in groups[kind]] for kind in KINDS}
    model = source.merged(groups)
    if args.refit:
        more, _ = load_tokens(data["text"], tokenizer, args.refit_sequences, data["length"])
        figures["refit"] = refit(source, model, more, args.refit == "attention")
    stock = model.config.model_type == "llama"
    export.check_cache(model, counts)
    kl = mean_kl(all_logits(source.layers.model, tokens), all_logits(model, tokens))
    steps = search["summary"]["steps_so_far"] if "search" in (args.groups, args.counts) else 0
    summary = {"steps_so_far": steps, "heads": counts, "stock": stock, "kl": kl, **figures}
    with write_directory(output) as aside:
        companions.save(model, aside, path)
        inputs = input_digests(args.run, [search_path, calibration])
        write_record(aside, make_record(CLOSED_FORM, args, search["model"], inputs, summary, clock()))
    print(f"cache   key heads {counts['key']}, value heads {counts['value']}")
    print(f"wrote   {output}\nclosed_form: KL {kl:.4f} from {path} on {tokens.numel()} training tokens, "
          f"in {clock()} s")


if __name__ == "__main__":
    run_stage(main)
