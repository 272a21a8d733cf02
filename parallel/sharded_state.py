"""The state of a strategy that shards it: gathered on rank 0 and scattered from there, a unit of layers at a time.

So no rank ever has more than a unit whole, but for `state` and `alone`, which gather everything on rank 0 for whoever
asks. What is written and read is what every other strategy writes and reads: a checkpoint goes on under any of them,
and on any number of ranks. Cost of a checkpoint over one process's: rank 0 receives it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from nn.network import Bad
from nn.serial import check_state, state_kinds
from parallel.synchronous import Synchronous
from parallel.units import Cut, Unit


class ShardedState(Synchronous):
    """What is kept of a trainer whose parameters and moments lie in blocks of units (units.py).

    A subclass has `cut`, `regions` (what lies in this rank's block of each unit), `landing` (memory for a block), `own`
    and `spread`.
    """

    cut: Cut

    def own(self, unit: Unit) -> np.ndarray:
        """This rank's block of the parameters of a unit."""
        raise TypeError(f"{type(self).__name__} does not define own")

    def spread(self) -> None:
        """Tell the other ranks that parameters in this rank's blocks have changed (collective)."""
        raise TypeError(f"{type(self).__name__} does not define spread")

    def kept(self) -> Iterator[tuple[str, Unit, np.ndarray]]:
        """(prefix of its names in the state, unit, this rank's block) of all that is sharded in a checkpoint."""
        for unit in self.cut.units:
            yield "param", unit, self.own(unit)
        for name, slot in self.slots.items():
            for unit in self.cut.units:
                yield f"optimizer/{name}", unit, slot[unit.blocks]

    def collect(self, unit: Unit, block: np.ndarray) -> np.ndarray | None:
        """All ranks' blocks of a unit, on rank 0, in memory that the next call uses again."""
        whole = self._room()[: unit.block * self.shard[1]] if self.shard[0] == 0 else None
        self.communicator.Gather(block, whole)
        return whole

    def _room(self) -> np.ndarray:
        return self.run.common.memory.scratch("unit", (len(self.landing) * self.shard[1],), self.network.dtype)

    def entries(self):
        yield "steps", np.array(self.steps)
        specs = self.network.layout.specs
        for prefix, unit, block in self.kept():
            whole = self.collect(unit, block)
            if whole is None:
                yield from ((f"{prefix}/{name}", block) for name in unit.names)
            else:
                for name, array in self.cut.arrays(whole, unit):
                    yield f"{prefix}/{name}", array.reshape(specs[name].shape)
        yield from ((f"state/{name}", a) for name, a in self.network.state_layout.items(self.statistics))

    def state(self) -> dict[str, np.ndarray]:
        """All of the state on rank 0, which must have room for it; nothing on the others."""
        state = {}
        for name, array in self.entries():
            if self.shard[0] == 0:
                state[name] = array.copy()
        return state

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what rank 0 is given; what the others are given does not matter."""
        first = self.shard[0] == 0
        problem = self.communicator.bcast(check_state(state_kinds(self.network, self.slots), state) if first else None)
        if problem:
            raise ValueError(problem)
        for prefix, unit, block in self.kept():
            whole = None
            if first:
                whole = self._room()[: unit.block * self.shard[1]]
                whole[:] = 0
                for name, array in self.cut.arrays(whole, unit):
                    array[:] = state[f"{prefix}/{name}"].reshape(-1)
            self.communicator.Scatter(whole, block)
        if first:
            for name, array in self.network.state_layout.items(self.statistics):
                array[...] = state[f"state/{name}"]
        self.communicator.Bcast(self.statistics)
        self.steps = self.communicator.bcast(int(state["steps"]) if first else None)
        self.spread()

    def snapshot(self):
        """Copies of this rank's blocks."""
        blocks = [block.copy() for _, _, block in self.kept()]
        return {"blocks": blocks, "statistics": self.statistics.copy(), "steps": self.steps}

    def restore(self, snapshot):
        for (_, _, block), before in zip(self.kept(), snapshot["blocks"], strict=True):
            block[:] = before
        self.statistics[:], self.steps = snapshot["statistics"], snapshot["steps"]
        self.spread()

    def digest(self) -> str:
        sha = hashlib.sha256()
        for unit in self.cut.units:
            whole = self.collect(unit, self.own(unit))
            if whole is not None:
                sha.update(whole[: unit.stop - unit.start])
        return self.communicator.bcast(sha.hexdigest())

    # ------------------------------------------------------------------------------------------------ looking at it

    def first_bad(self, parts):
        bad = list(self.bad_parameters())
        everyone = {name for names in self.communicator.allgather(bad) for name in names}
        for name in reversed(self.network.layout.specs):
            if name in everyone:
                return Bad(-1, f"parameter {name} (it was updated in step {self.steps - 1})", [])
        return super().first_bad(parts)

    def bad_parameters(self) -> Iterator[str]:
        """The names of parameters of which this rank has values that are not finite."""
        for unit, region in zip(self.cut.units, self.regions, strict=True):
            block = self.own(unit)
            yield from (name for name, part, _ in region.tensors if not np.isfinite(block[part]).all())

    def look(self, parts):
        """At all parts, whatever is found in the first: where parameters are sharded, others wait for this rank."""
        found, common = [], self.run.common
        common.sample -= sum(map(len, parts[:-1]))
        for x in parts:
            found.append(self.look_at(x))
            common.sample += len(x)
        return min(filter(None, found), key=lambda bad: bad.depth, default=None)

    def look_at(self, x: np.ndarray) -> Bad | None:
        """The first value that is not finite in a forward pass of these samples."""
        return self.network.first_bad(self.p, x, self.run) if len(x) else None
