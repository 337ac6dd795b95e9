"""Search, the first phase of decoupled-head attention (DHA): heads that are alike, layers that need many.

Reads   an MHA Llama checkpoint, or RUN/fused/ of an earlier run, and text
Writes  RUN/search/         training checkpoints and metrics.jsonl
        RUN/searched/       the model after search, with as many heads: its operators are folded into them
        RUN/search.json     key and value groups of every layer, losses, head counts, data of later steps
        RUN/cka.png         head similarity in the source model (linear CKA, Appendix B.1)

    python -m related.dha.search                                                # the demo model
    python -m related.dha.search --run runs/dha/quarter --model runs/dha/half/fused --kv-heads 2
    torchrun --nproc-per-node 8 -m related.dha.search --run-dir runs/dha-7b \\
        --model meta-llama/Llama-2-7b-hf --text c4 --heldout FILE.txt --kv-heads 8 \\
        --steps 240 --batch 64 --length 4096 --sequences 80000 --lr 1e-4

Every head starts to read a mixture of all heads of its layer, through factors that change nothing at first;
the language-model loss trains factors and weights. Two heads whose factors stay close share a head (simulated
annealing, Algorithm 4), and a layer whose factors spread keeps more heads (Algorithm 5), for keys and values
separately. Published: 240 steps of 64 x 4096 tokens with learning rates 1e-4 for weights and 1e-2 for
factors, as in the last command; the defaults suit the demo model. Run the same command again to resume.

The second command belongs to staged compression (Appendix B.2), where every halving has a search and a fusion
of its own: it halves again what fuse.py left of a first halving. The steps behind that checkpoint count.
"""

import os
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from common import companions
from common.artifacts import claim, input_digests, make_record, verify_files, write_record
from common.cli import Clock, UserError, non_negative_float, positive, run_stage, seed, stage_parser
from common.data.demo import DEMO, resolve_model
from common.families import Geometry, geometry
from common.files import write_directory, write_json
from common.method.grouping import check_kv_heads
from common.models import describe, load_config, load_model, load_tokenizer
from common.training.engine import STOPPED, steps
from common.training.sharding import joined_ranks
from related.dha import export, fusion, grouping, similarity, training
from related.dha.records import DATA_FLAGS, FUSE, SEARCH, read_start, steps_before


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument(
        "--model",
        default=DEMO,
        help="an MHA Llama: checkpoint directory, hub repository, or demo; or a checkpoint of fuse.py",
    )
    parser.add_argument(
        "--kv-heads",
        type=positive,
        default=None,
        help="key heads, and value heads, that a layer keeps on average (default: a quarter of query heads)",
    )
    parser.add_argument(
        "--ladder",
        type=positive,
        nargs="+",
        default=None,
        metavar="N",
        help="numbers of heads that a layer may keep (default: half, once and twice --kv-heads)",
    )
    parser.add_argument("--walks", type=positive, default=50, help="annealing walks per layer (published: 1)")
    add_data_flags(parser)
    parser.section("optimization")
    parser.add_argument("--steps", type=positive, default=60, help="steps of search (published: 240)")
    parser.add_argument(
        "--lr",
        type=non_negative_float,
        default=5e-4,
        help="learning rate of the weights, in this and all later steps (published: 1e-4)",
    )
    parser.add_argument(
        "--operator-lr", type=non_negative_float, default=1e-2, help="learning rate of the fusion operators"
    )
    training.add_logging_flags(parser, warmup=0.1, print_every=20)
    return parser.parse_args()


def add_data_flags(parser) -> None:
    """The flags of records.DATA_FLAGS but for --lr."""
    parser.section("text, the same for everything that is compared")
    parser.add_argument(
        "--text", default=DEMO, help="training text: c4, demo, or a .txt, .jsonl, .json.gz or .parquet file"
    )
    parser.add_argument("--heldout", default=DEMO, help="text whose losses are compared")
    parser.add_argument(
        "--sequences",
        type=positive,
        default=4096,
        help="training sequences; they repeat if the steps need more",
    )
    parser.add_argument("--heldout-sequences", type=positive, default=32, help="held-out sequences")
    parser.add_argument("--length", type=positive, default=256, help="tokens per sequence, at least 2")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--tokens-per-microbatch", type=positive, default=2048, help="tokens per packed row")
    parser.add_argument("--seed", type=seed, default=0, help="random seed of batches and annealing")


