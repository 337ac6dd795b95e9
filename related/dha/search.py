"""Search, the first phase of decoupled-head attention (DHA): heads that are alike, layers that need many.

Reads   an MHA Llama checkpoint, or RUN/fused/ of an earlier run, and text
Writes  RUN/search/         training checkpoints and metrics.jsonl
        RUN/searched/       the model after search, its operators folded into as many heads; in stage.json
                            groups and head counts of every layer, losses, data of later steps
        RUN/cka.png         head similarity in the source model (linear CKA, Appendix B.1)

    python -m related.dha.search                                                # the demo model
    python -m related.dha.search --run runs/dha/quarter --model runs/dha/half/fused --kv-heads 2
    torchrun --nproc-per-node 8 -m related.dha.search --run-dir runs/dha-7b \\
        --model meta-llama/Llama-2-7b-hf --text c4 --heldout FILE.txt --kv-heads 8 \\
        --steps 240 --batch 64 --length 4096 --sequences 80000 --lr 1e-4

Every head starts to read a mixture of all heads of its layer, through factors that change nothing at first;
the language-model loss trains factors and weights. Two heads whose factors stay close share a head (Algorithm
4), and a layer whose factors spread keeps more heads (Algorithm 5), for keys and values separately. The
defaults suit the demo model; the last command is as published. The second halves again what fuse.py wrote
after a first halving (Appendix B.2), whose steps count. Run the same command again to resume.
"""

import os

import torch

from common.data.demo import DEMO, resolve_model
from common.data.documents import EXPECTED, parse_source
from common.data.text import sequence_length
from common.models.families import check_kv_heads, geometry
from common.models.load import describe, fingerprint, load_config, load_model, load_tokenizer
from common.run.artifact import verify_files
from common.run.errors import UserError, run_stage
from common.run.flags import non_negative_float, positive, seed, stage_parser
from related.dha import fusion, grouping, training
from related.dha.records import DATA_FLAGS, FUSE, SEARCH, read_start, steps_before, write_checkpoint


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    flag = parser.add_argument
    flag("--model", default=DEMO, help="an MHA Llama: checkpoint directory, hub repository, or demo; or a "
                                       "checkpoint of fuse.py")
    flag("--kv-heads", type=positive, help="key heads, and value heads, that a layer keeps on average "
                                           "(default: a quarter of query heads)")
    flag("--ladder", type=positive, nargs="+", metavar="N", help="numbers of heads that a layer may keep "
                                                                 "(default: half, once and twice --kv-heads)")
    parser.section("text, the same for everything that is compared")  # and --lr: records.DATA_FLAGS
    flag("--text", default=DEMO, help=f"training text: {EXPECTED}")
    flag("--heldout", default=DEMO, help="text whose losses are compared")
    flag("--sequences", type=positive, default=4096,
         help="training sequences; they repeat if the steps need more")
    flag("--heldout-sequences", type=positive, default=32, help="held-out sequences")
    flag("--length", type=positive, default=256, help="tokens per sequence, at least 2")
    flag("--batch", type=positive, default=8, help="sequences per step, over all ranks")
    flag("--tokens-per-microbatch", type=positive, default=2048, help="tokens per packed row")
    flag("--seed", type=seed, default=0, help="random seed of batches and annealing")
    parser.section("optimization")
    flag("--steps", type=positive, default=60, help="steps of search (published: 240)")
    flag("--lr", type=non_negative_float, default=5e-4,
         help="learning rate of the weights, in this and all later steps (published: 1e-4)")
    flag("--operator-lr", type=non_negative_float, default=1e-2, help="learning rate of the fusion operators")
    training.add_logging_flags(parser, warmup=0.1, print_every=20)
    return parser.parse_args()


