"""Fusion, the second phase of DHA: the heads of each group learn to read alike, then become one head.

Reads   RUN/search.json, RUN/searched/
Writes  RUN/fusion/   training checkpoints and metrics.jsonl
        RUN/fused/    the DHA checkpoint, which holds the fused heads alone
        RUN/cka-fused.png   their similarity, to be held against RUN/cka.png (Figures 9, 13)

    python -m related.dha.fuse                                                  # after related/dha/search.py
    torchrun --nproc-per-node 8 -m related.dha.fuse --run-dir runs/dha-7b --steps 1000 --margin-steps 200 \\
        --operator-lr 1e-2 --lambda-lr 1e-2 --check-steps 40

Every head starts to read itself again, now within its group: min over weights and factors, max over lambda of
L_lm + lambda max(L_fusion - t, 0), where t falls from 1 to 0 over --margin-steps (Eq. 8). Every --check-steps
steps L_fusion is compared with 1e-3; below that, fusion ends. The factors of a group's heads are then
averaged and its keys (values) fused into one, and the effect of averaging is measured and printed. Published:
t over 200 steps; at most 1000 steps with learning rates 1e-2 for factors and lambda in Section 5.1, as in the
second command, but 800 steps with 0.05 for both in Table 4. A small model with few steps needs a lambda that
grows faster.

If keys and values share groups and all layers keep the same number of heads (search.py --kv-heads 1, say),
the result is a stock LlamaForCausalLM; otherwise related/dha/modeling.py is saved with the weights, for
AutoModelForCausalLM with trust_remote_code.
"""

import os

import torch
from transformers import AutoModelForCausalLM

from common import companions
from common.artifacts import (
    check_input,
    claim,
    input_digests,
    make_record,
    read_record,
    verify_files,
    write_record,
)
from common.cli import Clock, UserError, non_negative_float, positive, run_stage, stage_parser
from common.evaluate import max_difference, mean_kl, mean_nll
from common.files import sha256, write_directory
from common.models import load_config, load_tokenizer
from common.training.engine import STOPPED
from common.training.metrics import read_metrics
from common.training.sharding import joined_ranks
from related.dha import export, fusion, similarity, training
from related.dha.records import FUSE, SEARCH, read

FUSED = 1e-3  # L_fusion below which fusion ends
SETTINGS = (
    "steps",
    "margin_steps",
    "check_steps",
    "operator_lr",
    "lambda_lr",
)  # flags that a resumed fusion repeats


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument(
        "--steps", type=positive, default=240, help="largest number of steps (published: 1000, or 800)"
    )
    parser.add_argument(
        "--margin-steps",
        type=positive,
        default=60,
        help="steps over which t falls from 1 to 0 (published: 200)",
    )
    parser.add_argument(
        "--check-steps",
        type=positive,
        default=10,
        help="steps between comparisons of L_fusion with 1e-3, each with a checkpoint (published: 40)",
    )
    parser.section("optimization")
    parser.add_argument(
        "--operator-lr",
        type=non_negative_float,
        default=1e-2,
        help="learning rate of the fusion operators (published: 1e-2, or 0.05 in Table 4)",
    )
    parser.add_argument(
        "--lambda-lr", type=non_negative_float, default=1.0,
        help="learning rate of lambda (published: 1e-2, or 0.05)",
    )
    training.add_logging_flags(parser, warmup=0.1, print_every=20)
    return parser.parse_args()


