"""ZeRO: every rank keeps the optimizer's state, the gradients, the parameters of a shard only.

A rank has a block of every unit of layers (units.py). Gradients are summed by a reduce-scatter of each unit, every rank
updates its blocks, and an allgather brings the units back together: after the update, or, where parameters are sharded,
whenever a unit is about to be used. What is whole only for a moment lies in **unit buffers**, where units take turns;
so the layers' views of it are made once. Norms are those of whole tensors and of the whole gradient, however cut.

Sums in a fixed tree: each unit has a tree, of which a rank asks for its block; until a step's last virtual shard is
done its sums are whole, for every unit. Compressed sums: every rank sends each other one a message with its block.

Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from parallel.passes.virtual_shards import refuse_norms
from parallel.state.placed import REPLICATE, PlacedArray, Range, Shard, in_transit
from parallel.sync.base import GradientSync
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.compressed import Pieces
from parallel.sync.fixed_tree import TreeSum
from parallel.sync.offload import shards
from parallel.sync.step_result import StepMessage, head_elements
from parallel.sync.units import ShardRegion, Unit, UnitBuffers, UnitLayout

DRAWS = 1 << 16  # micro-batches of a step that may draw random numbers of their own


class Sharded(GradientSync):
    """Blocks of units: of moments in stage 1, of gradients too in stage 2, and of parameters in stage 3.

    Parameters
    ----------
    stage : {1, 2, 3}
    unit_bytes : int
        Neighbouring layers travel together until they have so many bytes of parameters.
    offload : path or None
        A directory in which the shards lie, in memory-mapped files; None for memory.
    together : bool
        Whether ranks can read each other's memory.
    prefetch : int or None
        Stage 3: how many units are gathered ahead; see FullyShardedDataParallel.
    compressor : Compressor or None
        One that keeps nothing.

    Attributes
    ----------
    gradient_shard : flat array
        The sum over all ranks of the gradients in this rank's blocks.
    slots : dict of flat arrays
        The optimizer's moments for this rank's blocks.
    """

    def __init__(
        self, stage: int, unit_bytes: int, offload, together: bool, prefetch=None, compressor: Compressor | None = None
    ):
        self.stage, self.unit_bytes, self.offload, self.together = stage, unit_bytes, offload, together
        self.prefetch = (0 if together else 1) if prefetch is None else prefetch
        self.compressor = compressor
        self.adds_up = stage == 1  # unit buffers never hold what was before
        together_in = ("reduce", "spread", "use") if stage == 3 else ("reduce", "spread")
        self.phases = (*GradientSync.phases, *(("communicate", f"sync.{name}", True) for name in together_in))

    def allocate(self):
        if self.pass_.fixed:
            refuse_norms(self.optimizer)
        rank, dtype = self.mesh.rank, self.dtype
        self.cut = UnitLayout(self.network, self.mesh.count, self.unit_bytes)
        self.regions = [self.cut.region(unit, rank) for unit in self.cut.units]
        for region in self.regions:
            region.elsewhere = self.layout.duplicates  # what is borrowed has its norm where it is used, too
        self.region = ShardRegion(self.cut, rank)
        names = [*self.optimizer.slots, *("parameters", "gradients")[3 - self.stage :]]
        found = shards(names, self.cut.size, dtype, self.offload, self.mesh.communicator)
        self.slots = {name: found[name] for name in self.optimizer.slots}
        self.landing = np.zeros(max((unit.block for unit in self.cut.units), default=0), dtype)
        self._allocate_parameters(found)
        self._allocate_gradients(found)
        self._allocate_sums()
        self.first_values()

    def _allocate_parameters(self, found: dict[str, np.ndarray]) -> None:
        if self.stage < 3:
            self.parameters = np.zeros(self.cut.size * self.mesh.count, self.dtype)
            self.p = self._views(self.parameters)
            return
        self.parameters = found["parameters"]
        self.parameter_buffers = UnitBuffers(self.cut, 1 + self.prefetch, lambda size: np.zeros(size, self.dtype))
        self.p = self.parameter_buffers.views()
        self.requests = {}  # number of a unit -> of its gathering
        needs = [self.cut.needs[path] for path in self.cut.stages]
        order = [unit for stage in needs for unit in stage] + [unit for stage in reversed(needs) for unit in stage]
        self.order = [u for i, u in enumerate(order) if i == 0 or order[i - 1] != u]  # in which a step uses units
        self.at = -1  # the place in it

    def _allocate_gradients(self, found: dict[str, np.ndarray]) -> None:
        self.moving = None  # (request, unit) that is on its way between nodes
        if self.stage > 1:
            self.gradients = self.gradient_shard = found["gradients"]
            self.gradient_buffers = UnitBuffers(self.cut, 1 if self.together else 2, self._zeros_for_all)
            self.g = self.gradient_buffers.views()
            return
        self.gradients = self._zeros_for_all(self.cut.size * self.mesh.count)
        self.g = self._views(self.gradients)
        # The sums are moved to the beginning, unit after unit: blocks are shorter than units, so what is written over
        # there is summed already.
        self.gradient_shard = self.gradients[: self.cut.size]

    def _allocate_sums(self) -> None:
        """The message, and what sums in another way than by reduce-scatter: a tree for each unit, or coded pieces."""
        head = head_elements(self.addends, self.dtype)
        self.numbers = np.zeros(head + self.network.buffer_layout.size, self.dtype)
        self.message = StepMessage(self.numbers[:head], self.numbers[head:], self.addends)
        if not self.pass_.fixed and not self.compressor:
            self.sends = "3, less what need not be gathered again for backward" if self.stage == 3 else "2"
        self.summed, self.trees, self.pieces, self.updates, self.dense = self.message, [], [], 0, 0
        mesh, ranks = self.mesh, range(self.mesh.count)
        if self.pass_.fixed:
            for unit in self.cut.units:
                cuts = [(unit.block * r, unit.block * (r + 1)) for r in ranks]
                self.trees.append(TreeSum(self.pass_.addends, cuts[-1][1], self.dtype, mesh.communicator, cuts))
            # Of the message:
            self.trees.append(TreeSum(self.pass_.addends, len(self.numbers), self.dtype, mesh.communicator))
        if self.compressor:
            self.compressor.check(self.optimizer)
            mesh.agree({"compression": repr(self.compressor)})
            for unit in self.cut.units:
                regions = [self.cut.region(unit, r) for r in ranks]
                self.pieces.append(
                    Pieces(mesh.communicator, self.compressor, regions, ranks, ranks, self.dtype, self.seed)
                )

    def _views(self, buffer: np.ndarray):
        """A buffer of all units as layers see it."""
        units = self.cut.units
        arrays = dict(pair for unit in units for pair in self.cut.arrays(self.cut.whole(buffer, unit), unit))
        return self.layout.tree(arrays)

    def _zeros_for_all(self, size: int) -> np.ndarray:
        """Memory that is reduced over all ranks: shared where that saves copies."""
        return self.mesh.communicator.empty(size, self.dtype) if self.together else np.zeros(size, self.dtype)

    def first_values(self):
        """Draw every tensor whole, one at a time, and keep what is in this rank's blocks."""
        for unit in self.cut.units:
            whole = np.zeros(unit.block * self.mesh.count, self.dtype)
            for name, array in self.cut.arrays(whole, unit):
                array[...] = self.layout.draw(name, self.seed).reshape(-1)
            self.own(unit)[...] = self._block(whole, unit)
        self.spread()

    def _block(self, whole: np.ndarray, unit: Unit) -> np.ndarray:
        """This rank's block of a whole unit."""
        return whole[self.mesh.rank * unit.block :][: unit.block]

    def own(self, unit: Unit) -> np.ndarray:
        """This rank's block of the parameters of a unit."""
        if self.stage == 3:
            return self.parameters[unit.blocks]
        return self._block(self.cut.whole(self.parameters, unit), unit)

    def spread(self):
        """Bring every rank's blocks to all; or, where they are gathered before use, forget what was gathered."""
        if self.stage == 3:
            self.parameter_buffers.forget()
            return
        for unit in self.cut.units:
            self.mesh.communicator.Allgather(MPI.IN_PLACE, self.cut.whole(self.parameters, unit))

    # ------------------------------------------------------------------------------------------------ a step

    def begin_step(self, step, samples, total, parts):
        self.passes, self.updates = 0, self.updates + bool(self.pieces)  # of this step so far; begun
        return super().begin_step(step, samples, total, parts)

    def begin_pass(self, micro):
        if self.stage == 3:
            self.at = -1
        if micro is None:
            return None
        self.accumulate, self.counts, self.reduced = micro.accumulate, micro.addend is not None, 0
        self.passes += 1
        return self.ready if self.stage > 1 else None

    def skip_pass(self, micro):
        """Take part in what other ranks do in their pass."""
        if self.stage == 1:
            return super().skip_pass(micro)
        forward = self.cut.stages if self.stage == 3 else []
        for path in forward:
            self._use_all(path)
        for path in reversed(self.cut.stages) if micro else ():
            self._use_all(path)
            end = self.layout.ends[path]
            for unit in self.cut.units[self.reduced :]:
                if unit.stop <= end:
                    self.gradient_buffers.of(unit)[:] = 0
                    self.ready(unit.stop)
        return None

    def ready(self, end: int) -> None:
        """So much of the layout's gradients is finished: reduce the units inside."""
        units = self.cut.units
        while self.reduced < len(units) and units[self.reduced].stop <= end:
            unit = units[self.reduced]
            self._finish_moving()
            target = (self.landing if self.accumulate else self.gradient_shard[unit.at :])[: unit.block]
            self.moving = self.reduce(self.gradient_buffers.of(unit), unit, target), unit
            self.reduced += 1
        if self.together or self.reduced == len(units):
            self._finish_moving()

    def reduce(self, whole: np.ndarray, unit: Unit, out: np.ndarray):
        """out = this rank's block of the sum of all ranks' gradients of a unit; returns a request while it is not."""
        unit.clear_gaps(whole)
        communicator = self.mesh.communicator
        if self.trees:
            return self.trees[unit.number].add(whole) if self.counts else None  # summed when all shards are there
        if self.pieces:
            pieces = self.pieces[unit.number]
            starts = range(0, self.mesh.count * unit.block, unit.block)
            cut = [whole[lo : lo + e.length] for lo, e in zip(starts, pieces.encoders, strict=True)]
            self.dense += (len(whole) - unit.block) * whole.itemsize
            out[:] = 0
            return pieces.reduce(cut, out[: pieces.decoder.length], self.step * DRAWS + self.passes - 1)
        if self.together or self.stage == 1:  # a plan that sends messages has a working copy of the unit
            return communicator.Reduce_scatter_block(whole, out, keep=self.together)
        return communicator.Ireduce_scatter_block(whole, out, keep=False)

    def _finish_moving(self) -> None:
        """Have the unit that was reduced last in its shard."""
        if self.moving:
            request, unit = self.moving
            self.moving = None
            if request:
                request.Wait()
            if self.accumulate:
                self.gradient_shard[unit.blocks] += self.landing[: unit.block]

    def end_addend(self):
        if self.trees:
            for unit in self.cut.units if self.stage == 1 else ():
                self.reduce(self.cut.whole(self.gradients, unit), unit, self.landing)
            self.trees[-1].add(self.numbers)

    def finish_step(self):
        if self.trees:
            *trees, of_message = self.trees
            for unit, tree in zip(self.cut.units, trees, strict=True):
                self.gradient_shard[unit.blocks] = tree.reduce_scatter()
            self.numbers[:] = of_message.allreduce()
            return super().finish_step()
        for unit in self.cut.units if self.stage == 1 else ():
            block = self.landing[: unit.block]
            self.reduce(self.cut.whole(self.gradients, unit), unit, block)
            self.gradient_shard[unit.blocks] = block
        self.mesh.sum(self.numbers)
        return super().finish_step()

    def update(self):
        """Update this rank's blocks, unit after unit; a clip has seen the whole gradient before."""
        optimizer, g = self.optimizer, self.gradient_shard
        optimizer.clip_gradients(g, self.region, self.sum_norms)
        for unit, region in zip(self.cut.units, self.regions, strict=True):
            slots = {name: slot[unit.blocks] for name, slot in self.slots.items()}
            optimizer.apply(self.own(unit), g[unit.blocks], slots, self.step, region, self.sum_squares)
        self.spread()

    def sum_squares(self, squares: np.ndarray) -> None:
        """Sum over the ranks with other blocks, and with other parts, of the same tensors."""
        self.mesh.sum(squares)
        self.sum_parts(squares)

    def sum_norms(self, squares: np.ndarray) -> None:
        """Sum over the ranks with other blocks, and those with other parts of the network."""
        self.mesh.sum(squares)
        if self.sum_model:
            self.sum_model(squares)

    # ------------------------------------------------------------------------------------------- gathering, in stage 3

    @property
    def before_layer(self):
        return self._prefetch if self.stage == 3 else None

    def _prefetch(self, ctx) -> None:
        """Gather the units that a layer needs, and start on the next ones."""
        self._use_all(ctx.path)

    def _use_all(self, path: str) -> None:
        for number in self.cut.needs.get(path, ()) if self.stage == 3 else ():
            self.use(number)

    def use(self, number: int) -> None:
        """Have a unit of parameters in its buffer."""
        if self.at >= 0 and self.order[self.at] == number:
            return
        self.at = self.order.index(number, self.at + 1)
        self._gather(number)
        if number in self.requests:
            self.requests.pop(number).Wait()
        if self.prefetch:
            for ahead in self.order[self.at + 1 : self.at + 1 + self.prefetch]:
                self._gather(ahead)
            self.mesh.communicator.progress()

    def _gather(self, number: int) -> None:
        """Bring a unit into its buffer, or start on it."""
        unit = self.cut.units[number]
        if not self.parameter_buffers.take(unit):
            return
        whole = self.parameter_buffers.of(unit)
        if self.prefetch:
            self.requests[number] = self.mesh.communicator.Iallgather(self.own(unit), whole)
        else:
            self.mesh.communicator.Allgather(self.own(unit), whole)

    # ------------------------------------------------------------------------------------------------ the state

    def placed(self):
        layout, count, rank = self.layout, self.mesh.count, self.mesh.rank
        shard, mine, all_units = Shard(count), [], []
        for unit in self.cut.units:
            start = min(unit.start + rank * unit.block, unit.stop)
            mine.append(Range(start, min(start + unit.block, unit.stop), unit.at))
            all_units.append(Range(unit.start, unit.stop, count * unit.at))
        if self.stage == 3:
            yield PlacedArray("param", "parameters", self.parameters, layout, shard, tuple(mine))
        else:  # every rank has all, and answers for its own blocks
            own = tuple(r._replace(at=count * r.at + rank * u.block) for r, u in zip(mine, self.cut.units, strict=True))
            yield PlacedArray("param", "", self.parameters, layout, shard, own)
            yield PlacedArray("param", "parameters", self.parameters, layout, ranges=tuple(all_units), copy=True)
        yield PlacedArray("", "gradients", self.gradients, layout, shard if self.stage > 1 else REPLICATE)
        for name, slot in self.slots.items():
            yield PlacedArray(f"optimizer/{name}", "moments", slot, layout, shard, tuple(mine))
        buffers = self.gradient_buffers.memory.values() if self.stage > 1 else ()
        gathered = self.parameter_buffers.memory.values() if self.stage == 3 else ()
        yield from in_transit(self.landing, *buffers, *gathered, *(tree.sums for tree in self.trees))

    def loaded(self, steps, anew=()):
        if self.stage == 3:
            self.parameter_buffers.forget()

    def bytes_sent(self):
        """Where gradients are sharded every micro-batch sends its own, as it does without compression."""
        if not self.pieces:
            return {}
        sent, steps = sum(pieces.sent for pieces in self.pieces), max(1, self.updates)
        mean = self.mesh.communicator.allreduce(sent) / self.mesh.count / steps
        return {"bytes_sent": mean, "bytes_dense": self.dense / steps}

    def describe(self):
        sizes = [(unit.stop - unit.start) * self.dtype.itemsize / 2**20 for unit in self.cut.units] or [0]
        kept = self.optimizer.slots or self.stage > 1
        where = f"shards in {self.offload or 'memory'}" if kept else "nothing in shards"
        how = f"; gradients sent as {self.compressor!r}" if self.compressor else ""
        if len(sizes) == 1:
            return f"one unit of {sizes[0]:.2g} MiB, {where}{how}"
        return f"{len(sizes)} units of {min(sizes):.2g} to {max(sizes):.2g} MiB, {where}{how}"
