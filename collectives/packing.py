"""Messages as bytes, for data that is only moved: elements without holes where they lie, others packed and unpacked."""

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from mpi4py import MPI

from collectives.executor import copying
from collectives.messages import Message


@dataclass
class Bytes:
    """A message as bytes: where the blocks lie, and the calls that pack and unpack what cannot travel as it lies."""

    memory: np.ndarray
    blocks: list[tuple[int, int]]
    pack: list = field(default_factory=list)
    unpack: list = field(default_factory=list)

    def block(self, i: int) -> np.ndarray:
        lo, hi = self.blocks[i]
        return self.memory[lo:hi]


def as_bytes(message: Message, slices, consecutive=False) -> Bytes:
    """Slices (in elements) of a message as blocks of bytes, one after another where they must be `consecutive`."""
    size, extent = message.size, message.extent
    in_order = all(first[1] == second[0] for first, second in pairwise(slices))
    if message.plain and (in_order or not consecutive):
        end = max((hi for _, hi in slices), default=0)
        return Bytes(message.bytes(0, end), [(lo * size, hi * size) for lo, hi in slices])
    ends = [0, *accumulate((hi - lo) * size for lo, hi in slices)]
    packed = Bytes(np.empty(ends[-1], np.uint8), list(pairwise(ends)))
    for i, (lo, hi) in enumerate(slices):
        if hi <= lo or not size:
            continue
        room = packed.block(i)
        if message.plain:
            packed.pack.append(copying(room, message.bytes(lo, hi)))
            packed.unpack.append(copying(message.bytes(lo, hi), room))
        else:
            memory = MPI.buffer.fromaddress(message.address + lo * extent, (hi - lo) * extent)
            packed.pack.append(partial(message.datatype.Pack, memory, room, 0, MPI.COMM_SELF))
            packed.unpack.append(partial(message.datatype.Unpack, room, 0, memory, MPI.COMM_SELF))
    return packed


def whole(message: Message) -> Bytes:
    return as_bytes(message, [(0, message.count)])


def slices_of(message: Message, parts: int) -> list[tuple[int, int]]:
    """(lo, hi) of each block in elements."""
    return message.slices or [(i * message.count, (i + 1) * message.count) for i in range(parts)]


def dtype_of(message: Message) -> np.dtype | None:
    """The NumPy dtype of a message's elements; None if there is none."""
    if message.half:
        return np.dtype(np.float16)
    if not message.datatype.is_predefined:
        return None
    code = message.datatype.tocode() if message.plain else None
    try:
        return np.dtype(code) if code else None
    except TypeError:
        return None


def typed(message: Message, count: int | None = None) -> np.ndarray:
    """The first `count` elements of a message as an array; by default all."""
    return message.bytes(0, message.count if count is None else count).view(dtype_of(message))
