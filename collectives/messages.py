"""What mpi4py's upper-case methods accept as a buffer, taken apart into memory, count and datatype.

The forms are mpi4py's (its documentation, "Communicating memory buffers"): an object with the buffer protocol, DLPack
or the CUDA array interface; [data, datatype], [data, count, datatype], [data, (count, displacement), datatype]; and
for the vector methods [data, counts, displacements, datatype] with sequences. A message names memory by its address
and keeps nothing alive: the caller's buffer is alive while the call that it was given to lasts.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI


class Message:
    """One parsed buffer argument.

    Attributes
    ----------
    memory : MPI.buffer
        the caller's memory from the first element on
    address : int
    count : int
        elements; of one block where the buffer holds `parts` blocks
    slices : list of (lo, hi), in elements
        of each block, in the vector form only
    datatype : MPI.Datatype
        float16 travels as MPI.UINT16_T, because MPI has no reductions for it
    half : bool
        whether the elements are float16
    extent, size : int
        bytes from one element to the next, and bytes of data in one
    """

    def __init__(self, spec, parts: int = 1, vector: bool = False):
        buf, counts, displacements, datatype = split(spec, vector)
        memory = MPI.buffer(b"" if buf is None else buf)
        if datatype is None:
            datatype = "B" if buf is None else typecode(buf)
        self.half = isinstance(datatype, str) and datatype == "e"
        if isinstance(datatype, str):
            datatype = MPI.UINT16_T if self.half else MPI.Datatype.fromcode(datatype)
        self.datatype, self.memory = datatype, memory
        self.size, self.extent = datatype.Get_size(), datatype.Get_extent()[1]
        have = memory.nbytes // self.extent if self.extent else 0
        self.slices: list[tuple[int, int]] = []
        if vector:
            self.slices = vector_slices(counts, displacements, have, parts)
            self.count = sum(hi - lo for lo, hi in self.slices)
            need = max((hi for lo, hi in self.slices if hi > lo), default=0)
        else:
            offset = int(displacements or 0)
            self.memory = memory[offset * self.extent :] if offset else memory
            have -= offset
            if counts is None and have % parts:
                raise ValueError(f"message: {have} elements cannot be dealt to {parts} ranks evenly")
            self.count = have // parts if counts is None else int(counts)
            need = self.count * parts
        if self.extent and need * self.extent - (self.extent - self.size) > self.memory.nbytes:
            raise ValueError(f"message: buffer of {have} elements is too small for {need} of {name_of(self)}")
        self.address, self.nbytes = self.memory.address, need * self.extent

    @property
    def plain(self) -> bool:
        """Whether elements lie one after another without holes, so that data may be moved as bytes."""
        return self.size == self.extent and self.datatype.is_predefined

    def bytes(self, lo: int, hi: int) -> np.ndarray:
        """The memory of elements lo ... hi - 1, as bytes."""
        return view(self.memory, lo * self.extent, hi * self.extent)


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
    return spec is None or spec is MPI.IN_PLACE


def name_of(message: Message) -> str:
    """The element type in words."""
    return "float16" if message.half else message.datatype.Get_name() or "a derived datatype"


def view(memory: MPI.buffer, lo: int, hi: int) -> np.ndarray:
    """Bytes lo ... hi - 1 of a piece of memory, without keeping its owner alive."""
    if hi <= lo:
        return np.empty(0, np.uint8)
    return np.frombuffer(MPI.buffer.fromaddress(memory.address + lo, hi - lo), np.uint8)


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
    """MPI forbids buffers that overlap; the result would depend on the algorithm."""
    low, high = max(send.address, recv.address), min(send.address + send.nbytes, recv.address + recv.nbytes)
    if low < high:
        raise ValueError("send and receive buffer overlap: pass MPI.IN_PLACE for the one, or a copy")
