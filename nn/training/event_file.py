"""TensorBoard's event files, written by hand: scalars over steps, which `tensorboard --logdir DIR` draws.

A file is a row of records, each

    length    8 bytes, little-endian
    checksum  4 bytes, of the length
    content   a message Event of Protocol Buffers
    checksum  4 bytes, of the content

The checksum is CRC-32C (Castagnoli et al. 1993, RFC 3720), rotated by 15 bits and moved by a constant, so that a file
inside a record keeps checksums of its own. Source: the record format and event.proto that TensorFlow publishes.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from nn.protobuf import double, message

VERSION = "brain.Event:2"  # the first record's: what readers know of the format
START = 1  # SessionLog.status: later steps of files before this one are void
LARGEST = float.fromhex("0x1.fffffep+127")  # of four bytes
POLYNOMIAL = 0x82F63B78  # of CRC-32C, lowest bit first
MASK = 0xA282EAD8
_NUMBERS = itertools.count()


def _row(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
    return byte


TABLE = tuple(map(_row, range(256)))


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of bytes.

    Examples
    --------
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    rest = 0xFFFFFFFF
    for byte in content:
        rest = TABLE[(rest ^ byte) & 255] ^ rest >> 8
    return rest ^ 0xFFFFFFFF


def masked(checksum: int) -> int:
    """Return a checksum as records hold it."""
    return ((checksum >> 15 | checksum << 17) + MASK) & 0xFFFFFFFF


def record(content: bytes) -> bytes:
    """Return a record: length and content, each with its checksum."""
    length = struct.pack("<Q", len(content))
    return b"".join(
        [length, struct.pack("<I", masked(crc32c(length))), content, struct.pack("<I", masked(crc32c(content)))]
    )


def narrow(value: float) -> float:
    """Return a number that four bytes can hold: an infinite one beyond their range."""
    value = float(value)
    return math.copysign(math.inf, value) if abs(value) > LARGEST else value


class EventFile:
    """A new event file in a directory, which is made where it is not there.

    Parameters
    ----------
    directory : path
    start : int or None
        The first step of this file, in a run that continues. Readers drop what earlier files hold from there on.

    Raises
    ------
    OSError
        The directory cannot be made, or written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     file = EventFile(directory)
    ...     file.add(10, {"loss": 0.5})
    ...     file.flush()
    ...     file.path.stat().st_size
    82
    """

    def __init__(self, directory: str | os.PathLike, start: int | None = None):
        Path(directory).mkdir(parents=True, exist_ok=True)
        host = platform.node().replace("/", "-")
        name = f"events.out.tfevents.{time.time():017.6f}.{host}.{os.getpid()}.{next(_NUMBERS)}"
        self.path = Path(directory) / name  # readers take a directory's files in the order of their names
        self._records = [self._event((3, VERSION))]
        if start is not None:
            self._records.append(self._event((2, start), (7, message((1, START)))))
        self.path.touch(exist_ok=False)
        self.flush()

    @staticmethod
    def _event(*fields) -> bytes:
        return record(double(1, time.time()) + message(*fields))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the values of a step, by their names; `flush` writes them."""
        values = [message((1, name), (2, narrow(value))) for name, value in scalars.items()]
        self._records.append(self._event((2, step), (5, message((1, values)))))

    def flush(self) -> None:
        """Append what was added to the file."""
        records, self._records = b"".join(self._records), []
        with open(self.path, "ab") as file:
            file.write(records)
