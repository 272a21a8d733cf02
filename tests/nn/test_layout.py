"""The layout: order, alignment, views of one buffer, first values, regions and ties."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nn.core.layer import ShapeError, Spec
from nn.core.layout import ALIGN, Layout
from nn.initializers import normal, zeros

FIRST = normal()


def numbered(parts):
    return {str(i): part for i, part in enumerate(parts)}


TREE = {
    "0": {"W": Spec((3, 5), FIRST), "b": Spec((5,), zeros, decay=False)},
    "1": {},
    "2": {"0": {"W": Spec((5, 7), FIRST), "mean": Spec((7,), zeros, buffer=True)}, "1": {"W": Spec((1,), FIRST)}},
    "3": {"W": Spec((17,), FIRST)},
}
shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
leaves = st.dictionaries(st.sampled_from(["W", "b", "c"]), shapes.map(lambda s: Spec(s, FIRST)), max_size=3)
trees = st.recursive(leaves, lambda inner: st.lists(inner, min_size=1, max_size=3).map(numbered), max_leaves=8)


def test_last_layer_first():
    layout = Layout(TREE)
    assert list(layout.slices) == ["3.W", "2.1.W", "2.0.W", "0.W", "0.b"]
    assert [s.start for s in layout.slices.values()] == [0, 32, 48, 96, 112]
    assert layout.count == 17 + 1 + 35 + 15 + 5
    assert layout.ends == {"3": 32, "2.1": 48, "2.0": 96, "2": 96, "1": 96, "0": 128, "": 128}
    state = Layout(TREE, buffers=True)
    assert list(state.slices) == ["2.0.mean"] and state.count == 7


@settings(max_examples=60, deadline=None)
@given(trees)
def test_entries_are_aligned_apart_and_all_there(tree):
    layout = Layout(tree)
    places = sorted(layout.slices.values(), key=lambda s: s.start)
    assert all(place.start % ALIGN == 0 for place in places) and layout.size % ALIGN == 0
    for a, b in itertools.pairwise(places):
        assert a.stop <= b.start
    assert layout.count == sum(math.prod(spec.shape) for spec in layout.specs.values())
    buffer = layout.zeros(np.float64)
    layout.initialize(buffer, 0)
    for name, array in layout.items(buffer):
        assert array.shape == layout.specs[name].shape and np.shares_memory(array, buffer)
        array[...] = np.nan
    inside = np.zeros(layout.size, bool)
    for place in places:
        inside[place] = True
    assert np.isnan(buffer[inside]).all() and (buffer[~inside] == 0).all()


def test_views_are_the_buffer():
    layout = Layout(TREE)
    buffer = np.arange(layout.size, dtype=np.float32)
    views = layout.views(buffer)
    assert views[0].W.shape == (3, 5) and views[2][1].W.shape == (1,) and vars(views[1]) == {}
    views[2][0].W[4, 6] = -1
    assert dict(layout.items(buffer))["2.0.W"][4, 6] == -1
    assert not hasattr(views[2][0], "mean")
    for wrong in (np.zeros((2, 64)), np.zeros(layout.size - 1)):
        with pytest.raises(ValueError, match=f"flat buffer of {layout.size}"):
            layout.views(wrong)


def test_first_values_hang_on_seed_and_name_alone():
    layout = Layout(TREE)
    a, b, c = (layout.zeros(np.float64) for _ in range(3))
    b[:] = 7
    layout.initialize(a, 3)
    layout.initialize(b, 3)
    layout.initialize(c, 4)
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    other = Layout({"0": TREE["0"], "3": TREE["3"]})
    d = other.zeros(np.float32)
    other.initialize(d, 3)
    for name, array in other.items(d):
        assert np.array_equal(array, dict(layout.items(a))[name].astype(np.float32))
    assert np.unique(a[a != 0]).size == 17 + 1 + 35 + 15


@settings(max_examples=60, deadline=None)
@given(trees, st.data())
def test_regions_of_a_cut_cover_the_whole(tree, data):
    layout = Layout(tree)
    cut = data.draw(st.integers(0, layout.size))
    marks = np.zeros(layout.size, int)
    for lo, hi in ((0, cut), (cut, layout.size)):
        for name, place, spec in layout.region(lo, hi).tensors:
            assert layout.specs[name] is spec
            marks[lo + place.start : lo + place.stop] += 1
    inside = np.zeros(layout.size, int)
    for place in layout.slices.values():
        inside[place] += 1
    assert np.array_equal(marks, inside)


def test_decayed_parts():
    region = Layout(TREE).region()
    decays = np.zeros(128, bool)
    for part in region.decayed:
        decays[part] = True
    layout = Layout(TREE)
    for name, place in layout.slices.items():
        assert decays[place].all() == layout.specs[name].decay == decays[place].any()
    assert len(region.decayed) == 1  # four neighbours, joined


def test_ties():
    tied = Spec((3, 5), zeros, tied="0.W")
    layout = Layout(
        {"0": {"W": Spec((3, 5), FIRST)}, "1": {"W": Spec((5, 5), FIRST)}, "2": {"W": tied}, "3": {"V": tied}}
    )
    assert list(layout.slices) == ["1.W", "0.W"] and layout.count == 40
    assert layout.shared == {"0", "2"}  # layer 3 is the first to write
    views = layout.views(layout.zeros(np.float32))
    assert np.shares_memory(views[0].W, views[2].W) and np.shares_memory(views[0].W, views[3].V)
    state = Layout({"0": {"W": Spec((3, 5), FIRST)}, "2": {"W": tied}}, buffers=True)
    assert state.size == 0 and state.shared == set()


def test_ties_that_cannot_be():
    owner = {"W": Spec((3, 5), FIRST)}
    for tree, words in (
        ({"0": owner, "1": {"W": Spec((5, 3), zeros, tied="0.W")}}, r"layer 1: needs shape \(5, 3\).*\(3, 5\)"),
        ({"0": {"W": Spec((3, 5), zeros, tied="1.W")}, "1": owner}, "tied"),
        ({"0": owner, "1": {"W": Spec((3, 5), zeros, tied="9.W")}}, "tied"),
        ({"0": owner | {"b": Spec((5,), zeros)}, "1": {"W": Spec((3, 5), zeros, tied="0.W")}}, "other parameters"),
        ({"0": owner, "1": {"b": Spec((5,), zeros), "W": Spec((3, 5), zeros, tied="0.W")}}, "other parameters"),
    ):
        with pytest.raises(ShapeError, match=words):
            Layout(tree)
