"""Train a small skipless Llama on text, with the training engine of 05_prune_train.py.

Reads   the shape and the tokenizer of a checkpoint (--model), a text
Writes  RUN/serial/ or RUN/parallel/   a skipless checkpoint

    python -m related.skipless.train                 # a minute on two cores: the demo model's shape and text
    python -m related.skipless.train --parallel
    torchrun --nproc-per-node 2 -m related.skipless.train --run-dir runs/skipless

A training that was stopped by a signal exits with 75 (torchrun: 1) and resumes when called again with the
same flags; --force begins anew. training.py says how a skipless model starts so that it trains at all.
"""

import os

from common.artifacts import claim
from common.cli import Clock, run_stage, stage_parser
from common.data.demo import resolve_model
from common.models import DEMO, load_config, require_convertible
from common.training.engine import STOPPED
from common.training.sharding import joined_ranks
from related.skipless.training import TRAIN_STAGE, check_length, train_skipless, training_flags


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint that gives shape and tokenizer")
    parser.add_argument("--parallel", action="store_true",
                        help="attention beside the FFN instead of before it")
    training_flags(parser)
    return parser.parse_args()


def main() -> int:
    args, clock = parse(), Clock()
    source = resolve_model(args.model)
    config = load_config(source)
    require_convertible(source, config)
    check_length(args.length, source, config)
    claim(TRAIN_STAGE, args, os.path.join(args.run, "parallel" if args.parallel else "serial"))
    with joined_ranks() as ranks:
        finished = train_skipless(args, source, args.parallel, ranks, clock)
    return 0 if finished else STOPPED


if __name__ == "__main__":
    run_stage(main)
