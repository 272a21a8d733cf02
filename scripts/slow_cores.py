"""A core for every host of the lab: ranks that share cores rest behind what they compute, as if each had a slower one.

    with slow_cores.of(slow_cores.times(ranks), network, optimizer) as cores: ...

Hosts of the lab (netlab.py) are namespaces of one machine. Where they are more than its cores, a layer takes as long as
the other hosts let it, which no machine of its own does, and no profile can foretell. So everything that a rank
computes is computed, and then it rests until `times` the processor's seconds of it have passed: a core so many times as
slow, that is free half of the time. How many ranks compute at once then counts little, and what else the machine does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import nn
from nn.core.layer import Layer

LEAST = 5e-5  # seconds: a shorter rest takes longer than it should


def times(ranks: int) -> int:
    """How many times as slow: 1, which is no rest, where every rank has a core."""
    cores = len(os.sched_getaffinity(0))
    return 1 if ranks <= cores else -(-2 * ranks // cores)


class Cores:
    """So many times as slow as a core here; seconds of all calls, and of those seconds how many were too many."""

    def __init__(self, slower: float):
        self.slower = slower
        self.seconds = self.late = 0.0

    def resting(self, call: Callable) -> Callable:
        """The same call, which returns when so many times its processor's seconds have passed."""

        @wraps(call)
        def rested(*arguments, **named):
            start, busy = time.perf_counter(), time.thread_time()
            result = call(*arguments, **named)
            until = start + self.slower * (time.thread_time() - busy)
            if until - time.perf_counter() > LEAST:
                time.sleep(max(0.0, until - time.perf_counter()))
            end = time.perf_counter()
            self.seconds += end - start
            self.late += max(0.0, end - until)
            return result

        return rested

    def describe(self) -> str:
        """What a row says of them."""
        if self.slower == 1:
            return ""
        late = self.late / max(self.seconds, 1e-9)
        return f", on cores {self.slower} times as slow as those here, which came {late:.0%} late"


@contextmanager
def of(slower: float, network: nn.Network, optimizer: nn.Optimizer) -> Iterator[Cores]:
    """Within this context all layers of the kinds that a network has, and this kind of optimizer, are so much slower.

    Containers and layers that wait for other ranks stay as they are; the layers inside them do not.
    """
    cores = Cores(slower)
    methods = {(type(layer), kind) for layer in leaves(network.root) for kind in ("forward", "backward")}
    methods |= {(type(optimizer), "apply"), (nn.Network, "backward_weights")}
    with ExitStack() as stack:
        for owner, name in methods if slower > 1 else ():
            stack.enter_context(patch.object(owner, name, cores.resting(getattr(owner, name))))
        yield cores


def leaves(layer: Layer) -> Iterator[Layer]:
    """The layers that have none inside."""
    children = layer.children().values()
    yield from (leaf for child in children for leaf in leaves(child)) if children else (layer,)
