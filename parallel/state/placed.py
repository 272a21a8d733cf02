"""One row of the table of a trainer's arrays: what it is for, which elements this rank has, and who has the others.

| placement | what a rank's buffer has |
|---|---|
| `Replicate` | all elements, the same on every rank of the data-parallel group |
| `Shard` | ranges of the elements; no two ranks have the same ones |
| `Partial` | an addend for every element: what counts is their sum over the group |

The words are those of PyTorch's DTensor. A placement says how an array lies along the axis "data". Along "tensor" an
array lies as its layer says (splits.py); along "pipeline" a stage's layout has the stage's arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nn.core.layout import Layout
from parallel.state.fragments import Fragment

OWN = "exchange/"  # begins the names of a strategy's private state; not renamed, so that files of older runs are read
KINDS = ("parameters", "gradients", "moments", "in transit")


class Replicate(NamedTuple):
    """Every rank has all elements."""

    def __str__(self):
        return "Replicate"


REPLICATE = Replicate()


class Shard(NamedTuple):
    """A rank has some ranges of the elements.

    Attributes
    ----------
    count : int
        Over how many ranks the elements are dealt.
    """

    count: int

    def __str__(self):
        return f"Shard over {self.count}"


class Partial(NamedTuple):
    """A rank has an addend. A checkpoint has the addends of all ranks, along a first axis.

    Attributes
    ----------
    index, count : int
        Which addend, of how many.
    """

    index: int
    count: int

    def __str__(self):
        return f"Partial over {self.count}"


class Range(NamedTuple):
    """Elements `start` to before `stop` of a layout, which lie in a buffer from `at` on."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class PlacedArray:
    """An array of a trainer, or what this rank has of it.

    Parameters
    ----------
    name : str
        How the names of its entries in a state begin: "param", "optimizer/mean". "" if no state has it.
    kind : str
        What it is for, one of KINDS; "" if its memory is counted in another row.
    buffer : array
        What this rank has.
    layout : Layout or None
        Whose entries lie in the buffer; None for one array, of the name itself.
    placement : Replicate, Shard or Partial
    ranges : tuple of Range
        Where elements of the layout lie in the buffer; () for all of them, in the layout's order.
    copy : bool
        Whether other rows answer for the same elements: this one is loaded, and not saved.
    """

    name: str
    kind: str
    buffer: np.ndarray
    layout: Layout | None = None
    placement: Replicate | Shard | Partial = REPLICATE
    ranges: tuple[Range, ...] = ()
    copy: bool = False

    def fragments(self) -> Iterator[Fragment]:
        """Views of the buffer: of every entry the elements that are here."""
        if self.layout is None:
            yield Fragment(self.name, self.buffer)
            return
        for start, stop, at in self.ranges or (Range(0, self.layout.size, 0),):
            for entry, part, spec in self.layout.region(start, stop).tensors:
                shape, first = spec.shape, start + part.start - self.layout.slices[entry].start
                if isinstance(self.placement, Partial):
                    first += self.placement.index * math.prod(shape)
                    shape = (self.placement.count, *shape)
                array = self.buffer[at + part.start : at + part.stop]
                yield Fragment(f"{self.name}/{entry}", array, shape, first)

    @property
    def expected_bytes(self) -> float:
        """Bytes of the buffer by the formula of the placement, without padding."""
        count = self.layout.count if self.layout else self.buffer.size
        return count * self.buffer.itemsize / (self.placement.count if isinstance(self.placement, Shard) else 1)


def in_transit(*arrays: np.ndarray) -> Iterator[PlacedArray]:
    """Rows of memory that is no state: messages, and what is whole for a moment only."""
    return (PlacedArray("", "in transit", array) for array in arrays)
