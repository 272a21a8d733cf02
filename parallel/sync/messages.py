"""Gradients summed by messages: in buckets, which travel while backprop goes on.

Gradients finish in the order of the layout, last layer first, so those that are finished are a growing prefix of the
buffer, and a bucket is a slice of it: nothing is packed. A bucket ends with a layer, once it holds enough; the first is
smaller, so that the first message leaves early. The last one carries the loss and the running statistics as well.

    backward   | layer 5 | layer 4 | layer 3 | layer 2 | layer 1 |
    messages             | bucket 0     | bucket 1     ..| bucket 2 |

Buckets are summed one after another, in the same order on every rank. What moves them while layers compute:

thread  a thread that looks every 0.2 ms (collectives/running/nonblocking.py)
poke    the computing thread itself, between layers
none    nothing: they leave when backprop is done
auto    none, unless the first steps show that another way is faster

What of it hides is bounded by the network and the MPI library: see collectives/running/nonblocking.py. Source: Li et
al. 2020.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from itertools import pairwise
from numbers import Real
from statistics import median

from mpi4py import MPI

from parallel.sync.base import GradientSync

MIB = 1 << 20
OVERLAPS = ("auto", "thread", "poke", "none")
BUCKETING = {"bucket": 25.0, "first_bucket": 1.0, "overlap": "none"}  # where nobody says how
ROUNDS = 9  # steps of each way that `auto` makes; the first of each is not counted


def check_bucketing(bucket: float, first_bucket: float, overlap: str) -> None:
    """Refuse what no buckets can be made of."""
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap {overlap!r}: expected one of {', '.join(OVERLAPS)}")
    if not all(isinstance(size, Real) and 0 < size < math.inf for size in (bucket, first_bucket)):
        raise ValueError(f"buckets must hold more than 0 MiB, given {bucket!r} and {first_bucket!r} for the first")


def bucket_slices(ends: Iterable[int], total: int, first: int, rest: int) -> list[slice]:
    """Return the slices of the buckets over range(total).

    Parameters
    ----------
    ends : where layers end, in elements; a bucket ends there, but for a layer that is too long for one
    total : elements in all
    first, rest : elements that fill the first bucket, and each later one
    """
    buckets, start, enough = [], 0, first
    for end in sorted({end for end in ends if end < total} | {total}):
        if end - start < enough and end < total:
            continue
        pieces = max(1, (end - start) // max(1, enough))
        at = [start + (end - start) * i // pieces for i in range(pieces + 1)]
        buckets += [slice(lo, hi) for lo, hi in pairwise(at)]
        start, enough = end, rest
    return buckets


class Buckets:
    """A flat array that is summed over ranks in pieces, while it fills from its beginning (collective).

    Parameters
    ----------
    communicator : collectives.Communicator
        Buckets travel on duplicates of it, with its algorithm.
    array : 1-d array
    ends : where layers end in it, in elements
    size : elements up to the last end; what is behind goes with the last bucket
    bucket, first_bucket : float
        MiB that fill a bucket, and the first one.
    overlap : str
        One of OVERLAPS.

    Attributes
    ----------
    buckets : list of arrays
        Parts of the array, in its order.
    stops : list of int
        Where each ends.
    """

    def __init__(
        self, communicator, array, ends: Iterable[int], size: int, bucket: float, first_bucket: float, overlap: str
    ):
        first, rest = (max(1, int(mib * MIB) // array.itemsize) for mib in (first_bucket, bucket))
        places = bucket_slices(ends, size, first, rest) if size else [slice(0, 0)]
        places[-1] = slice(places[-1].start, array.size)
        self.buckets, self.stops = [array[place] for place in places], [place.stop for place in places]
        self.trial, self.overlap = None, overlap
        if overlap == "auto":
            ways = ["thread", "poke", "none"] if MPI.Query_thread() >= MPI.THREAD_MULTIPLE else ["poke", "none"]
            self.overlap = "none"
            if len(places) > 1 and communicator.size > 1:  # else there is nothing to hide, or nothing to hide it behind
                self.trial = OverlapTrial(ways)
        threads = {"thread"} if overlap == "thread" or (self.trial and "thread" in self.trial.ways) else set()
        # On communicators of their own, so that their messages meet no others; only one of them has a thread.
        self.communicators = {way: communicator.Dup(progress=way == "thread") for way in ["poke", *threads]}
        self.root = communicator
        self.launched, self.pending = 0, []
        self.plan()

    def plan(self) -> None:
        """Plan the sums of all buckets, which every step starts again (collective)."""
        self.requests = {
            way: [communicator.Allreduce_init(MPI.IN_PLACE, bucket) for bucket in self.buckets]
            for way, communicator in self.communicators.items()
        }

    @property
    def early(self) -> bool:
        """Whether buckets leave before the end."""
        return self.overlap != "none"

    def begin_step(self) -> None:
        """Start to fill the array anew."""
        self.launched, self.pending = 0, []
        if self.trial:
            self.overlap, self.clock = self.trial.next(), time.perf_counter()

    def ready(self, end: int) -> None:
        """Send the buckets that are complete: the array is final up to `end`."""
        if not self.early:
            return
        while self.launched < len(self.stops) and self.stops[self.launched] <= end:
            self._launch()
        while self.pending and self.pending[0].Test():
            self.pending.pop(0)

    def sum(self) -> str:
        """Return when all buckets are summed; those that have not left do so now. Says what `auto` has found, if so."""
        if self.early:
            while self.launched < len(self.buckets):
                self._launch()
            for request in self.pending:
                request.Wait()
        else:
            for request in self.requests["poke"]:
                request.Start()
                request.Wait()
        if self.trial and self.trial.add(time.perf_counter() - self.clock):
            return self._decide()
        return ""

    def _launch(self) -> None:
        request = self.requests[self.overlap][self.launched]
        request.Start()
        self.pending.append(request)
        self.launched += 1

    def _decide(self) -> str:
        """Take what rank 0 has found to be the fastest; the bits are the same either way."""
        self.overlap = self.root.bcast(self.trial.best())
        news = f"overlap {self.overlap}: {self.trial.describe()}"
        self.trial = None
        if self.overlap != "thread" and "thread" in self.communicators:
            del self.requests["thread"]
            self.communicators.pop("thread").Free()
        return news

    def describe(self) -> str:
        """Describe number and size of the buckets, and what moves them."""
        sizes = [bucket.nbytes / MIB for bucket in self.buckets]
        number = f"{len(sizes)} buckets of" if len(sizes) > 1 else "one bucket of"
        each = f"{min(sizes):.3g} to {max(sizes):.3g}" if len(sizes) > 1 else f"{sizes[0]:.3g}"
        how = "measured in the first steps" if self.trial else self.overlap
        return f"{number} {each} MiB, overlap {how}"

    def close(self) -> None:
        """Free the communicators (collective)."""
        for communicator in self.communicators.values():
            communicator.Free()
        self.communicators, self.requests = {}, {}


class Messages(GradientSync):
    """Gradients are summed in buckets, which may leave while backprop goes on; every rank makes the same update.

    Parameters
    ----------
    bucketing : bucket, first_bucket, overlap
        As for Buckets.
    why : str
        Why there is no node memory, for the log.
    """

    sends = "2"

    def __init__(self, bucketing: dict, why: str = ""):
        self.bucketing, self.why = bucketing, why

    def allocate(self):
        super().allocate()
        ends = self.layout.ends.values()
        self.buckets = Buckets(self.mesh.communicator, self.flat_buffer, ends, self.layout.size, **self.bucketing)

    def begin_step(self, step, samples, total, parts):
        self.buckets.begin_step()
        return super().begin_step(step, samples, total, parts)

    def begin_pass(self, micro):
        return self.buckets.ready if micro and micro.addend is not None else None

    def finish_step(self):
        if news := self.buckets.sum():
            self.say(news)
        return super().finish_step()

    def describe(self):
        why = f" ({self.why})" if self.why else ""
        return f"gradients summed by messages, {self.buckets.describe()}{why}"

    def close(self):
        self.buckets.close()


class OverlapTrial:
    """Measure alternatives in turn, some steps each, and choose the fastest.

    Steps vary by more than overlapping saves, so a way must show that it is no accident: in all rounds but one its step
    took less than that of the last way, which is to beat (a sign test: by chance in 1 of 28 trials).

    Parameters
    ----------
    ways : list of str
    """

    def __init__(self, ways: list[str]):
        self.ways = ways
        self.times: dict[str, list[float]] = {way: [] for way in ways}
        self.steps = 0

    def next(self) -> str:
        """Return the alternative for this step."""
        return self.ways[self.steps % len(self.ways)]

    def add(self, seconds: float) -> bool:
        """Add the seconds of this step; return whether there are enough to decide."""
        self.times[self.next()].append(seconds)
        self.steps += 1
        return self.steps == ROUNDS * len(self.ways)

    def medians(self) -> dict[str, float]:
        """Return the seconds of each, without its first step, which plans and connects."""
        return {way: median(times[1:]) for way, times in self.times.items()}

    def best(self) -> str:
        """Return the alternative to use from now on."""
        medians, plain = self.medians(), self.times[self.ways[-1]][1:]
        wins = {way: sum(a < b for a, b in zip(self.times[way][1:], plain, strict=True)) for way in self.ways}
        return min((way for way in self.ways if wins[way] >= ROUNDS - 2), key=medians.get, default=self.ways[-1])

    def describe(self) -> str:
        return ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in self.medians().items())
