"""Files and directories, written completely or not at all and never over something else; their sha256."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time

from safetensors import SafetensorError

from common.cli import UserError

LARGE = 2**26  # bytes; smaller files are hashed each time
RECORD = "stage.json"  # of a directory: the record of what made it, and the sha256 of its files
WRITER = "writer"  # in a directory of unfinished output: locked by the process that writes there
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a disk
SETTLED = 2e9  # nanoseconds, longer than a tick of any file system's clock: a later change has another time


def require_regular(path: str) -> None:
    """Raise UserError for a FIFO or a device: reading one may never end."""
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise UserError(f"{path}: expected a file, found a FIFO or a device")


def sha256(path: str) -> str:
    """Hex digest of a file."""
    require_regular(path)
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
def unfinished(path: str):
    """Context manager: a free name in a new directory next to `path`, to be renamed to it.

    The directory is removed at the end, and so are those that killed processes left for this path, and the
    one around them if it was made here and nothing got its name.
    """
    home, name = os.path.split(os.path.abspath(path))
    created = not os.path.isdir(home)
    os.makedirs(home, exist_ok=True)
    prefix, suffix = f".{name}.", ".unfinished"
    for entry in os.listdir(home):
        if entry.startswith(prefix) and entry.endswith(suffix):
            remove_abandoned(os.path.join(home, entry))
    aside = tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=home)
    try:
        with open(os.path.join(aside, WRITER), "x") as writer:
            fcntl.flock(writer, fcntl.LOCK_EX)
            yield os.path.join(aside, name)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) or error.errno in FULL:  # they name no file of the user's
            raise UserError(f"{path}: cannot be written: {error}") from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if created:
            with contextlib.suppress(OSError):  # not empty: something did
                os.rmdir(home)


def remove_abandoned(directory: str) -> None:
    """Remove a directory that unfinished() made, unless its process is alive; any other one stays."""
    with contextlib.suppress(OSError):  # also BlockingIOError: the process is alive
        descriptor = os.open(os.path.join(directory, WRITER), os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def write_file(path: str):
    """Context manager: an open file, renamed to `path` if the block succeeds, removed if it fails."""
    with unfinished(path) as aside:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)


@contextlib.contextmanager
def open_text(path: str):
    """Context manager: a text file open to read. Raises UserError where it is not UTF-8.

    Every newline is read as "\\n", and a byte-order mark is skipped.
    """
    require_regular(path)
    with open(path, encoding="utf-8-sig") as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            place = file.buffer.tell() - len(error.object) + error.start  # the invalid bytes end there
            raise UserError(f"{path}: not UTF-8: {error.reason} at byte {place + 1}") from error


def read_text(path: str) -> str:
    """The text of a file, as by open_text."""
    with open_text(path) as file:
        return file.read()


def write_text(path: str, text: str) -> None:
    """Write a text file, completely or not at all."""
    with write_file(path) as file:
        file.write(text.encode())


def write_json(path: str, value: dict) -> None:
    """Write a JSON file, completely or not at all."""
    write_text(path, json.dumps(value, indent=1))


def read_json(path: str):
    """The JSON value in a file; None if there is none that can be read."""
    require_regular(path)
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
    """Context manager: an empty directory to fill, renamed to `path` if the block succeeds.

    A previous directory stays untouched until then. It is moved aside to a free name, and once the new one is
    in place, the files that its record names are removed; any others stay there. Raises UserError if path is
    a file or a symbolic link.
    """
    if os.path.islink(path) or os.path.isfile(path):
        kind = "a symbolic link" if os.path.islink(path) else "a file"
        raise UserError(f"{path}: expected nothing or a directory, found {kind}; remove it first")
    with unfinished(path) as aside:
        os.mkdir(aside)
        yield aside
        flush(aside)
        previous = move_aside(path)
        try:
            os.rename(aside, path)
        except BaseException:
            if previous:
                os.rename(previous, path)
            raise
    if previous:
        remove_named(previous)


def named_files(path: str) -> dict[str, str]:
    """File name -> sha256 of the files next to it that a record names; none if `path` has no record."""
    record = read_json(path)
    files = record.get("files") if isinstance(record, dict) else None
    return files if isinstance(files, dict) else {}


def remove_named(directory: str) -> None:
    """Remove the files that a directory's record names, then itself, if nothing else is in it."""
    named = named_files(os.path.join(directory, RECORD))
    for name in files_in(directory) if named else ():
        if name in named or name == RECORD:
            os.remove(os.path.join(directory, name))
    remove_empty(directory)


def remove_empty(directory: str) -> None:
    """Remove the directories below a directory that are empty, then itself, if it is."""
    for folder, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def flush(directory: str) -> None:
    """Flush the files of a directory to disk, with the umask's permissions: safetensors writes with 0600."""
    permissions = os.stat(directory).st_mode & 0o666
    for name in files_in(directory):
        os.chmod(os.path.join(directory, name), permissions)
        sync(os.path.join(directory, name))


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
