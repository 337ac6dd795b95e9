"""Search, the first phase of decoupled-head attention (DHA): which heads resemble each other, and which layers need many.

Reads   an MHA Llama checkpoint and text
Writes  RUN/search/         training checkpoints and metrics.jsonl
        RUN/searched/       the model after search, an MHA checkpoint again: its operators folded into its heads
        RUN/search.json     key and value groups of every layer, losses, budgets, redundancy, and the data all later steps use
        RUN/cka.png         head similarity of the source (linear CKA, Appendix B.1)

    python -m related.dha.search                                                          # the embedded model
    torchrun --nproc-per-node 8 -m related.dha.search --run-dir runs/dha-7b --model meta-llama/Llama-2-7b-hf --text c4 \\
        --heldout FILE.txt --kv-heads 8 --steps 240 --batch 64 --length 4096 --sequences 80000 --lr 1e-4

Every head starts to read a mixture of all heads of its layer, with factors that change nothing; the language-model loss trains
factors and weights. How far the factors of two heads have then moved apart decides who shares a head (simulated annealing,
Algorithm 4), how far those of a layer have, how many heads it keeps (Algorithm 5), keys and values apart. Published: 240 steps of
64 x 4096 tokens at 1e-4 for weights and 1e-2 for factors, as in the second command; the defaults suit the embedded model. The same
command again goes on where it was stopped.
"""

import os
import shutil

import torch
from transformers import AutoModelForCausalLM

from common.artifacts import RECORD, record, refuse_overwrite, write_directory, write_json
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.data.demo import resolve_model
from common.evaluate import all_logits
from common.models import (
    DEMO,
    check_kv_heads,
    describe,
    geometry,
    load_config,
    load_model,
    load_tokenizer,
)
from common.reporting import plots
from common.training.sharding import joined_ranks
from related.dha import fusion, grouping, training

NAME = "related/dha/search.py"
DATA = ("text", "heldout", "sequences", "heldout_sequences", "length", "batch", "tokens_per_microbatch", "seed", "lr")  # the same for all that is compared


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


@plots.drawing
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


def finish(args, clock, described, data, whole, kv_heads, ladder, tokenizer, figures) -> None:
    """Choose groups, fold the operators, and write, on the first rank."""
    weights, operators, _, steps = training.last_weights(os.path.join(args.run, "search"))
    layers, heads = described["layers"], described["heads"]
    groups, chosen = choose(args, operators, layers, heads, kv_heads, ladder)
    model = AutoModelForCausalLM.from_config(load_config(described["path"]), dtype=torch.float32).eval()
    model.load_state_dict(fusion.combine_heads(weights, operators, whole, fusion.mix))
    ended = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    ended.load_state_dict(weights)
    tokens = torch.randint(model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    expected = all_logits(fusion.with_operators(ended, operators, whole), tokens)
    folding = training.relative_difference(expected, all_logits(model, tokens), "searched/ against the model at the end of search")
    print("            | " + " | ".join(f"layer {layer:5d}" for layer in range(layers)))
    for kind, found in chosen.items():
        print(f"{kind:5s} loss  | " + " | ".join(f"{loss:11.6f}" for loss in found["layer_loss"]))
        print(f"{kind:5s} heads | " + " | ".join(f"{count:11d}" for count in found["heads"]) + f" | {sum(found['heads'])} of {kv_heads * layers}")
    summary = {"steps": steps, "tokens": steps * args.batch * args.length, "kv_heads": kv_heads, "ladder": ladder, "unchanged_by_folding": folding, "data": data} | figures | chosen
    written = record(NAME, args, described, [], summary, clock())
    searched, output = os.path.join(args.run, "searched"), os.path.join(args.run, "search.json")
    with write_directory(searched) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(os.path.join(aside, RECORD), written)
    write_json(output, written | {"groups": groups})
    print(f"wrote   {searched}, {output}")
    print(f"search: {steps} steps; the model unchanged at the start to {figures['unchanged_at_start']:.1e}, by folding to {folding:.1e}; "
          f"key heads {chosen['key']['heads']}, value heads {chosen['value']['heads']} in {clock()} s")


def search(args, clock, ranks) -> None:
    directory, output = os.path.join(args.run, "search"), os.path.join(args.run, "search.json")
    refuse_overwrite(output, args.force)
    if args.text == args.heldout and args.text not in (DEMO, "c4"):
        raise UserError(f"--heldout: expected another text than --text, found {args.heldout} for both")
    path = resolve_model(args.model)
    config, tokenizer = load_config(path), load_tokenizer(path)
    check_source(path, config)
    described, shape = describe(path, args.model), geometry(config)
    kv_heads = args.kv_heads or max(shape.heads // 4, 1)
    check_kv_heads(shape.kv_heads, kv_heads)
    ladder = sorted(args.ladder or {rung for rung in (kv_heads // 2, kv_heads, 2 * kv_heads) if rung and shape.heads % rung == 0})
    if any(shape.heads % rung for rung in ladder):
        raise UserError(f"--ladder: expected divisors of {shape.heads} heads, found {ladder}")
    grouping.allocate([1.0] * shape.layers, ladder, kv_heads * shape.layers)  # a budget that cannot be met is said before the search

    data = {name: getattr(args, name) for name in DATA}
    ranks.say(f"reads   {path}")
    samples, heldout = training.load_data(data, tokenizer, ranks)
    whole = {kind: [[list(range(shape.heads))]] * shape.layers for kind in fusion.PROJECTIONS}
    start, figures = fusion.starting_operators(whole, shape.head_dim), {}
    if ranks.first:
        if args.force:
            shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory, exist_ok=True)
        similarity, figures["redundancy"] = head_similarity(load_model(path), shape.head_dim)
        cka_heatmaps(os.path.join(args.run, "cka.png"), similarity, figures["redundancy"], f"{args.model}: head similarity, and the redundancy of each layer")
        figures["unchanged_at_start"] = training.prove_unchanged(path, start, whole, training.as_tokens(heldout[:2]))
    torch.distributed.barrier()

    plan = training.make_plan(data, args.steps, args.warmup, args.print_every)
    settings = data | {"model": described["fingerprint"], "steps": args.steps, "operator_lr": args.operator_lr, "warmup": plan.warmup}
    job = training.begin(directory, settings, path, ranks, (args.lr, args.operator_lr), start)
    phase = training.Operating(job, plan, heldout, args.heldout_every, groups=whole)
    if (job.step == plan.steps or training.train(job, phase, samples, plan)) and ranks.first:
        finish(args, clock, described, data, whole, kv_heads, ladder, tokenizer, figures)


def main():
    args, clock = parse(), Clock()
    with joined_ranks() as ranks:
        search(args, clock, ranks)


if __name__ == "__main__":
    run_stage(main)
