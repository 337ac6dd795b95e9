"""Search, the first phase of decoupled-head attention (DHA): which heads resemble each other, and which layers need many.

Reads   an MHA Llama checkpoint and text
Writes  RUN/search/         training checkpoints and metrics.jsonl
        RUN/searched/       the model after search, an MHA checkpoint again: its operators folded into its heads
        RUN/search.json     key and value groups of every layer, losses, budgets, redundancy, and the data all later steps use
        RUN/cka.png         head similarity of the source (linear CKA, Appendix B.1)

    python related/dha/search.py                                                          # the embedded model
    torchrun --nproc-per-node 8 related/dha/search.py --run-dir runs/dha-7b --model meta-llama/Llama-2-7b-hf --text c4 \\
        --heldout c4 --kv-heads 8 --steps 240 --batch 64 --length 4096 --lr 1e-4 --operator-lr 1e-2

Every head starts to read a mixture of all heads of its layer, with factors that change nothing; the language-model loss trains
factors and weights. How far two heads' factors have then moved apart decides who shares a head (simulated annealing,
Algorithm 4), how far those of a layer have, how many heads it keeps (Algorithm 5), keys and values apart. Published: 240 steps of
64 x 4096 tokens, learning rates 1e-4 and 1e-2, which the second command above gives; the defaults are for the embedded model. The same command again goes on where it was
stopped.
"""

import os
import shutil
import sys

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from common import checkpoints, plots
from common.artifacts import RECORD, record, refuse_overwrite, write_directory, write_json
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.models import DEMO, check_kv_heads, describe, geometry, load_config, load_model, load_tokenizer, resolve_model
from common.sharding import build, joined_ranks
from related.dha import fusion, grouping, training

NAME = "related/dha/search.py"


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--model", default=DEMO, help="an MHA Llama: checkpoint directory, hub repository, or demo")
    parser.add_argument("--kv-heads", type=positive, default=None, help="mean number of key heads, and of value heads, that a layer keeps (default: a quarter)")
    parser.add_argument("--ladder", type=positive, nargs="+", default=None, metavar="N", help="numbers of heads that a layer may keep (default: half, once, twice --kv-heads)")
    parser.add_argument("--walks", type=positive, default=50, help="annealing walks per layer (published: 1)")
    parser.section("text, the same for all that is compared")
    parser.add_argument("--text", default=DEMO, help="of training: c4, demo, or a .txt, .jsonl, .json.gz file")
    parser.add_argument("--heldout", default=DEMO, help="of the losses that are compared")
    parser.add_argument("--sequences", type=positive, default=4096, help="of the training text; more steps than that read them again")
    parser.add_argument("--heldout-sequences", type=positive, default=32, help="of the held-out text")
    parser.add_argument("--length", type=positive, default=256, help="tokens per sequence")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step, all ranks together")
    parser.add_argument("--tokens-per-microbatch", type=positive, default=2048, help="tokens in one row")
    parser.add_argument("--seed", type=int, default=0, help="of batches and annealing")
    parser.section("optimization")
    parser.add_argument("--steps", type=positive, default=60, help="of search (published: 240)")
    parser.add_argument("--lr", type=float, default=5e-4, help="of the weights, here and in all later steps (published: 1e-4)")
    parser.add_argument("--operator-lr", type=float, default=1e-2, help="of the fusion operators")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps")
    parser.add_argument("--heldout-every", type=positive, default=20, help="steps between held-out losses")
    parser.add_argument("--print-every", type=positive, default=20, help="steps between printed lines; metrics.jsonl has all")
    return parser.parse_args()


@plots._drawing
def cka_heatmaps(plt, similarity: dict[str, list], redundancies: dict[str, list], title: str):
    """Rows: queries, keys, values; columns: layers, the redundancy above each. similarity: kind -> layers of [H, H]."""
    layers = len(similarity["key"])
    figure, axes = plt.subplots(len(similarity), layers, squeeze=False, layout="constrained", figsize=(1.7 * layers + 1.4, 1.9 * len(similarity) + 0.5))
    for row, (kind, matrices) in zip(axes, similarity.items(), strict=True):
        for layer, (axis, matrix) in enumerate(zip(row, matrices, strict=True)):
            shown = axis.imshow(matrix, vmin=0, vmax=1, cmap="viridis")
            axis.set(xticks=[], yticks=[])
            axis.set_title(f"layer {layer}: {redundancies[kind][layer]:.3f}", fontsize=8)
        row[0].set_ylabel(kind)
    figure.colorbar(shown, ax=axes, shrink=0.6, label="linear CKA of two heads' weights")
    figure.suptitle(title)
    return figure


