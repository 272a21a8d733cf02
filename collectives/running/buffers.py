"""What mpi4py's upper-case methods accept as a buffer, taken apart into memory, count and datatype.

The forms are mpi4py's (its documentation, "Communicating memory buffers"): an object with the buffer protocol; [data,
datatype], [data, count, datatype], [data, (count, displacement), datatype]; and for the vector methods [data, counts,
displacements, datatype] with sequences. The MPI library has the others (`for_library`): arrays by DLPack or the CUDA
array interface, and derived datatypes that are not contiguous. A call with such a buffer is mpi4py's own, and must be
so on every rank. A message names memory by its address and keeps nothing alive: the caller's buffer is alive while the
call that it was given to lasts.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.executor.plan import allocate, array, copying


class Elements(NamedTuple):
    """What the elements of a buffer are. They lie one after another, without holes.

    Attributes
    ----------
    datatype : MPI.Datatype
        float16 travels as MPI.UINT16_T, because MPI has no reductions for it
    float16 : bool
        whether they are float16
    itemsize : int
        bytes of an element, those included that MPI adds to the end of its pairs of numbers
    dtype : np.dtype
        None if NumPy has none for them
    """

    datatype: MPI.Datatype
    float16: bool
    itemsize: int
    dtype: np.dtype | None


PREDEFINED: dict[int, Elements] = {}  # by handle


def elements_of(datatype: MPI.Datatype) -> Elements:
    """Return the elements of a datatype, which is contiguous."""
    known = PREDEFINED.get(datatype.handle)
    if known is None:
        size, itemsize = datatype.Get_size(), datatype.Get_extent()[1]
        try:
            dtype = np.dtype(datatype.tocode()) if datatype.is_predefined and size == itemsize else None
        except (TypeError, ValueError):  # such as FLOAT_INT
            dtype = None
        known = Elements(datatype, False, itemsize, dtype)
        if datatype.is_predefined:  # else the handle may come to mean another one
            PREDEFINED[datatype.handle] = known
    return known


@cache
def elements_of_code(code: str) -> Elements:
    """Return the elements of a type's code, as in NumPy."""
    return Elements(MPI.UINT16_T, True, 2, np.dtype("e")) if code == "e" else elements_of(MPI.Datatype.fromcode(code))


def is_contiguous(datatype: MPI.Datatype) -> bool:
    """Return whether a datatype is one of MPI's own, or several of such one after another."""
    if datatype.is_predefined:
        return True
    base, combiner, _ = datatype.decode()
    return combiner in ("CONTIGUOUS", "DUP") and is_contiguous(base)


class Message:
    """One parsed buffer argument.

    Attributes
    ----------
    memory : MPI.buffer
        the caller's memory from the first element on
    address, nbytes : int
        where it begins, and how far the last element reaches
    count, length : int
        elements; of one block where the buffer holds `parts` blocks, and up to the end of the last one
    slices : list of (lo, hi), in elements
        of each block, in the vector form only
    elements : Elements
    datatype, float16, itemsize
        of the elements
    """

    def __init__(self, spec, parts: int = 1, vector: bool = False):
        buf, counts, displacements, datatype = split(spec, vector)
        if for_library(spec):
            raise TypeError(
                f"message: {type(buf).__name__}, or its datatype, is the MPI library's alone: pass a NumPy copy"
            )
        memory = MPI.buffer(b"" if buf is None else buf)
        if datatype is None:
            datatype = "B" if buf is None else memoryview(buf).format
        self.elements = elements_of_code(datatype) if isinstance(datatype, str) else elements_of(datatype)
        self.datatype, self.float16, self.itemsize, _ = self.elements
        have = memory.nbytes // self.itemsize if self.itemsize else 0
        self.slices: list[tuple[int, int]] = []
        self.memory = memory
        if vector:
            self.slices = vector_slices(counts, displacements, have, parts)
            self.count = sum(hi - lo for lo, hi in self.slices)
            need = max((hi for lo, hi in self.slices if hi > lo), default=0)
        else:
            if displacements:
                if int(displacements) < 0:
                    raise ValueError(f"message: negative displacement {int(displacements)}")
                self.memory = memory[int(displacements) * self.itemsize :]
                have -= int(displacements)
            if counts is None and have % parts:
                raise ValueError(f"message: {have} elements cannot be dealt to {parts} ranks evenly")
            self.count = have // parts if counts is None else int(counts)
            if self.count < 0:
                raise ValueError(f"message: negative count {self.count}")
            need = self.count * parts
        self.address, self.length, self.nbytes = self.memory.address, need, need * self.itemsize
        if self.nbytes > self.memory.nbytes:
            raise ValueError(f"message: buffer of {have} elements is too small for {need} of {name_of(self)}")

    def bytes(self, lo: int, hi: int) -> MPI.buffer:
        """Return the memory of elements lo ... hi - 1, without keeping its owner alive."""
        return MPI.buffer.fromaddress(self.address + lo * self.itemsize, max(0, hi - lo) * self.itemsize)

    def array(self, count: int | None = None) -> np.ndarray:
        """Return the first `count` elements as an array, by default all."""
        return array(self.bytes(0, self.count if count is None else count), self.elements.dtype)


def for_library(spec) -> bool:
    """Return whether only the MPI library takes a buffer: an array of another library, or elements with holes."""
    data, *rest = spec if isinstance(spec, list | tuple) and spec else (spec,)
    foreign = hasattr(data, "__dlpack__") or hasattr(data, "__cuda_array_interface__")
    derived = (item for item in rest if isinstance(item, MPI.Datatype))
    return (foreign and not isinstance(data, np.ndarray)) or not all(map(is_contiguous, derived))


