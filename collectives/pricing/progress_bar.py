"""A bar for what takes longer than two seconds."""

import sys
import time

PATIENCE = 2.0  # seconds


class ProgressBar:
    """A bar on standard error, where that is a terminal, from two seconds on; erased at the end.

    Parameters
    ----------
    total : float
        What `update` will have been told when all is done.
    """

    def __init__(self, total: float):
        self.total, self.begin, self.shown = total, time.monotonic(), -1
        self.active = sys.stderr.isatty()

    def update(self, done: float) -> None:
        """So much of `total` is done."""
        if not self.active:
            return
        percent = min(100, int(100 * done / self.total)) if self.total else 100
        if percent != self.shown and time.monotonic() - self.begin > PATIENCE:
            self.shown = percent
            print(f"\r[{'#' * (percent * 3 // 10):30}] {percent}%", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erase the bar."""
        if self.shown >= 0:
            print("\r" + " " * 40 + "\r", end="", file=sys.stderr, flush=True)
