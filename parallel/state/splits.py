"""Arrays that are split: every rank of a tensor group holds a part, and they compute a layer together.

Which arrays are split, and how, is said once, by the layers of tensor parallelism (strategies/tensor/layers.py): their
specs have a SplitSpec where a layer of `nn` has a Spec. So `nn` knows nothing of it, and a layer's name in the
literature (ColumnLinear, RowLinear) says how it is split.

    part = NetworkPart(network, 1, 2)                # the second of two
    part.layout.initialize(w, seed)
    mine = cut(part.whole_specs, state, 1, 2)        # a part's state, of a checkpoint's
    state = merge(part.whole_specs, [state of part 0, mine])

What a part holds is drawn whole and then cut, so it has the values that it has in one process, and checkpoints hold
whole arrays: training in n parts continues what was trained in m, or in one. Layers take their sizes from the arrays in
p. Source: Shoeybi et al. 2019 (which ways to cut a transformer pay).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from nn.core.layer import ShapeError, Spec
from nn.core.layout import Layout
from nn.core.network import Network
from parallel.axis import DIVIDE_ARRAYS
from parallel.mesh import Mesh


@dataclass(frozen=True)
class Split:
    """How an array is cut into parts.

    Parameters
    ----------
    axis : int
        The axis that is cut.
    blocks : int
        Number of blocks of one size along the axis; every part gets its share of each: 3 where queries, keys and values
        are one matrix.
    units : int
        Number of units in a block, such as heads, which are never cut; all parts get equally many. 0: single entries,
        of which parts may have one more or less.
    copies : int
        How many ranks have each part: n ranks have n / copies parts, dealt out again and again. So are arrays cut along
        the axis "tensor" beside an axis "expert".
    """

    axis: int
    blocks: int = 1
    units: int = 0
    copies: int = 1

    def parts(self, ranks: int) -> int:
        """Return how many parts so many ranks have."""
        return ranks // self.copies


@dataclass(frozen=True)
class SplitSpec(Spec):
    """The Spec of an array that is split; `shape` is that of the whole array.

    Parameters
    ----------
    split : Split

    Raises
    ------
    ShapeError
        The array cannot be cut so: its axis is no multiple of the blocks and units.
    """

    split: Split = Split(0)

    def __post_init__(self):
        super().__post_init__()
        split = self.split
        size = self.shape[split.axis] if 0 <= split.axis < len(self.shape) else 0
        if split.blocks < 1 or not size or size % (split.blocks * (split.units or 1)):
            raise ShapeError(f"an array of shape {self.shape} does not consist of what {split} says")


def with_split(spec: Spec, split: Split | None) -> Spec:
    """Return the Spec with this split, or without any."""
    values = {field.name: getattr(spec, field.name) for field in fields(Spec)}
    return Spec(**values) if split is None else SplitSpec(**values, split=split)


def split_of(spec: Spec | None) -> Split | None:
    """Return how the array is cut; None if it is whole on every rank."""
    return spec.split if isinstance(spec, SplitSpec) else None


def same_along(axis: str, split: Split | None, mesh: Mesh) -> bool:
    """Return whether all ranks of an axis that divides arrays have the same of an array that is cut so."""
    if split is None:
        return True
    stride = math.prod(mesh.sizes[later] for later in DIVIDE_ARRAYS[DIVIDE_ARRAYS.index(axis) + 1 :])
    return stride % split.parts(mesh.part[1]) == 0


class NetworkPart(Network):
    """Part `index` of `count` of a network: the same layers, with a layout of the part's arrays.

    Shapes of samples stay those of the whole network; partial results are put together by the layers of tensor
    parallelism.

    Parameters
    ----------
    network : Network
    index, count : int

    Attributes
    ----------
    whole_specs : dict of Spec
        By full name, those of the whole arrays, running statistics included.
    sample_shape : tuple of int
        Shape of one sample as this part takes it: in_shape, unless the input comes cut.

    Raises
    ------
    ShapeError
        An array has not enough units, or not a multiple of `count` heads.
    """

    checks_shapes = False

    def __init__(self, network: Network, index: int, count: int):
        check_part(index, count)
        self.copy_attributes(network)
        self.sample_shape = network.in_shape
        layout, buffer_layout = network.layout, network.buffer_layout
        self.whole_specs = layout.specs | buffer_layout.specs
        self.specs = _part_specs(network.specs, layout.specs, index, count)
        borrowed = {name: layout.specs[name] for name in layout.borrowed}
        self.layout = Layout(
            self.specs,
            borrowed=_part_specs(borrowed, layout.specs, index, count),
            names=layout.names,
            reserve=largest(layout.specs, count),
            duplicates={name for name, spec in layout.specs.items() if not is_first(split_of(spec), index, count)},
        )
        self.buffer_layout = Layout(self.specs, buffers=True, reserve=largest(buffer_layout.specs, count))

    def check_input(self, x, sample_shape=None):
        super().check_input(x, sample_shape or self.sample_shape)


def is_first(split: Split | None, index: int, count: int) -> bool:
    """Return whether rank `index` of `count` is the first of those that have the same of an array."""
    return index < split.parts(count) if split else index == 0


def whole_specs(network: Network) -> dict[str, Spec]:
    """By full name, the Specs of the whole arrays of a network, or of a part of one."""
    if isinstance(network, NetworkPart):
        return network.whole_specs
    return network.layout.specs | network.buffer_layout.specs


def sample_shape(network: Network) -> tuple[int, ...]:
    """Return the shape of one sample as a network, or a part of one, takes it."""
    return network.sample_shape if isinstance(network, NetworkPart) else network.in_shape


def cut(whole: Mapping[str, Spec], state: Mapping[str, np.ndarray], index: int, count: int) -> dict[str, np.ndarray]:
    """Return part `index` of `count` of whole arrays: copies of what is split, other entries as they are.

    Parameters
    ----------
    whole : dict of Spec
        By full name, those of whole arrays, such as NetworkPart.whole_specs.
    state : dict of arrays
        By full name, perhaps with a prefix such as "param/" or "optimizer/velocity/". Other names are passed on.

    Raises
    ------
    ShapeError
        An array is not whole, or cannot be cut into so many parts.
    """
    check_part(index, count)
    found = dict(state)
    for key, spec in _split_entries(whole, state):
        if state[key].shape != spec.shape:
            raise ShapeError(f"{key}: expected the whole array, of shape {spec.shape}, given {state[key].shape}")
        found[key] = _array_part(_name(key), spec, state[key], index, count)
    return found


def merge(whole: Mapping[str, Spec], states: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return whole arrays from those of all ranks, in their order; what several have is the first one's.

    Raises
    ------
    ShapeError
        An array is not that of a part: which one, expected and given.
    """
    found = dict(states[0])
    for key, spec in _split_entries(whole, states[0]):
        split = spec.split
        pieces = [state[key] for state in states[: split.parts(len(states))]]
        for index, piece in enumerate(pieces):
            if piece.shape != (shape := part_shape(_name(key), spec, index, len(states))):
                raise ShapeError(f"{key}: expected {shape} of part {index} of {len(states)}, given {piece.shape}")
        blocks = [_in_blocks(piece, split) for piece in pieces]
        found[key] = np.concatenate(blocks, axis=split.axis + 1).reshape(spec.shape)
    return found


