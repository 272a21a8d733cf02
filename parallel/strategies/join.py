"""Ranks whose own data ends at different times train together until the last one is done.

    for x, y, total in join(my_batches, communicator):
        trainer.step(x, y, total)

In each round every rank announces how many samples it has; the sum is the size of the global batch, so that every
sample counts once and alike, whichever rank has it. A rank that is done, or never had anything, goes on with empty
arrays, and so takes part in every allreduce: nobody hangs. Cost: one allgather of two numbers a step.

Where one data set is cut among the ranks a Loader does all this without messages. Source: PyTorch's Join, 2021.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from parallel.passes.forward_backward import UnevenTotal


def join(batches: Iterable, communicator) -> Iterator[tuple[np.ndarray, np.ndarray, UnevenTotal]]:
    """Iterate over this rank's batches until all ranks are done (collective).

    Parameters
    ----------
    batches : iterable of (x, y)
        This rank's own; as many as it has, of any length.
    communicator : MPI.Intracomm or collectives.Communicator

    Yields
    ------
    x, y : arrays, empty where this rank has no more
    total : UnevenTotal
        Samples of all ranks in this round, at least one.

    Raises
    ------
    ValueError
        On all ranks: batches of different shapes or dtypes, or x and y of different lengths; the message names ranks.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.DistributedDataParallel(network, loss, optimizer, communicator)
    >>> own = [(x.astype(np.float32), y)] * (1 + communicator.rank)  # rank 1 has more batches
    >>> for images, targets, total in parallel.join(own, communicator):
    ...     value = trainer.step(images, targets, total)
    >>> trainer.steps == communicator.size
    True
    >>> trainer.close()
    """
    rank = communicator.Get_rank()
    batches = iter(batches)
    kind = None  # shapes of samples and dtypes, the same on every rank
    done = False
    announced, mine = np.empty((communicator.Get_size(), 2), np.int64), np.empty(2, np.int64)
    while True:
        x = y = None
        if not done:
            x, y = next(batches, (None, None))
            done = x is None
        fits = done or (len(x) == len(y) and kind in (None, _kind(x, y)))
        mine[:] = 0 if done else len(x), DONE if done else FITS if fits else DIFFERS
        communicator.Allgather(mine, announced)
        if (announced[:, 1] == DONE).all():
            return
        if kind is None or (announced[:, 1] == DIFFERS).any():
            kind = _agree(communicator, kind, x, y)
            empty = tuple(np.empty((0, *shape), dtype) for shape, dtype in kind)
        total = int(announced[:, 0].sum())
        if total:  # else: empty batches only
            yield *(empty if done else (x, y)), UnevenTotal(total, int(announced[:rank, 0].sum()))


DONE, FITS, DIFFERS = range(3)


def _kind(x, y) -> tuple:
    return (x.shape[1:], x.dtype.str), (y.shape[1:], y.dtype.str)


def _agree(communicator, kind, x, y) -> tuple:
    """What batches are made of, by the ranks that have one."""
    announced = communicator.allgather(None if x is None else (_kind(x, y), len(x), len(y)))
    kind = kind or next(each[0] for each in announced if each)
    for rank, each in enumerate(announced):
        if each and each[1] != each[2]:
            raise ValueError(f"join: rank {rank} has {each[1]} samples and {each[2]} targets in a batch")
        if each and each[0] != kind:
            raise ValueError(f"join: rank {rank} has samples and targets of {each[0]}, expected {kind}")
    return kind
