"""The pool: memory is used again as soon as, and never before, nobody refers to it; a step allocates nothing large."""

import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nn.losses import CrossEntropyLoss
from nn.memory import ALIGN, SMALL, Memory
from nn.models import build
from nn.optimizers import SGD
from nn.serial import Serial

LARGE = (SMALL, 4)  # 64 KiB of float32


def address(array):
    return array.__array_interface__["data"][0]


def test_freed_memory_is_used_again_and_held_memory_is_not():
    memory = Memory()
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
    memory = Memory()
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
    memory, live = Memory(), []
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
    memory = Memory()
    a = memory.scratch("a", (10, 20), np.float32)
    assert memory.scratch("a", (10, 20), np.float32) is a
    assert np.shares_memory(memory.scratch("a", (50,), np.float64), a)
    assert not np.shares_memory(memory.scratch("b", (10, 20), np.float32), a)
    larger = memory.scratch("a", (100, 200), np.float32)
    assert larger.shape == (100, 200)
    assert np.shares_memory(memory.scratch("a", (10, 20), np.float32), larger)


def test_ones_cannot_be_written():
    ones = Memory().ones(5, np.dtype(np.float32))
    assert (ones == 1).all() and ones.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        ones[0] = 2


def test_clear_forgets_but_arrays_live_on():
    memory = Memory()
    a = memory.empty(LARGE, np.float32)
    a[...] = 3
    memory.clear()
    assert memory.nbytes == 0
    memory.empty(LARGE, np.float32)[...] = 0
    assert (a == 3).all()


@pytest.mark.parametrize(
    "spec, in_shape, batch",
    [("mlp:784,128,10", (784,), 64), ("cnn", (28, 28, 1), 16), ("transformer:32,2,2", (32,), 8)],
)
def test_a_training_step_allocates_nothing_large(spec, in_shape, batch):
    """After the first steps the pool has all that a step needs: it stays as it is, and NumPy takes little besides."""
    network = build(spec, in_shape, 10)
    trainer = Serial(network, CrossEntropyLoss(), SGD(lr=0.01, momentum=0.9))
    rng = np.random.default_rng(0)
    if spec.startswith("transformer"):
        x, y = rng.integers(0, 10, (batch, *in_shape)), rng.integers(0, 10, (batch, *in_shape))
    else:
        x, y = rng.standard_normal((batch, *in_shape)).astype(np.float32), rng.integers(0, 10, batch)
    for _ in range(3):
        trainer.step(x, y)
    held = trainer.run.common.memory.nbytes
    tracemalloc.start()
    try:
        trainer.step(x, y)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        trainer.step(x, y)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert trainer.run.common.memory.nbytes == held
    assert peak < 160 << 10, f"{peak} bytes"  # 128 KiB are a block of the optimizer's


def test_reference_counts_are_what_the_pool_expects():
    """The pool rests on sys.getrefcount: that a view's base is the owner, however many views lie between."""
    owner = np.empty(100, np.uint8)
    count = sys.getrefcount(owner)
    view = np.ndarray((5, 5), np.float32, owner)[1:][::2].T
    assert sys.getrefcount(owner) == count + 1
    del view
    assert sys.getrefcount(owner) == count
