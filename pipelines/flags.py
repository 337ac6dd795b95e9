"""Parse the flags of several stages, each by its own parser, before any of them runs, and read the first row
of each source that stage 5 trains on.

    python -m pipelines.flags 05_prune_train --lr 1e-4 ::: 07_eval --only piqa :::
"""

import importlib
import os
import sys

from common.data.sources import check_sources
from common.run import flags
from common.run.errors import run_stage
from common.training.checkpoints import SETTINGS


def main():
    words = sys.argv[1:]
    while words:
        end = words.index(":::")
        sys.argv, words = words[:end], words[end + 1 :]
        args = importlib.import_module(sys.argv[0]).parse()
        begun = os.path.join(args.run, flags.named("train", getattr(args, "name", None)), SETTINGS)
        if sys.argv[0] == "05_prune_train" and not os.path.exists(begun):
            check_sources(args.text or [], args.chat or [])


if __name__ == "__main__":
    run_stage(main)
