"""Barriers of plans in node memory: the calls for a Barrier, and the first one of a call, at which ranks must agree.

At the first barrier every rank shows a signature of operation, count, dtype and place. Differences are refused on every
rank, before any data moves.
"""

from collections.abc import Callable
from functools import partial

from collectives.executor.plan import Disagreement
from collectives.node_memory.flags import UNSIGNED, signature_of
from collectives.steps import Barrier


def barrier_of(window, description: str, ranks, step: Barrier) -> Callable[[], object]:
    """Return the call that waits until the ranks of a Barrier have come."""
    if step.ranks is None or len(step.ranks) == window.size:
        return partial(window.flags.barrier, description)
    return partial(window.flags.subset_barrier, [ranks.index(rank) for rank in step.ranks], description)


class SplitBarrier:
    """A barrier in two calls, so that a plan in flight need not wait in it.

    Start says that this rank has come; Test looks whether all have, Wait waits for that.

    Parameters
    ----------
    start : function () -> what `test` and `wait` are given
    test : function -> whether all have come
    wait : function that waits for them
    """

    def __init__(self, start: Callable, test: Callable, wait: Callable):
        self.start, self.test, self.wait = start, test, wait
        self.awaited = None

    def Start(self):
        self.awaited = self.start()

    def Test(self) -> bool:
        return self.test(self.awaited)

    def Wait(self):
        self.wait(self.awaited)


def split_barrier_of(window, description: str, ranks, step: Barrier) -> SplitBarrier:
    """Return the same in two calls, for a plan in flight."""
    flags = window.flags
    if step.ranks is None or len(step.ranks) == window.size:
        return split_barrier(flags, description, UNSIGNED, lambda same: None)
    subset = [ranks.index(rank) for rank in step.ranks]
    wait = lambda counts: flags.wait_for_subset(counts, description)
    return SplitBarrier(partial(flags.arrive_at_subset, subset), flags.subset_arrived, wait)


def split_barrier(flags, description: str, marks: tuple[int, int], agree: Callable[[bool], None]) -> SplitBarrier:
    """Return a barrier of all ranks, which show `marks`; `agree` is called with whether all show the same."""

    def test(shown) -> bool:
        same = flags.arrived(*shown)
        if same is not None:
            agree(same)
        return same is not None

    return SplitBarrier(
        partial(flags.arrive, marks), test, lambda shown: agree(flags.wait_for_all(*shown, description))
    )


def first_barrier(window, description: str, places: list, epochs: int) -> tuple[Callable[[], None], Callable]:
    """Return the call that waits for all ranks of the window, and what makes the same as a SplitBarrier.

    It raises Disagreement on every rank where the signatures of the ranks differ.
    """
    marks, signed_barrier = signature_of(f"{description} at {places}"), window.flags.signed_barrier

    def agree(same=None):
        same = signed_barrier(marks, description) if same is None else same
        window.epoch += epochs if same else 1  # others may have put something into slots
        if not same:
            raise disagreement(window, description, places)

    return agree, partial(split_barrier, window.flags, description, marks, agree)


def disagreement(window, description: str, places: list) -> Disagreement:
    """Return what two ranks call that came to the first barrier with different signatures (collective)."""
    calls = window.comm.allgather((description, places))
    rank = next(rank for rank, call in enumerate(calls) if call != calls[0])
    (first, first_places), (other, other_places) = calls[0], calls[rank]
    if first != other:
        return Disagreement(f"ranks disagree: rank 0 calls {first}, rank {rank} calls {other}")
    one, another = ("the same part of a shared array" if p else "a private array" for p in (first_places, other_places))
    if first_places and other_places:
        one, another = (f"shared array {p[0][0]} from byte {p[0][1]} on" for p in (first_places, other_places))
    return Disagreement(
        f"{first}: rank 0 gives {one}, rank {rank} {another}; give the same part of an array from empty() on all "
        f"ranks, or private arrays on all"
    )
