"""Tensors that are cut: every one of several ranks holds a part, and they compute a layer together.

A Spec says how its array may be cut (Split). What a part holds is drawn whole and then cut, so it has the values that
it has in one process, and checkpoints hold whole arrays, which `join` puts together and `cut` takes apart: whoever
trains in n parts continues what was trained in m, or in one.

    part = network.part(1, 2)                        # the second of two
    part.layout.initialize(w, seed)
    mine = cut(part.whole.specs, state, 1, 2)        # a part's state, of a checkpoint's
    state = join(part.whole.specs, [state of part 0, mine])

Layers take their sizes from the arrays in p. Source: Shoeybi et al. 2019 (which ways to cut a transformer pay).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from nn.core.layer import ShapeError, Spec


def cut(whole: Mapping[str, Spec], state: Mapping[str, np.ndarray], index: int, count: int) -> dict[str, np.ndarray]:
    """Part `index` of `count` of whole arrays: copies of what is cut, other entries as they are.

    Parameters
    ----------
    whole : dict of Spec
        By full name, those of whole arrays, such as Network.whole.specs: they say what is cut.
    state : dict of arrays
        By full name, perhaps with a prefix such as "param/" or "optimizer/velocity/". Other names are passed on.

    Raises
    ------
    ShapeError
        An array is not whole, or cannot be cut into so many parts.
    """
    check_part(index, count)
    found = dict(state)
    for key, spec in _cut_entries(whole, state):
        if state[key].shape != spec.shape:
            raise ShapeError(f"{key}: expected the whole array, of shape {spec.shape}, given {state[key].shape}")
        found[key] = _take(_name(key), spec, state[key], index, count)
    return found


def join(whole: Mapping[str, Spec], states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Whole arrays from those of all parts, in their order; what is not cut is the first part's.

    Raises
    ------
    ShapeError
        An array is not that of a part: which one, expected and given.
    """
    found = dict(states[0])
    for key, spec in _cut_entries(whole, states[0]):
        pieces, split = [state[key] for state in states], spec.split
        for index, piece in enumerate(pieces):
            if piece.shape != (shape := part_shape(_name(key), spec, index, len(states))):
                raise ShapeError(f"{key}: expected {shape} of part {index} of {len(states)}, given {piece.shape}")
        blocks = [_in_blocks(piece, split) for piece in pieces]
        found[key] = np.concatenate(blocks, axis=split.axis + 1).reshape(spec.shape)
    return found


def inside(name: str, spec: Spec, array: np.ndarray, index: int, count: int) -> np.ndarray:
    """Where part `index` of `count` lies in a whole contiguous array that is cut: a view, with an axis of blocks."""
    lo, hi = _bounds(name, spec, index, count)
    before = (slice(None),) * (spec.split.axis + 1)
    return _in_blocks(array, spec.split)[(*before, slice(lo, hi))]


def check_part(index: int, count: int) -> None:
    """Refuse a part that there is not, with a ValueError."""
    if not 0 <= index < count:
        raise ValueError(f"there is no part {index} of {count}: they are numbered from 0")


def chosen(specs: dict, borrowed: Mapping[str, Spec], only: Iterable[str] | None) -> tuple[dict, dict]:
    """Both with the split of those Specs only that are chosen: of layers at the paths `only`, and inside them."""
    if only is None:
        return specs, dict(borrowed)
    paths, found = set(only), {""}

    def keep(path: str, spec: Spec) -> Spec:
        outer = {"", *accumulate(path.split("."), "{}.{}".format)}  # of "2.0.body": "2", "2.0" and itself
        found.update(outer)
        return spec if outer & paths else replace(spec, split=None)

    def walk(tree: dict, path: str) -> dict:
        return {
            name: walk(entry, f"{path}.{name}" if path else name) if isinstance(entry, dict) else keep(path, entry)
            for name, entry in tree.items()
        }

    result = walk(specs, ""), {name: keep(name.rpartition(".")[0], spec) for name, spec in borrowed.items()}
    if missing := sorted(paths - found):
        raise ValueError(f"no layer with parameters is at {', '.join(map(repr, missing))}: nothing to cut there")
    return result


def largest(whole: Mapping[str, Spec], count: int) -> dict[str, int]:
    """Elements of the largest of `count` parts of every array that is cut, by full name: the last one's.

    With room for so many, all parts' layouts put the same array in the same place: what is whole on every rank, and is
    summed over others in pieces, is then cut and added up alike on all.
    """
    return {
        name: math.prod(part_shape(name, spec, count - 1, count))
        for name, spec in whole.items()
        if spec.split is not None
    }


def part_specs(tree: dict, whole: Mapping[str, Spec], index: int, count: int, prefix: str = "") -> dict:
    """The Specs of part `index` of `count`, each with the part's shape; `whole` has those of whole arrays by name."""
    result = {}
    for name, entry in tree.items():
        full = prefix + name
        if isinstance(entry, dict):
            result[name] = part_specs(entry, whole, index, count, f"{full}.")
        elif entry.tied:  # it is the owner's, and cut as that is
            result[name] = replace(entry, shape=_part(entry.tied, whole[entry.tied], index, count).shape)
        else:
            result[name] = _part(full, entry, index, count)
    return result


def _part(name: str, spec: Spec, index: int, count: int) -> Spec:
    """The Spec of a part, which draws the whole array and cuts it."""
    if spec.split is None:
        return spec

    def init(rng: np.random.Generator, shape) -> np.ndarray:
        return _take(name, spec, spec.init(rng, spec.shape), index, count)

    return replace(spec, shape=part_shape(name, spec, index, count), init=init, split=None)


def _take(name: str, spec: Spec, array: np.ndarray, index: int, count: int) -> np.ndarray:
    """A part of a whole array."""
    lo, hi = _bounds(name, spec, index, count)
    blocks = _in_blocks(array, spec.split)
    return blocks.take(range(lo, hi), axis=spec.split.axis + 1).reshape(part_shape(name, spec, index, count))


def _in_blocks(array: np.ndarray, split) -> np.ndarray:
    """The array with an axis of blocks before the one that is cut."""
    axis = split.axis
    return array.reshape(*array.shape[:axis], split.blocks, array.shape[axis] // split.blocks, *array.shape[axis + 1 :])


def part_shape(name: str, spec: Spec, index: int, count: int) -> tuple[int, ...]:
    """The shape of a part of an array that is cut."""
    lo, hi = _bounds(name, spec, index, count)
    axis = spec.split.axis
    return (*spec.shape[:axis], spec.split.blocks * (hi - lo), *spec.shape[axis + 1 :])


def _bounds(name: str, spec: Spec, index: int, count: int) -> tuple[int, int]:
    """Where a part's share of every block begins and ends."""
    split, size = spec.split, spec.shape[spec.split.axis] // spec.split.blocks
    units = split.units or size
    if units < count or (split.units and units % count):
        kind = f"{units} units of {size // units} (such as heads)" if split.units else f"{units} entries"
        raise ShapeError(
            f"{name} has {kind} on axis {split.axis}, which cannot be cut into {count} parts: use a number of parts "
            + ("that divides them" if split.units else "that is no larger")
        )
    return tuple(units * i // count * (size // units) for i in (index, index + 1))


def _cut_entries(whole: Mapping[str, Spec], state: Mapping[str, np.ndarray]):
    """(key, Spec) of what is cut."""
    for key in state:
        spec = whole.get(_name(key))
        if spec is not None and spec.split is not None:
            yield key, spec


def _name(key: str) -> str:
    """The array's full name, without a prefix such as "param/"."""
    return key.rpartition("/")[2]
