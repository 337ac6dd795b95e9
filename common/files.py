"""Files and directories, written completely or not at all and never over something else; their sha256."""

import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
import time

from safetensors import SafetensorError

from common.errors import UserError
from common.records import FILES, mismatch

LARGE = 2**26  # bytes; smaller files are hashed each time
RECORD = "stage.json"  # of a directory: the record of what made it, and the sha256 of its files
DIGESTS = "sha256.json"  # of a training checkpoint: file name -> sha256 of its other files
UNFINISHED = ".unfinished"  # at the end of the name of a directory of unfinished output
WRITER = "writer"  # in such a directory: locked by the process that writes there
REPLACED = "replaced"  # in such a directory: what was there before, until the new output has its name
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems without flock
# of file systems without permissions, or that flush files by themselves, as mounted object stores
NOT_OFFERED = (errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
MTIME_SLACK_NS = 2e9  # longer than a tick of any file system's clock: a later change has another time


def require_regular(path: str) -> None:
    """Raise UserError for a FIFO or a device: reading one may never end."""
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path):
        raise UserError(f"{path}: expected a file, found a FIFO or a device")


@contextlib.contextmanager
def open_bytes(path: str):
    """Context manager: a file open to read. Raises UserError for a FIFO or a device, and if it cannot be read
    to its end.
    """
    require_regular(path)
    with open(path, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise named(error, path, "read") from error


def named(error: OSError, path: str, verb: str) -> Exception:
    """The error itself, or a UserError that names the file where the error, one of a descriptor, does not."""
    return error if error.filename else UserError(f"{path}: cannot be {verb}: {error}")


def sha256(path: str) -> str:
    """Hex digest of a file."""
    with open_bytes(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_sha256(path: str) -> str:
    """sha256(path); that of a large file is kept in the user's cache under its inode, size and times."""
    status = os.stat(path)
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if status.st_size < LARGE or time.time_ns() - changed < MTIME_SLACK_NS:
        return sha256(path)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    known = os.path.join(cache, "mha2gqa", "-".join(map(str, identity)))
    with contextlib.suppress(OSError), open(known, encoding="ascii") as file:
        return file.read()
    digest = sha256(path)
    with contextlib.suppress(OSError, UserError):  # a cache is optional
        write_text(known, digest)
    return digest


def refuse_overwrite(path: str, force: bool) -> None:
    """Raise UserError if path is a symbolic link, or exists and force is off. Call it before any work."""
    if os.path.islink(path):
        raise UserError(f"{path}: expected nothing or an earlier output, found a symbolic link; "
                        "remove it first")
    if os.path.exists(path) and not force:
        raise UserError(f"{path} already exists; pass --force to replace it")


def lock(file) -> bool:
    """Lock an open file or descriptor until it is closed. Returns False where the file system has no locks.

    Raises BlockingIOError if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


@contextlib.contextmanager
def unfinished(path: str):
    """Context manager: a free name in a new directory next to `path`, to be renamed to it.

    The directory is removed at the end, as is the one around it if it was made here and nothing got its name.
    What killed processes left in the one around it is swept first. Raises UserError for what cannot be
    written, where the system's error names no file, or one in the new directory.
    """
    home, name = os.path.split(os.path.abspath(path))
    created = not os.path.isdir(home)
    os.makedirs(home, exist_ok=True)
    sweep(home)
    aside = tempfile.mkdtemp(prefix=f".{name}.", suffix=UNFINISHED, dir=home)
    try:
        with open(os.path.join(aside, WRITER), "x") as writer:
            lock(writer)
            yield os.path.join(aside, name)
    except UserError as error:
        raise UserError(str(error).replace(os.path.join(aside, name), path)) from error
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be written: {error}") from error
    except OSError as error:
        inside = os.path.join(aside, "") in f"{error.filename}"
        raise named(OSError(error.errno, error.strerror) if inside else error, path, "written") from error
    finally:
        put_back(aside, path)
        shutil.rmtree(aside, ignore_errors=True)
        if created:
            with contextlib.suppress(OSError):  # not empty: something did
                os.rmdir(home)


def sweep(home: str) -> None:
    """Remove what unfinished() made in a directory for processes that were killed, after put_back.

    Any other directory stays, as all do on a file system without locks.
    """
    for entry in os.listdir(home) if os.path.isdir(home) else ():
        if not (entry.startswith(".") and entry.endswith(UNFINISHED)):
            continue
        aside = os.path.join(home, entry)
        with contextlib.suppress(OSError):  # also BlockingIOError: the process is alive
            descriptor = os.open(os.path.join(aside, WRITER), os.O_RDWR | os.O_NOFOLLOW)
            try:
                if lock(descriptor):
                    put_back(aside, os.path.join(home, entry[1:].removesuffix(UNFINISHED).rpartition(".")[0]))
                    shutil.rmtree(aside)
            finally:
                os.close(descriptor)


def put_back(aside: str, path: str) -> None:
    """Complete what was interrupted while a name that unfinished() gave took the place of `path`.

    Files that were to follow X.json, which has its name, get theirs. A directory that was being replaced gets
    its own again; if the new one has it, the old one is removed by remove_own.
    """
    home, name = os.path.split(path)
    following = os.path.join(aside, name)
    for file, digest in named_files(path).items() if os.path.isdir(following) else ():
        file = os.path.join(following, file)
        if os.path.isfile(file) and sha256(file) == digest:
            os.rename(file, os.path.join(home, os.path.basename(file)))
    replaced = os.path.join(aside, REPLACED)
    if os.path.isdir(replaced) and not os.path.lexists(path):
        os.rename(replaced, path)
    elif os.path.isdir(replaced):
        remove_own(replaced, path)


@contextlib.contextmanager
def write_file(path: str):
    """Context manager: an open file, renamed to `path` if the block succeeds, removed if it fails."""
    with unfinished(path) as aside:
        with open(aside, "xb") as file:
            yield file
        sync(aside)
        os.rename(aside, path)


@contextlib.contextmanager
def open_text(path: str):
    """Context manager: a text file open to read. Raises UserError where it is not UTF-8.

    Every newline is read as "\\n", and a byte-order mark is skipped.
    """
    with open_bytes(path) as content, io.TextIOWrapper(content, encoding="utf-8-sig") as file:
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

    A previous directory stays untouched until then, and is removed by remove_own. Raises UserError if path is
    a file or a symbolic link.
    """
    if os.path.islink(path) or os.path.isfile(path):
        kind = "a symbolic link" if os.path.islink(path) else "a file"
        raise UserError(f"{path}: expected nothing or a directory, found {kind}; remove it first")
    with unfinished(path) as aside:
        os.mkdir(aside)
        yield aside
        flush(aside)
        take_name(aside, path)


def take_name(aside: str, path: str) -> None:
    """Rename a name that unfinished() gave to `path`, in place of a directory, which that removes then."""
    if os.path.isdir(path):
        os.rename(path, os.path.join(os.path.dirname(aside), REPLACED))
    os.rename(aside, path)


def named_files(path: str) -> dict[str, str]:
    """File name -> sha256 of the files that a record names, all of them below its own directory.

    None if `path` has no record, or one that names anything else.
    """
    record = read_json(path)
    files = record.get("files", record) if isinstance(record, dict) else None  # DIGESTS has nothing else
    return {} if mismatch(files, FILES, "files") else files


def recorded_files(directory: str) -> set[str]:
    """Names of a directory's record and of the files that it names; none without a record."""
    records = ((name, named_files(os.path.join(directory, name))) for name in (RECORD, DIGESTS))
    return next(({name, *named} for name, named in records if named), set())


def remove_own(directory: str, path: str) -> None:
    """Remove the files that a directory's record names, and itself. Any others are kept, in PATH.old-N."""
    own = recorded_files(directory)
    for name in files_in(directory):
        if name in own:
            os.remove(os.path.join(directory, name))
    remove_empty(directory)
    if os.path.isdir(directory):
        os.rename(directory, free_name(path))


def remove_empty(directory: str) -> None:
    """Remove the directories below a directory that are empty, then itself, if it is."""
    for folder, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def flush(directory: str) -> None:
    """Flush the files of a directory to disk, with the umask's permissions: safetensors writes with 0600."""
    permissions = os.stat(directory).st_mode & 0o666
    for name in files_in(directory):
        with offered():
            os.chmod(os.path.join(directory, name), permissions)
        sync(os.path.join(directory, name))


def sync(path: str) -> None:
    """Flush a file to disk."""
    with open(path, "rb") as file, offered():
        os.fsync(file.fileno())


@contextlib.contextmanager
def offered():
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
