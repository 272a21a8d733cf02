"""ZeRO: every rank keeps the optimizer's state, the gradients, the parameters of a shard only.

| strategy | sharded | elements a rank keeps, Adam | elements on the wire a step |
|---|---|---|---|
| DistributedDataParallel | nothing | 4 Psi | 2 Psi |
| ZeRO1 | moments | 2 Psi + 2 Psi/N | 2 Psi |
| ZeRO2 | and gradients | Psi + 3 Psi/N | 2 Psi |
| FullyShardedDataParallel (ZeRO-3) | and parameters | 4 Psi/N | 3 Psi |

for Psi parameters on N ranks. A rank has a block of every unit of layers (units.py). Gradients are summed by a
reduce-scatter of each unit, every rank updates its blocks, and an allgather brings the units back together: after the
update, or, where parameters are sharded, whenever a unit is about to be used. What is whole only for a moment lies in
**slots**, memory that units take turns in; so the layers' views of it are made once. Norms are those of whole tensors
and of the whole gradient, however they are cut.

Milliseconds a step on 2 ranks of one node with Adam, 64 samples each, replicated and stages 1 to 3 (measured, median):
MLP 784-512-512-10 7.7, 8.0, 7.7, 8.1; eight layers of 1024 x 1024 85, 85, 87, 97.

Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives.world import nodes_of
from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from parallel.breakdown import DEFAULT
from parallel.offload import shards
from parallel.sharded_state import ShardedState
from parallel.units import Cut, Joined, Slots, Unit

UNIT_BYTES = 1 << 20


class Sharded(ShardedState):
    """What the three stages share: the cut, first values, sums, and the update of a shard.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for Synchronous.
    unit_bytes : int
        Neighbouring layers travel together until they have so many bytes of parameters.
    offload : path or None
        A directory in which the shards lie, in memory-mapped files; None for memory.

    Attributes
    ----------
    gradient_shard : flat array
        The sum over all ranks of the gradients in this rank's blocks.
    slots : dict of flat arrays
        The optimizer's moments for this rank's blocks.

    Raises
    ------
    OSError
        On all ranks, if the directory has too little room on one.
    """

    phases = (*DEFAULT, ("communicate", "reduce", True), ("communicate", "spread", True))

    def __init__(
        self,
        network: Network,
        loss: Loss,
        optimizer: Optimizer,
        communicator,
        seed: int = 0,
        unit_bytes: int = UNIT_BYTES,
        offload: str | Path | None = None,
    ):
        self.cut = Cut(network, communicator.size, unit_bytes)
        self.offload = offload
        self.together = len(set(nodes_of(communicator))) == 1  # ranks can read each other's memory
        super().__init__(network, loss, optimizer, communicator, seed)

    def allocate(self) -> None:
        names = [*self.optimizer.slots, *self.sharded]
        found = shards(names, self.cut.size, self.network.dtype, self.offload, self.communicator)
        self.slots = {name: found[name] for name in self.optimizer.slots}
        self.landing = np.zeros(max((unit.block for unit in self.cut.units), default=0), self.network.dtype)
        self.place(found)

    sharded: tuple[str, ...] = ()  # what is in shards besides the optimizer's state

    def initialize(self) -> None:
        """Draw every tensor whole, one at a time, and keep what is in this rank's blocks."""
        layout, rank = self.network.layout, self.shard[0]
        for unit in self.cut.units:
            whole = np.zeros(unit.block * self.shard[1], self.network.dtype)
            for name, array in self.cut.arrays(whole, unit):
                array[...] = layout.draw(name, self.seed).reshape(-1)
            self.own(unit)[...] = whole[rank * unit.block :][: unit.block]
        self.spread()
        self.regions = [self.cut.region(unit, rank) for unit in self.cut.units]
        self.region = Joined(self.cut, rank)
        self.message = np.zeros(3 + self.network.state_layout.size, self.network.dtype)  # loss, totals, statistics

    def zeros_for_all(self, size: int) -> np.ndarray:
        """Memory that is reduced over all ranks: shared where that saves copies."""
        dtype = self.network.dtype
        return self.communicator.empty(size, dtype) if self.together else np.zeros(size, dtype)

    def reduce(self, whole: np.ndarray, unit: Unit, out: np.ndarray) -> None:
        """out = this rank's block of the sum of all ranks' gradients of a unit."""
        unit.clear_gaps(whole)
        # Between nodes a plan has a working copy of the unit. Plans for a memoryview are not kept.
        self.communicator.Reduce_scatter_block(whole if self.together else memoryview(whole), out)

    def combine(self, loss: float) -> float:
        """Sum the loss; take the mean of the ranks' running statistics, so that replicas stay alike."""
        self.message[:3] = loss, *self.totals(first=self.shard[0] == 0)
        np.divide(self.statistics, self.shard[1], out=self.message[3:])
        self.all_sum(self.message)
        self.refuse_other_totals(float(self.message[1]) / self.shard[1], float(self.message[2]))
        self.statistics[:] = self.message[3:]
        return float(self.message[0])

    def update(self) -> None:
        """Update this rank's blocks, unit after unit; a clip has seen the whole gradient before."""
        optimizer, g = self.optimizer, self.gradient_shard
        clip = optimizer.clip
        if clip:
            clip(g, self.region, self.all_sum)
        optimizer.clip = None
        try:
            for unit, region in zip(self.cut.units, self.regions, strict=True):
                slots = {name: slot[unit.blocks] for name, slot in self.slots.items()}
                optimizer.update(self.own(unit), g[unit.blocks], slots, self.steps, region, self.all_sum)
        finally:
            optimizer.clip = clip
        self.spread()

    def memory(self) -> dict[str, int]:
        passing = self.landing.nbytes + sum(slots.nbytes for slots in self.in_transit())
        return super().memory() | {"in transit": passing}

    def in_transit(self) -> list[Slots]:
        """Memory for what is whole for a moment."""
        return []

    def describe(self) -> str:
        sizes = [(unit.stop - unit.start) * self.network.dtype.itemsize / 2**20 for unit in self.cut.units] or [0]
        where = f"shards in {self.offload or 'memory'}" if self.optimizer.slots or self.sharded else "nothing in shards"
        if len(sizes) == 1:
            return f"one unit of {sizes[0]:.2g} MiB, {where}"
        return f"{len(sizes)} units of {min(sizes):.2g} to {max(sizes):.2g} MiB, {where}"


