"""The loader: global batches in a seeded order, cut into shards, read ahead on a thread.

A batch is *global*: `batch` samples over all shards. The order of an epoch is a permutation that depends on
(seed, epoch) alone; the loader of every shard draws the same one and takes its part of each batch. So the number of
shards changes nothing but who computes what, a loss is divided by the same total everywhere, and any step of any epoch
can be reached at once (`start_step`), which makes a resumed run equal to one that never stopped.

Small batches are gathered a block at a time (about half a MiB, so that it stays in cache) and handed out as
slices: an iteration over MNIST by 10 costs about 6 us, by 64 about 27 us (one core).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Never

import numpy as np

from nn.arguments import COUNT, Closed, Optional, refuse_others

from .dataset import Dataset, instead_of_dataset
from .transforms import sample_keys

BLOCK_BYTES = 512 * 1024


class BatchTooSmall(ValueError):
    """A global batch with fewer samples than shards.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> data = nn.data.Dataset(np.zeros((3, 2)), np.zeros(3, int), classes=2)
    >>> try:
    ...     nn.Loader(data, batch=1, shard=(0, 2))
    ... except nn.data.BatchTooSmall:
    ...     print("fewer samples in a batch than shards")
    fewer samples in a batch than shards
    """


class Loader(Closed):
    """Batches of a data set.

    Parameters
    ----------
    dataset : Dataset
    batch : int
        Samples in a global batch, over all shards. More than the data set holds makes one step an epoch.
    seed : int
        Seed of the order and of the transforms.
    shuffle : bool
        A new order each epoch; else the order of the data set.
    shard : (index, count) or (index, count, virtual)
        Which shard of each batch is read. With a third number each batch is cut into that many virtual shards, which
        are divided among `count` shards. Index None has no samples: it reads nothing, but knows the size of
        every batch.
    drop_last : bool
        Leave out a last batch that is not full.
    transform : callable (x, keys) -> x, or a sequence of them
        Applied to stored samples before conversion; see nn/data/transforms.py.
    dtype : float32, float64 or None
        That of the batches; None takes the data set's.
    prefetch : int or None
        Blocks read ahead on a thread; 0 reads when asked. None means 2 where reading takes time (a memory map, a
        transform), else 0, since gathering from memory costs less than handing over.
    timeline : callable (name, start, end)
        Told, in seconds of time.perf_counter, when a block was read ("read", on the reading thread) and when the
        consumer had to wait for one ("wait").

    Raises
    ------
    BatchTooSmall
        Fewer samples in a global batch than shards.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> data = nn.data.Dataset(np.zeros((10, 3)), np.zeros(10, int), classes=2)
    >>> [len(y) for x, y in nn.Loader(data, batch=4)]
    [4, 4, 2]
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: int = 32,
        seed: int = 0,
        shuffle: bool = True,
        shard: tuple[int | None, ...] = (0, 1),
        drop_last: bool = False,
        transform: Callable | Sequence[Callable] | None = None,
        dtype=None,
        prefetch: int | None = None,
        timeline: Callable[[str, float, float], None] | None = None,
        **others: Never,
    ):
        refuse_others("Loader", others, {"batch_size": "batch=", "num_workers": "prefetch=", "generator": "seed="})
        if not isinstance(dataset, Dataset):
            raise TypeError(f"Loader: {instead_of_dataset(dataset)}")
        batch = COUNT("Loader: batch", batch)
        if (
            not isinstance(shard, tuple | list)
            or len(shard) not in (2, 3)
            or not all(isinstance(n, int | np.integer) for n in (shard[0] or 0, *shard[1:]))
        ):
            raise TypeError(f"Loader: shard must be (index, count), such as a trainer's shard, given {shard!r:.80}")
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
            shuffle = ": shuffle= has a name" if isinstance(seed, bool) else ""
            raise ValueError(f"Loader: seed must be a whole number, not negative, given {seed!r:.80}{shuffle}")
        prefetch = Optional(COUNT)("Loader: prefetch", prefetch)
        transforms = () if transform is None else (transform,) if callable(transform) else tuple(transform)
        for function in transforms:
            if not callable(function) or isinstance(function, type):
                hint = ", the class itself: call it" if isinstance(function, type) else ""
                raise TypeError(f"Loader: a transform is a function (x, keys) -> x, given {function!r:.80}{hint}")
        if transforms and type(dataset).batch is not Dataset.batch:
            raise TypeError(
                f"Loader: a transform is given stored samples, and would never call {type(dataset).__name__}.batch: "
                "define raw(indices) -> (x, y) instead, or transform in batch"
            )
        index, count = shard[:2]
        if not 0 <= (index or 0) < count <= shard[-1]:
            raise ValueError(f"shard {shard}: expected (index, count) with 0 <= index < count, then virtual >= count")
        if batch < max(1, count):
            raise BatchTooSmall(
                f"a global batch of {batch} samples cannot be cut among {count} ranks: use a batch of at least "
                f"{count}, or fewer ranks"
            )
        self.dataset, self.batch, self.seed, self.shuffle = dataset, batch, int(seed), shuffle
        self.shard = shard
        self.drop_last = drop_last
        self.transforms = transforms
        self.dtype = np.dtype(dataset.dtype if dtype is None else dtype)
        self.prefetch = (2 if dataset.mapped or self.transforms else 0) if prefetch is None else prefetch
        self.timeline = timeline
        self._next_epoch = 0  # of `for x, y in loader`
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, order) that `targets` was asked for last

    def __repr__(self) -> str:
        return f"Loader({self.dataset!r}, batch={self.batch}, shuffle={self.shuffle}, {len(self)} steps an epoch)"

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over (x, y) of the next epoch: the first time epoch 0, then 1, in a new order each where it shuffles.

        `epoch` is the same for an epoch of one's choice, and says the size of the global batch, too.
        """
        number, self._next_epoch = self._next_epoch, self._next_epoch + 1
        return ((x, y) for x, y, _ in self.epoch(number))

    def __len__(self) -> int:
        """Steps in an epoch."""
        full, rest = divmod(len(self.dataset), self.batch)
        return full + bool(rest and not self.drop_last)

    def totals(self) -> set[int]:
        """Return the sizes of the batches of an epoch: of those that are full, and of the last one."""
        full, rest = divmod(len(self.dataset), self.batch)
        return {total for total in (self.batch * (full > 0), rest * (not self.drop_last)) if total}

    def order(self, epoch: int) -> np.ndarray:
        """Sample indices in the order of an epoch: (n,) int64, the same for every shard."""
        n = len(self.dataset)
        if not self.shuffle:
            return np.arange(n)
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(0, epoch))).permutation(n)

    def targets(self, epoch: int, step: int) -> np.ndarray:
        """Return the targets of the whole global batch at a step of an epoch, whatever the shard is.

        A loss whose rows count differently needs their weight, wherever the samples are.
        """
        known = self._order  # once: another thread may be in another epoch
        if known is None or known[0] != epoch:
            known = self._order = epoch, self.order(epoch)
        targets = self.dataset.y[known[1][step * self.batch : (step + 1) * self.batch]]  # samples are not read
        return self.dataset.targets(targets, self.dtype)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Iterate over an epoch from a step on: (x, y, total) a step.

        x and y are this shard's part, possibly empty, new arrays that are yours to keep; total is the number
        of samples in the global batch.
        """
        if not 0 <= start_step <= len(self):
            raise ValueError(f"start_step {start_step}: an epoch of {self.dataset.name} has {len(self)} steps")
        plan = self._plan(start_step)
        indices = self.order(epoch)

        def read(block):
            start = time.perf_counter()
            chosen = np.concatenate([indices[lo:hi] for lo, hi, _ in block])
            out = self._read(chosen, epoch)
            if self.timeline:
                self.timeline("read", start, time.perf_counter())
            return out

        return self._batches(plan, read)

    def step_slices(self, start_step: int = 0) -> list[tuple[int, int, int]]:
        """Return (lo, hi, total) for every step from `start_step` on.

        lo and hi are this shard's slice of the epoch's order, total the size of the global batch.
        """
        n, steps = len(self.dataset), []
        for step in range(start_step, len(self)):
            first = step * self.batch
            total = min(self.batch, n - first)
            lo, hi = _cut(total, *self.shard)
            steps.append((first + lo, first + hi, total))
        return steps

    def _plan(self, start_step: int) -> list[list[tuple[int, int, int]]]:
        """Return the items of `step_slices`, grouped into the blocks that are read at once."""
        steps = self.step_slices(start_step)
        sample = max(1, self.dataset.x[0].size * self.dtype.itemsize)
        per_block = max(1, BLOCK_BYTES // (sample * max(1, self.batch // self.shard[1])))
        return [steps[i : i + per_block] for i in range(0, len(steps), per_block)]

    def _read(self, indices, epoch):
        if not self.transforms:
            return self.dataset.batch(indices, self.dtype)
        x, y = self.dataset.raw(indices)
        keys = sample_keys(self.seed, epoch, indices)
        for position, transform in enumerate(self.transforms):
            x = transform(x, keys + np.uint64(position))
            if not isinstance(x, np.ndarray) or len(x) != len(y):
                result = f"{len(x)} samples" if isinstance(x, np.ndarray) else f"{x!r:.80}"
                raise ValueError(f"Loader: of {len(y)} samples the transform {transform!r:.80} made {result}")
        return self.dataset.convert(x, self.dtype), self.dataset.targets(y, self.dtype)

    def _batches(self, plan, read):
        results = map(read, plan) if self.prefetch == 0 else _ahead(read, plan, self.prefetch, self.timeline)
        for block, (x, y) in zip(plan, results, strict=True):
            at = 0
            for lo, hi, total in block:
                end = at + hi - lo
                yield x[at:end], y[at:end], total
                at = end


def _ahead(read: Callable, plan: list, depth: int, timeline: Callable | None) -> Iterator:
    """map(read, plan), at most `depth` results ahead, on a thread that ends with this generator."""
    results, slots, stop = queue.SimpleQueue(), threading.Semaphore(depth), threading.Event()

    def work():
        try:
            for block in plan:
                slots.acquire()
                if stop.is_set():
                    return
                results.put((read(block), None))
        except BaseException as error:  # handed over: the consumer raises it
            results.put((None, error))

    thread = threading.Thread(target=work, name="loader", daemon=True)
    thread.start()
    try:
        for _ in plan:
            start = time.perf_counter()
            result, error = results.get()
            if timeline:
                timeline("wait", start, time.perf_counter())
            if error is not None:
                raise error
            slots.release()
            yield result
    finally:
        stop.set()
        slots.release()
        thread.join()


def _cut(total: int, index: int | None, count: int, virtual: int | None = None) -> tuple[int, int]:
    """Return (lo, hi) of a shard in a batch of `total` samples; with `virtual` shards, of those assigned to it."""
    if index is None:
        return 0, 0
    if virtual is None:
        return _nearly_equal_part(total, index, count)
    first, last = _nearly_equal_part(virtual, index, count)
    return _nearly_equal_part(total, first, virtual)[0], _nearly_equal_part(total, last - 1, virtual)[1]


def _nearly_equal_part(count: int, i: int, n: int) -> tuple[int, int]:
    """Return (lo, hi) of slice i of `count` elements cut into n: the first count % n slices are one longer."""
    size, longer = divmod(count, n)
    lo = size * i + min(i, longer)
    return lo, lo + size + (i < longer)
