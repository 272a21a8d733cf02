"""The arrays of a checkpoint's file, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from nn.data.arrays import NUMBERS, TEXT, Archive
from nn.reading import TABLE, parse_json

PROGRESS = "progress"  # the entry that is no array of the state
Kind = tuple[tuple[int, ...], np.dtype]


class LazyState(Mapping):
    """A state whose arrays are read when they are asked for: they need not all fit in memory.

    Attributes
    ----------
    progress : dict
        What `Checkpoints.save` was given beside the state.
    """

    progress: dict

    def kind(self, name: str) -> Kind:
        """Return (shape, dtype) of an array, which is not read for that."""
        raise TypeError(f"{type(self).__name__} does not define kind")


class StateFile(LazyState):
    """The arrays of a checkpoint of one file, by name."""

    def __init__(self, path: Path):
        self._file = Archive(path, NUMBERS + TEXT, compressed=False)
        self._names = dict.fromkeys(self._file)
        for name in self._names:
            self._file.check(name)
        self.progress = read_object(self._file, PROGRESS)
        del self._names[PROGRESS]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._file[name]

    def kind(self, name: str) -> Kind:
        return self._file.check(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_object(file: Archive, name: str) -> dict:
    """Return an entry that is an object of JSON.

    Raises
    ------
    ValueError
        It is something else.
    """
    value = parse_json(file.text(name, TABLE))
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, given {value!r:.40}")
    return value
