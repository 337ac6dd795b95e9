"""Files and directories, written whole or not at all and never over something else; their sha256."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import time

from common.cli import UserError

LARGE = 2**26  # bytes; smaller files are hashed each time
SETTLED = 2e9  # nanoseconds, longer than a tick of any file system's clock: a later change has another time


def sha256(path: str) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: str) -> str:
    """sha256(path); that of a large file is kept in the user's cache under its inode, size and times."""
    status = os.stat(path)
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if status.st_size < LARGE or time.time_ns() - changed < SETTLED:
        return sha256(path)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    known = os.path.join(cache, "mha2gqa", "-".join(map(str, identity)))
    with contextlib.suppress(OSError), open(known, encoding="ascii") as file:
        return file.read()
    digest = sha256(path)
    with contextlib.suppress(OSError):  # a cache is optional
        write_text(known, digest)
    return digest


def refuse_overwrite(path: str, force: bool) -> None:
    """Raise UserError if path is a symbolic link, or exists and force is off. Call it before any work."""
    if os.path.islink(path):
        raise UserError(f"{path}: expected nothing or an earlier output, found a symbolic link; "
                        "remove it first")
    if os.path.exists(path) and not force:
        raise UserError(f"{path} already exists; pass --force to replace it")


@contextlib.contextmanager
def write_file(path: str):
    """Context manager: an open file PATH.tmp, renamed to PATH if the block succeeds, removed if it fails."""
    aside = path + ".tmp"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(aside)
        raise


@contextlib.contextmanager
def open_text(path: str):
    """Context manager: a text file open to read. Raises UserError where it is not UTF-8.

    Every newline is read as "\\n", and a byte-order mark is skipped.
    """
    with open(path, encoding="utf-8-sig") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            place = file.buffer.tell() - len(error.object) + error.start  # what it failed on ends there
            raise UserError(f"{path}: not UTF-8: {error.reason} at byte {place + 1}") from error


def read_text(path: str) -> str:
    """The text of a file, as by open_text."""
    with open_text(path) as file:
        return file.read()


def write_text(path: str, text: str) -> None:
    """Write text to a temporary file, then rename it."""
    with write_file(path) as file:
        file.write(text.encode())


def write_json(path: str, value: dict) -> None:
    """Write JSON to a temporary file, then rename it."""
    write_text(path, json.dumps(value, indent=1))


def read_json(path: str):
    """The JSON value in a file; None if there is none that can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError):  # UTF-8 and JSON errors are ValueErrors
        return None


def files_in(directory: str) -> list[str]:
    """All files below a directory, relative to it, sorted."""
    files = []
    for folder, _, names in os.walk(directory):
        files += [os.path.relpath(os.path.join(folder, name), directory) for name in names]
    return sorted(files)


@contextlib.contextmanager
def write_directory(path: str):
    """Context manager: an empty directory PATH.tmp to fill, renamed to PATH if the block succeeds.

    A previous directory stays untouched until then: it is moved aside to a free name and removed once the new
    one is in place. Files get the permissions that the umask gives, also those that safetensors writes with
    0600. Raises UserError if path is a file or a symbolic link.
    """
    if os.path.islink(path) or os.path.isfile(path):
        kind = "a symbolic link" if os.path.islink(path) else "a file"
        raise UserError(f"{path}: expected nothing or a directory, found {kind}; remove it first")
    aside = path + ".tmp"
    shutil.rmtree(aside, ignore_errors=True)  # from a killed run
    os.makedirs(aside)
    try:
        yield aside
        permissions = os.stat(aside).st_mode & 0o666
        for name in files_in(aside):
            os.chmod(os.path.join(aside, name), permissions)
            sync(os.path.join(aside, name))
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    previous = move_aside(path)
    try:
        os.rename(aside, path)
    except BaseException:
        if previous:
            os.rename(previous, path)
        raise
    if previous:
        shutil.rmtree(previous)


def sync(path: str) -> None:
    """Flush a file to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def move_aside(path: str, kind: str = "old") -> str | None:
    """Rename a path to the first free PATH.KIND-N and return that name; None if the path does not exist."""
    if not os.path.lexists(path):
        return None
    names = (f"{path}.{kind}-{number}" for number in itertools.count(1))
    free = next(name for name in names if not os.path.lexists(name))
    os.rename(path, free)
    return free
