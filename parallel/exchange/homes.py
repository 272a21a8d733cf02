"""The state of a network whose stages, or parts of whose tensors, lie on different ranks: brought together on rank 0,
and dealt out from there.

Each rank goes through its own entries in the order of its layout, which is that of the whole network's with some left
out. So rank 0 takes them one by one, each from the rank that has it, and never has more than one in its hands: what is
written is what one process writes, and a stage that fits a rank is all that has to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile

import numpy as np

from nn.core.layout import ALIGN, Layout
from nn.core.network import Network
from nn.core.parts import cut, join, part_shape
from nn.training.serial import OWN, check_state
from nn.training.stored import Fragment
from parallel.mesh import Mesh

TAG = 31  # of all messages here


class Homes:
    """Who has which arrays (collective).

    Parameters
    ----------
    mesh : Mesh
    held : Network
        What this rank has of the network.

    Attributes
    ----------
    home : dict
        Name of an array -> the place on the axis "pipeline" that it belongs to.
    holders : dict
        Name -> all places that have it: also stages whose layers are tied to it.
    """

    def __init__(self, mesh: Mesh, held: Network):
        self.mesh = mesh
        layout = held.layout
        self.specs = held.whole.specs | held.whole_state.specs  # of whole arrays
        own = [*(name for name in layout.specs if name not in layout.borrowed), *held.state_layout.specs]
        mine = own, sorted(layout.borrowed)
        everyone = mesh.pipeline.allgather(mine) if mesh.pipeline else [mine]
        self.home = {name: place for place, (names, _) in enumerate(everyone) for name in names}
        self.holders: dict[str, list[int]] = {}
        for place, (names, borrowed) in enumerate(everyone):
            for name in (*names, *borrowed):
                self.holders.setdefault(name, []).append(place)

    def collect(self, mine: Iterable[tuple[str, np.ndarray]], kinds: Mapping[str, tuple]) -> Iterator[tuple]:
        """(name, array) of all, in the order of one process's, on rank 0; elsewhere its own (collective).

        Parameters
        ----------
        mine : pairs of this rank, the same names in the same order on all ranks of a line
        kinds : name -> (shape, dtype) of what is to be collected; what is of no array, such as "steps", is nobody's
        """
        mesh = self.mesh
        if mesh.index:  # others have the same
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

    def fragments(self, mine: Iterable[Fragment]) -> Iterator[Fragment]:
        """Those of this rank's fragments that it writes, where ranks with the same arrays would write the same."""
        ranks, here = self.mesh.tensor, self.mesh.places["pipeline"]
        for fragment in mine:
            if "/" in fragment.name and self.home[array_of(fragment.name)] != here:
                continue  # borrowed from another stage
            if ranks and self.is_cut(fragment.name):
                spec = self.specs[array_of(fragment.name)]
                yield replace(fragment, shape=spec.shape, part=(ranks.rank, ranks.size), split=spec.split)
            elif ranks is None or ranks.rank == 0:
                yield fragment

    def is_cut(self, name: str) -> bool:
        """Whether the ranks of the axis "tensor" have a part each of an entry; of the loss scale they have not."""
        spec = self.specs.get(array_of(name))
        return spec is not None and spec.split is not None

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

    def scatter(self, state: Mapping[str, np.ndarray], kinds: Mapping[str, tuple], to_all: bool) -> dict:
        """What this rank has of a state that rank 0 is given (collective).

        Parameters
        ----------
        to_all : bool
            Whether all ranks of a line need it; otherwise its first.

        Raises
        ------
        ValueError
            On all ranks: what is missing, foreign or misshapen.
        """
        mesh = self.mesh
        if problem := mesh.bcast(check_state(dict(kinds), state) if mesh.rank == 0 else None):
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
            if mesh.index == 0 and here in self.holders[array_of(name)]:
                mine[name] = self._cut(name, mine.get(name), shape, dtype)
        if to_all:
            mine = mesh.line.bcast(mine)
        return mine | mesh.bcast({name: state[name] for name in kinds if "/" not in name} if mesh.rank == 0 else None)

    def digest(self, sha, entries: Iterable[tuple[str, np.ndarray]], layout: Layout, dtype) -> None:
        """Let a hash have all parameters, on rank 0, as they lie in the whole network's layout (collective)."""
        mine = takewhile(lambda entry: entry[0].startswith("param/"), entries)
        kinds = {f"param/{name}": (spec.shape, dtype) for name, spec in layout.specs.items()}
        for _, array in self.collect(mine, kinds):
            if self.mesh.rank == 0:
                sha.update(np.ascontiguousarray(array))
                sha.update(np.zeros(-array.size % ALIGN, array.dtype))

    def _leader(self, place: int) -> int:
        """The rank that speaks for a place on the axis "pipeline"."""
        return self.mesh.rank_at(data=0, pipeline=place, tensor=0)


def array_of(name: str) -> str:
    """The full name of the array that an entry of the state is of, such as "0.W" of "optimizer/mean/0.W"."""
    return name.rpartition("/")[2]


def in_order(kinds: Iterable[str]) -> list[str]:
    """Names of the state as trainers go through them: parameters, moments, what an exchange has kept, statistics."""
    kinds = list(kinds)
    return [name for prefix in ("param/", "optimizer/", OWN, "state/") for name in kinds if name.startswith(prefix)]