def inside(name: str, spec: SplitSpec, array: np.ndarray, index: int, count: int) -> np.ndarray:
    """Return where part `index` of `count` lies in a whole contiguous array: a view, with an axis of blocks."""
    lo, hi = _bounds(name, spec, index, count)
    before = (slice(None),) * (spec.split.axis + 1)
    return _in_blocks(array, spec.split)[(*before, slice(lo, hi))]


def check_part(index: int, count: int) -> None:
    """Refuse the number of a part that does not exist, with a ValueError."""
    if not 0 <= index < count:
        raise ValueError(f"there is no part {index} of {count}: they are numbered from 0")


def largest(whole: Mapping[str, Spec], count: int) -> dict[str, int]:
    """Return the elements of the largest of `count` parts of every array that is split, by full name: the last one's.

    With that reserved, all parts' layouts put the same array in the same place: what is whole on every rank, and is
    summed over others in pieces, is then cut and added up alike on all.
    """
    return {
        name: math.prod(part_shape(name, spec, count - 1, count))
        for name, spec in whole.items()
        if split_of(spec) is not None
    }


def _part_specs(tree: dict, whole: Mapping[str, Spec], index: int, count: int, prefix: str = "") -> dict:
    """The Specs of part `index` of `count`, each with the part's shape; `whole` has those of whole arrays by name."""
    result = {}
    for name, entry in tree.items():
        full = prefix + name
        if isinstance(entry, dict):
            result[name] = _part_specs(entry, whole, index, count, f"{full}.")
        elif entry.tied:  # it is the owner's, and cut as that is
            result[name] = replace(entry, shape=_part(entry.tied, whole[entry.tied], index, count).shape)
        else:
            result[name] = _part(full, entry, index, count)
    return result


