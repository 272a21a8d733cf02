"""Rows of the table of a trainer's arrays: their fragments make whole arrays, and take as many bytes as they say."""

import numpy as np
import pytest

import nn
from parallel import DistributedDataParallel
from parallel.state.fragments import GatheredFragments
from parallel.state.placed import Partial, PlacedArray, Range, Shard
from parallel.state.table import as_addends

RANKS = 3


def layout():
    return nn.Network(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (5,), "float64").layout


def shards(whole):
    """A row of each rank, with two ranges of the layout behind one another in its buffer."""
    half, rows = whole.size // 2, []
    for rank in range(RANKS):
        ranges, parts, at = [], [], 0
        for lo, hi in (0, half), (half, whole.size):
            start, stop = (lo + (hi - lo) * i // RANKS for i in (rank, rank + 1))
            ranges.append(Range(start, stop, at))
            parts.append(np.arange(start, stop, dtype=np.float64))
            at += stop - start
        rows.append(PlacedArray("param", "parameters", np.concatenate(parts), whole, Shard(RANKS), tuple(ranges)))
    return rows


def test_fragments_of_all_shards_make_whole_arrays():
    whole, rows = layout(), shards(layout())
    found = GatheredFragments(row.fragments() for row in rows)
    for name, array in whole.items(np.arange(whole.size, dtype=np.float64)):
        np.testing.assert_array_equal(found[f"param/{name}"], array)
    with pytest.raises(ValueError, match="missing"):  # control
        GatheredFragments(row.fragments() for row in rows[:-1])
    assert sum(row.expected_bytes for row in rows) == whole.count * 8


def test_a_fragment_takes_its_elements_from_a_whole_array():
    whole = layout()
    values = {f"param/{name}": array for name, array in whole.items(np.arange(whole.size, dtype=np.float64))}
    for row in shards(whole):
        wanted = row.buffer.copy()
        row.buffer[:] = -1
        for fragment in row.fragments():
            fragment.fill(values[fragment.name])
        held = np.concatenate([fragment.array for fragment in row.fragments()])
        assert (held >= 0).all() and np.isin(held, wanted).all()


def test_addends_lie_along_a_first_axis_and_are_dealt_to_other_numbers_of_ranks():
    whole = layout()
    rows = [
        PlacedArray("compress/error", "moments", np.full(whole.size, i + 1.0), whole, Partial(i, 3)) for i in range(3)
    ]
    found = GatheredFragments(row.fragments() for row in rows)
    error = found["compress/error/0.W"]
    assert error.shape == (3, 5, 7) and [set(addend.flat) for addend in error] == [{1.0}, {2.0}, {3.0}]
    assert as_addends(error, 3) is error
    for count in (1, 2, 5):
        other = as_addends(error, count)
        assert other.shape == (count, 5, 7) and not other[1:].any()
        np.testing.assert_array_equal(other.sum(0), error.sum(0))


def test_a_trainer_prints_its_table():
    network = nn.Network(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (5,))
    trainer = DistributedDataParallel(network, nn.CrossEntropyLoss(), nn.Adam(0.1), None, shards=2)
    table = trainer.summary()
    for name in ("param ", "gradients ", "optimizer/mean ", "Replicate", "steps "):
        assert name in table, name
    assert trainer.memory()["moments"] == 2 * trainer.flat_parameters.nbytes
    trainer.close()