@torch.no_grad()
def head_similarity(model, head_dim: int) -> tuple[dict, dict]:
    """CKA of the heads of every layer, "query", "key" and "value" -> [H, H] matrices, and their redundancies."""
    similarity = {kind: [grouping.cka(getattr(layer.self_attn, f"{kind[0]}_proj").weight.view(-1, head_dim, model.config.hidden_size)) for layer in model.model.layers]
                  for kind in ("query", "key", "value")}
    return similarity, {kind: [round(grouping.redundancy(matrix), 5) for matrix in matrices] for kind, matrices in similarity.items()}


def check_source(path: str, config) -> None:
    """Raise UserError unless DHA, as the paper has it, applies to this model."""
    shape = geometry(config)
    if config.model_type != "llama":
        raise UserError(f"{path}: expected model_type llama, found {config.model_type}: what is exported is a Llama with other attention")
    if shape.kv_heads != shape.heads:
        raise UserError(f"{path}: expected a key and a value head per query head (MHA), found {shape.kv_heads} of {shape.heads}: fusion mixes the heads of query heads")


def folded(weights: dict, operators: dict, groups: dict, head_dim: int) -> dict:
    """Weights with every head replaced by the mixture it reads: an MHA model of the same function."""
    state = dict(weights)
    for name, operator in operators.items():
        layer, kind = name.split("_")
        for part in ("weight", "bias"):
            key = f"model.layers.{layer}.self_attn.{fusion.PROJECTIONS[kind]}.{part}"
            if key in weights:
                heads = weights[key].double().view(-1, head_dim, weights[key][0].numel())
                state[key] = fusion.mix(operator.double(), torch.tensor(groups[kind][int(layer)]), heads).view_as(weights[key]).to(weights[key].dtype)
    return state


