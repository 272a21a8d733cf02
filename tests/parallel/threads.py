"""Ranks as threads of one process, for tests of what a group of ranks computes: no launch, and any number of them.

results = on_threads(4, lambda group: ...)
"""

import threading
from collections import Counter

import numpy as np

from nn.core.context import Group


class Threads(Group):
    """One of several threads that compute together; counts its calls, and the elements that it gave."""

    def __init__(self, rank, size, barrier, table):
        self.rank, self.size, self.barrier, self.table = rank, size, barrier, table
        self.calls, self.elements = Counter(), Counter()

    def _all(self, name, array):
        self.calls[name] += 1
        self.elements[name] += array.size
        self.table[self.rank] = array
        self.barrier.wait()
        found = [np.array(each) for each in self.table]
        assert len({each.dtype for each in found}) == 1
        self.barrier.wait()
        return found

    def sum(self, array):
        assert array.flags.c_contiguous, "an allreduce needs it"
        array[...] = sum(self._all("sum", array))

    def maximum(self, array):
        array[...] = np.max(self._all("maximum", array), axis=0)

    def all_gather(self, array):
        return np.stack(self._all("all_gather", array))

    def reduce_scatter(self, array):
        return sum(self._all("reduce_scatter", array))[self.rank]

    def all_to_all(self, array):
        return np.stack([each[self.rank] for each in self._all("all_to_all", array)])


def on_threads(size, work):
    """work(group) on so many threads; returns what each returned. One that fails ends the others' waiting."""
    barrier, table = threading.Barrier(size, timeout=60), [None] * size
    results, errors = [None] * size, []

    def one(rank):
        try:
            results[rank] = work(Threads(rank, size, barrier, table))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
