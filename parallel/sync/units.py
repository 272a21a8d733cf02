"""How a network's parameters are cut among ranks: into units of whole layers, and each unit into a block a rank.

A **unit** is what travels at once: neighbouring layers with at least some bytes of parameters. All ranks' blocks of a
unit have one length, a multiple of 16 elements, so a tensor may be cut anywhere and the last blocks may end in
padding. A rank's **shard** is its block of every unit, one after another.

    layout, size 128        | unit 0        | unit 1            |        (backward order: the last layers first)
    3 ranks                 | 0  | 1  | 2  -| 0    | 1    | 2  -|        (- padding)
    shard of rank 1         | 1  | 1    |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nn.core.layer import Layer, Sequential, child_path
from nn.core.layout import ALIGN, Layout, Region
from nn.core.network import Network


@dataclass(frozen=True)
class Unit:
    """Consecutive layers whose parameters travel together.

    Attributes
    ----------
    number : int
        In the order of the layout, in which backward finishes them.
    start, stop : int
        Their part of the layout.
    block : int
        Elements of every rank's block.
    at : int
        Where the block lies in a shard.
    names : tuple of str
        Of the arrays inside.
    gaps : tuple of slice
        Places between and behind the arrays, relative to the unit: always zero.
    out_of_turn : bool
        Another layer's array is one of this unit (Spec.tied), so it is used out of turn.
    """

    number: int
    start: int
    stop: int
    block: int
    at: int
    names: tuple[str, ...]
    gaps: tuple[slice, ...]
    out_of_turn: bool

    @property
    def blocks(self) -> slice:
        """Its place in a shard."""
        return slice(self.at, self.at + self.block)

    def clear_gaps(self, whole: np.ndarray) -> None:
        """Write zeros between the arrays, in memory where other units may have been."""
        for gap in self.gaps:
            whole[gap] = 0


class UnitLayout:
    """The units of a network, and what each layer needs of them.

    Parameters
    ----------
    network : Network
    ranks : int
    least : int
        Bytes of parameters that a unit has at least, but for the last.

    Attributes
    ----------
    units : list of Unit
    size : int
        Elements of a shard.
    paths : list of str
        Of the layers that need units, in forward order: the children of nested Sequentials, or the root. Of any other
        container all layers are needed at once.
    needs : dict
        Path -> numbers of the units that the layer uses: its own, and those of arrays that it is tied to.
    """

    def __init__(self, network: Network, ranks: int, least: int):
        self.layout, self.ranks = network.layout, ranks
        self.units: list[Unit] = []
        self.size = 0
        self.needs: dict[str, tuple[int, ...]] = {}
        ties = {path: list(_ties(specs, self.layout)) for path, _, specs in _in_turn(network.root, "", network.specs)}
        owners = {owner for found in ties.values() for owner in found}
        start, inside = 0, []
        for path in reversed(ties):
            stop, before = self.layout.ends[path], start if not inside else self.layout.ends[inside[-1]]
            own = _names(self.layout, before, stop)
            if owners & set(own) and inside:  # a unit of its own
                self._add(start, before, inside, owners)
                start, inside = before, []
            inside.append(path)
            if (stop - start) * network.dtype.itemsize >= least or owners & set(own) or stop == self.layout.own:
                self._add(start, stop, inside, owners)
                start, inside = stop, []
        if self.layout.borrowed:
            self._add(self.layout.own, self.layout.size, [], owners)
        home = {name: unit.number for unit in self.units for name in unit.names}
        for path, found in ties.items():
            needed = dict.fromkeys([*self.needs[path], *(home[owner] for owner in found)])
            self.needs[path] = tuple(needed)
        self.paths = [path for path in ties if self.needs[path]]

    def _add(self, start: int, stop: int, paths: list[str], owners: set[str]) -> None:
        """Add a unit of the layers at `paths`, unless they have no parameters."""
        names = _names(self.layout, start, stop)
        before = start
        for path in paths:
            end = self.layout.ends[path]
            self.needs[path] = (len(self.units),) if end > before else ()
            before = end
        if not names:
            return
        block = -(-(stop - start) // (ALIGN * self.ranks)) * ALIGN
        ends = [0, *(self.layout.slices[name].stop - start for name in names)]
        begins = [*(self.layout.slices[name].start - start for name in names), block * self.ranks]
        gaps = tuple(slice(a, b) for a, b in zip(ends, begins, strict=True) if b > a)
        out_of_turn = bool(owners & set(names))
        self.units.append(Unit(len(self.units), start, stop, block, self.size, names, gaps, out_of_turn))
        self.size += block

    def whole(self, buffer: np.ndarray, unit: Unit) -> np.ndarray:
        """Return all ranks' blocks of a unit in a buffer that holds all units."""
        return buffer[self.ranks * unit.at : self.ranks * (unit.at + unit.block)]

    def arrays(self, memory: np.ndarray, unit: Unit) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, its elements) of the arrays of a unit that lies in `memory`."""
        for name in unit.names:
            place = self.layout.slices[name]
            yield name, memory[place.start - unit.start : place.stop - unit.start]

    def views(self, buffer: np.ndarray):
        """Return a buffer of all units as layers see it."""
        return self.layout.tree(dict(p for unit in self.units for p in self.arrays(self.whole(buffer, unit), unit)))

    def region(self, unit: Unit, rank: int) -> Region:
        """Return what lies in a rank's block of a unit."""
        lo = min(unit.start + rank * unit.block, unit.stop)
        return self.layout.region(lo, min(lo + unit.block, unit.stop))


