"""IDX, the format of MNIST: a big-endian header, then the numbers in row-major order.

    bytes 0 0, type code, number of axes d; d sizes of 4 bytes; the numbers

Type codes: 08 uint8, 09 int8, 0B int16, 0C int32, 0D float32, 0E float64. Magic 2049 (0x0801) is a vector of
bytes, 2051 (0x0803) a stack of images. Source: Y. LeCun, C. Cortes, C. Burges, the MNIST page. A file may be
gzip-compressed (told by its first bytes, not by its name). One that is not is memory-mapped, so it may be
larger than memory.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from .dataset import DataError

TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def read_idx(path: str | Path, ndim: int | None = None, dtype=None) -> np.ndarray:
    """The array of an IDX file, read-only.

    Parameters
    ----------
    path : str or Path
        Gzip-compressed or not.
    ndim, dtype : int, numpy type or None
        What it must hold; None accepts any.

    Raises
    ------
    DataError
        Not an IDX file, another number of axes or type than asked for, shorter or longer than its header
        says.
    """
    path = Path(path)
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if packed:
        content = _unpack(path)
    else:
        content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)

    kind, shape, start = _header(path, content)
    if ndim is not None and len(shape) != ndim:
        raise DataError(f"{path}: expected {ndim} axes (magic {2048 + ndim}), given {len(shape)} of shape {shape}")
    if dtype is not None and kind != dtype:
        raise DataError(f"{path}: expected numbers of type {np.dtype(dtype)}, given {kind}")
    expected = start + kind.itemsize * int(np.prod(shape, dtype=object))
    if len(content) != expected:
        state = "truncated" if len(content) < expected else "too long"
        raise DataError(
            f"{path}: {state}: header says shape {shape}, which takes {expected} bytes, given {len(content)}"
        )
    return content[start:].view(kind).reshape(shape)


def _unpack(path: Path) -> np.ndarray:
    try:
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), np.uint8)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: truncated or damaged gzip file: {error}") from error


def _header(path: Path, content: np.ndarray) -> tuple[np.dtype, tuple[int, ...], int]:
    head = bytes(content[:4])
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES:
        raise DataError(
            f"{path}: not an IDX file: expected two zero bytes, a type code and the number of axes, "
            f"given {head.hex(' ') or 'nothing'}"
        )
    axes, start = head[3], 4 + 4 * head[3]
    sizes = bytes(content[4:start])
    if axes == 0 or len(sizes) < 4 * axes:
        raise DataError(f"{path}: truncated in its header: {axes} axes, given {len(content)} bytes in all")
    return np.dtype(TYPES[head[2]]), struct.unpack(f">{axes}I", sizes), start
