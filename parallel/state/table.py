"""The table of a trainer's arrays, and all that is asked of its state: written once, over the rows.

    gather        items            whole arrays on rank 0, one after the other
    scatter       load             the other way around
    checkpoints   fragments        what each rank writes where every rank writes its own
    memory        bytes, formula
    comparison    digest, replicated, not_finite
    looking back  snapshot, restore

An array may be on one rank, in shards on servers, in parts of a tensor group, in stages: a row says what a rank has
(placed.py), fragments say where it belongs (fragments.py), and rank 0 puts whole arrays together, one at a time: so a
shard that fits a rank is all that has to fit, and what is saved is what one process saves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from weakref import WeakMethod

import numpy as np

from nn.core.layout import ALIGN
from nn.core.network import Network
from nn.training.state import PRIVATE, check_state, kind_of
from parallel.mesh import Mesh
from parallel.state.fragments import Fragment, WholeArrays
from parallel.state.placed import KINDS, Partial, PlacedArray, Replicate
from parallel.state.splits import is_first, split_of, whole_specs

TAG = 31  # of all messages here


class StateTable:
    """The rows of this rank, and what is done with those of all ranks.

    Parameters
    ----------
    mesh : Mesh
    network, local_network : Network
        The whole one, and what this rank has of it.
    slots : iterable of str
        Names of the optimizer's moments, in their order.
    rows : WeakMethod () -> iterable of PlacedArray
        The rows of this rank, as they are now. Held weakly: a trainer has its table, and a cycle would delay freeing
        its buffers.
    first_of_peers : bool
        Whether no rank before this one on the axis "pipeline" has the same stage.

    Attributes
    ----------
    scattered : bool
        Whether a rank lacks some elements: then whole arrays are gathered on rank 0, else every rank has them.
    """

    def __init__(
        self,
        mesh: Mesh,
        network: Network,
        local_network: Network,
        slots: Iterable[str],
        rows: WeakMethod,
        first_of_peers: bool = True,
    ):
        self.mesh, self.network, self.weak_rows = mesh, network, rows
        self.specs = whole_specs(local_network)
        serves = mesh.index is None and mesh.model_size > 1
        self.answers = first_of_peers and mesh.data_group.rank == 0 and not serves  # for what all ranks have
        self.sections = {name: i for i, name in enumerate(["param", *(f"optimizer/{slot}" for slot in slots)])}
        self.places = {name: i for i, name in enumerate([*network.layout.specs, *network.buffer_layout.specs])}
        self.fragments_of_ranks: list | None = None  # on rank 0, once gathered: the fragments that every rank has
        held = self.held()
        here = sorted(name for name, fragments in held.items() if any(each.whole for each in fragments))
        replicated = all(isinstance(row.placement, Replicate) for row in self.rows() if row.name)
        mine = zlib.crc32(repr(here).encode()) if replicated and len(here) == len(held) else None
        found = set(mesh.allgather(mine))
        self.scattered = mesh.size > 1 and (len(found) > 1 or None in found)

    def rows(self) -> Iterable[PlacedArray]:
        """The rows of this rank."""
        return self.weak_rows()()

    def order(self, name: str) -> tuple:
        """Where an entry stands in a state, the same on all ranks: as one process has it, then what strategies keep."""
        row, _, entry = name.rpartition("/")
        if not row:
            return -1, "", name != "steps", name
        return self.sections.get(row, len(self.sections)), row, self.places.get(entry, -1), entry

    def split(self, row: PlacedArray) -> Iterator[Fragment]:
        """Yield the fragments of a row's entries that this rank has, as its part where a tensor group has parts."""
        ranks = self.mesh.parts
        for each in row.fragments():
            spec = self.specs.get(each.name.rpartition("/")[2]) if ranks and row.layout else None
            if (split := split_of(spec)) is not None:
                count = split.parts(ranks.size)
                part, split = (ranks.rank % count, count), replace(split, copies=1)
                each = replace(each, shape=spec.shape, part=part, split=split)
            yield each

    def first_of_parts(self, row: PlacedArray, name: str) -> bool:
        """Whether this rank is the first, of those with parts of the same arrays, that has what it has of an entry."""
        ranks = self.mesh.parts
        split = split_of(self.specs.get(name.rpartition("/")[2])) if row.layout else None
        return ranks is None or is_first(split, ranks.rank, ranks.size)

    def held(self) -> dict[str, list[Fragment]]:
        """All that this rank has of each entry, copies included."""
        found: dict[str, list[Fragment]] = {}
        for row in self.rows():
            for each in self.split(row) if row.name else ():
                found.setdefault(each.name, []).append(each)
        return found

    def fragments(self) -> Iterator[Fragment]:
        """Yield the fragments that this rank answers for: over all ranks, each element comes once."""
        for row in self.rows():
            answers = self.answers if row.layout is not None else self.mesh.rank == 0
            if not row.name or row.copy or (isinstance(row.placement, Replicate) and not answers):
                continue
            for each in self.split(row):
                borrowed = row.layout is not None and each.name.rpartition("/")[2] in row.layout.borrowed
                if not borrowed and self.first_of_parts(row, each.name):
                    yield each

    # ------------------------------------------------------------------------------------------------ gather

    def items(self, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of all entries with this prefix, in their order; all on rank 0 (collective if scattered).

        An array is valid until the next one is asked for. Where the state is scattered, other ranks iterate over what
        they send.
        """
        mine = self._sorted() if self.scattered else []
        whole = self.gather(mine) if self.scattered else self.own()
        if whole is None:
            for each in mine:
                if each.name.startswith(prefix):
                    communicator = self.mesh.communicator
                    sent = communicator.Isend(_bytes(each.array), 0, TAG)
                    communicator.planner.wait_for(sent, f"to send {each.name} to rank 0, which gathers the state")
                    yield each.name, each.array
            return
        for name in sorted(whole, key=self.order):
            if name.startswith(prefix):
                yield name, whole[name]

    def _sorted(self) -> list[Fragment]:
        """Return the fragments that this rank answers for, in the order of entries."""
        return sorted(self.fragments(), key=lambda each: self.order(each.name))

    def own(self) -> WholeArrays:
        """The arrays where this rank has all elements of each."""
        found = WholeArrays()
        for fragments in self.held().values():
            complete = [each for each in fragments if each.whole]
            for each in complete[:1] or fragments:
                found.add(each, each.array.size, lambda array=each.array: array)
        return found

    def gather(self, mine: list[Fragment]) -> WholeArrays | None:
        """Return the arrays of all ranks, on rank 0; to be read in their order, in which other ranks send theirs."""
        mesh = self.mesh
        if self.fragments_of_ranks is None:  # once: what ranks have stays where it is
            bare = [replace(each, array=np.empty(0, each.array.dtype), shape=each.full_shape) for each in mine]
            sizes = [each.array.size for each in mine]
            self.fragments_of_ranks = mesh.communicator.gather(list(zip(bare, sizes, strict=True)), 0) or []
        if mesh.rank:
            return None
        found = WholeArrays()
        for each in mine:
            found.add(each, each.array.size, lambda array=each.array: array)
        for rank, fragments in enumerate(self.fragments_of_ranks):
            for each, size in fragments if rank else ():
                found.add(each, size, partial(self._receive, rank, each.array.dtype, size))
        return found

    def _receive(self, rank: int, dtype: np.dtype, size: int) -> np.ndarray:
        array, communicator = np.empty(size, dtype), self.mesh.communicator
        communicator.planner.wait_for(communicator.Irecv(_bytes(array), rank, TAG), f"for the state of rank {rank}")
        return array

    def digest(self, sha) -> None:
        """Let a hash have all parameters, as they lie in the whole network's layout; rank 0's counts (collective)."""
        for _, array in self.items("param/"):
            sha.update(np.ascontiguousarray(array))
            sha.update(np.zeros(-array.size % ALIGN, array.dtype))

    # ------------------------------------------------------------------------------------------------ scatter

    def load(self, state: Mapping[str, np.ndarray]) -> set[str]:
        """Take over what rank 0 is given (collective); return the kinds of private state that begin anew.

        What a strategy keeps for itself alone (PRIVATE) is taken over where all entries of its kind are there and fit;
        else that kind begins anew, at zero. It is never a reason to refuse a state.

        Raises
        ------
        ValueError
            On all ranks: what is missing, foreign or misshapen.
        """
        mesh, held = self.mesh, self.held()
        whole = self.gather(self._sorted()) if self.scattered else self.own()
        problem, entries, unusable = "", [], set()
        if mesh.rank == 0:
            partial_rows = [row for row in self.rows() if isinstance(row.placement, Partial)]
            addends = {each.name for row in partial_rows for each in row.fragments()}
            kinds = {name: whole.kind(name) for name in sorted(whole, key=self.order)}
            private = {name for name in kinds if name.startswith(PRIVATE)}
            if not (problem := check_state({name: kinds[name] for name in kinds if name not in private}, state)):
                misfits = [name for name in private if not _fits(state, name, kinds[name], name in addends)]
                unusable = {kind_of_private(name) for name in misfits}
            for name, kind in kinds.items():
                if name not in private or kind_of_private(name) not in unusable:
                    entries.append((name, *kind, name in addends))
        problem, entries, unusable = mesh.bcast((problem, entries, unusable))
        if problem:
            raise ValueError(problem)
        for row in self.rows():
            if row.layout is not None and row.name.startswith(PRIVATE) and kind_of_private(row.name) in unusable:
                row.buffer[...] = 0
        for name, shape, dtype, has_addends in entries:
            given = state[name] if mesh.rank == 0 else None
            if not has_addends:
                given = self._broadcast(given, shape, dtype)
                for each in held.get(name, ()):
                    each.fill(given)
                continue
            given = as_addends(given, shape[0]) if mesh.rank == 0 else [None] * shape[0]
            for index, addend in enumerate(given):
                addend = self._broadcast(addend, shape[1:], dtype)
                for each in held.get(name, ()):
                    if each.start == index * addend.size:
                        each.array[...] = addend.reshape(each.array.shape)
        return unusable

    def _broadcast(self, array: np.ndarray | None, shape, dtype) -> np.ndarray:
        """An array of rank 0 on all ranks."""
        array = np.empty(shape, dtype) if self.mesh.rank else np.ascontiguousarray(array)
        if self.mesh.communicator and array.size:
            self.mesh.communicator.Bcast(_bytes(array), root=0)
        return array

    # ------------------------------------------------------------------------------------------------ of this rank

    def buffers(self) -> list[np.ndarray]:
        """All that this rank keeps from step to step, each buffer once."""
        return list({id(row.buffer): row.buffer for row in self.rows() if row.name}.values())

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of what this rank keeps, for `restore`."""
        return {str(number): buffer.copy() for number, buffer in enumerate(self.buffers())}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Go back to a snapshot."""
        for number, buffer in enumerate(self.buffers()):
            buffer[...] = snapshot[str(number)]

    def replicated(self) -> Iterator[Fragment]:
        """Parameters, running statistics and the loss scale, where every rank of a group has a copy."""
        for row in self.rows():
            if row.name in ("param", "state", "loss_scale") and isinstance(row.placement, Replicate):
                yield from self.split(row)

    def not_finite(self) -> set[str]:
        """Return the names of parameters of which this rank has values that are not finite."""
        rows = (row for row in self.rows() if row.name == "param")
        found = (each for row in rows for each in row.fragments() if not np.isfinite(each.array).all())
        return {each.name.removeprefix("param/") for each in found}

    def bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has allocated, by what they are for."""
        rows = list(self.rows())
        return {kind: sum(row.buffer.nbytes for row in rows if row.kind == kind) for kind in KINDS}

    def formula(self) -> dict[str, float]:
        """Return what `bytes` should be by the placements, without padding, but for what is in transit."""
        rows = list(self.rows())
        return {kind: sum(row.expected_bytes for row in rows if row.kind == kind) for kind in KINDS[:-1]}

    def describe(self) -> str:
        """Return the table of what this rank has, as text."""
        lines = [f"{'array':<24}{'for':<12}{'placement':<18}{'elements here':>15}{'of':>15}"]
        for row in self.rows():
            if row.kind in KINDS[:-1] or row.name:
                count = row.layout.count if row.layout else row.buffer.size
                name = row.name or row.kind
                lines.append(f"{name:<24}{row.kind:<12}{row.placement!s:<18}{row.buffer.size:>15,}{count:>15,}")
        return "\n".join(lines)


def kind_of_private(name: str) -> str:
    """The kind of an entry that only one strategy reads: "outer" of "exchange/outer/velocity/0.W"."""
    return name.split("/")[1]


def as_addends(addends: np.ndarray, count: int) -> np.ndarray:
    """Return the addends of some ranks as those of `count` ranks, with the same sum: the first one has all of it."""
    if len(addends) == count:
        return addends
    found = np.zeros((count, *addends.shape[1:]), addends.dtype)
    found[0] = addends.sum(0)
    return found


def _fits(state: Mapping[str, np.ndarray], name: str, kind: tuple, has_addends: bool) -> bool:
    """Whether a private entry is there, in the shape that it has here; addends may be those of another number."""
    found = kind_of(state, name) if name in state else None
    if found is None or not has_addends:
        return found == kind
    return (found[0][1:], found[1], len(found[0])) == (kind[0][1:], kind[1], len(kind[0]))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