class ShardRegion:
    """The regions of a shard's blocks as one (see nn.core.layout.Region)."""

    def __init__(self, units: UnitLayout, rank: int):
        layout = units.layout
        self.names, self.elsewhere = layout.names, layout.duplicates | layout.borrowed
        self.tensors, self.decayed, self.owned, self.blocks = [], [], [], ((), [])
        for unit in units.units:
            region = units.region(unit, rank)
            self.tensors += [(name, _shifted(part, unit.at), spec) for name, part, spec in region.tensors]
            self.decayed += [_shifted(part, unit.at) for part in region.decayed]
            self.owned += [_shifted(part, unit.at) for part in region.owned]


class UnitBuffers:
    """Memory for some whole units at a time: units take turns in it, and each has its views once and for all.

    Parameters
    ----------
    layout : UnitLayout
    count : int
        Units that are there at once; one that is used out of turn has memory of its own.
    make : callable (size) -> flat array
    """

    def __init__(self, layout: UnitLayout, count: int, make):
        self.layout = layout
        self.number = {
            unit.number: (unit.number if unit.out_of_turn else -1 - unit.number % count) for unit in layout.units
        }
        sizes: dict[int, int] = {}
        for unit in layout.units:
            buffer = self.number[unit.number]
            sizes[buffer] = max(sizes.get(buffer, 0), unit.block * layout.ranks)
        self.memory = {buffer: make(size) for buffer, size in sizes.items()}
        self.holds: dict[int, int] = {}  # buffer -> number of the unit in it

    def of(self, unit: Unit) -> np.ndarray:
        """Return the memory of a unit."""
        return self.memory[self.number[unit.number]][: unit.block * self.layout.ranks]

    def claim_buffer(self, unit: Unit) -> bool:
        """Give a unit its buffer; return False if the buffer already holds it."""
        buffer = self.number[unit.number]
        if self.holds.get(buffer) == unit.number:
            return False
        self.holds[buffer] = unit.number
        return True

    def invalidate(self) -> None:
        """Mark all buffers as empty."""
        self.holds.clear()

    def views(self):
        """Return the units as layers see them."""
        arrays = dict(pair for unit in self.layout.units for pair in self.layout.arrays(self.of(unit), unit))
        return self.layout.layout.tree(arrays)


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _names(layout: Layout, start: int, stop: int) -> tuple[str, ...]:
    return tuple(name for name, place in layout.slices.items() if start <= place.start < stop)


def _in_turn(layer: Layer, path: str, specs: dict) -> Iterator[tuple[str, Layer, dict]]:
    """(path, layer, specs) of what nested Sequentials run one after another, in forward order."""
    if not isinstance(layer, Sequential):
        yield path, layer, specs
        return
    for name, child in layer.children().items():
        yield from _in_turn(child, child_path(path, name), specs[name])


def _ties(specs: dict, layout: Layout) -> Iterator[str]:
    """Names of the arrays of other layers that these specs are tied to."""
    for spec in specs.values():
        if isinstance(spec, dict):
            yield from _ties(spec, layout)
        elif spec.tied:
            yield spec.tied
