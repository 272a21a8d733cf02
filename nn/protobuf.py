"""The part of Protocol Buffers that ONNX and TensorBoard need, by hand: a message is its fields, one after the other.

A field is a key, number << 3 | kind, and a value: kind 0 a varint (seven bits a byte, lowest first, the eighth bit says
that more follow), kind 1 eight bytes of a float, kind 2 bytes with their length before them (texts and messages too),
kind 5 four bytes of a float.
Source: the encoding as Google publishes it (Protocol Buffers, 2008).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5


def varint(number: int) -> bytes:
    """Encode a whole number; a negative one as 64 bits of its two's complement."""
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, value: int | float | str | bytes) -> bytes:
    """Encode one field; the value of a nested message is its bytes."""
    if isinstance(value, float):
        return varint(number << 3 | FLOAT) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(content)) + content


def double(number: int, value: float) -> bytes:
    """Encode one field of eight bytes."""
    return varint(number << 3 | DOUBLE) + struct.pack("<d", value)


def message(*fields: tuple[int, int | float | str | bytes | Iterable]) -> bytes:
    """Encode fields by number; a list is one field for each of its values."""
    encoded = []
    for number, value in fields:
        values = value if isinstance(value, list | tuple) else [value]
        encoded += [field(number, value) for value in values]
    return b"".join(encoded)
