"""What mpi4py's upper-case methods accept as a buffer, taken apart into memory, count and datatype.

The forms are mpi4py's (its documentation, "Communicating memory buffers"): an object with the buffer protocol, DLPack
or the CUDA array interface; [data, datatype], [data, count, datatype], [data, (count, displacement), datatype]; and
for the vector methods [data, counts, displacements, datatype] with sequences. A message names memory by its address
and keeps nothing alive: the caller's buffer is alive while the call that it was given to lasts.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.executor.memory import allocate, array, copying


class Elements(NamedTuple):
    """What the elements of a buffer are.

    Attributes
    ----------
    datatype : MPI.Datatype
        float16 travels as MPI.UINT16_T, because MPI has no reductions for it
    half : bool
        whether they are float16
    size, extent, reach : int
        bytes of data in an element, from one to the next, and from its place to the end of its data
    plain : bool
        whether they lie one after another without holes, so that data may be moved as bytes
    apart : bool
        whether they do not reach into each other, so that a vector may be cut
    dtype : np.dtype
        None if NumPy has none for them
    """

    datatype: MPI.Datatype
    half: bool
    size: int
    extent: int
    reach: int
    plain: bool
    apart: bool
    dtype: np.dtype | None


PREDEFINED: dict[int, Elements] = {}  # by handle


def elements(datatype: MPI.Datatype) -> Elements:
    """The facts about the elements of a datatype."""
    known = PREDEFINED.get(datatype.handle)
    if known is None:
        known = facts(datatype)
        if datatype.is_predefined:  # else the handle may come to mean another one
            PREDEFINED[datatype.handle] = known
    return known


@cache
def elements_of_code(code: str) -> Elements:
    """The same for a type's code, as in NumPy."""
    return facts(MPI.UINT16_T, half=True) if code == "e" else elements(MPI.Datatype.fromcode(code))


def facts(datatype: MPI.Datatype, half: bool = False) -> Elements:
    """What MPI and NumPy say of a datatype."""
    size, extent = datatype.Get_size(), datatype.Get_extent()[1]
    low, length = datatype.Get_true_extent()
    plain = datatype.is_predefined and size == extent
    try:
        dtype = np.dtype("e" if half else datatype.tocode()) if plain else None
    except (TypeError, ValueError):  # such as FLOAT_INT
        dtype = None
    reach = low + length
    return Elements(datatype, half, size, extent, reach, plain, low >= 0 and reach <= extent, dtype)


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
    datatype, half, size, extent, plain
        of the elements
    """

    def __init__(self, spec, parts: int = 1, vector: bool = False):
        buf, counts, displacements, datatype = split(spec, vector)
        memory = MPI.buffer(b"" if buf is None else buf)
        if datatype is None:
            datatype = "B" if buf is None else typecode(buf)
        self.elements = elements_of_code(datatype) if isinstance(datatype, str) else elements(datatype)
        self.datatype, self.half, self.size, self.extent, reach, self.plain, _, _ = self.elements
        have = memory.nbytes // self.extent if self.extent else 0
        self.slices: list[tuple[int, int]] = []
        self.memory = memory
        if vector:
            self.slices = vector_slices(counts, displacements, have, parts)
            self.count = sum(hi - lo for lo, hi in self.slices)
            need = max((hi for lo, hi in self.slices if hi > lo), default=0)
        else:
            if displacements:
                self.memory = memory[int(displacements) * self.extent :]
                have -= int(displacements)
            if counts is None and have % parts:
                raise ValueError(f"message: {have} elements cannot be dealt to {parts} ranks evenly")
            self.count = have // parts if counts is None else int(counts)
            need = self.count * parts
        self.address, self.length = self.memory.address, need
        self.nbytes = (need - 1) * self.extent + reach if need else 0
        if self.nbytes > self.memory.nbytes:
            raise ValueError(f"message: buffer of {have} elements is too small for {need} of {name_of(self)}")

    def bytes(self, lo: int, hi: int) -> MPI.buffer:
        """The memory of elements lo ... hi - 1, without keeping its owner alive."""
        return MPI.buffer.fromaddress(self.address + lo * self.extent, max(0, hi - lo) * self.extent)

    def array(self, count: int | None = None) -> np.ndarray:
        """The first `count` elements as an array, by default all."""
        return array(self.bytes(0, self.count if count is None else count), self.elements.dtype)


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
    return [(int(d), int(d) + int(c)) for c, d in zip(counts, displacements, strict=True)]


def typecode(buf) -> str:
    """The element type of an object that came without a datatype."""
    try:
        return memoryview(buf).format
    except TypeError:
        pass
    if hasattr(buf, "__dlpack__"):
        code, bits, lanes = dlpack_type(buf.__dlpack__())
        kinds = {0: "i", 1: "u", 2: "c" if lanes == 2 else "f", 5: "c", 6: "b"}  # a pair of floats is a complex number
        return np.dtype(f"{kinds[code]}{bits * lanes // 8}").char
    return np.dtype(buf.__cuda_array_interface__["typestr"]).char


def dlpack_type(capsule) -> tuple[int, int, int]:
    """(code, bits, lanes) of a DLPack capsule, whose tensor is {void *data; int32 device[2], ndim; uint8 code, ...}."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    code, bits, low, high = ctypes.string_at(get(capsule, b"dltensor") + 20, 4)
    return code, bits, low + 256 * high


