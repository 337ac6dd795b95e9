"""Fusion, the second phase of DHA: the heads of each group are brought to read alike, then become one.

Reads   RUN/search.json, RUN/searched/
Writes  RUN/fusion/   training checkpoints and metrics.jsonl
        RUN/fused/    the DHA checkpoint, which holds the fused heads alone

    python -m related.dha.fuse                                                            # after related/dha/search.py
    torchrun --nproc-per-node 8 -m related.dha.fuse --run-dir runs/dha-7b --steps 1000 --margin-steps 200 --operator-lr 1e-2 \\
        --lambda-lr 1e-2 --check-steps 40

Again every head starts to read itself, now within its group; min over weights and factors, max over lambda of L_lm + lambda max(L_fusion -
t, 0), where t falls from 1 to 0 over --margin-steps (Eq. 8). It ends when L_fusion < 1e-3, asked every --check-steps steps. Then the
factors of a group's heads are averaged, and its keys (values) are fused into one. What averaging did to the model is
measured and printed. Published: at most 1000 steps, t over 200, 1e-2 for factors and lambda, as in the second command; a small model
with few steps needs a lambda that grows faster.

Where keys and values share groups and all layers have the same number (--kv-heads 1 of search.py, say) what is written is a stock
LlamaForCausalLM; else related/dha/modeling.py lies beside the weights, for AutoModelForCausalLM with trust_remote_code.
"""

import copy
import os
import shutil

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from common.artifacts import (
    RECORD,
    read_record,
    record,
    refuse_overwrite,
    sha256,
    write_directory,
    write_json,
)
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.evaluate import all_logits, max_difference, mean_kl, mean_nll
from common.models import load_config, load_tokenizer
from common.training.engine import read_metrics
from common.training.sharding import joined_ranks
from related.dha import fusion, training
from related.dha.modeling import DhaConfig, DhaForCausalLM

NAME = "related/dha/fuse.py"
FUSED = 1e-3  # L_fusion below which fusion ends


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--steps", type=positive, default=240, help="at most (published: 1000)")
    parser.add_argument("--margin-steps", type=positive, default=60, help="over which t falls from 1 to 0 (published: 200)")
    parser.add_argument("--check-steps", type=positive, default=10, help="steps between a look at L_fusion and a checkpoint (published: 40)")
    parser.section("optimization")
    parser.add_argument("--operator-lr", type=float, default=1e-2, help="of the fusion operators (published: 1e-2)")
    parser.add_argument("--lambda-lr", type=float, default=1.0, help="of the multiplier (published: 1e-2)")
    parser.add_argument("--warmup", type=float, default=0.1, help="share of the steps")
    parser.add_argument("--heldout-every", type=positive, default=20, help="steps between held-out losses")
    parser.add_argument("--print-every", type=positive, default=20, help="steps between printed lines; metrics.jsonl has all")
    return parser.parse_args()


def is_stock(groups: dict) -> bool:
    """Whether a GQA Llama can hold these heads: keys and values in the same groups, the same number in every layer."""
    return groups["key"] == groups["value"] and len({len(of_layer) for of_layer in groups["key"]}) == 1


