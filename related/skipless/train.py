"""Train a small skipless Llama on text, with the training engine of 05_prune_train.py.

Reads   the shape and the tokenizer of a checkpoint (--model), a text
Writes  RUN/serial/ or RUN/parallel/   a skipless checkpoint
        RUN/serial-trained-without-q/  with --without q, and so on

    python -m related.skipless.train                 # a minute on two cores: the demo model's shape and text
    python -m related.skipless.train --parallel
    python -m related.skipless.train --without k     # the paper's Figure 1(c) from the start: no K and no P
    torchrun --nproc-per-node 2 -m related.skipless.train --run-dir runs/skipless

A training that was stopped by a signal exits with 75 (torchrun: 1) and resumes when called again with the
same flags; --force begins anew. training.py says how a skipless model starts so that it trains at all.
"""

import os

from common.artifacts import claim
from common.cli import Clock, run_stage, stage_parser
from common.data.demo import DEMO, resolve_model
from common.families import require_convertible
from common.models import load_config
from common.training.engine import STOPPED
from common.training.sharding import joined_ranks
from related.skipless.training import (
    TRAIN_STAGE,
    check_length,
    model_name,
    require_square,
    train_skipless,
    training_flags,
)


def parse():
    parser = stage_parser(__doc__)
    parser.set_defaults(run="runs/skipless")
    parser.add_argument("--model", default=DEMO, help="checkpoint that gives shape and tokenizer")
    parser.add_argument("--parallel", action="store_true",
                        help="attention beside the FFN instead of before it")
    parser.add_argument("--without", choices=("q", "k", "v"),
                        help="leave out Q, K or V, and P with it, from the start; K and V for MHA only")
    training_flags(parser)
    return parser.parse_args()


def main() -> int:
    args, clock = parse(), Clock()
    source = resolve_model(args.model)
    config = load_config(source)
    require_convertible(source, config)
    check_length(args.length, source, config)
    require_square(config, args.without)
    claim(TRAIN_STAGE, args, os.path.join(args.run, model_name(args.parallel, args.without)))
    with joined_ranks() as ranks:
        finished = train_skipless(args, source, args.parallel, ranks, clock, args.without)
    return 0 if finished else STOPPED


if __name__ == "__main__":
    run_stage(main)
