"""Fusion, the second phase of DHA: the heads of each group learn to read alike, then become one head.

Reads   RUN/searched/
Writes  RUN/fusion/   training checkpoints and metrics.jsonl
        RUN/fused/    the DHA checkpoint, which holds the fused heads alone
        RUN/cka-fused.png   their similarity, to compare with RUN/cka.png (Figures 9, 13)

    python -m related.dha.fuse                                                  # after related/dha/search.py
    torchrun --nproc-per-node 8 -m related.dha.fuse --run-dir runs/dha-7b --steps 1000 --margin-steps 200 \\
        --operator-lr 1e-2 --lambda-lr 1e-2 --check-steps 40

Every head starts to read itself again, now within its group: min over weights and factors, max over lambda of
L_lm + lambda max(L_fusion - t, 0), where t falls from 1 to 0 over --margin-steps (Eq. 8). Every --check-steps
steps L_fusion is compared with 1e-3; below that, fusion ends. The factors of a group's heads are then
averaged and its keys (values) fused into one, and the effect of averaging is measured and printed. The second
command is as published in Section 5.1; Table 4 has 800 steps with learning rates of 0.05. Few steps need a
lambda that grows faster. What GQA can express becomes a stock LlamaForCausalLM; otherwise modeling.py is
saved with the weights, for AutoModelForCausalLM with trust_remote_code.
"""

import os

import torch

from common.models.equivalence import max_difference, mean_kl, mean_nll
from common.models.load import load_config, load_tokenizer
from common.run.artifact import digest, input_digests, read_record, verify_files
from common.run.errors import UserError, run_stage
from common.run.flags import non_negative_float, positive, stage_parser
from related.dha import fusion, grouping, training
from related.dha.records import FUSE, SEARCH, write_checkpoint


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    flag = parser.add_argument
    flag("--steps", type=positive, default=240, help="largest number of steps (published: 1000, or 800)")
    flag("--margin-steps", type=positive, default=60,
         help="steps over which t falls from 1 to 0 (published: 200)")
    flag("--check-steps", type=positive, default=10,
         help="steps between comparisons of L_fusion with 1e-3, each with a checkpoint (published: 40)")
    parser.section("optimization")
    flag("--operator-lr", type=non_negative_float, default=1e-2,
         help="learning rate of the fusion operators (published: 1e-2, or 0.05 in Table 4)")
    flag("--lambda-lr", type=non_negative_float, default=1.0,
         help="learning rate of lambda (published: 1e-2, or 0.05)")
    training.add_logging_flags(parser, warmup=0.1, print_every=20)
    return parser.parse_args()


@torch.no_grad()
def compare_models(config, weights: dict, operators: dict, groups: dict, fused, tokens: torch.Tensor) -> dict:
    """Differences between the fused model and the trained one, with operators averaged and as trained.

    Raises UserError if folding the averaged operators changes the logits for tokens [rows, length].
    """
    model = fusion.model_of(config, weights)
    ended, averaged = (training.all_logits(fusion.with_operators(model, factors, groups), tokens)
                       for factors in (operators, fusion.averaged(operators)))
    actual, name = training.all_logits(fused, tokens), "fused/ against averaged operators"
    return {
        "averaged_to_fused": training.relative_difference(averaged, actual, name),
        "ended_to_fused": max_difference(ended, actual),
        "kl_ended_to_fused": mean_kl(ended, actual),
        "loss_ended": mean_nll(ended, tokens),
        "loss_fused": mean_nll(actual, tokens),
    }


def finish(args, started, search: dict, tokens: torch.Tensor) -> None:
    """Fuse, check and write fused/ on the first rank. search: the record of search; tokens: held out."""
    directory, source = os.path.join(args.run, "fusion"), os.path.join(args.run, "searched")
    groups, output, searched = search["groups"], os.path.join(args.run, "fused"), search["summary"]
    config, data = load_config(source), searched["data"]
    weights, operators, multiplier, steps = training.last_weights(directory)
    loss = float(fusion.fusion_loss(operators))
    if not loss < training.FUSED:
        raise UserError(f"{directory}: expected a fusion loss below {training.FUSED:g} after {steps} steps, "
                        f"found {loss:.2e}; pass --force, and more --steps or a larger --lambda-lr")
    fused = fusion.fused_model(config, weights, groups, operators)
    heads = fusion.head_counts(fused.config)
    summary = {
        "steps": steps, "tokens": steps * data["batch"] * data["length"],
        "steps_so_far": searched["steps_so_far"] + steps, "fusion_loss": loss, "lambda": multiplier,
        "cache_heads": heads, "stock": fused.config.model_type == "llama", "data": data,
        **compare_models(config, weights, operators, groups, fused, tokens),
    }
    write_checkpoint(output, fused, source, started.record(search["model"], summary))
    title = f"{search['model']['name']}: similarity of fused heads, and the redundancy of each layer"
    grouping.draw_similarity(fused, os.path.join(args.run, "cka-fused.png"), title)
    print(f"checked averaged operators against fused heads: relative logit difference "
          f"{summary['averaged_to_fused']:.1e}\n"
          f"effect of averaging: logits by up to {summary['ended_to_fused']:.1e}, "
          f"KL {summary['kl_ended_to_fused']:.1e}, "
          f"held-out loss {summary['loss_ended']:.4f} -> {summary['loss_fused']:.4f}\n"
          f"cache   key heads {heads['key']}, value heads {heads['value']}\n"
          f"wrote   {output}: {type(fused).__name__}\n"
          f"fuse: L_fusion {loss:.1e} after {steps} steps, lambda {multiplier:.2f}, "
          f"held-out loss {summary['loss_fused']:.3f} as DHA, in {started.clock()} s")


def fuse(args, started, ranks) -> bool:
    """The whole phase; False if a signal stopped it."""
    directory, source = os.path.join(args.run, "fusion"), os.path.join(args.run, "searched")
    search = read_record(source, SEARCH)
    if ranks.first:
        verify_files(source, search)
    groups, data = search["groups"], search["summary"]["data"]
    ranks.say(f"reads   {source}")
    samples, heldout = training.load_data(data, load_tokenizer(source), ranks)

    schedule = training.make_schedule(data, args.steps, args, margin_steps=args.margin_steps,
                                      check_steps=args.check_steps)
    settings = data | {"search": digest(source), "warmup": schedule.warmup, "steps": args.steps,
                       "margin_steps": args.margin_steps, "check_steps": args.check_steps,
                       "operator_lr": args.operator_lr, "lambda_lr": args.lambda_lr}
    job = training.begin(directory, settings, source, ranks, groups, args.force)
    finished = training.train(job, schedule, samples, heldout)
    if finished and ranks.first:
        finish(args, started, search, training.as_tokens(heldout))
    return finished


def main() -> int:
    args = parse()
    inputs = input_digests(args.run, [os.path.join(args.run, "searched")])
    return training.run_phase(FUSE, args, os.path.join(args.run, "fused"), fuse, inputs)


if __name__ == "__main__":
    run_stage(main)