class ZeRO1(Sharded):
    """The optimizer's state is sharded; parameters and gradients are whole on every rank."""

    def place(self, found: dict[str, np.ndarray]) -> None:
        """Make parameters and gradients, and the layers' views of them; `found`: what was asked for in `sharded`."""
        self.place_parameters(found)
        self.gradients = self.zeros_for_all(self.cut.size * self.shard[1])
        self.gradient_shard = self.gradients[: self.cut.size]  # the sums move together, over what is summed already
        self.g = self.views(self.gradients)

    def place_parameters(self, found: dict[str, np.ndarray]) -> None:
        self.parameters = np.zeros(self.cut.size * self.shard[1], self.network.dtype)
        self.p = self.views(self.parameters)

    def views(self, buffer: np.ndarray):
        """A buffer of all units as layers see it."""
        units = self.cut.units
        arrays = dict(pair for unit in units for pair in self.cut.arrays(self.cut.whole(buffer, unit), unit))
        return self.network.layout.tree(arrays)

    def own(self, unit: Unit) -> np.ndarray:
        """This rank's block of the parameters of a unit."""
        return self.cut.whole(self.parameters, unit)[self.shard[0] * unit.block :][: unit.block]

    def spread(self) -> None:
        """Bring every rank's blocks of the parameters to all."""
        for unit in self.cut.units:
            self.communicator.Allgather(MPI.IN_PLACE, self.cut.whole(self.parameters, unit))

    def combine(self, loss):
        for unit in self.cut.units:
            block = self.landing[: unit.block]
            self.reduce(self.cut.whole(self.gradients, unit), unit, block)
            self.gradient_shard[unit.blocks] = block
        return super().combine(loss)

    def replicated(self):
        yield from ((f"state/{name}", a) for name, a in self.network.state_layout.items(self.statistics))
        for unit in self.cut.units:
            yield from self.cut.arrays(self.cut.whole(self.parameters, unit), unit)


class ZeRO2(ZeRO1):
    """Gradients are sharded too: a unit's are reduced as soon as they are finished, then its memory serves the next.

    Between nodes a unit's are on their way while the next one computes.
    """

    sharded = ("gradients",)

    def place(self, found):
        self.place_parameters(found)
        self.gradients = self.gradient_shard = found["gradients"]
        self.gradient_slots = Slots(self.cut, 1 if self.together else 2, self.zeros_for_all)
        self.moving = None  # (request, unit) that is on its way between nodes
        self.g = self.gradient_slots.views()
        self.adds = False  # whether gradient_shard holds the sums of earlier micro-batches
        self.reduced = 0  # units of this pass

    def compute_gradients(self, x, y, total):
        common = self.run.common
        self.adds, common.accumulate = common.accumulate, False  # slots never hold what was before
        common.ready, self.reduced = self.ready, 0
        self.begin_pass()
        try:
            if len(x) or self.everyone:
                loss = super().compute_gradients(x, y, total)
                self.ready(self.network.layout.size)
            else:
                loss = 0.0
                self.pass_without_samples()
        finally:
            common.ready, common.accumulate = None, self.adds
        return loss

    def in_transit(self):
        return [self.gradient_slots]

    def begin_pass(self) -> None:
        """Before every forward pass."""

    def pass_without_samples(self) -> None:
        """Take part in what other ranks do in theirs."""
        for unit in self.cut.units:
            self.gradient_slots.of(unit)[:] = 0
            self.ready(unit.stop)

    def ready(self, end: int) -> None:
        """So much of the layout's gradients is finished: reduce the units inside."""
        units = self.cut.units
        while self.reduced < len(units) and units[self.reduced].stop <= end:
            unit = units[self.reduced]
            self.finish_moving()
            target = (self.landing if self.adds else self.gradient_shard[unit.at :])[: unit.block]
            self.moving = self.reduce(self.gradient_slots.of(unit), unit, target), unit
            self.reduced += 1
        if self.together or self.reduced == len(units):
            self.finish_moving()

    def reduce(self, whole, unit, out):
        if self.together:
            return super().reduce(whole, unit, out)
        unit.clear_gaps(whole)
        return self.communicator.Ireduce_scatter_block(memoryview(whole), out)

    def finish_moving(self) -> None:
        """Have the unit that was reduced last in its shard."""
        if self.moving:
            request, unit = self.moving
            self.moving = None
            if request:
                request.Wait()
            if self.adds:
                self.gradient_shard[unit.blocks] += self.landing[: unit.block]

    def combine(self, loss):
        return Sharded.combine(self, loss)


