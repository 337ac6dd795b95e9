"""The progress of a loop: a bar on a terminal; elsewhere, as in a log file, a plain line a minute."""

import datetime
import os
import sys
import time

from tqdm import tqdm

INTERVAL = 60  # seconds between two lines


class Progress(tqdm):
    """tqdm on rank 0; its lines off a terminal read "calibrating: 40/120 batch, 33 %, ETA 0:02:10"."""

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
        if now - self.last_line < INTERVAL:
            return
        self.last_line = now
        if self.total:
            left = datetime.timedelta(seconds=round((now - self.start) * (self.total / self.n - 1)))
            state = f"{self.n:,}/{self.total:,} {self.unit}, {100 * self.n / self.total:.0f} %, ETA {left}"
        else:
            state = f"{self.n:,} {self.unit}"
        print(f"{self.desc}: {state}", file=sys.stderr, flush=True)
