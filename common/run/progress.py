"""Progress of a loop: a bar on a terminal, elsewhere a plain line a minute; seconds and memory of a stage."""

import os
import resource
import sys
import time

from tqdm import tqdm

INTERVAL = 60  # seconds between two lines


class Progress(tqdm):
    """tqdm on rank 0; its lines off a terminal read "calibrating:  33% 40/120 [01:04<02:10,  1.6s/batch]"."""

    def __init__(self, iterable=None, desc="", total=None, unit="it", **options):
        first, terminal = os.environ.get("RANK", "0") == "0", sys.stderr.isatty()
        self.lines = first and not terminal
        super().__init__(iterable, desc, total, unit=unit, disable=not (first and terminal), **options)
        self.desc, self.unit = desc, unit  # a disabled tqdm does not keep them
        self.start = self.last_line = time.monotonic()

    def __iter__(self):
        for item in super().__iter__():
            yield item
            if self.lines:  # a disabled tqdm does not count
                self.update()

    def update(self, n=1):
        super().update(n)
        if not self.lines:
            return
        self.n += n
        now = time.monotonic()
        if now - self.last_line >= INTERVAL:
            self.last_line = now
            line = self.format_meter(self.n, self.total, now - self.start, 0, self.desc, unit=self.unit)
            print(line, file=sys.stderr, flush=True)


def peak_memory() -> float:
    """Peak host memory of this process in GiB."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if os.path.exists("/proc/self/status"):
        with open("/proc/self/status") as file:
            kilobytes = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return round(kilobytes / 2**20, 2)


class Clock:
    """Seconds since its creation, for records and final lines."""

    def __init__(self):
        self.start = time.perf_counter()

    def __call__(self) -> float:
        return round(time.perf_counter() - self.start, 2)