@dataclass(frozen=True)
class Budget:
    """How many key heads, and how many value heads, a layer keeps on average, and the counts it may have."""

    kv_heads: int
    ladder: list[int]  # ascending


def head_budget(args, shape: Geometry, heads: dict[str, list[int]]) -> Budget:
    """The budget that the flags ask for. Raises UserError if no counts on the ladder meet it.

    heads: the number of key (value) heads that every layer has.
    """
    kv_heads = args.kv_heads or max(shape.heads // 4, 1)
    check_kv_heads(shape.kv_heads, kv_heads)
    ladder = args.ladder
    if ladder is None:
        counts = {kv_heads // 2, kv_heads, 2 * kv_heads}
        ladder = [count for count in counts if count and shape.heads % count == 0]
    ladder = sorted(ladder)
    if any(shape.heads % count for count in ladder):
        raise UserError(f"--ladder: expected divisors of {shape.heads} heads, found {ladder}")
    for counts in heads.values():
        grouping.allocate([1.0] * shape.layers, counts, ladder, kv_heads * shape.layers)
    return Budget(kv_heads, ladder)


def source_record(path: str, config) -> dict | None:
    """The record of a checkpoint of fuse.py, None for an MHA Llama. Raises UserError for any other model."""
    shape = geometry(config)
    if config.model_type not in ("llama", "dha"):
        raise UserError(
            f"{path}: expected model_type llama, found {config.model_type}: "
            "what is exported is a Llama with other attention"
        )
    if shape.kv_heads == shape.heads:
        return None
    start = read_start(path)
    if not start or start["stage"] != FUSE:
        raise UserError(
            f"{path}: expected a key and a value head per query head (MHA), or heads that {FUSE} fused, "
            f"found {shape.kv_heads} for {shape.heads} heads"
        )
    return start


def check_texts(args, positions: int) -> None:
    """Raise UserError for held-out text that is also trained on, or a length beyond the model's positions."""
    if args.text == args.heldout and args.text not in (DEMO, "c4"):  # these two have a split of each kind
        raise UserError(f"--heldout: expected another text than --text, found {args.heldout} for both")
    if not 2 <= args.length <= positions:
        raise UserError(
            f"--length: expected 2 to {positions} tokens, the model's positions, found {args.length}"
        )


def choose_groups(args, operators: dict, shape: Geometry, budget: Budget) -> tuple[dict, dict]:
    """Key and value groups of every layer from the operators after search, and the figures behind them."""
    groups, figures = {}, {}
    for kind in fusion.PROJECTIONS:
        layers = [operators[f"{layer}_{kind}"].double() for layer in range(shape.layers)]
        losses = [float(fusion.layer_loss(operator)) for operator in layers]
        heads = [operator.shape[1] for operator in layers]  # one group holds all heads of the layer
        # the loss is a mean over a layer's heads, of which there may be different numbers; their sums compare
        sums = [loss * count for loss, count in zip(losses, heads, strict=True)]
        counts = grouping.allocate(sums, heads, budget.ladder, budget.kv_heads * shape.layers)
        groups[kind], within, random = [], [], []
        for operator, count in zip(layers, counts, strict=True):
            scores = fusion.pair_losses(operator)[0]
            chosen = grouping.anneal(scores, count, args.walks, args.seed)
            groups[kind].append(chosen)
            within.append(grouping.within(scores.tolist(), chosen))
            random.append(grouping.within_random(scores, count))
        figures[kind] = {
            "source_heads": heads,
            "layer_loss": losses,
            "heads": counts,
            "loss_within_groups": within,
            "loss_within_random_groups": random,
        }
    return groups, figures


def fold_operators(config, weights: dict, operators: dict, groups: dict) -> tuple:
    """The model with the operators folded into its heads, and the relative logit difference."""
    folded = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    folded.load_state_dict(fusion.combine_heads(weights, operators, groups, fusion.mix))
    ended = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    ended.load_state_dict(weights)
    tokens = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    expected = training.all_logits(fusion.with_operators(ended, operators, groups), tokens)
    name = "searched/ against the model at the end of search"
    return folded, training.relative_difference(expected, training.all_logits(folded, tokens), name)


def print_choice(choice: dict, budget: Budget) -> None:
    """A line of losses and one of head counts, for keys and for values."""
    layers = len(choice["key"]["heads"])
    print("            | " + " | ".join(f"layer {layer:5d}" for layer in range(layers)))
    for kind, figures in choice.items():
        counts = figures["heads"]
        print(f"{kind:5s} loss  | " + " | ".join(f"{loss:11.6f}" for loss in figures["layer_loss"]))
        columns = " | ".join(f"{count:11d}" for count in counts)
        print(f"{kind:5s} heads | {columns} | {sum(counts)} of {budget.kv_heads * layers}")


def finish(args, clock, description: dict, data: dict, budget: Budget, figures: dict) -> None:
    """Choose groups, fold the operators, and write searched/ and search.json; called on the first rank."""
    weights, operators, _, steps = training.last_weights(os.path.join(args.run, "search"))
    config = load_config(description["path"])
    shape = geometry(config)
    groups, choice = choose_groups(args, operators, shape, budget)
    whole = fusion.whole_layers(export.head_counts(config))
    model, folding = fold_operators(config, weights, operators, whole)
    print_choice(choice, budget)
    summary = {
        "steps": steps,
        "tokens": steps * data["batch"] * data["length"],
        "kv_heads": budget.kv_heads,
        "ladder": budget.ladder,
        "unchanged_by_folding": folding,
        "data": data,
    }
    searched, output = os.path.join(args.run, "searched"), os.path.join(args.run, "search.json")
    summary |= figures | choice
    with write_directory(searched) as aside:
        companions.save(model, aside, description["path"])
        write_record(aside, make_record(SEARCH, args, description, {}, summary, clock()))
    inputs = input_digests(args.run, [searched])
    search_record = make_record(SEARCH, args, description, inputs, summary, clock())
    write_json(output, search_record | {"groups": groups})
    print(f"wrote   {searched}, {output}")
    print(
        f"search: {steps} steps; relative logit difference with identity operators "
        f"{figures['unchanged_at_start']:.1e}, after folding {folding:.1e}; "
        f"key heads {choice['key']['heads']}, value heads {choice['value']['heads']}, in {clock()} s"
    )


def measure_source(args, path: str, start: dict, whole: dict, heldout: list) -> dict:
    """Draw the source's head similarity, check its operators `start` on groups `whole`; both figures."""
    model = load_model(path)
    matrices, redundancies = similarity.head_similarity(model, geometry(model.config).head_dim)
    title = f"{args.model}: head similarity, and the redundancy of each layer"
    similarity.cka_heatmaps(os.path.join(args.run, "cka.png"), matrices, redundancies, title)
    difference = training.check_unchanged(path, start, whole, training.as_tokens(heldout[:2]))
    return {"redundancy": redundancies, "unchanged_at_start": difference}


def search(args, clock, ranks) -> bool:
    """The whole phase; False if a signal stopped it."""
    directory = os.path.join(args.run, "search")
    path = resolve_model(args.model)
    config = load_config(path)
    fused, heads = source_record(path, config), export.head_counts(config)
    check_texts(args, config.max_position_embeddings)
    shape, description = geometry(config), describe(path, args.model)
    budget = head_budget(args, shape, heads)
    if ranks.first and fused:
        verify_files(path, fused)

    ranks.say(f"reads   {path}")
    data = {name: getattr(args, name) for name in DATA_FLAGS}
    samples, heldout = training.load_data(data, load_tokenizer(path), ranks)
    figures = {"steps_so_far": steps_before(fused, data) + args.steps}
    training.open_directory(directory, args.force, ranks)
    whole = fusion.whole_layers(heads)
    start = fusion.starting_operators(whole, shape.head_dim)
    if ranks.first:
        figures |= measure_source(args, path, start, whole, heldout)

    schedule = training.make_schedule(data, args.steps, args.warmup, args.print_every)
    settings = data | {
        "model": description["fingerprint"],
        "steps": args.steps,
        "operator_lr": args.operator_lr,
        "warmup": schedule.warmup,
    }
    job = training.begin(directory, settings, path, ranks, (args.lr, args.operator_lr), start)
    fusion.set_operators(job.trainee.net, training.operators_in(job.trainee), whole)
    heldout = training.Heldout(heldout, args.heldout_every, args.tokens_per_microbatch, ranks.device)
    for step in steps(job, schedule, samples):
        training.search_step(step, heldout)
    if job.stopped:
        return False
    if ranks.first:
        finish(args, clock, description, data, budget, figures)
    return True


def main() -> int:
    args, clock = parse(), Clock()
    claim(SEARCH, args, os.path.join(args.run, "search.json"))
    with joined_ranks() as ranks:
        finished = search(args, clock, ranks)
    return 0 if finished else STOPPED


if __name__ == "__main__":
    run_stage(main)