def _part(name: str, spec: Spec, index: int, count: int) -> Spec:
    """The Spec of a part, which draws the whole array and cuts it."""
    if split_of(spec) is None:
        return spec

    def init(rng: np.random.Generator, shape) -> np.ndarray:
        return _array_part(name, spec, spec.init(rng, spec.shape), index, count)

    return replace(with_split(spec, None), shape=part_shape(name, spec, index, count), init=init)


def _array_part(name: str, spec: SplitSpec, array: np.ndarray, index: int, count: int) -> np.ndarray:
    """A part of a whole array."""
    lo, hi = _bounds(name, spec, index, count)
    blocks = _in_blocks(array, spec.split)
    return blocks.take(range(lo, hi), axis=spec.split.axis + 1).reshape(part_shape(name, spec, index, count))


def _in_blocks(array: np.ndarray, split: Split) -> np.ndarray:
    """The array with an axis of blocks before the one that is cut."""
    axis = split.axis
    return array.reshape(*array.shape[:axis], split.blocks, array.shape[axis] // split.blocks, *array.shape[axis + 1 :])


def part_shape(name: str, spec: SplitSpec, index: int, count: int) -> tuple[int, ...]:
    """Return the shape of a part of an array that is split."""
    lo, hi = _bounds(name, spec, index, count)
    axis = spec.split.axis
    return (*spec.shape[:axis], spec.split.blocks * (hi - lo), *spec.shape[axis + 1 :])


def _bounds(name: str, spec: SplitSpec, index: int, count: int) -> tuple[int, int]:
    """Where a part's share of every block begins and ends."""
    split, size = spec.split, spec.shape[spec.split.axis] // spec.split.blocks
    count = split.parts(count)
    index %= count
    units = split.units or size
    if units < count or (split.units and units % count):
        kind = f"{units} units of {size // units} (such as heads)" if split.units else f"{units} entries"
        raise ShapeError(
            f"{name} has {kind} on axis {split.axis}, which cannot be cut into {count} parts: use a number of parts "
            + ("that divides them" if split.units else "that is no larger")
        )
    return tuple(units * i // count * (size // units) for i in (index, index + 1))


def _split_entries(whole: Mapping[str, Spec], state: Mapping[str, np.ndarray]):
    """(key, Spec) of what is split."""
    for key in state:
        spec = whole.get(_name(key))
        if split_of(spec) is not None:
            yield key, spec


def _name(key: str) -> str:
    """The array's full name, without a prefix such as "param/"."""
    return key.rpartition("/")[2]
