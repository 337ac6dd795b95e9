"""Data sets of the hub: their rows, through the package datasets."""

import contextlib
import re
from collections.abc import Iterator

from huggingface_hub import dataset_info

from common.models import hub
from common.run.errors import UserError

DATA_SET = "hf:NAME[:CONFIG]"  # as a source of text or chats, in help and errors

COMMITS = {}  # hf:NAME[:CONFIG] -> the commit at which this process reads it


def is_data_set(source: str) -> bool:
    """Whether a source is a data set of the hub, hf:NAME[:CONFIG]."""
    return source.startswith("hf:")


def commit_of(source: str) -> str:
    """The commit at which this process reads hf:NAME[:CONFIG]: the last one when it first asks.

    Raises UserError for a name that the hub does not know, and where the hub does not answer.
    """
    parts = re.fullmatch("hf:([^:]+)(:[^:]+)?", source)
    if not parts:
        raise UserError(f"expected a data set of the hub as {DATA_SET}, found {source}")
    if source not in COMMITS:
        with _reading(parts[1]):
            COMMITS[source] = dataset_info(parts[1], expand=["sha"]).sha
    return COMMITS[source]


def stream(source: str) -> Iterator[dict]:
    """Yield the rows of hf:NAME[:CONFIG], its split train at commit_of, as they arrive."""
    commit = commit_of(source)
    name, _, config = source.removeprefix("hf:").partition(":")
    yield from rows_of(name, config or None, split="train", streaming=True, revision=commit)


def rows_of(name: str, config: str | None = None, **options) -> Iterator[dict]:
    """Yield the rows of what datasets.load_dataset gives for a data set. Raises UserError if it cannot."""
    import datasets  # slow to import, and not needed for local files

    datasets.disable_progress_bars()
    with _reading(name):
        yield from datasets.load_dataset(name, config, **options)


@contextlib.contextmanager
def _reading(name: str):
    try:
        yield
    except Exception as error:  # the exception class depends on how the hub fails
        raise UserError(f"cannot read the data set {name} from the hub ({hub.reason(error)}); pass local "
                        "files instead") from error
