"""Continued pre-training, the third phase of DHA; and that of everything it is compared with, on the same tokens.

Reads   RUN/search.json (which text, batches and learning rate), --start (default: RUN/fused/)
Writes  RUN/NAME/         the trained checkpoint, its metrics.jsonl, and stage.json with its held-out losses
        RUN/NAME.train/   training checkpoints, gone when it is done

    python -m related.dha.pretrain                                                        # DHA, after related/dha/fuse.py
    python -m related.dha.pretrain --name mean-pool --start runs/dha/pool/merged          # a baseline of the same --steps
    torchrun --nproc-per-node 8 -m related.dha.pretrain --run-dir runs/dha-7b --steps 5000 --warmup 0.03

--steps counts from the source model on: those that search and fusion took are taken off. Next-token loss on all parameters, learning
rate with a warm-up over --warmup of the steps and a cosine to 10% (published: 3%, 5000 steps of 1M tokens at 1e-4). The same command again goes on
where it was stopped.
"""

import json
import os
import shutil

import torch
from transformers import AutoModelForCausalLM

import related.dha.modeling  # noqa: F401  registers DHA checkpoints
from common.artifacts import RECORD, read_record, record, refuse_overwrite, write_directory, write_json
from common.cli import Clock, UserError, positive, run_stage, stage_parser
from common.evaluate import cache_bytes_per_token
from common.models import describe, fingerprint, load_config, load_tokenizer
from common.training.engine import read_metrics
from common.training.sharding import joined_ranks
from related.dha import training

NAME = "related/dha/pretrain.py"


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    parser.add_argument("--start", default=None, metavar="DIR", help="checkpoint to train (default: RUN/fused)")
    parser.add_argument("--name", default="dha", help="of the directory in RUN that it ends in")
    parser.add_argument("--steps", type=positive, default=400, help="from the source model on, search and fusion included")
    parser.add_argument("--warmup", type=float, default=0.03, help="share of the steps")
    parser.add_argument("--heldout-every", type=positive, default=20, help="steps between held-out losses")
    parser.add_argument("--print-every", type=positive, default=50, help="steps between printed lines; metrics.jsonl has all")
    return parser.parse_args()


def steps_behind(checkpoint: str) -> int:
    """Training steps that a checkpoint took since the source model: those of search and fusion, none for a merged one."""
    path = os.path.join(checkpoint, RECORD)
    if not os.path.exists(path):
        return 0
    with open(path, encoding="utf-8") as file:
        return json.load(file)["summary"].get("steps_so_far", 0)


def finish(args, clock, start: str, before: int, data: dict, plan, last_loss: float, tokenizer) -> None:
    """Write the trained checkpoint with its held-out losses over tokens, on the first rank."""
    output = os.path.join(args.run, args.name)
    directory, per_step = output + ".train", plan.batch * data["length"]
    model = AutoModelForCausalLM.from_config(load_config(start), dtype=torch.float32).eval()
    model.load_state_dict(training.last_weights(directory)[0])
    lines = read_metrics(os.path.join(directory, "metrics.jsonl"))
    losses = [[(before + line["step"] - 1) * per_step, line["heldout"]] for line in lines if "heldout" in line] + [[args.steps * per_step, last_loss]]
    held = cache_bytes_per_token(model, torch.zeros(data["length"], dtype=torch.long))
    summary = {"steps": plan.steps, "steps_before": before, "tokens": args.steps * per_step, "heldout": losses, "cache_bytes_per_token": held, "data": data}
    with write_directory(output) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        shutil.copy(os.path.join(directory, "metrics.jsonl"), aside)
        write_json(os.path.join(aside, RECORD), record(NAME, args, describe(start), [], summary, clock()))
    shutil.rmtree(directory)
    print(f"wrote   {output}")
    print(f"pretrain {args.name}: held-out loss {losses[0][1]:.3f} -> {last_loss:.3f} in {plan.steps} steps, {held:.0f} bytes of cache per token, in {clock()} s")


def pretrain(args, clock, ranks) -> None:
    start, output = args.start or os.path.join(args.run, "fused"), os.path.join(args.run, args.name)
    directory = output + ".train"
    refuse_overwrite(output, args.force)
    data = read_record(os.path.join(args.run, "search.json"), "related/dha/search.py")["summary"]["data"]
    before, tokenizer = steps_behind(start), load_tokenizer(start)
    if args.steps <= before:
        raise UserError(f"--steps: expected more than the {before} that search and fusion took, found {args.steps}")
    plan = training.make_plan(data, args.steps - before, args.warmup, args.print_every)
    ranks.say(f"reads   {start}")
    samples, heldout = training.load_data(data, tokenizer, ranks)
    ranks.say(f"trains  {plan.steps} steps of {plan.batch} x {data['length']} tokens; {before} went before")
    if ranks.first:
        if args.force:
            shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory, exist_ok=True)
    torch.distributed.barrier()
    settings = data | {"start": fingerprint(start), "steps": plan.steps, "warmup": plan.warmup}
    job = training.begin(directory, settings, start, ranks, (data["lr"],))
    phase = training.LanguageModel(job, plan, heldout, args.heldout_every)
    if job.step < plan.steps and not training.train(job, phase, samples, plan):
        return
    loss = phase.heldout_loss()
    if ranks.first:
        finish(args, clock, start, before, data, plan, loss, tokenizer)


def main():
    args, clock = parse(), Clock()
    with joined_ranks() as ranks:
        pretrain(args, clock, ranks)


if __name__ == "__main__":
    run_stage(main)
