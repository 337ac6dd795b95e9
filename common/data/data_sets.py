"""Data sets of the hub: their rows, through the package datasets."""

import contextlib
import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator

from huggingface_hub import dataset_info

from common.models import hub
from common.run.errors import UserError
from common.run.progress import Progress

DATA_SET = "hf:NAME[:CONFIG[:SPLIT]]"  # as a source of text or chats, in help and errors
COLUMNS = ("text", "messages")  # that are read where a data set has them, as others may need packages
TRIES, PAUSE = 5, 2.0  # of a hub that is busy; seconds before the second one, doubled before each further one
BUSY = (429, 500, 502, 503, 504)  # status codes
COMMITS = {}  # a source -> the commit at which this process reads it


def parts_of(source: str) -> tuple[str, str | None, str]:
    """The name, config and split of a source. Raises UserError if it is none."""
    parts = re.fullmatch("hf:([^:]+)(?::([^:]+))?(?::([^:]+))?", source)
    if not parts:
        raise UserError(f"expected a data set of the hub as {DATA_SET}, found {source}")
    return parts[1], parts[2], parts[3] or "train"


def commit_of(source: str) -> str:
    """The commit at which this process reads a source: the last one when it first asks.

    Raises UserError for a name that the hub does not know, and where the hub does not answer.
    """
    if source not in COMMITS:
        name, *_ = parts_of(source)
        (COMMITS[source],) = _patiently(name, lambda: [dataset_info(name, expand=["sha"]).sha])
    return COMMITS[source]


def stream(source: str) -> Iterator[dict]:
    """Yield the rows of a source at commit_of, as they arrive, without those that have a null in COLUMNS."""
    commit, (name, config, split), skipped = commit_of(source), parts_of(source), 0
    try:
        for row in rows_of(name, config, split=split, streaming=True, revision=commit):
            if any(value is None for column, value in row.items() if column in COLUMNS):
                skipped += 1
            else:
                yield row
    finally:
        if skipped:
            Progress.write(f"note    {source}: {skipped} rows with a null, skipped")


def rows_of(name: str, config: str | None = None, **options) -> Iterator[dict]:
    """Yield the rows of what datasets.load_dataset gives for a data set. Raises UserError if it cannot."""
    import datasets  # slow to import, and not needed for local files

    datasets.disable_progress_bars()

    def load() -> Iterator[dict]:
        with contextlib.ExitStack() as stack:
            if os.path.exists(name):  # a folder of this name here is not the data set of the hub
                stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
            rows = datasets.load_dataset(name, config, **options)
        present = [column for column in COLUMNS if column in (rows.features or ())]
        return iter(rows.select_columns(present) if present else rows)

    yield from _patiently(name, load)


def _patiently(name: str, read) -> Iterator:
    """Yield what read() has, from where it was when a busy hub ended it. Raises UserError if the hub stays
    busy, or has no such data set.
    """
    taken, pause = 0, PAUSE
    for tries in itertools.count(1):
        try:
            for item in itertools.islice(read(), taken, None):
                taken += 1
                yield item
            return
        except Exception as error:  # the exception class depends on how the hub fails
            if tries == TRIES or not _is_busy(error):
                raise UserError(f"cannot read the data set {name} from the hub ({hub.reason(error)}); pass "
                                "local files instead") from error
        time.sleep(pause)
        pause *= 2


def _is_busy(error: BaseException | None) -> bool:
    """Whether an error, or one that it follows from, is the answer of a hub that may serve soon."""
    while error is not None:
        aiohttps = getattr(error, "status", None)
        if getattr(getattr(error, "response", None), "status_code", aiohttps) in BUSY:
            return True
        error = error.__cause__ or error.__context__
    return False