@torch.no_grad()
def compare_models(config, weights: dict, operators: dict, groups: dict, fused, tokens: torch.Tensor) -> dict:
    """Differences between the fused model and the trained one, with operators averaged and as trained.

    weights, operators: after fusion. tokens: [rows, length]. Raises UserError if folding the averaged
    operators changes the logits.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    model.load_state_dict(weights)
    ended = training.all_logits(fusion.with_operators(model, operators, groups), tokens)
    averages = {name: fusion.averaged(operator) for name, operator in operators.items()}
    averaged = training.all_logits(fusion.with_operators(model, averages, groups), tokens)
    actual = training.all_logits(fused, tokens)
    return {
        "averaged_to_fused": training.relative_difference(
            averaged, actual, "fused/ against averaged operators"
        ),
        "ended_to_fused": max_difference(ended, actual),
        "kl_ended_to_fused": mean_kl(ended, actual),
        "loss_ended": mean_nll(ended, tokens),
        "loss_fused": mean_nll(actual, tokens),
    }


def finish(args, clock, searched: dict, tokens: torch.Tensor, unchanged: float) -> None:
    """Fuse, check and write fused/ on the first rank. searched: the record of search; tokens: held out."""
    directory, source = os.path.join(args.run, "fusion"), os.path.join(args.run, "searched")
    groups, output = searched["groups"], os.path.join(args.run, "fused")
    config = load_config(source)
    weights, operators, multiplier, steps = training.last_weights(directory)
    loss = float(fusion.fusion_loss(operators))
    if not loss < FUSED:
        raise UserError(
            f"{directory}: expected a fusion loss below {FUSED:g} after {steps} steps, found {loss:.2e}; "
            "pass --force, and more --steps or a larger --lambda-lr"
        )
    fused = export.fused_model(config, fusion.combine_heads(weights, operators, groups, fusion.fold), groups)
    figures = compare_models(config, weights, operators, groups, fused, tokens)
    chosen = {kind: searched["summary"][kind]["heads"] for kind in groups}
    export.check_cache(fused, chosen)
    data = searched["summary"]["data"]
    summary = {
        "steps": steps,
        "tokens": steps * data["batch"] * data["length"],
        "steps_so_far": searched["summary"]["steps_so_far"] + steps,
        "fusion_loss": loss,
        "lambda": multiplier,
        "unchanged_at_start": unchanged,
        "cache_heads": chosen,
        "stock": fused.config.model_type == "llama",
        "data": data,
        **figures,
    }
    with write_directory(output) as aside:
        companions.save(fused, aside, source)
        inputs = input_digests(args.run, [os.path.join(args.run, "search.json")])
        write_record(aside, make_record(FUSE, args, searched["model"], inputs, summary, clock()))
    first_loss = read_metrics(os.path.join(directory, "metrics.jsonl"))[0]["fusion_loss"]
    matrices, redundancies = similarity.head_similarity(fused, config.head_dim)
    title = f"{searched['model']['name']}: similarity of fused heads, and the redundancy of each layer"
    similarity.cka_heatmaps(os.path.join(args.run, "cka-fused.png"), matrices, redundancies, title)
    print_result(summary)
    print(f"wrote   {output}: {type(fused).__name__}")
    print(
        f"fuse: L_fusion {first_loss:.3f} -> {loss:.1e} in {steps} steps, "
        f"held-out loss {figures['loss_fused']:.3f} as DHA, in {clock()} s"
    )


def print_result(summary: dict) -> None:
    """The figures of a fusion, line by line."""
    print(
        f"fused   L_fusion {summary['fusion_loss']:.2e} after {summary['steps']} steps, "
        f"lambda {summary['lambda']:.2f}"
    )
    print(
        "checked averaged operators against fused heads: "
        f"relative logit difference {summary['averaged_to_fused']:.1e}"
    )
    print(
        f"        effect of averaging: logits by up to {summary['ended_to_fused']:.1e}, "
        f"KL {summary['kl_ended_to_fused']:.1e}, "
        f"held-out loss {summary['loss_ended']:.4f} -> {summary['loss_fused']:.4f}"
    )
    print(f"cache   key heads {summary['cache_heads']['key']}, value heads {summary['cache_heads']['value']}")


def fuse(args, clock, ranks) -> bool:
    """The whole phase; False if a signal stopped it."""
    directory, source = os.path.join(args.run, "fusion"), os.path.join(args.run, "searched")
    plan_path = os.path.join(args.run, "search.json")
    searched = read(plan_path, SEARCH)
    check_input(searched, source)
    if ranks.first:
        verify_files(source, read_record(source, SEARCH, searched["model"]))
    groups, data = searched["groups"], searched["summary"]["data"]
    ranks.say(f"reads   {source}, {plan_path}")
    samples, heldout = training.load_data(data, load_tokenizer(source), ranks)
    tokens, unchanged = training.as_tokens(heldout), 0.0
    start = fusion.starting_operators(groups, searched["model"]["head_dim"])
    training.open_directory(directory, args.force, ranks)
    if ranks.first:
        unchanged = training.check_unchanged(source, start, groups, tokens[:2])

    schedule = training.make_schedule(data, args.steps, args.warmup, args.print_every)
    settings = data | {"search": sha256(plan_path), "warmup": schedule.warmup}
    settings |= {name: getattr(args, name) for name in SETTINGS}
    rates = data["lr"], args.operator_lr, args.lambda_lr
    job = training.begin(directory, settings, source, ranks, rates, start)
    operators = training.operators_in(job.trainee)
    fusion.set_operators(job.trainee.net, operators, groups)
    heldout = training.Heldout(heldout, args.heldout_every, data["tokens_per_microbatch"], ranks.device)

    def fused_enough() -> bool:
        return float(fusion.fusion_loss(operators).detach()) < FUSED

    for step in training.steps_until(fused_enough, job, schedule, samples, args.check_steps):
        training.fuse_step(step, heldout, args.margin_steps)
    if job.stopped:
        return False
    if ranks.first:
        finish(args, clock, searched, tokens, unchanged)
    return True


def main() -> int:
    args, clock = parse(), Clock()
    claim(FUSE, args, os.path.join(args.run, "fused"))
    with joined_ranks() as ranks:
        finished = fuse(args, clock, ranks)
    return 0 if finished else STOPPED


if __name__ == "__main__":
    run_stage(main)