def is_in_place(spec) -> bool:
    """Whether a rank gives no buffer of its own."""
    return spec is None or spec is MPI.IN_PLACE


def name_of(message: Message) -> str:
    """The element type in words."""
    return "float16" if message.half else message.datatype.Get_name() or "a derived datatype"


def in_words(spec, parts: int = 1) -> str:
    """How many elements of what a buffer has, in each of so many parts."""
    message = outgoing(spec, parts)
    return f"{message.count} of {name_of(message)}" if message.plain else f"{message.count * message.size} bytes"


def outgoing(spec, parts: int = 1, vector: bool = False) -> Message:
    """The message of a buffer that is read."""
    return Message(spec, parts, vector)


def incoming(spec, parts: int = 1, vector: bool = False) -> Message:
    """The message of a buffer that is written."""
    message = Message(spec, parts, vector)
    if message.memory.readonly:
        raise BufferError("message: the receive buffer is read-only")
    return message


def refuse_overlap(send: Message, recv: Message):
    """MPI forbids buffers that overlap; the result would depend on the algorithm.

    They may lie between each other, as columns of a matrix do, or blocks with gaps.
    """
    low, high = max(send.address, recv.address), min(send.address + send.nbytes, recv.address + recv.nbytes)
    if low < high and (touched(send, low, high) & touched(recv, low, high)).any():
        raise ValueError("send and receive buffer overlap: pass MPI.IN_PLACE for the one, or a copy")


def same_type(send: Message, recv: Message):
    """Refuse buffers of two element types."""
    if send.datatype != recv.datatype or send.half != recv.half:
        raise TypeError(f"the send buffer holds {name_of(send)}, the receive buffer {name_of(recv)}")


def touched(message: Message, low: int, high: int) -> np.ndarray:
    """Which bytes from one address to another belong to a message."""
    extent, apart = message.extent, message.elements.apart
    marks = np.full(max(message.length * extent, message.nbytes), not apart)  # else all that it may reach
    for lo, hi in message.slices or [(0, message.length)]:
        place = marks[lo * extent : hi * extent]
        if message.plain:
            place[:] = True
        elif apart and hi > lo:
            message.datatype.Unpack(np.ones((hi - lo) * message.size, bool), 0, place, MPI.COMM_SELF)
    return marks[low - message.address : high - message.address]


# ------------------------------------------------------------------- as bytes, for data that is only moved


@dataclass
class Bytes:
    """A message as bytes: where the blocks lie, and the calls that pack and unpack what cannot travel as it lies.

    `own` is the memory in which they lie then, else nothing.
    """

    memory: MPI.buffer
    blocks: tuple[tuple[int, int], ...]
    pack: list = field(default_factory=list)
    unpack: list = field(default_factory=list)
    own: tuple[MPI.buffer, ...] = ()

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
    packed = Bytes(memory := allocate(ends[-1]), tuple(pairwise(ends)), own=(memory,))
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
    """All of a message as one block."""
    return as_bytes(message, [(0, message.count)])


def slices_of(message: Message, parts: int) -> list[tuple[int, int]]:
    """(lo, hi) of each block in elements."""
    return message.slices or [(i * message.count, (i + 1) * message.count) for i in range(parts)]
