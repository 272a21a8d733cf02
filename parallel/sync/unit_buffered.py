"""ZeRO stages 2 and 3: gradients, and parameters, are whole only for a moment, in unit buffers.

Units take turns in a **unit buffer**, so the layers' views of it are made once. In stage 2 a unit's gradients are
reduced to this rank's block as soon as they are finished. In stage 3 a unit's parameters are gathered before its
forward and before its backward; one that is still there when backward begins is not gathered again. A layer has one
unit, and what it is tied to has buffers of its own. So prefetch + 1 buffers are enough: what is gathered ahead takes
the buffer of a unit that is behind.

Sources: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

import numpy as np

from parallel.state.placed import PlacedArray, Shard
from parallel.sync.sharded import ShardedOptimizer
from parallel.sync.units import UnitBuffers


class ShardedGradients(ShardedOptimizer):
    """ZeRO-2: gradients in blocks of units, too. Between nodes a unit is on its way while the next one computes.

    Layers write into unit buffers (`g`); `gradients` is this rank's shard of the sums.
    """

    sharded = ("gradients",)
    adds_up = False  # unit buffers never hold what was before

    def allocate_gradients(self, flat):
        self.gradients = self.gradient_shard = flat["gradients"]
        self.gradient_placement = Shard(self.mesh.count)
        self.gradient_buffers = UnitBuffers(self.unit_layout, 1 if self.shared_memory else 2, self.zeros_for_all)
        self.g = self.gradient_buffers.views()
        self.reducing = None  # (request, unit) of the unit that was reduced last

    def begin_pass(self, micro):
        super().begin_pass(micro)
        if micro is None:
            return None
        self.accumulate, self.reduced = micro.accumulate, 0
        return self.ready

    def skip_pass(self, micro):
        """Take part in what other ranks do in their pass."""
        for path in reversed(self.unit_layout.paths) if micro else ():
            self.skip_backward(path)

    def skip_backward(self, path: str) -> None:
        """Add nothing to the gradients of a layer."""
        end = self.layout.ends[path]
        for unit in self.units[self.reduced :]:
            if unit.stop <= end:
                self.gradient_buffers.of(unit)[:] = 0
                self.ready(unit.stop)

    def ready(self, end: int) -> None:
        """Reduce the units inside the finished prefix of the layout's gradients."""
        units = self.units
        while self.reduced < len(units) and units[self.reduced].stop <= end:
            unit = units[self.reduced]
            self.finish_reducing()
            target = (self.block if self.accumulate else self.gradient_shard[unit.at :])[: unit.block]
            self.reducing = self.reduce(self.gradient_buffers.of(unit), unit, target), unit
            self.reduced += 1
        if self.shared_memory or self.reduced == len(units):
            self.finish_reducing()

    def finish_reducing(self) -> None:
        """Have the unit that was reduced last in its shard."""
        if self.reducing:
            request, unit = self.reducing
            self.reducing = None
            if request:
                request.Wait()
            if self.accumulate:
                self.gradient_shard[unit.blocks] += self.block[: unit.block]

    def reduce_scatter(self, whole, out):
        if self.shared_memory:
            return super().reduce_scatter(whole, out)
        return self.mesh.communicator.Ireduce_scatter_block(whole, out, keep=False)

    def reduce_units(self):
        """Do nothing: each was reduced as soon as it was finished."""

    def unit_memory(self):
        return self.gradient_buffers.memory.values()


class ShardedParameters(ShardedGradients):
    """ZeRO-3, fully sharded: parameters in blocks of units, too.

    Parameters
    ----------
    unit_bytes, offload, shared_memory, compressor
        As for ShardedOptimizer.
    prefetch : int or None
        How many units are gathered ahead; see FullyShardedDataParallel.
    """

    sharded = ("parameters", "gradients")
    sends_plain = "3, less what need not be gathered again for backward"
    phases = (*ShardedGradients.phases, ("communicate", "sync.gather_unit", True))

    def __init__(self, unit_bytes, offload, shared_memory, compressor=None, prefetch: int | None = None):
        super().__init__(unit_bytes, offload, shared_memory, compressor)
        self.prefetch = (0 if shared_memory else 1) if prefetch is None else prefetch

    def allocate_parameters(self, flat):
        self.parameters = flat["parameters"]
        self.parameter_buffers = UnitBuffers(
            self.unit_layout, 1 + self.prefetch, lambda size: np.zeros(size, self.dtype)
        )
        self.p = self.parameter_buffers.views()
        self.requests = {}  # number of a unit -> of its gathering
        needs = [self.unit_layout.needs[path] for path in self.unit_layout.paths]
        order = [unit for each in (*needs, *reversed(needs)) for unit in each]
        self.use_order = [u for i, u in enumerate(order) if i == 0 or order[i - 1] != u]  # of 3 units: 0 1 2 1 0
        self.position = -1  # in use_order, of the unit that was used last

    def own_block(self, unit):
        return self.parameters[unit.blocks]

    def publish_parameters(self):
        """Forget what was gathered before the update: units are gathered again when they are used."""
        self.parameter_buffers.invalidate()

    def begin_pass(self, micro):
        self.position = -1
        return super().begin_pass(micro)

    def skip_pass(self, micro):
        for path in self.unit_layout.paths:
            self.gather_layer(path)
        super().skip_pass(micro)

    def skip_backward(self, path):
        self.gather_layer(path)
        super().skip_backward(path)

    def before_layer(self, ctx) -> None:
        """Gather the units that a layer needs, and start on the next ones."""
        self.gather_layer(ctx.path)

    def gather_layer(self, path: str) -> None:
        """Have the units that the layer at a path needs."""
        for number in self.unit_layout.needs.get(path, ()):
            self.gather_unit(number)

    def gather_unit(self, number: int) -> None:
        """Have a unit of parameters in its buffer."""
        if self.position >= 0 and self.use_order[self.position] == number:
            return
        self.position = self.use_order.index(number, self.position + 1)
        self.start_gather(number)
        if number in self.requests:
            self.requests.pop(number).Wait()
        if self.prefetch:
            for ahead in self.use_order[self.position + 1 : self.position + 1 + self.prefetch]:
                self.start_gather(ahead)
            self.mesh.communicator.progress()

    def start_gather(self, number: int) -> None:
        """Start to gather a unit into its buffer, or gather it, where none is gathered ahead."""
        unit = self.units[number]
        if not self.parameter_buffers.claim_buffer(unit):
            return
        whole = self.parameter_buffers.of(unit)
        if self.prefetch:
            self.requests[number] = self.mesh.communicator.Iallgather(self.own_block(unit), whole)
        else:
            self.mesh.communicator.Allgather(self.own_block(unit), whole)

    def placed_parameters(self, blocks):
        yield PlacedArray("param", "parameters", self.parameters, self.layout, Shard(self.mesh.count), blocks)

    def unit_memory(self):
        return *super().unit_memory(), *self.parameter_buffers.memory.values()

    def loaded(self, steps, anew=()):
        self.parameter_buffers.invalidate()
