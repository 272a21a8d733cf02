"""The safetensors format: arrays by name in one file, which can be mapped into memory and holds no code.

    8 bytes     N, the length of the header, little-endian
    N bytes     JSON: {"__metadata__": {text: text},
                NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
    the rest    the numbers, little-endian, in C order; offsets count from here

Written and read by hand, for it is that short. What makes a file safe to read is checked, all of it, before an array
is shown: the header has at most 16 MiB (the format allows 100 MB) and each name once, every array has exactly the bytes
of its shape, and arrays cover the rest without overlap and without a hole. Source: the format as its authors publish it
(safetensors, 2022).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from nn.data.arrays import MOST_AXES
from nn.reading import TABLE, open_file, parse_json
from nn.training.checkpoints import replacing

DTYPES = {
    **{"BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4"},
    **{"U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8"},
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
BFLOAT16 = "BF16"  # the upper half of a float32; NumPy has none, so it is read as float32
LARGEST_HEADER = TABLE  # of a network with 30,000 layers; as objects in memory it takes twenty times as much
ALIGN = 8  # bytes: the numbers begin at a multiple


class TensorError(ValueError):
    """A file that is not what the format says; the message names it."""


def write(file: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays under their names; it is there whole or not at all.

    Parameters
    ----------
    file : path
    tensors : dict of arrays
        They hold booleans, whole numbers or floats of 16 to 64 bits, contiguous or not. Those with the largest
        numbers come first in the file, so that all are aligned.
    metadata : dict of str, or None

    Raises
    ------
    TypeError
        A dtype that the format has no name for, or metadata that are no texts.
    OSError
        The file cannot be written; what was there before is kept.
    """
    header: dict[str, object] = {}
    if metadata:
        if not all(isinstance(text, str) for pair in metadata.items() for text in pair):
            raise TypeError(f"{file}: metadata must be texts by texts")
        header["__metadata__"] = dict(metadata)
    end = 0
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    for name in order:
        array = arrays[name]
        code = NAMES.get(array.dtype.newbyteorder("<"))
        if code is None or name == "__metadata__":
            raise TypeError(f"{file}: {name!r} cannot be written: its dtype is {array.dtype}; known are {[*DTYPES]}")
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN)
    with replacing(Path(file)) as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name in order:
            out.write(
                np.ascontiguousarray(arrays[name], arrays[name].dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
            )


class Tensors(Mapping):
    """The arrays of a file by name, memory-mapped and read-only.

    Attributes
    ----------
    metadata : dict of str

    Raises
    ------
    TensorError
        The file is not what the format says: which entry, and what is wrong with it.
    OSError
        It is not there, or cannot be read.
    """

    def __init__(self, file: str | Path):
        self.file = Path(file)
        with open_file(self.file) as raw:
            size = os.fstat(raw.fileno()).st_size
            length = int.from_bytes(raw.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise self._wrong(f"{size} bytes cannot begin with a header of {length}")
            header = self._header(raw.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            if not isinstance(self.metadata, dict) or not all(isinstance(v, str) for v in self.metadata.values()):
                raise self._wrong("__metadata__ must hold texts by name")
            self._entries = {name: self._checked_entry(name, entry) for name, entry in header.items()}
            self._check_cover(size - 8 - length)
            self._bytes = np.memmap(raw, np.uint8, "r", 8 + length) if size > 8 + length else np.zeros(0, np.uint8)

    def __getitem__(self, name: str) -> np.ndarray:
        code, shape, start, end = self._entries[name]
        raw = self._bytes[start:end]
        if code == BFLOAT16:
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if code == "BOOL":
            return (raw != 0).reshape(shape)  # a byte may hold what is no boolean
        return raw.view(DTYPES[code]).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _wrong(self, why: str) -> TensorError:
        return TensorError(f"{self.file}: no safetensors file: {why if len(why) < 400 else why[:400] + '...'}")

    def _header(self, text: bytes) -> dict:
        def once(pairs):
            entries = dict(pairs)
            if len(entries) < len(pairs):
                raise ValueError("a name is there twice")
            return entries

        try:
            if not text.startswith(b"{"):
                raise ValueError("a header begins with {")
            return parse_json(text.decode(), once)
        except ValueError as error:
            raise self._wrong(f"its header is not right ({error})") from error

    def _checked_entry(self, name: str, entry) -> tuple[str, tuple[int, ...], int, int]:
        """(code of the dtype, shape, first byte, last byte) of an entry that is what it says."""
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._wrong(f"{name!r:.80} must have a dtype, a shape and data_offsets, given {entry!r:.80}")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str) or code not in (*DTYPES, BFLOAT16):
            raise self._wrong(f"{name!r:.80} has dtype {code!r:.40}; known here are {', '.join((*DTYPES, BFLOAT16))}")
        for numbers in (shape, offsets):
            if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
                raise self._wrong(f"{name!r:.80}: shape and data_offsets must be whole numbers, given {numbers!r:.80}")
        itemsize = 2 if code == BFLOAT16 else np.dtype(DTYPES[code]).itemsize
        expected = math.prod(shape) * itemsize
        if len(shape) > MOST_AXES or math.prod(max(1, n) for n in shape) * itemsize >= 2**63:
            raise self._wrong(f"{name!r:.80}: no array can have shape {shape!r:.80}")
        if len(offsets) != 2 or offsets[1] - offsets[0] != expected:
            raise self._wrong(
                f"{name!r:.80}: {code} {shape!r:.80} takes {expected} bytes, its offsets are {offsets!r:.80}"
            )
        return code, tuple(shape), *offsets

    def _check_cover(self, size: int) -> None:
        """Refuse arrays that overlap, leave a hole, or end before or behind the file's end."""
        at = 0
        for name, (_, _, start, end) in sorted(self._entries.items(), key=lambda entry: entry[1][2:]):
            if start != at:
                raise self._wrong(
                    f"{name!r:.80} begins at byte {start} of the numbers, where the one before ends at {at}"
                )
            at = end
        if at != size:
            raise self._wrong(f"its arrays take {at} bytes, and there are {size}")
