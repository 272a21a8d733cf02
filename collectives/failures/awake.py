"""A clock for waits that end: it stands still where this process does.

A job that is suspended and resumed (`scontrol suspend`, a virtual machine that is paused or moved) finds each of its
waits far too long, and nobody is to blame: the others stood still with it. So of the time between two looks at this
clock a second counts at most. A rank that waits looks more often than that.
"""

import time

LARGEST_STEP = 1.0  # seconds


class Awake:
    """Seconds, from 0, that this process was awake.

    Parameters
    ----------
    largest_step : float
        Seconds that count between two looks, at most.
    """

    def __init__(self, largest_step: float = LARGEST_STEP):
        self.largest_step, self.seconds, self.last_look = largest_step, 0.0, time.monotonic()

    def now(self) -> float:
        """Look at the clock."""
        now = time.monotonic()
        self.seconds += min(now - self.last_look, self.largest_step)
        self.last_look = now
        return self.seconds
