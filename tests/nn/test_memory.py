"""The pool: memory is used again as soon as, and never before, nobody refers to it; a step allocates nothing large."""

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nn.core.memory_pool import ALIGN, SMALL, VIEWS, MemoryPool
from nn.losses import CrossEntropyLoss
from nn.models import build
from nn.optim.optimizers import SGD
from nn.training.trainer import Trainer

LARGE = (SMALL, 4)  # 64 KiB of float32


def address(array):
    return array.__array_interface__["data"][0]


def test_freed_memory_is_used_again_and_held_memory_is_not():
    memory = MemoryPool()
    a = memory.empty(LARGE, np.float32)
    first = address(a)
    b = memory.empty(LARGE, np.float32)
    assert address(b) != first
    del a
    c = memory.empty(LARGE, np.float32)
    assert address(c) == first
    assert memory.nbytes == 2 * (c.nbytes + ALIGN)


@pytest.mark.parametrize("view", [lambda a: a[3:5], lambda a: a.T, lambda a: a.reshape(-1)[7:9].view(np.int32)])
def test_a_view_keeps_its_memory(view):
    memory = MemoryPool()
    kept = view(memory.empty(LARGE, np.float32))
    kept[...] = 5
    others = [memory.empty(LARGE, np.float32) for _ in range(3)]
    for other in others:
        assert not np.shares_memory(kept, other)
        other[...] = 0
    assert (kept == 5).all()
    where = address(kept)
    del kept, other, others
    assert any(address(a) <= where < address(a) + a.nbytes for a in [memory.empty(LARGE, np.float32) for _ in range(4)])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([(1024, 4), (4096,), (2, 2048)])), max_size=40)
)
def test_arrays_in_use_never_overlap(actions):
    memory, live = MemoryPool(), []
    for keep, index, shape in actions:
        if keep or not live:
            array = memory.empty(shape, np.float32)
            array[...] = len(live)
            live.append((array, float(len(live))))
        else:
            live.pop(index % len(live))
            continue
        assert address(array) % ALIGN == 0
        for other, value in live:
            assert (other == value).all()


def test_workspaces_by_name():
    memory = MemoryPool()
    a = memory.workspace("a", (10, 20), np.float32)
    assert memory.workspace("a", (10, 20), np.float32) is a
    assert np.shares_memory(memory.workspace("a", (50,), np.float64), a)
    assert not np.shares_memory(memory.workspace("b", (10, 20), np.float32), a)
    larger = memory.workspace("a", (100, 200), np.float32)
    assert larger.shape == (100, 200)
    assert np.shares_memory(memory.workspace("a", (10, 20), np.float32), larger)


def test_ones_cannot_be_written():
    ones = MemoryPool().ones(5, np.dtype(np.float32))
    assert (ones == 1).all() and ones.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        ones[0] = 2


