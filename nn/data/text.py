"""Text for byte-level language models: a sample is `length` bytes, its target the same one byte further.

The vocabulary is the 256 bytes, so that any text will do and none has to be tokenised. Samples are views into
the text, which may be a memory map. The first nine tenths are for training, of which the last samples may be held out
for validation (splitting.py); the last tenth is the test part.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

from nn.reading import open_file, read_bytes

from .dataset import DataError, Dataset

LARGEST = 1 << 30  # bytes of all texts of a directory: they are joined in memory
SUFFIXES = (".c", ".h", ".md", ".py", ".rst", ".txt")
VOCABULARY = tuple(repr(chr(i)) if 32 <= i < 127 else f"\\x{i:02x}" for i in range(256))


def text_datasets(tokens: np.ndarray, name: str, length: int, **options) -> list[Dataset]:
    """Training and test Dataset of a text (n,) uint8, cut at nine tenths."""
    cut = len(tokens) * 9 // 10
    splits = tokens[:cut], tokens[cut:]
    if length < 1 or min(map(len, splits)) <= length:
        raise DataError(
            f"{name}: {len(tokens)} bytes are too few for samples of {length}: "
            f"the last tenth must hold at least {length + 1}; give a longer text or a shorter length"
        )
    return [_windows(split, name, length, options) for split in splits]


def _windows(tokens: np.ndarray, name: str, length: int, options: dict) -> Dataset:
    count = (len(tokens) - 1) // length
    x = tokens[: count * length].reshape(count, length)
    y = tokens[1 : count * length + 1].reshape(count, length)
    return Dataset(x, y, name, classes=256, class_names=VOCABULARY, **options)


def read_text(path: str | Path) -> np.ndarray:
    """Return the bytes of a file (memory-mapped) or of all texts below a directory: (n,) uint8.

    Files of a directory are those named *.c .h .md .py .rst .txt, in the order of their paths, each ended by
    a zero byte.
    """
    path = Path(path)
    if not path.is_dir():
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise DataError(f"{path}: the text is empty")
            return np.memmap(file, np.uint8, "r")
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return _join(files, path)


def read_standard_library() -> np.ndarray:
    """Return the sources of this interpreter's standard library without its tests: (n,) uint8.

    About 12 MB that every Python has; the exact text differs between versions.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - left_out)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return _join(files, root)


def _join(files: list[Path], root: Path) -> np.ndarray:
    if not files:
        raise DataError(f"{root}: no text found, expected files named *{' *'.join(SUFFIXES)}")
    if (size := sum(file.stat().st_size for file in files)) > LARGEST:
        raise DataError(
            f"{root}: its texts have {size:,} bytes, and at most {LARGEST:,} are joined: write them into one file, "
            "which is memory-mapped"
        )
    return np.frombuffer(b"".join(read_bytes(file, LARGEST) + b"\0" for file in files), np.uint8)