def split(spec, vector):
    """(data, counts, displacements, datatype) of a specification; None for what it leaves out."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    data, *rest = spec
    counts = displacements = datatype = None
    if rest and (rest[-1] is None or isinstance(rest[-1], MPI.Datatype | str)):
        datatype = rest.pop()
    if len(rest) > 2:
        raise ValueError(f"message: expecting 2 to 4 items, got {len(spec)}")
    if len(rest) == 2:
        counts, displacements = rest
    elif rest:
        (counts,) = rest
        if isinstance(counts, tuple) or (isinstance(counts, list) and not vector):
            counts, displacements = counts
    return data, counts, displacements, datatype


def vector_slices(counts, displacements, have, parts) -> list[tuple[int, int]]:
    """(lo, hi) of each block; counts default to nearly equal parts, displacements to one block after another."""
    if counts is None:
        counts = [have // parts + (have % parts > i) for i in range(parts)]
    elif not isinstance(counts, Sequence | np.ndarray):
        counts = [counts] * parts
    if displacements is None:
        displacements = np.cumsum([0, *counts[:-1]]) if parts else []
    elif not isinstance(displacements, Sequence | np.ndarray):
        displacements = [i * displacements for i in range(parts)]
    if len(counts) != parts or len(displacements) != parts:
        raise ValueError(f"message: {len(counts)} counts and {len(displacements)} displacements for {parts} ranks")
    for c, d in zip(counts, displacements, strict=True):
        if c < 0 or (c and d < 0):
            raise ValueError(f"message: negative {'count' if c < 0 else 'displacement'} {int(c if c < 0 else d)}")
    return [(int(d), int(d) + int(c)) for c, d in zip(counts, displacements, strict=True)]


def is_in_place(spec) -> bool:
    """Return whether a rank gives no buffer of its own."""
    return spec is None or spec is MPI.IN_PLACE


def name_of(message: Message) -> str:
    """Return the element type in words."""
    return "float16" if message.float16 else message.datatype.Get_name() or "a derived datatype"


def in_words(spec, parts: int = 1) -> str:
    """Return how many elements, and of which type, each of a buffer's `parts` has."""
    message = outgoing(spec, parts)
    return f"{message.count} of {name_of(message)}"


def outgoing(spec, parts: int = 1, vector: bool = False) -> Message:
    """Return the message of a buffer that is read."""
    return Message(spec, parts, vector)


def incoming(spec, parts: int = 1, vector: bool = False) -> Message:
    """Return the message of a buffer that is written."""
    message = Message(spec, parts, vector)
    if message.nbytes and message.memory.readonly:  # that of None is, without elements
        raise BufferError("message: the receive buffer is read-only")
    return message


def refuse_overlap(send: Message, recv: Message):
    """MPI forbids buffers that overlap; the result would depend on the algorithm.

    They may lie between each other, as columns of a matrix do, or blocks with gaps.
    """
    low, high = max(send.address, recv.address), min(send.address + send.nbytes, recv.address + recv.nbytes)
    if low < high and (touched_bytes(send, low, high) & touched_bytes(recv, low, high)).any():
        raise ValueError("send and receive buffer overlap: pass MPI.IN_PLACE for the one, or a copy")


def same_type(send: Message, recv: Message):
    """Refuse buffers of two element types."""
    if send.datatype != recv.datatype or send.float16 != recv.float16:
        raise TypeError(f"the send buffer holds {name_of(send)}, the receive buffer {name_of(recv)}")


def touched_bytes(message: Message, low: int, high: int) -> np.ndarray:
    """Return which bytes from one address to another belong to a message."""
    marks = np.zeros(message.nbytes, bool)
    for lo, hi in message.slices or [(0, message.length)]:
        marks[lo * message.itemsize : hi * message.itemsize] = True
    return marks[low - message.address : high - message.address]


# ------------------------------------------------------------------- as bytes, for data that is only moved


class Bytes(NamedTuple):
    """Blocks of memory, as bytes."""

    memory: MPI.buffer
    blocks: tuple[tuple[int, int], ...]

    def block(self, i: int) -> MPI.buffer:
        lo, hi = self.blocks[i]
        return self.memory[lo:hi]


def as_bytes(message: Message, slices) -> Bytes:
    """Slices (in elements) of a message as blocks of bytes."""
    itemsize, end = message.itemsize, max((hi for lo, hi in slices if hi > lo), default=0)
    return Bytes(message.bytes(0, end), tuple((lo * itemsize, hi * itemsize) for lo, hi in slices))


def all_bytes(message: Message) -> MPI.buffer:
    """Return all of a message."""
    return message.bytes(0, message.count)


def packed(x: Bytes) -> tuple[Bytes, list, list]:
    """Blocks one after another, and the calls that copy them there and back; none where they lie so already."""
    if x.blocks[0][0] == 0 and all(first[1] == second[0] for first, second in pairwise(x.blocks)):
        return x, [], []
    ends = [0, *accumulate(hi - lo for lo, hi in x.blocks)]
    copy = Bytes(allocate(ends[-1]), tuple(pairwise(ends)))
    pairs = [(copy.block(i), x.block(i)) for i in range(len(x.blocks))]
    return copy, [copying(mine, theirs) for mine, theirs in pairs], [copying(theirs, mine) for mine, theirs in pairs]


def slices_of(message: Message, parts: int) -> list[tuple[int, int]]:
    """(lo, hi) of each block in elements."""
    return message.slices or [(i * message.count, (i + 1) * message.count) for i in range(parts)]
