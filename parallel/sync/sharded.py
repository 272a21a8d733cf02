"""ZeRO stage 1: every rank keeps the optimizer's moments of a shard only; parameters and gradients are whole.

A rank has a block of every unit of layers (units.py). Gradients are summed by a reduce-scatter of each unit, every rank
updates its blocks, and an allgather brings the units back together. Norms are those of whole tensors and of the whole
gradient, however they are sharded. Stages 2 and 3 are in unit_buffered.py.

Sums in a fixed tree: each unit has a tree, of which a rank asks for its block; until a step's last virtual shard is
done its sums are whole, for every unit. Compressed sums: every rank sends each other one a message with its block.

Source: Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from mpi4py import MPI

from parallel.passes.virtual_shards import refuse_norms
from parallel.state.placed import REPLICATE, PlacedArray, Range, Shard, in_transit
from parallel.sync.base import GradientSync
from parallel.sync.compression.base import Compressor
from parallel.sync.compression.compressed import CompressedReduceScatter
from parallel.sync.fixed_tree import TreeSum
from parallel.sync.offload import shards
from parallel.sync.step_result import StepMessage, head_elements
from parallel.sync.units import ShardRegion, Unit, UnitLayout

DRAWS = 1 << 16  # micro-batches of a step that may draw random numbers of their own


class ShardedOptimizer(GradientSync):
    """ZeRO-1: moments in blocks of units.

    Parameters
    ----------
    unit_bytes : int
        Neighbouring layers travel together until they have so many bytes of parameters.
    offload : path or None
        A directory in which the shards lie, in memory-mapped files; None for memory.
    shared_memory : bool
        Whether ranks can read each other's memory.
    compressor : Compressor or None
        One that keeps nothing.

    Attributes
    ----------
    units : list of Unit
    gradient_shard : flat array
        The sum over all ranks of the gradients in this rank's blocks.
    slots : dict of flat arrays
        The optimizer's moments for this rank's blocks.
    """

    sharded: tuple[str, ...] = ()  # beside the moments
    gradient_placement = REPLICATE
    sends_plain = "2"  # `sends`, where sums are reduce-scattered
    phases = (
        *GradientSync.phases,
        ("communicate", "sync.reduce", True),
        ("communicate", "sync.publish_parameters", True),
    )

    def __init__(self, unit_bytes: int, offload, shared_memory: bool, compressor: Compressor | None = None):
        self.unit_bytes, self.offload, self.shared_memory = unit_bytes, offload, shared_memory
        self.compressor = compressor

    def allocate(self):
        if self.forward_backward.fixed:
            refuse_norms(self.optimizer)
        rank, dtype = self.mesh.rank, self.dtype
        self.unit_layout = UnitLayout(self.network, self.mesh.count, self.unit_bytes)
        self.units = self.unit_layout.units
        self.regions = [self.unit_layout.region(unit, rank) for unit in self.units]
        for region in self.regions:
            region.elsewhere = self.layout.duplicates  # what is borrowed has its norm where it is used, too
        self.region = ShardRegion(self.unit_layout, rank)
        names = *self.optimizer.slots, *self.sharded
        flat = shards(names, self.unit_layout.size, dtype, self.offload, self.mesh.communicator)
        self.slots = {name: flat[name] for name in self.optimizer.slots}
        self.block = np.zeros(max((unit.block for unit in self.units), default=0), dtype)  # of a unit that is summed
        self.allocate_parameters(flat)
        self.allocate_gradients(flat)
        self.allocate_sums()
        self.first_values()

    def allocate_parameters(self, flat: dict[str, np.ndarray]) -> None:
        """Make the parameters, and how layers see them."""
        self.parameters = np.zeros(self.unit_layout.size * self.mesh.count, self.dtype)
        self.p = self.unit_layout.views(self.parameters)

    def allocate_gradients(self, flat: dict[str, np.ndarray]) -> None:
        """Make the gradients, and how layers see them."""
        self.gradients = self.zeros_for_all(self.unit_layout.size * self.mesh.count)
        self.g = self.unit_layout.views(self.gradients)
        # The sums are moved to the beginning, unit after unit: blocks are shorter than units, so what is written over
        # there is summed already.
        self.gradient_shard = self.gradients[: self.unit_layout.size]

    def allocate_sums(self) -> None:
        """Make the message, and what sums in another way than by reduce-scatter: a tree for each unit, coded pieces."""
        head = head_elements(self.addends, self.dtype)
        self.numbers = np.zeros(head + self.network.buffer_layout.size, self.dtype)
        self.message = StepMessage(self.numbers[:head], self.numbers[head:], self.addends)
        if not self.forward_backward.fixed and not self.compressor:
            self.sends = self.sends_plain
        self.summed, self.trees, self.pieces, self.dense = self.message, [], [], 0
        self.passes = self.step_count = 0  # of the step that runs, so far; begun
        mesh, ranks = self.mesh, range(self.mesh.count)
        if self.forward_backward.fixed:
            for unit in self.units:
                cuts = [(unit.block * r, unit.block * (r + 1)) for r in ranks]
                self.trees.append(TreeSum(self.addends, cuts[-1][1], self.dtype, mesh.communicator, cuts))
            # Of the message:
            self.trees.append(TreeSum(self.addends, len(self.numbers), self.dtype, mesh.communicator))
        if self.compressor:
            self.compressor.check(self.optimizer)
            for unit in self.units:
                regions = [self.unit_layout.region(unit, r) for r in ranks]
                self.pieces.append(
                    CompressedReduceScatter(
                        mesh.communicator, self.compressor, regions, ranks, ranks, self.dtype, self.seed
                    )
                )

    def zeros_for_all(self, size: int) -> np.ndarray:
        """Return memory that is reduced over all ranks: shared where that saves copies."""
        return self.mesh.communicator.empty(size, self.dtype) if self.shared_memory else np.zeros(size, self.dtype)

    def first_values(self):
        """Draw every tensor whole, one at a time, and keep what is in this rank's blocks."""
        for unit in self.units:
            whole = np.zeros(unit.block * self.mesh.count, self.dtype)
            for name, array in self.unit_layout.arrays(whole, unit):
                array[...] = self.layout.draw(name, self.seed).reshape(-1)
            self.own_block(unit)[...] = self.own_part(whole, unit)
        self.publish_parameters()

    def own_part(self, whole: np.ndarray, unit: Unit) -> np.ndarray:
        """Return this rank's block of a whole unit."""
        return whole[self.mesh.rank * unit.block :][: unit.block]

    def own_block(self, unit: Unit) -> np.ndarray:
        """Return this rank's block of the parameters of a unit."""
        return self.own_part(self.unit_layout.whole(self.parameters, unit), unit)

    def publish_parameters(self) -> None:
        """Let all ranks see the updated blocks of all others (collective)."""
        for unit in self.units:
            self.mesh.communicator.Allgather(MPI.IN_PLACE, self.unit_layout.whole(self.parameters, unit))

    # ------------------------------------------------------------------------------------------------ a step

    def begin_step(self, step, samples, total, parts):
        self.passes, self.step_count = 0, self.step_count + 1
        return super().begin_step(step, samples, total, parts)

    def begin_pass(self, micro):
        self.ends_addend = micro is not None and micro.addend is not None
        self.passes += micro is not None
        return None

    def reduce_units(self) -> None:
        """Reduce all units, whose gradients are complete."""
        for unit in self.units:
            block = self.block[: unit.block]
            self.reduce(self.unit_layout.whole(self.gradients, unit), unit, block)
            if not self.trees:
                self.gradient_shard[unit.blocks] = block

    def reduce(self, whole: np.ndarray, unit: Unit, out: np.ndarray):
        """out = this rank's block of the sum of all ranks' gradients of a unit; returns a request while it is not."""
        unit.clear_gaps(whole)
        if self.trees:
            return self.trees[unit.number].add(whole) if self.ends_addend else None  # summed when all shards are there
        if not self.pieces:
            return self.reduce_scatter(whole, out)
        pieces, draw = self.pieces[unit.number], self.step * DRAWS + self.passes - 1  # another draw each micro-batch
        starts = range(0, self.mesh.count * unit.block, unit.block)
        cut = [whole[lo : lo + e.length] for lo, e in zip(starts, pieces.encoders, strict=True)]
        self.dense += (len(whole) - unit.block) * whole.itemsize
        out[:] = 0
        return pieces.reduce(cut, out[: pieces.decoder.length], draw)

    def reduce_scatter(self, whole: np.ndarray, out: np.ndarray):
        """Sum a unit over ranks; each gets its block. Messages need a working copy of the unit."""
        return self.mesh.communicator.Reduce_scatter_block(whole, out, keep=self.shared_memory)

    def end_addend(self):
        if self.trees:
            self.reduce_units()
            self.trees[-1].add(self.numbers)

    def finish_step(self):
        """Sum the message, and in stage 1 the gradients: stages 2 and 3 have reduced every unit by now."""
        if self.trees:
            *trees, of_message = self.trees
            for unit, tree in zip(self.units, trees, strict=True):
                self.gradient_shard[unit.blocks] = tree.reduce_scatter()
            self.numbers[:] = of_message.allreduce()
        else:
            self.reduce_units()
            self.mesh.sum(self.numbers)
        return super().finish_step()

    def update(self):
        """Update this rank's blocks, unit after unit; a clip has seen the whole gradient before."""
        optimizer, g = self.optimizer, self.gradient_shard
        optimizer.clip_gradients(g, self.region, self.sum_norms)
        for unit, region in zip(self.units, self.regions, strict=True):
            slots = {name: slot[unit.blocks] for name, slot in self.slots.items()}
            optimizer.apply(self.own_block(unit), g[unit.blocks], slots, self.step, region, self.sum_squares)
        self.publish_parameters()

    def sum_squares(self, squares: np.ndarray) -> None:
        """Sum over the ranks with other blocks, and with other parts, of the same tensors."""
        self.mesh.sum(squares)
        self.sum_parts(squares)

    def sum_norms(self, squares: np.ndarray) -> None:
        """Sum over the ranks with other blocks, and those with other parts of the network."""
        self.mesh.sum(squares)
        if self.sum_model:
            self.sum_model(squares)

    # ------------------------------------------------------------------------------------------------ the state

    def placed(self):
        count, rank = self.mesh.count, self.mesh.rank
        blocks = []
        for unit in self.units:
            start = min(unit.start + rank * unit.block, unit.stop)
            blocks.append(Range(start, min(start + unit.block, unit.stop), unit.at))
        yield from self.placed_parameters(tuple(blocks))
        own = tuple(blocks) if isinstance(self.gradient_placement, Shard) else self.whole_units()
        yield PlacedArray("", "gradients", self.gradients, self.layout, self.gradient_placement, own)
        for name, slot in self.slots.items():
            yield PlacedArray(f"optimizer/{name}", "moments", slot, self.layout, Shard(count), tuple(blocks))
        yield from in_transit(self.block, *self.unit_memory(), *(tree.sums for tree in self.trees))

    def placed_parameters(self, blocks: tuple[Range, ...]) -> Iterator[PlacedArray]:
        """Every rank has all parameters, and answers for its own blocks, whose ranges in a shard these are."""
        count, rank, layout = self.mesh.count, self.mesh.rank, self.layout
        pairs = list(zip(blocks, self.units, strict=True))
        own = tuple(r._replace(at=count * r.at + rank * unit.block) for r, unit in pairs)
        yield PlacedArray("param", "", self.parameters, layout, Shard(count), own)
        yield PlacedArray("param", "parameters", self.parameters, layout, ranges=self.whole_units(), copy=True)

    def whole_units(self) -> tuple[Range, ...]:
        """Return where all elements lie in a buffer of whole units."""
        return tuple(Range(unit.start, unit.stop, self.mesh.count * unit.at) for unit in self.units)

    def unit_memory(self) -> Iterable[np.ndarray]:
        """Buffers in which units take turns."""
        return ()

    def bytes_sent(self):
        """Where gradients are sharded every micro-batch sends its own, as it does without compression."""
        if not self.pieces:
            return {}
        sent, steps = sum(pieces.sent for pieces in self.pieces), max(1, self.step_count)
        mean = self.mesh.communicator.allreduce(sent) / self.mesh.count / steps
        return {"bytes_sent": mean, "bytes_dense": self.dense / steps}

    def describe(self):
        sizes = [(unit.stop - unit.start) * self.dtype.itemsize / 2**20 for unit in self.units] or [0]
        where = f"shards in {self.offload or 'memory'}" if self.slots or self.sharded else "nothing in shards"
        how = f"; gradients sent as {self.compressor!r}" if self.compressor else ""
        count = f"{len(sizes)} units" if len(sizes) > 1 else "one unit"
        size = f"{min(sizes):.2g} to {max(sizes):.2g}" if len(sizes) > 1 else f"{sizes[0]:.2g}"
        return f"{count} of {size} MiB, {where}{how}"
