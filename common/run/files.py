"""Files: written completely or not at all, read with errors that name them; locks of directories."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import socket
import sys

from common.run.errors import UserError

STAMPS: dict[str, dict] = {}  # absolute path -> the last stamp
UNFINISHED = ".unfinished"  # at the end of the name of what is being written
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without flock
# of file systems without permissions, or that flush files by themselves, as mounted object stores
NOT_OFFERED = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def sha256(path: str) -> str:
    """Hex digest of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: str) -> dict:
    """The size in bytes, time of change in ns and sha256 of a file, for records.

    The sha256 is that of the last stamp, of this process or of remember, while size and time are the same.
    """
    path, status = os.path.abspath(path), os.stat(path)
    known, new = STAMPS.get(path, {}), {"size": status.st_size, "time": status.st_mtime_ns}
    STAMPS[path] = known if new.items() <= known.items() else new | {"sha256": sha256(path)}
    return STAMPS[path]


def remember(stamps: dict[str, dict]) -> None:
    """Take over the stamps in a record, by path."""
    STAMPS.update({os.path.abspath(path): known for path, known in stamps.items() if known})


def beside(path: str, suffix: str = UNFINISHED) -> str:
    """A hidden name next to a path for what this process makes of it: .NAME.PROCESS-RANK.unfinished."""
    home, name = os.path.split(os.path.abspath(path))
    return os.path.join(home, f".{name}.{os.getpid()}-{os.environ.get('RANK', 0)}{suffix}")


@contextlib.contextmanager
def write_file(path: str):
    """Context manager: an open file, renamed to `path` if the block succeeds, removed if it fails.

    Raises UserError where it cannot be written.
    """
    aside = beside(path)
    try:
        os.makedirs(os.path.dirname(aside), exist_ok=True)
        with open(aside, "wb") as file:
            yield file
        sync(aside)
        os.rename(aside, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error}".replace(aside, path)) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(aside)


def write_text(path: str, text: str) -> None:
    """Write a text file, completely or not at all."""
    with write_file(path) as file:
        file.write(text.encode())


def write_json(path: str, value: dict) -> None:
    """Write a JSON file, completely or not at all."""
    write_text(path, json.dumps(value, indent=1))


@contextlib.contextmanager
def open_text(path: str):
    """Context manager: a text file open to read. Raises UserError where it is not UTF-8.

    Every newline is read as "\\n", and a byte-order mark is skipped.
    """
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


def flush(directory: str) -> None:
    """Flush the files of a directory to disk, with the umask's permissions: safetensors writes with 0600."""
    permissions = os.stat(directory).st_mode & 0o666
    for name in files_in(directory):
        with _if_offered():
            os.chmod(os.path.join(directory, name), permissions)
        sync(os.path.join(directory, name))


def sync(path: str) -> None:
    """Flush a file to disk."""
    with open(path, "rb") as file, _if_offered():
        os.fsync(file.fileno())


@contextlib.contextmanager
def _if_offered():
    """Context manager: what the file system does not offer is left out."""
    try:
        yield
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise


def free_name(path: str, kind: str = "old") -> str:
    """The first of PATH.KIND-1, PATH.KIND-2, ... that does not exist."""
    names = (f"{path}.{kind}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def move_aside(path: str, kind: str = "old") -> str:
    """Rename a path to its free_name and return that."""
    free = free_name(path, kind)
    os.rename(path, free)
    return free


@contextlib.contextmanager
def locked(directory: str, name: str):
    """Context manager: a lock in a directory, which is made, and removed if it is still empty.

    Raises UserError if another process holds it.
    """
    created = not os.path.isdir(directory)
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, f".{name}.lock")
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise UserError(f"{directory}: expected no {name} running there, found {holder}") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            print(f"warning: {directory}: its file system has no locks: nothing stops a second {name} there",
                  file=sys.stderr)
        same = os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path))
        if not same:  # its holder has removed it meanwhile
            raise UserError(f"{directory}: expected no {name} running there, found one that was ending")
        file.truncate(0)
        print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the directory is not empty
                os.remove(path)
                if created:
                    os.rmdir(directory)
