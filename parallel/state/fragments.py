"""Fragments of arrays, as ranks hold them and write them, and the whole arrays that they make.

A fragment is a range of elements of an array, or of a part of an array that is split over ranks (splits.py). A file of
fragments says in its entry "fragments" where each belongs. So the reader need not know how many ranks there were, nor
what each of them had: it asks for an array and gets it whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nn.core.layer import Spec
from nn.data.arrays import NUMBERS, TEXT, Archive, ArrayError, nbytes
from nn.training.state_files import PROGRESS, Kind, LazyState, read_object
from parallel.state.splits import Split, check_part, cut, merge, part_shape, with_split

FRAGMENTS = "fragments"  # the entry that says where fragments belong
MAX_PARTS = 1 << 16  # of an array


@dataclass(frozen=True)
class Fragment:
    """A range of elements of an array.

    Parameters
    ----------
    name : str
        As in the state.
    array : array
        The elements, in the order in which they lie in the array (or in its part); of any shape.
    shape : tuple of int or None
        Of the whole array; None for that of `array`.
    start : int
        Which element is the first one.
    part : (int, int)
        (index, count) of the part of the array that the elements are of.
    split : Split or None
        How the array is cut into parts, where there are several.
    """

    name: str
    array: np.ndarray
    shape: tuple[int, ...] | None = None
    start: int = 0
    part: tuple[int, int] = (0, 1)
    split: Split | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.array.shape if self.shape is None else self.shape

    @property
    def whole(self) -> bool:
        """Whether all elements of the array are here."""
        return self.split is None and self.array.size == math.prod(self.full_shape)

    def fill(self, whole: np.ndarray) -> None:
        """Write these elements, as the whole array has them."""
        if self.split is not None:
            key, spec = self.name.rpartition("/")[2], with_split(Spec(self.shape, None), self.split)
            whole = cut({key: spec}, {key: whole}, *self.part)[key]
        self.array[...] = whole.reshape(-1)[self.start : self.start + self.array.size].reshape(self.array.shape)

    def place(self) -> dict:
        """Where the elements belong, for JSON."""
        split = [self.split.axis, self.split.blocks, self.split.units] if self.split else None
        return {"shape": list(self.full_shape), "start": self.start, "part": list(self.part), "split": split}


def with_places(fragments: Iterable[Fragment]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of fragments as a file has them, each name once, and in the end where they belong."""
    places = {}
    for fragment in fragments:
        if fragment.name in places:
            raise ValueError(f"{fragment.name}: two fragments of it in one file")
        places[fragment.name] = fragment.place()
        yield fragment.name, fragment.array
    yield FRAGMENTS, np.array(json.dumps(places))


