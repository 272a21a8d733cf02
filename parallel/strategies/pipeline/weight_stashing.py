"""Weight stashing: one stage's parameters, updated after every mini-batch, and older versions for those in flight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from parallel.state.placed import OWN, PlacedArray, Shard, in_transit
from parallel.state.table import kind_of_private
from parallel.sync.local_update import LocalUpdate, temporarily
from parallel.sync.messages import BUCKETING, Buckets
from parallel.sync.step_result import StepResult

UPDATES = OWN + "updates/"  # in a checkpoint


class WeightStashing(LocalUpdate):
    """Updates after every mini-batch, or after one of each replica of the stage; older versions while they are needed.

    Parameters
    ----------
    bucketing : bucket, first_bucket, overlap of sync/messages.py
        How the replicas of a stage sum their gradients.

    Attributes
    ----------
    updates : int
        Updates since nothing was in flight: the newest version.
    update_count : array of one number
        Updates of this stage since training began, or steps of the strategy that trained before: what Adam counts.
    stash : dict
        Version -> (parameters, how layers see them).
    loss : float
        What the step returns.
    buckets : Buckets or None
        What replicas sum.
    """

    buckets: Buckets | None = None
    phases = (
        ("compute", "compute_gradients", False),
        ("communicate", "sync.sum_replicas", False),
        ("update", "sync.apply", False),
    )

    def __init__(self, bucketing: dict = BUCKETING):
        self.bucketing = bucketing

    def allocate(self):
        super().allocate()
        self.stash: dict[int, tuple[np.ndarray, object]] = {}
        self.update_count, self.updates, self.loss = np.zeros((), np.int64), 0, 0.0
        self.counts = {name: self.update_count.copy() for name in self.layout.specs}  # `update_count`, for the state

    def empty(self) -> None:
        """Forget all older versions: nothing is in flight."""
        self.stash, self.updates = {}, 0

    def weights(self, version: int):
        """Return the parameters after `version` updates, as layers see them."""
        return self.p if version == self.updates else self.stash[version][1]

    def make_buckets(self, peers) -> None:
        """Make the buckets in which the ranks of `peers`, which have this stage, sum gradients (collective)."""
        layout, size = self.layout, self.layout.size
        buffer = self.flat_buffer[: size + 1]  # behind the gradients, whether a loss was bad
        self.buckets = Buckets(peers, buffer, layout.ends.values(), size, **self.bucketing)

    def begin_sum(self) -> Callable[[int], None]:
        """Start the gradients of a mini-batch; return the hook for those that are ready."""
        self.buckets.begin_step()
        return self.buckets.ready

    def sum_replicas(self, bad: bool) -> bool:
        """Sum the gradients over the ranks with this stage; return whether any of them is `bad`."""
        any_bad = self.flat_buffer[self.layout.size : self.layout.size + 1]
        any_bad[:] = bad
        if news := self.buckets.sum():
            self.say(news)
        return bool(any_bad[0])

    def apply(self, rate: float, needed: int) -> None:
        """Update with the gradients that are there; keep the versions from `needed` on."""
        self.stash = {version: kept for version, kept in self.stash.items() if version >= needed}
        if self.updates >= needed:
            copy = self.parameters.copy()
            self.stash[self.updates] = copy, self.layout.views(copy)
        with temporarily(self.optimizer, lr=rate):
            self.optimizer.update(self.parameters, self.gradients, self.slots, int(self.update_count), self.region)
        self.updates += 1
        self.update_count += 1

    def finish_step(self):
        return StepResult(self.loss, True)

    def update(self):
        """Do nothing: every mini-batch has had its own update, or will have it."""

    def synchronize(self):
        self.resume()
        self.synchronized = True
        return self.forward_backward.drain()

    def trained(self):
        yield from super().trained()
        yield self.flat_buffer
        yield self.update_count

    def write_synchronized(self):
        in_flight = self.stash, self.updates
        self.forward_backward.drain_copy()
        self.stash, self.updates = in_flight

    def before_load(self):
        """Receive what was sent (collective): once the other state is taken over, nothing is in flight any more."""
        self.show_synchronized()

    def reset(self):
        super().reset()
        self.forward_backward.forget()

    def placed(self):
        """Also the updates of each array, so that another cut into stages goes on with them."""
        yield from super().placed()
        peers = self.forward_backward.peers
        for name, count in self.counts.items():
            count[...] = self.update_count
            copy = name in self.layout.borrowed or (peers is not None and peers.rank > 0)
            yield PlacedArray(UPDATES + name, "", count, None, Shard(1), copy=copy)
        yield from in_transit(*(copy for copy, _ in self.stash.values()))

    def loaded(self, steps, anew=()):
        own = max(self.counts.values(), default=0)  # none where the stage has no parameters
        self.update_count[...] = steps if kind_of_private(UPDATES) in anew else own

    def describe(self):
        return f"replicas sum gradients by messages, {self.buckets.describe()}" if self.buckets else ""

    def close(self):
        """Free what is held beside arrays, once nothing is in flight (collective)."""
        self.show_synchronized()
        self.reset()
        if self.buckets:
            self.buckets.close()
