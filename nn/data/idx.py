"""IDX, the format of MNIST: a big-endian header, then the numbers in row-major order.

    bytes 0 0, type code, number of axes d; d sizes of 4 bytes; the numbers

Type codes: 08 uint8, 09 int8, 0B int16, 0C int32, 0D float32, 0E float64. Magic 2049 (0x0801) is a vector of
bytes, 2051 (0x0803) a stack of images. Source: Y. LeCun, C. Cortes, C. Burges, the MNIST page. A file may be
gzip-compressed (its first bytes say so, not its name): no more of it is unpacked than its header asks for. One that
is not is memory-mapped, so it may be larger than memory.
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nn.data.arrays import LARGEST_RATIO, ArrayError, check_memory, nbytes
from nn.reading import open_file

from .dataset import DataError

TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: str | Path, ndim: int | None = None, dtype=None) -> np.ndarray:
    """Return the array of an IDX file, read-only.

    Parameters
    ----------
    path : str or Path
        Gzip-compressed or not.
    ndim, dtype : int, numpy type or None
        Number of axes, and dtype, that the file must have; None accepts any.

    Raises
    ------
    DataError
        Not an IDX file, another number of axes or type than asked for, shorter or longer than its header
        says.
    """
    path = Path(path)
    with open_file(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        size = os.fstat(raw.fileno()).st_size
        try:
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            kind, shape, start = _header(path, file)
            expected = start + nbytes(shape, kind)
            if ndim is not None and len(shape) != ndim:
                raise DataError(
                    f"{path}: expected {ndim} axes (magic {2048 + ndim}), given {len(shape)} of shape {shape}"
                )
            if dtype is not None and kind != dtype:
                raise DataError(f"{path}: expected numbers of type {np.dtype(dtype)}, given {kind}")
            if not packed:
                _compare(path, shape, expected, size)
                content = np.memmap(raw, np.uint8, "r", shape=(expected,))[start:]
            elif expected > LARGEST_RATIO * size:
                raise DataError(
                    f"{path}: truncated: header says shape {shape}, which takes {expected} bytes, "
                    f"and {size} bytes of gzip cannot hold so many"
                )
            else:
                check_memory(expected)
                # One byte more, to find the end: there the checksum is compared.
                content = np.frombuffer(file.read(expected - start + 1), np.uint8)
                _compare(path, shape, expected, start + len(content), "or more")
        except ArrayError as error:
            raise DataError(f"{path}: {error}") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error
    return content.view(kind).reshape(shape)


def _compare(path: Path, shape: tuple[int, ...], expected: int, given: int, more: str = "") -> None:
    if given != expected:
        state, more = ("truncated", "") if given < expected else ("too long", f" {more}".rstrip())
        raise DataError(
            f"{path}: {state}: header says shape {shape}, which takes {expected} bytes, given {given}{more}"
        )


def _header(path: Path, file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], int]:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES:
        raise DataError(
            f"{path}: not an IDX file: expected two zero bytes, a type code and the number of axes, "
            f"given {head.hex(' ') or 'nothing'}"
        )
    axes = head[3]
    sizes = file.read(4 * axes)
    if axes == 0 or len(sizes) < 4 * axes:
        raise DataError(f"{path}: truncated in its header: {axes} axes, given {4 + len(sizes)} bytes in all")
    return np.dtype(TYPES[head[2]]), struct.unpack(f">{axes}I", sizes), 4 + 4 * axes