def choose(args, operators: dict, layers: int, heads: int, kv_heads: int, ladder: list[int]) -> tuple[dict, dict]:
    """Groups of keys and of values from the searched operators, and the figures behind them."""
    groups, figures = {}, {}
    for kind in fusion.PROJECTIONS:
        of_layers = [operators[f"{layer}_{kind}"] for layer in range(layers)]
        losses = [float(fusion.layer_loss(operator.double())) for operator in of_layers]
        given = grouping.allocate(losses, ladder, kv_heads * layers)
        scores = [fusion.pair_losses(operator.double())[0] for operator in of_layers]
        groups[kind] = [grouping.anneal(score, count, args.walks, args.seed) for score, count in zip(scores, given, strict=True)]
        inside = [grouping.within(score.tolist(), of_layer) for score, of_layer in zip(scores, groups[kind], strict=True)]
        expected = [float(score.sum()) / 2 * (heads // count - 1) / (heads - 1) for score, count in zip(scores, given, strict=True)]
        figures[kind] = {"layer_loss": losses, "heads": given, "loss_within_groups": inside, "loss_within_random_groups": expected}
    return groups, figures


def finish(args, clock, described, data, heads_of, tokenizer, groups, whole, ladder, directory, unchanged, redundancies) -> None:
    """Everything after training, on the first rank."""
    layers, heads, kv_heads, head_dim = heads_of
    weights = checkpoints.whole_weights(checkpoints.steps_saved(directory)[-1])
    operators = {name.removeprefix("operators."): weights.pop(name) for name in list(weights) if name.startswith("operators.")}
    groups, figures = choose(args, operators, layers, heads, kv_heads, ladder)
    config = load_config(described["path"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    fusion.patch(model)
    fusion.set_operators(model, operators, whole)

    def fold(model):
        for layer in model.model.layers:
            for name in fusion.PROJECTIONS.values():
                getattr(layer.self_attn, name).__class__ = torch.nn.Linear
        model.load_state_dict(folded(weights, operators, whole, head_dim))

    tokens = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    same = training.difference_after(model, fold, tokens)
    if not same <= training.UNCHANGED:
        raise UserError(f"searched/ is not the searched model: relative logit difference expected <= {training.UNCHANGED:.0e}, found {same:.2e}")
    print("            | " + " | ".join(f"layer {layer:5d}" for layer in range(layers)))
    for kind, found in figures.items():
        print(f"{kind:5s} loss  | " + " | ".join(f"{loss:11.6f}" for loss in found["layer_loss"]))
        print(f"{kind:5s} heads | " + " | ".join(f"{count:11d}" for count in found["heads"]) + f" | {sum(found['heads'])} of {kv_heads * layers}")
    summary = {"steps": args.steps, "tokens": args.steps * args.batch * args.length, "kv_heads": kv_heads, "ladder": ladder, "unchanged_at_start": unchanged,
               "unchanged_by_folding": same, "redundancy": redundancies, "data": data} | figures
    written = record(NAME, args, described, [], summary, clock())
    with write_directory(os.path.join(args.run, "searched")) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(os.path.join(aside, RECORD), written)
    write_json(os.path.join(args.run, "search.json"), written | {"groups": groups})
    print(f"wrote   {os.path.join(args.run, 'searched')}, {os.path.join(args.run, 'search.json')}")
    print(f"search: {args.steps} steps; unchanged at the start to {unchanged:.1e}, by folding to {same:.1e}; key heads {figures['key']['heads']}, "
          f"value heads {figures['value']['heads']} in {clock()} s")


def search(args, clock, ranks) -> None:
    directory, output = os.path.join(args.run, "search"), os.path.join(args.run, "search.json")
    refuse_overwrite(output, args.force)
    path = resolve_model(args.model)
    config, tokenizer = load_config(path), load_tokenizer(path)
    check_source(path, config)
    described, shape = describe(path, args.model), geometry(config)
    layers, heads, head_dim = shape.layers, shape.heads, shape.head_dim
    kv_heads = args.kv_heads or max(heads // 4, 1)
    check_kv_heads(shape, kv_heads)
    ladder = sorted(args.ladder or {n for n in (kv_heads // 2, kv_heads, 2 * kv_heads) if n and heads % n == 0})
    if any(heads % rung for rung in ladder):
        raise UserError(f"--ladder: expected divisors of {heads} heads, found {ladder}")
    grouping.allocate([1.0] * layers, ladder, kv_heads * layers)  # a budget that cannot be met is said before hours of search

    samples, said = training.load_samples(args.text, tokenizer, args.sequences, args.length)
    heldout, heldout_said = training.load_samples(args.heldout, tokenizer, args.heldout_sequences, args.length, split="heldout")
    ranks.say(f"reads   {path}; {said}\nreads   {heldout_said}, for held-out losses")
    data = {name: getattr(args, name) for name in ("text", "heldout", "sequences", "heldout_sequences", "length", "batch", "tokens_per_microbatch", "seed", "lr")}
    whole = {kind: [[list(range(heads))]] * layers for kind in fusion.PROJECTIONS}
    start = fusion.starting_operators(whole, head_dim)
    if args.force and ranks.first:
        for stale in (directory, output):
            shutil.rmtree(stale, ignore_errors=True)
    torch.distributed.barrier()
    unchanged, redundancies = 0.0, {}
    if ranks.first:
        os.makedirs(directory, exist_ok=True)
        model = load_model(path)
        similarity, redundancies = head_similarity(model, head_dim)
        cka_heatmaps(os.path.join(args.run, "cka.png"), similarity, redundancies, f"{args.model}: head similarity, and redundancy of each layer")

        def patched(model):
            fusion.patch(model)
            fusion.set_operators(model, start, whole)

        unchanged = training.difference_after(model, patched, torch.tensor([(*sample.prompt, *sample.answer) for sample in heldout[:2]]))
        print(f"proof   the model with operators that change nothing: relative logit difference {unchanged:.1e}")

    plan = training.make_plan(data, args.steps, args.warmup, args.print_every)
    saved = training.begun(directory, data | {"model": described["fingerprint"], "steps": args.steps, "operator_lr": args.operator_lr, "warmup": plan.warmup}, ranks)
    trainee = build(config, ranks, sources=None if saved else lambda name: (path, name), prepare=fusion.patch, **training.ways(ranks))
    training.add_operators(trainee, start, multiplier=False, ranks=ranks)
    optimizer = training.make_optimizer(trainee, args.lr, args.operator_lr)
    first = checkpoints.load(saved, trainee, optimizer) if saved else 0
    phase = training.Operating(trainee, optimizer, plan, heldout, args.heldout_every, ranks, groups=whole)
    if first < plan.steps and not training.train(trainee, optimizer, phase, samples, plan, directory, ranks, first):
        return
    if ranks.first:
        finish(args, clock, described, data, (layers, heads, kv_heads, head_dim), tokenizer, whole, whole, ladder, directory, unchanged, redundancies)


def main():
    args, clock = parse(), Clock()
    with joined_ranks() as ranks:
        search(args, clock, ranks)


if __name__ == "__main__":
    run_stage(main)