class WholeArrays(LazyState):
    """Whole arrays, of which fragments are held in several places, each put together when it is asked for."""

    def __init__(self):
        self._places: dict[str, list[_Place]] = {}
        self._kinds: dict[str, tuple[Spec, np.dtype, int]] = {}  # name -> (whole array, dtype, number of parts)

    def add(self, fragment: Fragment, elements: int, fetch: Callable[[], np.ndarray]) -> None:
        """A fragment of so many elements, which `fetch` returns."""
        self._add(fragment.name, fragment.place(), elements, fragment.array.dtype, fetch)

    def _add(self, name: str, place: dict, elements: int, dtype: np.dtype, fetch: Callable[[], np.ndarray]) -> None:
        """Add a fragment from a file or a rank that describes it so; all fragments of an array are of one kind."""
        spec, start, index, count = _read_place(name, place)
        try:
            nbytes(spec.shape, dtype)
        except ArrayError as error:
            raise ValueError(f"{name}: {error}") from error
        kind = spec, dtype, count
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"{name}: another shape, dtype or number of parts than in another file")
        self._places.setdefault(name, []).append(_Place(index, start, start + elements, fetch))

    def _check(self, name: str) -> None:
        """Refuse an array of which elements are missing, or are there twice."""
        _, _, count = self._kinds[name]
        places = sorted(self._places[name], key=lambda place: (place.index, place.start, place.stop))
        for index in range(count):
            of, at = f" of part {index} of {count}" if count > 1 else "", 0
            for start, stop in [(p.start, p.stop) for p in places if p.index == index]:
                if start != at:
                    what = "missing" if start > at else "there twice"
                    raise ValueError(f"{name}: elements{of} from {min(start, at)} on are {what}")
                at = stop
            if at != (size := self._size(name, index)):
                raise ValueError(f"{name}: it has {size} elements{of}, in the files there are {at}")

    def _size(self, name: str, index: int) -> int:
        """Elements of a part."""
        spec, _, count = self._kinds[name]
        return math.prod(part_shape(name, spec, index, count) if count > 1 else spec.shape)

    def kind(self, name: str) -> Kind:
        """(shape, dtype) of an array, which is not read for that."""
        spec, dtype, _ = self._kinds[name]
        return spec.shape, dtype

    def __getitem__(self, name: str) -> np.ndarray:
        spec, dtype, count = self._kinds[name]
        parts = [np.empty(self._size(name, index), dtype) for index in range(count)]
        for place in self._places[name]:
            parts[place.index][place.start : place.stop] = place.fetch().reshape(-1)
        if count == 1:
            return parts[0].reshape(spec.shape)
        key = name.rpartition("/")[2]
        shaped = [{key: part.reshape(part_shape(name, spec, i, count))} for i, part in enumerate(parts)]
        return merge({key: spec}, shaped)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class JoinedFiles(WholeArrays):
    """The whole arrays of a checkpoint whose fragments lie in several files, each read when it is asked for.

    Raises
    ------
    ValueError
        The files do not have all elements of an array, each once: which, and what is missing or there twice.
    OSError
        A file is not there, or cannot be read.
    """

    def __init__(self, paths: Sequence[Path]):
        super().__init__()
        self.progress, self._files = None, []
        try:
            for path in paths:
                try:
                    self._open(path)
                except (ValueError, KeyError, RecursionError) as error:
                    raise ValueError(f"{path.name}: {error}") from error
            if self.progress is None:
                raise ValueError("none of its files has the progress")
            for name in self._places:
                self._check(name)
        except BaseException:
            for file in self._files:
                file.close()
            raise

    def _open(self, path: Path) -> None:
        """Take up what a file says of its fragments."""
        file = Archive(path, NUMBERS + TEXT, compressed=False)
        self._files.append(file)
        places = read_object(file, FRAGMENTS)
        if PROGRESS in file:
            self.progress = read_object(file, PROGRESS)
        if missing := file.keys() - places.keys() - {FRAGMENTS, PROGRESS}:
            raise ValueError(f"{min(missing)}: not said where it belongs")
        for name, place in places.items():
            held, dtype = file.check(name)
            self._add(name, place, math.prod(held), dtype, partial(file.__getitem__, name))


class GatheredFragments(WholeArrays):
    """The whole arrays of which ranks have given fragments.

    Raises
    ------
    ValueError
        Elements of an array are missing, or there twice.
    """

    def __init__(self, parts: Iterable[Iterable[Fragment]]):
        super().__init__()
        for each in (fragment for part in parts for fragment in part):
            self.add(each, each.array.size, lambda array=each.array: array)
        for name in self._places:
            self._check(name)


@dataclass(frozen=True)
class _Place:
    """Elements from `start` to before `stop` of part `index`, and what returns them: from a file, or a rank."""

    index: int
    start: int
    stop: int
    fetch: Callable[[], np.ndarray]


def _read_place(name: str, place) -> tuple[Spec, int, int, int]:
    """(whole array, first element, index of the part, number of parts) as a file says it."""
    try:
        shape, start, (index, count), split = (place[key] for key in ("shape", "start", "part", "split"))
        numbers = [*shape, start, index, count, *(split or ())]
        if not all(type(n) is int and n >= 0 for n in numbers) or (count > 1) != (split is not None):
            raise ValueError
        check_part(index, count)
        found = with_split(Spec(tuple(shape), None), Split(*split) if split else None)
        if count > MAX_PARTS:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{name}: what place is {place!r:.80}?") from None
    return found, start, index, count