def export(config, state: dict, groups: dict):
    """The model of fused heads, from the MHA config and a fused state: stock where that is possible."""
    config, heads = copy.deepcopy(config), sum(len(of_layer) for kind in groups for of_layer in groups[kind])
    config.num_key_value_heads = heads // (2 * config.num_hidden_layers)
    if not is_stock(groups):
        model = DhaForCausalLM(DhaConfig(**config.to_dict() | {"key_groups": groups["key"], "value_groups": groups["value"]}))
    else:
        model, state, size = LlamaForCausalLM(config), dict(state), config.head_dim
        for layer, of_layer in enumerate(groups["key"]):  # a GQA model's readers of one head are neighbours
            order = torch.tensor(of_layer).flatten()
            rows = (order[:, None] * size + torch.arange(size)).flatten()
            prefix = f"model.layers.{layer}.self_attn."
            state |= {name: state[name][rows] for name in (f"{prefix}q_proj.weight", f"{prefix}q_proj.bias") if name in state}
            state[f"{prefix}o_proj.weight"] = state[f"{prefix}o_proj.weight"][:, rows]
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def compare_ends(config, weights: dict, operators: dict, groups: dict, fused, tokens: torch.Tensor) -> dict:
    """The fused model beside the one that training ended with: its operators averaged within groups, and as they stood."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    ended = all_logits(fusion.with_operators(model, operators, groups), tokens)
    averaged = all_logits(fusion.with_operators(model, {name: fusion.averaged(operator) for name, operator in operators.items()}, groups), tokens)
    found = all_logits(fused, tokens)
    return {"averaged_to_fused": training.relative_difference(averaged, found, "fused/ against averaged operators"),
            "ended_to_fused": max_difference(ended, found), "kl_ended_to_fused": mean_kl(ended, found),
            "loss_ended": mean_nll(ended, tokens), "loss_fused": mean_nll(found, tokens)}


@torch.no_grad()
def cache_heads(model) -> dict[str, list[int]]:
    """Key and value heads that the cache of each layer really holds after a forward pass."""
    layers = model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=True).past_key_values.layers
    return {"key": [layer.keys.shape[1] for layer in layers], "value": [layer.values.shape[1] for layer in layers]}


def finish(args, clock, searched, tokenizer, tokens, unchanged: float) -> None:
    """Fuse, prove and write, on the first rank."""
    directory, output, groups = os.path.join(args.run, "fusion"), os.path.join(args.run, "fused"), searched["groups"]
    config = load_config(os.path.join(args.run, "searched"))
    weights, operators, multiplier, steps = training.last_weights(directory)
    loss = float(fusion.fusion_loss(operators))
    if not loss < FUSED:
        raise UserError(f"{directory}: expected a fusion loss below {FUSED:g} after {steps} steps, found {loss:.2e}; give --force, and more --steps or a larger --lambda-lr")
    fused = export(config, fusion.combine_heads(weights, operators, groups, fusion.fold), groups)
    ends, held = compare_ends(config, weights, operators, groups, fused, tokens), cache_heads(fused)
    chosen = {kind: [len(of_layer) for of_layer in groups[kind]] for kind in groups}
    if held != chosen:
        raise UserError(f"{output}: expected a cache of {chosen} heads, found {held}")
    print(f"fused   L_fusion {loss:.2e} after {steps} steps, lambda {multiplier:.2f}")
    print(f"proof   averaged operators against fused heads: relative logit difference {ends['averaged_to_fused']:.1e}")
    print(f"        what averaging did: logits up to {ends['ended_to_fused']:.1e}, KL {ends['kl_ended_to_fused']:.1e}, held-out loss {ends['loss_ended']:.4f} -> {ends['loss_fused']:.4f}")
    print(f"cache   key heads {held['key']}, value heads {held['value']}")
    was, per_step = searched["summary"], searched["summary"]["data"]["batch"] * searched["summary"]["data"]["length"]
    summary = {"steps": steps, "tokens": steps * per_step, "steps_so_far": was["steps"] + steps, "fusion_loss": loss, "lambda": multiplier,
               "unchanged_at_start": unchanged, "cache_heads": held, "stock": is_stock(groups), "data": was["data"]} | ends
    with write_directory(output) as aside:
        fused.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(os.path.join(aside, RECORD), record(NAME, args, searched["model"], [os.path.join(args.run, "search.json")], summary, clock()))
    first = read_metrics(os.path.join(directory, "metrics.jsonl"))[0]["fusion_loss"]
    print(f"wrote   {output}: {type(fused).__name__}")
    print(f"fuse: L_fusion {first:.3f} -> {loss:.1e} in {steps} steps, held-out loss {ends['loss_fused']:.3f} as DHA, in {clock()} s")


def fuse(args, clock, ranks) -> None:
    directory, plan_path, source = (os.path.join(args.run, name) for name in ("fusion", "search.json", "searched"))
    refuse_overwrite(os.path.join(args.run, "fused"), args.force)
    searched = read_record(plan_path, "related/dha/search.py")
    read_record(source, "related/dha/search.py", searched["model"])
    groups, data = searched["groups"], searched["summary"]["data"]
    tokenizer = load_tokenizer(source)
    ranks.say(f"reads   {source}, {plan_path}")
    samples, heldout = training.load_data(data, tokenizer, ranks)
    tokens, start, unchanged = training.as_tokens(heldout), fusion.starting_operators(groups, searched["model"]["head_dim"]), 0.0
    if ranks.first:
        if args.force:
            shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory, exist_ok=True)
        unchanged = training.prove_unchanged(source, start, groups, tokens[:2])
    torch.distributed.barrier()

    plan = training.make_plan(data, args.steps, args.warmup, args.print_every)
    settings = data | {"search": sha256(plan_path), "warmup": plan.warmup} | {name: getattr(args, name) for name in ("steps", "margin_steps", "check_steps", "operator_lr", "lambda_lr")}
    job = training.begin(directory, settings, source, ranks, (data["lr"], args.operator_lr, args.lambda_lr), start)
    phase = training.Fusing(job, plan, heldout, args.heldout_every, groups=groups, margin_steps=args.margin_steps)

    def done() -> bool:
        return float(fusion.fusion_loss(training.operators_of(job.trainee)).detach()) < FUSED

    if training.steps_until(done, job, phase, samples, plan, args.check_steps) and ranks.first:
        finish(args, clock, searched, tokenizer, tokens, unchanged)


def main():
    args, clock = parse(), Clock()
    with joined_ranks() as ranks:
        fuse(args, clock, ranks)


if __name__ == "__main__":
    run_stage(main)