class FullyShardedDataParallel(ZeRO2):
    """Parameters are sharded too: a unit's are gathered before its forward and again before its backward.

    Parameters
    ----------
    prefetch : int or None
        How many units are gathered ahead, while others compute; None for 1 between nodes, and 0 on a node, where the
        cores that would copy are busy computing. Memory for prefetch + 1 units is needed. A unit that is still there
        when backward begins is not gathered again.
    """

    sharded = ("parameters", "gradients")
    phases = (*ZeRO2.phases, ("communicate", "use", True))

    def __init__(
        self, network, loss, optimizer, communicator, seed=0, unit_bytes=UNIT_BYTES, offload=None, prefetch=None
    ):
        self.prefetch = prefetch
        super().__init__(network, loss, optimizer, communicator, seed, unit_bytes, offload)
        this = weakref.proxy(self)  # no cycle
        self.run.common.fetch = lambda run: this.fetch(run)

    def place_parameters(self, found):
        if self.prefetch is None:
            self.prefetch = 0 if self.together else 1
        self.parameters = found["parameters"]
        self.parameter_slots = Slots(self.cut, 1 + self.prefetch, lambda size: np.zeros(size, self.network.dtype))
        self.p = self.parameter_slots.views()
        self.requests = {}  # number of a unit -> of its gathering
        needs = [self.cut.needs[path] for path in self.cut.stages]
        order = [unit for stage in needs for unit in stage] + [unit for stage in reversed(needs) for unit in stage]
        self.order = [u for i, u in enumerate(order) if i == 0 or order[i - 1] != u]  # in which a step uses units
        self.at = -1  # the place in it

    def own(self, unit):
        return self.parameters[unit.blocks]

    def in_transit(self):
        return [self.gradient_slots, self.parameter_slots]

    def spread(self):
        """The parameters have changed: what is in the slots does not count any more."""
        self.parameter_slots.forget()

    def begin_pass(self):
        self.at = -1

    def fetch(self, run) -> None:
        """Before a layer is run: gather the units that it needs, and start on the next ones."""
        for number in self.cut.needs.get(run.path, ()):
            self.use(number)

    def use(self, number: int) -> None:
        if self.at >= 0 and self.order[self.at] == number:
            return
        self.at = self.order.index(number, self.at + 1)
        self.gather(number)
        if number in self.requests:
            self.requests.pop(number).Wait()
        if self.prefetch:
            for ahead in self.order[self.at + 1 : self.at + 1 + self.prefetch]:
                self.gather(ahead)
            self.communicator.poke()

    def gather(self, number: int) -> None:
        """Bring a unit into its slot, or start on it."""
        unit = self.cut.units[number]
        if not self.parameter_slots.take(unit):
            return
        whole = self.parameter_slots.of(unit)
        if self.prefetch:
            self.requests[number] = self.communicator.Iallgather(self.own(unit), whole)
        else:
            self.communicator.Allgather(self.own(unit), whole)

    def pass_without_samples(self):
        self.forward_without_samples()
        for path in reversed(self.cut.stages):
            for number in self.cut.needs[path]:
                self.use(number)
            end = self.network.layout.ends[path]
            for unit in self.cut.units[self.reduced :]:
                if unit.stop <= end:
                    self.gradient_slots.of(unit)[:] = 0
                    self.ready(unit.stop)

    def forward_without_samples(self) -> None:
        for path in self.cut.stages:
            for number in self.cut.needs[path]:
                self.use(number)

    def predict(self, x):
        """The network's output for a batch, in evaluation mode; called on every rank."""
        self.begin_pass()
        return super().predict(x)

    def evaluate(self, x, y):
        if not len(x):
            self.begin_pass()
            self.forward_without_samples()
        return super().evaluate(x, y)

    def look_at(self, x):
        self.begin_pass()
        bad = super().look_at(x)
        if not len(x) or (bad and bad.depth == 0):  # there was no forward pass
            self.forward_without_samples()
        return bad

    def replicated(self):
        """Running statistics only: of every parameter there is one copy."""
        yield from ((f"state/{name}", a) for name, a in self.network.state_layout.items(self.statistics))
