"""The state of a trainer: what its exchange has of it, with the running statistics, which the trainer has.

Where stages of the network, or parts of its tensors, lie on different ranks, it is brought together on rank 0, and
dealt out from there. Each rank goes through its own entries in the order of its layout, which is that of the whole
network's with some left out. So rank 0 takes them one by one, each from the rank that has it, and never has more than
one in its hands: what is written is what one process writes, and a stage that fits a rank is all that has to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, takewhile

import numpy as np

from nn.core.layout import ALIGN
from nn.core.network import Network
from nn.training.state import check_state, state_kinds
from parallel.exchange.base import Exchange
from parallel.mesh import Mesh
from parallel.state.fragments import Fragment
from parallel.state.private_state import OWN, UsableState
from parallel.state.splits import cut, join, part_shape, split_of, whole_specs

TAG = 31  # of all messages here


def homes_of(mesh: Mesh, network: Network, exchange: Exchange) -> Homes:
    """The one for this mesh and this exchange."""
    kind = Homes if mesh.model is None else ServedHomes if exchange.joins else PartHomes
    return kind(mesh, network, exchange)


class Homes:
    """Where ranks have the same of the network: the exchange knows all (collective).

    Parameters
    ----------
    mesh : Mesh
    network : Network
        The whole one.
    exchange : Exchange
        Started.
    """

    def __init__(self, mesh: Mesh, network: Network, exchange: Exchange):
        self.mesh, self.network, self.exchange = mesh, network, exchange

    @property
    def scattered(self) -> bool:
        """Whether the state is gathered on rank 0; else every rank has all of it."""
        return self.exchange.from_first

    def state_items(self, running: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of all, in the order of one process's; `running` are this rank's running statistics."""
        return chain(self.exchange.state_items(), running)

    def fragments(self, running: Iterable[tuple[str, np.ndarray]]) -> Iterator[Fragment]:
        """What this rank writes of `state_items`, where each writes its own."""
        return chain(self.exchange.fragments(), self._first_of_line(running))

    def _first_of_line(self, running: Iterable[tuple[str, np.ndarray]]) -> Iterator[Fragment]:
        """Ranks of a line have the same."""
        return (Fragment(name, array) for name, array in running if self.mesh.line.rank == 0)

    def load(self, state: Mapping[str, np.ndarray], names: Iterable[str]) -> dict[str, np.ndarray]:
        """Let the exchange take over a state; returns the entries of these names, for this rank.

        Raises
        ------
        ValueError
            What is missing, foreign or misshapen.
        """
        if problem := self.exchange.check(state):
            raise ValueError(problem)
        return self._load(UsableState(self.exchange.own_kinds(), state), names)

    def _load(self, state, names):
        self.exchange.load(state)
        found = {name: state[name] for name in names if name in state}
        return self.exchange.mesh.bcast(found) if self.exchange.from_first else found

    def digest(self, sha) -> None:
        """Let a hash have all parameters, in the order of the layout."""
        self.exchange.digest(sha)

    def is_cut(self, name: str) -> bool:
        """Whether the ranks of the axis "tensor" have a part each of an entry; of the loss scale they have not."""
        return False