def test_blocks_of_one_slab_are_used_again_one_by_one():
    """Arrays of 2 MiB share memory of 32 MiB, which lives as long as any of them."""
    memory = MemoryPool()
    arrays = [memory.empty((1 << 19,), np.float32) for _ in range(20)]
    for i, array in enumerate(arrays):
        array[...] = i
    first, second, *_ = addresses = list(map(address, arrays))
    assert len({a // ALIGN for a in addresses}) == 20 and not any(a % ALIGN for a in addresses)
    assert second - first == arrays[0].nbytes + ALIGN, "side by side, so that large pages hold both"
    left = len(memory._slab)
    assert memory.empty((170_000,), np.float32).size and len(memory._slab) == left, "of 1 MiB, a third is not touched"
    del arrays[3:5], array
    assert {address(memory.empty((1 << 19,), np.float32)) for _ in range(3)} <= set(addresses[3:5])
    memory.clear()
    others = [memory.empty((1 << 19,), np.float32) for _ in range(20)]
    for other in others:
        other[...] = -1
    assert [int(a[0]) for a in arrays] == [*range(3), *range(5, 20)]


def test_a_workspace_that_grows_leaves_its_memory_to_others():
    memory = MemoryPool()
    small = address(memory.workspace("a", LARGE, np.float32))
    memory.workspace("a", (2 * SMALL, 4), np.float32)
    assert address(memory.empty(LARGE, np.float32)) == small
    for n in range(1, 1000):
        memory.workspace("b", (n, 1024), np.float32)
    assert memory.nbytes < 3 * 1000 * 4096, "all sizes together: less than twice the largest power of two"


def test_clear_forgets_but_arrays_live_on():
    memory = MemoryPool()
    a = memory.empty(LARGE, np.float32)
    a[...] = 3
    memory.clear()
    assert memory.nbytes == 0
    memory.empty(LARGE, np.float32)[...] = 0
    assert (a == 3).all()


def test_batches_of_all_sizes_need_little_more_than_the_largest():
    """A block of its own for every size would be 100 times as much: sizes from 1 to 200 times 4 KiB, 5 in use."""
    memory, largest = MemoryPool(), 5 * 200 * 4096
    for n in [*range(1, 201), *range(200, 0, -1)]:
        live = [memory.empty((n, 1024), np.float32) for _ in range(5)]
        memory.ones(n, np.dtype(np.float32)), memory.workspace("a", (n,), np.float32)
        del live
    assert memory.nbytes < 3 * largest, "rounded up to a power of two, and each smaller one: less than 4 / 1.6"


def test_views_and_ones_of_sizes_that_come_once_are_not_kept():
    memory, dtype = MemoryPool(), np.dtype(np.float32)
    tracemalloc.start()
    try:
        for n in range(10 * VIEWS, 0, -1):
            assert len(memory.ones(n, dtype)) == n
            memory.workspace("a", (n,), dtype)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (memory.ones(10 * VIEWS, dtype) == 1).all() and kept < 1000 * VIEWS, f"{kept} bytes"


@pytest.mark.parametrize("first", [0, -1], ids=["1F1B", "GPipe"])
def test_the_search_stays_short_with_many_micro_batches_in_flight(first):
    """Blocks looked at for one request, in the second step: forward of 200 micro-batches, then backward of each."""
    memory, looks = MemoryPool(), 0

    def step(micro_batches=200, layers=4):
        flying = [[memory.empty(LARGE, np.float32) for _ in range(layers)] for _ in range(micro_batches)]
        while flying:
            saved, gy = flying.pop(first), None
            while saved:
                gx = memory.empty(LARGE, np.float32)
                saved.pop()
                gy = gx
            del gx, gy
        return 2 * micro_batches * layers

    def count(frame, event, function):
        nonlocal looks
        looks += event == "c_call" and function is sys.getrefcount

    step()
    held = memory.nbytes
    sys.setprofile(count)
    try:
        requests = step()
    finally:
        sys.setprofile(None)
    assert requests <= looks < 6 * requests
    assert memory.nbytes == held


@pytest.mark.parametrize(
    "spec, in_shape, batch",
    [
        ("mlp:784,128,10", (784,), 64),
        ("cnn", (28, 28, 1), 16),
        ("transformer:32,2,2", (32,), 8),
        ("lstm:64,2", (32,), 16),
    ],
)
def test_a_training_step_allocates_nothing_large(spec, in_shape, batch):
    """After the first steps the pool has all that a step needs: it stays as it is, and NumPy takes little besides."""
    network = build(spec, in_shape, 10)
    trainer = Trainer(network, CrossEntropyLoss(), SGD(lr=0.01, momentum=0.9))
    rng = np.random.default_rng(0)
    if len(in_shape) == 1 and not spec.startswith("mlp"):
        x, y = rng.integers(0, 10, (batch, *in_shape)), rng.integers(0, 10, (batch, *in_shape))
    else:
        x, y = rng.standard_normal((batch, *in_shape)).astype(np.float32), rng.integers(0, 10, batch)
    for _ in range(3):
        trainer.step(x, y)
    held = trainer.ctx.network_context.pool.nbytes
    tracemalloc.start()
    try:
        trainer.step(x, y)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        trainer.step(x, y)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert trainer.ctx.network_context.pool.nbytes == held
    assert peak < 160 << 10, f"{peak} bytes"  # 128 KiB are a block of the optimizer's


def test_training_on_batches_of_many_sizes_holds_what_the_largest_needs():
    def held(sizes):
        trainer = Trainer(build("mlp:4,16,16,10", (4,), 10), CrossEntropyLoss(), SGD(lr=0.01))
        for n in sizes:
            trainer.step(np.zeros((n, 4), np.float32), np.zeros(n, int))
        return trainer.ctx.network_context.pool.nbytes

    assert held(range(80, 480, 4)) < 2.5 * held([476, 476])


def test_reference_counts_are_what_the_pool_expects():
    """The pool rests on sys.getrefcount: that a view's base is the owner, however many views lie between."""
    owner = np.empty(100, np.uint8)
    count = sys.getrefcount(owner)
    view = np.ndarray((5, 5), np.float32, owner)[1:][::2].T
    assert sys.getrefcount(owner) == count + 1
    del view
    assert sys.getrefcount(owner) == count
