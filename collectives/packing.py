"""Messages as bytes, for data that is only moved: elements without holes where they lie, others packed and unpacked."""

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise

from mpi4py import MPI

from collectives.executor import copying
from collectives.messages import Message, room


@dataclass
class Bytes:
    """A message as bytes: where the blocks lie, and the calls that pack and unpack what cannot travel as it lies."""

    memory: MPI.buffer
    blocks: tuple[tuple[int, int], ...]
    pack: list = field(default_factory=list)
    unpack: list = field(default_factory=list)

    def block(self, i: int) -> MPI.buffer:
        lo, hi = self.blocks[i]
        return self.memory[lo:hi]


def as_bytes(message: Message, slices, consecutive=False) -> Bytes:
    """Slices (in elements) of a message as blocks of bytes, one after another where they must be `consecutive`."""
    size = message.size
    in_order = all(first[1] == second[0] for first, second in pairwise(slices))
    if message.plain and (in_order or not consecutive):
        end = max((hi for _, hi in slices), default=0)
        return Bytes(message.bytes(0, end), tuple((lo * size, hi * size) for lo, hi in slices))
    ends = [0, *accumulate((hi - lo) * size for lo, hi in slices)]
    packed = Bytes(room(ends[-1]), tuple(pairwise(ends)))
    for i, (lo, hi) in enumerate(slices):
        if hi <= lo or not size:
            continue
        block = packed.block(i)
        if message.plain:
            packed.pack.append(copying(block, message.bytes(lo, hi)))
            packed.unpack.append(copying(message.bytes(lo, hi), block))
        else:
            memory = message.bytes(lo, hi)
            packed.pack.append(partial(message.datatype.Pack, memory, block, 0, MPI.COMM_SELF))
            packed.unpack.append(partial(message.datatype.Unpack, block, 0, memory, MPI.COMM_SELF))
    return packed


def whole(message: Message) -> Bytes:
    return as_bytes(message, [(0, message.count)])


def slices_of(message: Message, parts: int) -> list[tuple[int, int]]:
    """(lo, hi) of each block in elements."""
    return message.slices or [(i * message.count, (i + 1) * message.count) for i in range(parts)]
