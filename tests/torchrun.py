"""Starting, watching and killing the processes of torchrun."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def launcher(processes: int, *options) -> list[str]:
    """The words before a script: of torchrun with so many processes on this machine and these options, of
    Python alone for none.
    """
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words += ["--local-addr", "127.0.0.1", *options]  # where the machine's own name cannot be looked up
    return [sys.executable, *(words if processes else [])]


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of torchrun's ranks; of a single process its own."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()] or [process.pid]


def kill(process: subprocess.Popen) -> None:
    ranks = ranks_of(process)
    for pid in (process.pid, *ranks):  # the launcher first, so that it has no time to tidy up
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    limit = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):  # a dying rank's threads still hold the lock
        assert time.monotonic() < limit, f"ranks {ranks} do not end"
        time.sleep(0.01)