class PartHomes(Homes):
    """Where ranks have stages, or parts of tensors: who has which arrays (collective).

    Attributes
    ----------
    home : dict
        Name of an array -> the place on the axis "pipeline" that it belongs to.
    holders : dict
        Name -> all places that have it: also stages whose layers are tied to it.
    """

    scattered = True

    def __init__(self, mesh, network, exchange):
        super().__init__(mesh, network, exchange)
        held = exchange.network
        layout = held.layout
        self.specs = whole_specs(held)
        own = [*(name for name in layout.specs if name not in layout.borrowed), *held.buffer_layout.specs]
        mine = own, sorted(layout.borrowed)
        everyone = mesh.pipeline.allgather(mine) if mesh.pipeline else [mine]
        self.home = {name: place for place, (names, _) in enumerate(everyone) for name in names}
        self.holders: dict[str, list[int]] = {}
        for place, (names, borrowed) in enumerate(everyone):
            for name in (*names, *borrowed):
                self.holders.setdefault(name, []).append(place)

    @property
    def kinds(self) -> dict[str, tuple]:
        """Name -> (shape, dtype) of the state of the whole network."""
        return state_kinds(self.network, self.exchange.optimizer.slots)

    def state_items(self, running):
        return self._collect(super().state_items(running), self.kinds | self.exchange.own_kinds())

    def fragments(self, running):
        return self._written(super().fragments(running))

    def load(self, state, names):
        own = self.exchange.own_kinds()
        if self.mesh.rank == 0 and isinstance(state, Mapping):  # else it is refused
            usable = UsableState(own, state)
            own = {name: kind for name, kind in own.items() if name in usable}
        return self._load(self._scatter(state, self.kinds | self.mesh.bcast(own)), names)

    def _collect(
        self, mine: Iterable[tuple[str, np.ndarray]], kinds: Mapping[str, tuple]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Those of these kinds, of all, in the order of one process's, on rank 0; elsewhere this rank's own.

        All ranks of a line have the same `mine`. What is of no array, such as "steps", is nobody's.
        """
        mesh = self.mesh
        if mesh.line.index:  # others have the same
            yield from mine
            return
        here = mesh.places["pipeline"]
        own = ((name, self._join(name, array)) for name, array in mine if self.home[array_of(name)] == here)
        if mesh.places["tensor"]:
            yield from own
            return
        if mesh.rank:
            for name, array in own:
                mesh.communicator.Send(np.ascontiguousarray(array), 0, TAG)
                yield name, array
            return
        for name in in_order(kinds):
            place, (shape, dtype) = self.home[array_of(name)], kinds[name]
            if place == here:
                found, array = next(own)
                if found != name:
                    raise RuntimeError(f"rank 0 has {found} where {name} is due: orders of entries differ")
            else:
                array = np.empty(shape, dtype)
                mesh.communicator.Recv(array, self._leader(place), TAG)
            yield name, array
        for _ in own:  # what is borrowed: all ranks go through to the end
            pass

    def _written(self, mine: Iterable[Fragment]) -> Iterator[Fragment]:
        """Those of this rank's fragments that it writes, where ranks with the same arrays would write the same."""
        ranks, here = self.mesh.tensor, self.mesh.places["pipeline"]
        for fragment in mine:
            if "/" in fragment.name and self.home[array_of(fragment.name)] != here:
                continue  # borrowed from another stage
            if ranks and self.is_cut(fragment.name):
                spec = self.specs[array_of(fragment.name)]
                yield replace(fragment, shape=spec.shape, part=(ranks.rank, ranks.size), split=split_of(spec))
            elif ranks is None or ranks.rank == 0:
                yield fragment

    def is_cut(self, name):
        return split_of(self.specs.get(array_of(name))) is not None

    def _join(self, name: str, array: np.ndarray) -> np.ndarray:
        """The whole array from its parts, on the first of the ranks that have them; elsewhere as it is."""
        ranks = self.mesh.tensor
        if ranks is None or not self.is_cut(name):
            return array
        if ranks.rank:
            ranks.Send(np.ascontiguousarray(array), 0, TAG)
            return array
        parts = [array]
        for index in range(1, ranks.size):
            shape = part_shape(name, self.specs[array_of(name)], index, ranks.size)
            parts.append(np.empty(shape, array.dtype))
            ranks.Recv(parts[-1], index, TAG)
        return join(self.specs, [{name: part} for part in parts])[name]

    def _cut(self, name: str, array: np.ndarray | None, shape, dtype) -> np.ndarray:
        """This rank's part of a whole array, which the first of the ranks that have one each is given."""
        ranks = self.mesh.tensor
        if ranks is None:
            return array
        array = np.empty(shape, dtype) if ranks.rank else np.ascontiguousarray(array)
        ranks.Bcast(array, root=0)
        return cut(self.specs, {name: array}, ranks.rank, ranks.size)[name]

    def _scatter(self, state: Mapping[str, np.ndarray], kinds: Mapping[str, tuple]) -> dict[str, np.ndarray]:
        """What this rank has of a state of these kinds that rank 0 is given; refuses it on all ranks."""
        mesh = self.mesh
        if problem := mesh.bcast(check_state(kinds, state) if mesh.rank == 0 else None):
            raise ValueError(problem)
        mine = {}
        here = mesh.places["pipeline"]
        for name in in_order(kinds):
            shape, dtype = kinds[name]
            for leader in map(self._leader, self.holders[array_of(name)]):
                if mesh.rank == leader == 0:
                    mine[name] = state[name]
                elif mesh.rank == 0:
                    mesh.communicator.Send(np.ascontiguousarray(state[name]), leader, TAG)
                elif mesh.rank == leader:
                    mine[name] = np.empty(shape, dtype)
                    mesh.communicator.Recv(mine[name], 0, TAG)
            if mesh.line.index == 0 and here in self.holders[array_of(name)]:
                mine[name] = self._cut(name, mine.get(name), shape, dtype)
        if not self.exchange.from_first:  # else the first of a line deals it out
            mine = mesh.line.bcast(mine)
        return mine | mesh.bcast({name: state[name] for name in kinds if "/" not in name} if mesh.rank == 0 else None)

    def digest(self, sha):
        """On rank 0, as they lie in the whole network's layout."""
        mine = takewhile(lambda entry: entry[0].startswith("param/"), self.exchange.state_items())
        kinds = {name: kind for name, kind in self.kinds.items() if name.startswith("param/")}
        for _, array in self._collect(mine, kinds):
            if self.mesh.rank == 0:
                sha.update(np.ascontiguousarray(array))
                sha.update(np.zeros(-array.size % ALIGN, array.dtype))

    def _leader(self, place: int) -> int:
        """The rank that speaks for a place on the axis "pipeline"."""
        return self.mesh.rank_at(data=0, pipeline=place, context=0, tensor=0)


class ServedHomes(PartHomes):
    """Where servers have whole arrays, and the exchange cuts and joins: ranks have parts of the statistics only."""

    def state_items(self, running):
        kinds = {name: kind for name, kind in self.kinds.items() if name.startswith("state/")}
        return chain(self.exchange.state_items(), self._collect(running, kinds))

    def fragments(self, running):
        return chain(self.exchange.fragments(), self._written(self._first_of_line(running)))

    def load(self, state, names):
        buffers = (name for name in self.kinds if name.startswith("state/"))  # of all stages: they come whole
        found = Homes.load(self, state, {*names, *buffers})
        return cut(self.specs, found, self.mesh.places["tensor"], self.mesh.sizes["tensor"])

    digest = Homes.digest


def array_of(name: str) -> str:
    """The full name of the array that an entry of the state is of, such as "0.W" of "optimizer/mean/0.W"."""
    return name.rpartition("/")[2]


def in_order(kinds: Iterable[str]) -> list[str]:
    """Names of the state as trainers go through them: parameters, moments, what an exchange has kept, statistics."""
    kinds = list(kinds)
    return [name for prefix in ("param/", "optimizer/", OWN, "state/") for name in kinds if name.startswith(prefix)]
