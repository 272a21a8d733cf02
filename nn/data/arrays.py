"""Arrays in files, read without trust: what a file says of itself is checked before it is believed.

An .npy file is a short header (dtype, order, shape) and the numbers; an .npz file is a zip archive of such files. Both
are read by NumPy, which takes a header at its word: it asks for the memory that the shape needs, divides by the size of
the dtype, or unpickles. So here the header is read first, and must hold plain numbers of exactly as many bytes as the
file has; of a compressed file no more is believed than its compression can make. Sources: the .npy format (NumPy
enhancement proposal 1); Deutsch 1996 (DEFLATE, RFC 1951).
"""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from nn.reading import TABLE, free_memory, open_file

MOST_AXES = 64  # of an array of NumPy
LARGEST_RATIO = 1032  # of DEFLATE: 258 bytes from two bits
NUMBERS = "biuf"  # kinds of dtype: booleans, whole numbers, floats
TEXT = "U"
HEADER = 12 + 10_000  # bytes of the longest header that NumPy reads


class ArrayError(ValueError):
    """An array that a file does not hold as it says; the message says what, and its reader which file."""


def nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of an array of that shape.

    Raises
    ------
    ArrayError
        There can be no such array.
    """
    if len(shape) > MOST_AXES:
        raise ArrayError(f"{len(shape)} axes, and an array has at most {MOST_AXES}")
    if math.prod(max(1, n) for n in shape) * dtype.itemsize > np.iinfo(np.intp).max:
        raise ArrayError(f"no array can have shape {shape}")
    return math.prod(shape) * dtype.itemsize


def read_header(head: bytes, size: int, kinds: str = NUMBERS) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return (shape, whether in Fortran's order, dtype, where the numbers begin) of an .npy file.

    Parameters
    ----------
    head : bytes
        The first HEADER bytes of the file, or all of it.
    size : int
        Bytes of the whole file.
    kinds : str
        Kinds of dtype that are allowed.

    Raises
    ------
    ArrayError
        No header, or one that the file does not live up to.
    """
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a header that is refused, or understood
            shape, fortran, dtype = read(file)
    except Exception as error:  # the header is parsed as a Python literal, which fails in many ways
        raise ArrayError(_reason(error)) from error
    if version > (2, 0):
        raise ArrayError(f"version {version[0]}.{version[1]} of .npy, which plain numbers do not need")
    if dtype.hasobject:
        raise ArrayError("it holds Python objects, which is a pickle: allow_pickle is never set here")
    if dtype.kind not in kinds or dtype.itemsize == 0:
        raise ArrayError(f"it must hold {'numbers or text' if TEXT in kinds else 'numbers'}, given dtype {dtype}")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ArrayError(f"no array can have shape {shape}")
    start = file.tell()
    expected, actual = nbytes(shape, dtype), size - start
    if expected != actual:
        state = "truncated" if actual < expected else "too long"
        raise ArrayError(f"{state}: its header says {dtype} {shape}, which takes {expected} bytes, given {actual}")
    return shape, fortran, dtype, start


def map_npy(path: Path) -> np.ndarray:
    """Return the numbers of an .npy file, memory-mapped and read-only.

    Raises
    ------
    ArrayError
        It is not what it says; the message does not name it.
    OSError
        It is not there, or cannot be read.
    """
    with open_file(path) as file:
        shape, fortran, dtype, start = read_header(file.read(HEADER), os.fstat(file.fileno()).st_size)
        return np.memmap(file, dtype, "r", start, shape, "F" if fortran else "C")


def check_memory(needed: int) -> None:
    """Refuse arrays that this machine, or the container or job that this process is in, has no memory for.

    A small file can unpack to a thousand times its size, and who asks Linux for more memory than there is gets it, and
    is killed as it is used.

    Raises
    ------
    ArrayError
    """
    if needed > (free := free_memory()):
        raise ArrayError(
            f"its arrays take {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free: .npy files "
            "in a directory (IDX files that are not compressed) are memory-mapped, and may be larger"
        )


class _Bounded(io.BufferedReader):
    """A file of which at most TABLE bytes are read at once: of an archive with very many members, the list of these."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > TABLE:
            raise ArrayError(f"its list of members has {size:,} bytes, and at most {TABLE:,} are read")
        return super().read(size)


class Archive(Mapping):
    """The arrays of an .npz file by name, each checked and read when it is asked for.

    Parameters
    ----------
    path : path
    kinds : str
        Kinds of dtype that are allowed.
    compressed : bool
        Whether arrays may be: a small file then makes a thousand times as much memory.

    Raises
    ------
    ArrayError
        The file is not what it says; the message does not name it.
    OSError
        It is not there, or cannot be read.
    """

    def __init__(self, path: str | Path, kinds: str = NUMBERS, compressed: bool = True):
        self._raw = _Bounded(open_file(path).detach())  # type: ignore[attr-defined]  # closed with the archive
        try:
            self._zip = zipfile.ZipFile(self._raw)
        except Exception as error:  # of a damaged archive zipfile raises errors of many kinds
            self._raw.close()
            raise ArrayError(_reason(error)) from error
        self._kinds, self._compressed, self._size = kinds, compressed, os.fstat(self._raw.fileno()).st_size
        self._members = {member.filename.removesuffix(".npy"): member for member in self._zip.infolist()}

    def check(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Return (shape, dtype) of an array; ArrayError if the file is not what it says, KeyError if there is none."""
        member = self._members[name]
        ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: LARGEST_RATIO}.get(member.compress_type)
        if ratio is None:
            raise ArrayError(f"{member.filename}: compressed in a way that numpy.savez does not know")
        if ratio > 1 and not self._compressed:
            raise ArrayError(f"{member.filename}: compressed, and here only arrays that numpy.savez wrote are read")
        if member.file_size > ratio * min(member.compress_size, self._size):
            raise ArrayError(f"{member.filename}: {member.file_size} bytes cannot come from {member.compress_size}")
        try:
            with self._zip.open(member) as file:
                shape, _, dtype, _ = read_header(file.read(HEADER), member.file_size, self._kinds)
        except Exception as error:
            raise ArrayError(f"{member.filename}: {_reason(error)}") from error
        return shape, dtype

    def __getitem__(self, name: str) -> np.ndarray:
        """The array; errors are those of `check`, and ArrayError where its bytes are damaged."""
        self.check(name)
        member = self._members[name]
        try:
            with self._zip.open(member) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:
            raise ArrayError(f"{member.filename}: {_reason(error)}") from error

    def text(self, name: str, longest: int) -> str:
        """Return a text of at most `longest` characters; errors are those of `__getitem__`."""
        shape, dtype = self.check(name)
        if shape != () or dtype.kind != TEXT or dtype.itemsize > 4 * longest:
            raise ArrayError(f"{name} must be a text of at most {longest:,} characters, given {dtype}{shape}")
        return str(self[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def close(self) -> None:
        """Give the file back."""
        self._zip.close()
        self._raw.close()


def _reason(error: BaseException) -> str:
    """Return the text of an error in one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "..."
