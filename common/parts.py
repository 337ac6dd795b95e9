"""Finished parts of an output that takes hours: the command that was stopped goes on from them."""

import os

from common.artifacts import write_record
from common.files import RECORD, files_in, read_json, remove_own, sha256, sweep, write_directory

COMMAND = ("stage", "flags", "inputs", "packages", "commit", "device")  # of a record: what made it, from what


class Parts:
    """Parts in a directory `home`, each a directory with a record of the command that made it.

    command: a record of this command. Only its own parts are found; those of another one are removed.
    """

    def __init__(self, home: str, command: dict):
        self.home, self.command = home, {name: command[name] for name in COMMAND}
        remove_parts(home, command["stage"], but=self.command)

    def find(self, name: str) -> tuple[str, dict] | None:
        """The directory and the metrics of a part; None unless it is as this command wrote it."""
        path = os.path.join(self.home, name)
        record = record_of(path)
        if not self.command.items() <= record.items():
            return None
        files = {file: sha256(os.path.join(path, file)) for file in files_in(path) if file != RECORD}
        return (path, record["metrics"]) if files == record.get("files") else None

    def add(self, name: str, fill) -> tuple[str, dict]:
        """Have fill(directory) write a part and return its metrics. Returns where it is, and the metrics."""
        path = os.path.join(self.home, name)
        with write_directory(path) as aside:
            metrics = fill(aside)
            write_record(aside, self.command | {"metrics": metrics})
        return path, metrics


def record_of(path: str) -> dict:
    """The record in a directory; an empty one if there is none, or `path` is a link."""
    record = None if os.path.islink(path) else read_json(os.path.join(path, RECORD))
    return record if isinstance(record, dict) else {}


def remove_parts(home: str, stage: str, but: dict | None = None) -> None:
    """Remove the stage's parts in `home`, but for those of one command, and `home` if nothing else is there.

    What no record of theirs names stays.
    """
    if not os.path.isdir(home):
        return
    sweep(home)
    for name in os.listdir(home):
        path = os.path.join(home, name)
        record = record_of(path)
        if record.get("stage") == stage and (but is None or not but.items() <= record.items()):
            remove_own(path, path)
    if not os.listdir(home):
        os.rmdir(home)