def head_budget(args, config) -> tuple[int, list[int]]:
    """How many key heads, and how many value heads, a layer keeps on average, and the ascending numbers that
    it may keep. Raises UserError if the layers of this config cannot meet the budget with them.
    """
    shape = geometry(config)
    kv_heads = args.kv_heads or max(shape.heads // 4, 1)
    check_kv_heads(shape.kv_heads, kv_heads)
    usual = [count for count in (kv_heads // 2, kv_heads, 2 * kv_heads) if count and shape.heads % count == 0]
    ladder = sorted(args.ladder or usual)
    for counts in fusion.head_counts(config).values():
        grouping.allocate([1.0] * shape.layers, counts, ladder, kv_heads * shape.layers)
    return kv_heads, ladder


def source_record(path: str, config) -> dict | None:
    """The record of a checkpoint of fuse.py, None for an MHA Llama. Raises UserError for any other model."""
    shape = geometry(config)
    if config.model_type not in ("llama", "dha"):
        raise UserError(f"{path}: expected model_type llama, found {config.model_type}: "
                        "what is exported is a Llama with other attention")
    if shape.kv_heads == shape.heads:
        return None
    start = read_start(path)
    if not start or start["stage"] != FUSE:
        raise UserError(f"{path}: expected a key and a value head per query head (MHA), or heads that {FUSE} "
                        f"fused, found {shape.kv_heads} for {shape.heads} heads")
    return start


def check_texts(args, positions: int) -> None:
    """Raise UserError for held-out text that is also trained on, or a length beyond the model's positions."""
    if args.text == args.heldout and not parse_source(args.text).known:  # which has two parts
        raise UserError(f"--heldout: expected another text than --text, found {args.heldout} for both")
    sequence_length(args.length, args.length, positions, least=2)


def choose_groups(operators: dict, kv_heads: int, ladder: list[int], seed: int) -> tuple[dict, dict]:
    """Key and value groups of every layer from the operators after search, and the numbers behind them."""
    groups, metrics = {}, {}
    for kind in fusion.PROJECTIONS:
        layers = [operators[f"{layer}_{kind}"].double() for layer in range(len(operators) // 2)]
        losses = [float(fusion.layer_loss(operator)) for operator in layers]
        heads = [operator.shape[1] for operator in layers]  # one group holds all heads of the layer
        # the loss is a mean over a layer's heads, of which there may be different numbers; their sums compare
        sums = [loss * count for loss, count in zip(losses, heads, strict=True)]
        counts = grouping.allocate(sums, heads, ladder, kv_heads * len(layers))
        groups[kind], within, random = [], [], []
        for operator, count in zip(layers, counts, strict=True):
            scores = fusion.pair_losses(operator)[0]
            chosen = grouping.anneal(scores, count, seed)
            groups[kind].append(chosen)
            within.append(grouping.within(scores.tolist(), chosen))
            random.append(grouping.within_random(scores, count))
        metrics[kind] = {"source_heads": heads, "layer_loss": losses, "heads": counts,
                         "loss_within_groups": within, "loss_within_random_groups": random}
    return groups, metrics


def fold_operators(config, weights: dict, operators: dict, groups: dict) -> tuple:
    """The model with the operators folded into its heads, and the relative logit difference."""
    folded = fusion.model_of(config, fusion.combine_heads(weights, operators, groups, fusion.mix))
    ended = fusion.with_operators(fusion.model_of(config, weights), operators, groups)
    tokens = torch.randint(config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    expected, actual = (training.all_logits(model, tokens) for model in (ended, folded))
    name = "searched/ against the model at the end of search"
    return folded, training.relative_difference(expected, actual, name)


def finish(args, started, model: dict, summary: dict) -> None:
    """Choose groups, fold the operators, and write searched/; called on the first rank.

    model: the description of the source; summary: what is known without the trained operators.
    """
    output = os.path.join(args.run, "searched")
    weights, operators, _, steps = training.last_weights(os.path.join(args.run, "search"))
    config = load_config(model["path"])
    groups, choice = choose_groups(operators, summary["kv_heads"], summary["ladder"], args.seed)
    whole = fusion.whole_layers(fusion.head_counts(config))
    folded, difference = fold_operators(config, weights, operators, whole)
    summary |= {"unchanged_by_folding": difference} | choice
    write_checkpoint(output, folded, model["path"], started.record(model, summary, groups=groups))
    print(f"wrote   {output}\nsearch: {steps} steps; key heads {choice['key']['heads']}, value heads "
          f"{choice['value']['heads']}; relative logit difference after folding {difference:.1e}, in "
          f"{started.clock()} s")


def search(args, started, ranks) -> bool:
    """The whole phase; False if a signal stopped it."""
    directory, path = os.path.join(args.run, "search"), resolve_model(args.model)
    config = load_config(path)
    fused, model = source_record(path, config), describe(path, args.model)
    check_texts(args, config.max_position_embeddings)
    kv_heads, ladder = head_budget(args, config)
    if ranks.first and fused:
        verify_files(path, fused)

    ranks.say(f"reads   {path}")
    data = {name: getattr(args, name) for name in DATA_FLAGS}
    samples, heldout = training.load_data(data, load_tokenizer(path), ranks)
    summary = {"steps": args.steps, "tokens": args.steps * args.batch * args.length,
               "steps_so_far": steps_before(fused, data) + args.steps,
               "kv_heads": kv_heads, "ladder": ladder, "data": data}
    whole = fusion.whole_layers(fusion.head_counts(config))
    if ranks.first:
        title = f"{args.model}: head similarity, and the redundancy of each layer"
        picture = os.path.join(args.run, "cka.png")
        summary["redundancy"] = grouping.draw_similarity(load_model(path), picture, title)

    schedule = training.make_schedule(data, args.steps, args)
    settings = data | {"model": model["fingerprint"], "steps": args.steps, "operator_lr": args.operator_lr,
                       "warmup": schedule.warmup}
    job = training.begin(directory, settings, path, ranks, whole, args.force)
    finished = training.train(job, schedule, samples, heldout)
    if finished and ranks.first:
        finish(args, started, model, summary)
    return finished


def main() -> int:
    args = parse()
    inputs = {"model": fingerprint(resolve_model(args.model))}
    return training.run_phase(SEARCH, args, os.path.join(args.run, "searched"), search, inputs)


if __name__ == "__main__":
    run_stage(main)
