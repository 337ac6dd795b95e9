"""Continued pre-training, the third phase of DHA, and the same training for every model it is compared with.

Reads   RUN/searched/ (its record: text, batches and learning rate), --checkpoint (default: RUN/fused/)
Writes  RUN/NAME/         the trained checkpoint, its metrics.jsonl, and stage.json with its held-out losses
        RUN/NAME.train/   training checkpoints, removed at the end

    python -m related.dha.pretrain                                                     # DHA, after fuse.py
    python -m related.dha.pretrain --name mean-pool --checkpoint runs/dha/start-mean-pool/merged  # a baseline
    torchrun --nproc-per-node 8 -m related.dha.pretrain --run-dir runs/dha-7b --steps 5000 --warmup 0.03

--steps counts from the source model, in batches of search: those of search and fusion are subtracted, and a
larger --batch takes fewer steps for the same tokens. The learning rate warms up over --warmup of the steps,
then follows a cosine down to 10% of its peak (published: 3%, 5000 steps of 256 x 4096 tokens at 1e-4; fusion
has batches of 64). Run the same command again to resume.
"""

import os
import shutil

import torch

from common.evaluation.evaluate import cache_bytes_per_token
from common.models import sidecars
from common.models.load import describe, fingerprint, load_config, load_tokenizer
from common.run import flags
from common.run.artifact import input_digests, read_record, verify_files, write_directory, write_record
from common.run.errors import UserError, run_stage
from common.run.flags import positive, stage_parser
from common.training import checkpoints
from common.training.lines import read_metrics
from related.dha import fusion, training
from related.dha.records import PRETRAIN, SEARCH, read_start, steps_before


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/dha")
    flag = parser.add_argument
    flag("--checkpoint", metavar="DIR", help="checkpoint to train (default: RUN/fused)")
    flag("--name", type=flags.name, default="dha", help="name of the result's directory in RUN")
    flag("--steps", type=positive, default=400,
         help="steps from the source model, search and fusion included")
    flag("--batch", type=positive,
         help="sequences per step of this phase (default: as in search; published: 4 times as many)")
    training.add_logging_flags(parser, warmup=0.03, print_every=50)
    return parser.parse_args()


def make_schedule(args, data: dict, before: int):
    """The steps that are left after `before` steps of search and fusion, in this phase's own batches."""
    if args.steps <= before:
        raise UserError(f"--steps: expected more than the {before} steps of search and fusion, "
                        f"found {args.steps}")
    batch, sequences = args.batch or data["batch"], (args.steps - before) * data["batch"]
    if sequences % batch:
        raise UserError(f"--batch: expected a divisor of the {sequences} sequences left, found {batch}")
    return training.make_schedule(data | {"batch": batch}, sequences // batch, args)


def finish(args, started, start: str, data: dict, schedule, last_loss: float) -> None:
    """Write the trained checkpoint with its held-out losses; called on the first rank."""
    output = os.path.join(args.run, args.name)
    directory, per_step = output + ".train", schedule.batch * data["length"]
    tokens = args.steps * data["batch"] * data["length"]
    model = fusion.model_of(load_config(start), training.last_weights(directory)[0])
    metrics = os.path.join(directory, "metrics.jsonl")
    curve = training.heldout_curve(read_metrics(metrics), tokens - schedule.steps * per_step, per_step)
    losses = [*curve, [tokens, last_loss]]
    cached_bytes = cache_bytes_per_token(model, torch.zeros(data["length"], dtype=torch.long))
    summary = {"steps": schedule.steps, "batch": schedule.batch, "tokens": tokens, "heldout": losses,
               "cache_bytes_per_token": cached_bytes, "data": data}
    with write_directory(output) as aside:
        sidecars.save(model, aside, start)
        shutil.copy(metrics, aside)
        write_record(aside, started.record(describe(start), summary))
    checkpoints.remove_training(directory)
    print(f"wrote   {output}\n"
          f"pretrain {args.name}: held-out loss {losses[0][1]:.3f} -> {last_loss:.3f} in {schedule.steps} "
          f"steps, {cached_bytes:.0f} bytes of cache per token, in {started.clock()} s")


def pretrain(args, started, ranks) -> bool:
    """The whole phase; False if a signal stopped it."""
    start = args.checkpoint or os.path.join(args.run, "fused")
    directory = os.path.join(args.run, args.name) + ".train"
    data = read_record(os.path.join(args.run, "searched"), SEARCH)["summary"]["data"]
    start_record = read_start(start)
    before, tokenizer = steps_before(start_record, data), load_tokenizer(start)
    if ranks.first and start_record:
        verify_files(start, start_record)
    schedule = make_schedule(args, data, before)
    ranks.say(f"reads   {start}")
    samples, heldout = training.load_data(data, tokenizer, ranks)
    ranks.say(f"trains  {schedule.steps} steps of {schedule.batch} x {data['length']} tokens, after {before} "
              "steps")
    settings = data | {"start": fingerprint(start), "batch": schedule.batch, "steps": schedule.steps,
                       "warmup": schedule.warmup}
    job = training.begin(directory, settings, start, ranks, force=args.force)
    if not training.train(job, schedule, samples, heldout):
        return False
    loss = training.heldout_loss(job, schedule, heldout)
    if ranks.first:
        finish(args, started, start, data, schedule, loss)
    return True


def main() -> int:
    args = parse()
    lock = f"pretrain {args.name}"  # one for each row: rows may train at the same time
    start = args.checkpoint or os.path.join(args.run, "fused")
    inputs = input_digests(args.run, [os.path.join(args.run, "searched")])
    inputs |= {"start": fingerprint(start)} if os.path.isdir(start) else {}
    return training.run_phase(PRETRAIN, args, os.path.join(args.run, args.name), pretrain, inputs, lock)


if __name__ == "__main__":
    run_stage(main)
