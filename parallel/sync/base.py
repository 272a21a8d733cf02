"""Gradient synchronizers: they move and sum the gradients of ranks. Here: their methods, and the one of one process.

A sync owns the flat buffers and lends the layers views of them. A step calls, in this order:

    begin_step    start a step
    begin_pass    start a micro-batch; returns a hook, called in backward when gradients up to its `end` are final
    before_layer  a layer runs next, forward or backward: ZeRO-3 gathers its parameters
    skip_pass     this rank has no samples in the micro-batch, and takes part in what the other ranks do
    set_loss      loss and statistics of an addend, after its forward pass: they are sent behind its gradients
    end_addend    the gradients of the addend are complete
    finish_step   return the summed loss and statistics; gradients are summed now, or in `update`
    update        clip and apply

An **addend** is what a rank, or a virtual shard, adds to the sums: its micro-batches together. A sync has no code for
state: `placed` lists its arrays and their placements, and parallel/state/table.py does the rest. All ranks call all
methods, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import numpy as np

from nn.core.network import Network
from nn.optim.optimizers import Optimizer
from parallel.mesh import Mesh
from parallel.passes.forward_backward import ForwardBackward, Samples
from parallel.state.placed import PlacedArray, in_transit
from parallel.sync.step_result import StepMessage, StepResult, checksum


class GradientSync:
    """Every rank has all parameters and moments, and makes the same update; this base class is the sync of one process.

    Attributes
    ----------
    parameters, gradients : flat arrays
    slots : dict of flat arrays
        The optimizer's moments that this rank holds.
    p, g : views
        Parameters and gradients as layers see them.
    message, summed : StepMessage
        What this rank sends beside its gradients, and the sums.
    adds_up : bool
        Whether gradients of micro-batches add up where layers write them.
    spans_mesh : bool
        Whether its group is the whole mesh, and not only the ranks with the same part of the network.
    phases : tuple of (name, method, together)
        As of a trainer.
    before_layer : callable (LayerContext) or None
        Called before a layer is run, forward or backward.
    local_update : bool
        Whether ranks make steps of their own, and only `synchronize` brings them together.
    offload : path or None
        A directory in which what is kept lies in memory-mapped files.
    trees : sequence of TreeSum
        What sums in a fixed tree, where something does.
    bad : bool
        Whether this rank, of a local-update strategy, has had a loss that is not finite.
    last_change : (int, int)
        Of memory that ranks share: the node, and the number of the last change of it that is complete; -1, 0 where no
        memory is shared.
    """

    adds_up = True
    spans_mesh = False
    before_layer: Callable | None = None
    local_update = bad = False
    offload, trees = None, ()
    last_change = -1, 0
    share = slice(None)  # of the moments: what this rank may write
    phases = (
        ("compute", "compute_gradients", False),
        ("communicate", "sync.finish_step", True),
        ("update", "sync.update", False),
    )

    def start(
        self,
        mesh: Mesh,
        forward_backward: ForwardBackward,
        network: Network,
        undivided: Network,
        optimizer: Optimizer,
        buffers: np.ndarray,
        seed: int,
    ) -> None:
        """Make the buffers, with first values; called once, on all ranks.

        `network` is what this rank holds of the `undivided` one.
        """
        self.mesh, self.forward_backward = mesh if self.spans_mesh else mesh.data_group, forward_backward
        self.allgather = mesh.allgather  # over all ranks, also those with other parts of the network
        self.network, self.undivided, self.optimizer = network, undivided, optimizer
        self.sum_model = mesh.sum_model if mesh.model else None  # over the ranks with the other parts of the network
        self.sum_parts, self.parts = mesh.sum_parts, mesh.parts  # and with the other parts of the same arrays
        self.buffers, self.seed, self.dtype, self.layout = buffers, seed, network.dtype, network.layout
        self.say: Callable[[str], None] = lambda line: None
        self.allocate()

    def allocate(self) -> None:
        """Make the flat buffers; the step's message lies behind the gradients, so one buffer is summed."""
        layout = self.layout
        self.parameters = layout.zeros(self.dtype)
        self.flat_buffer = np.zeros(layout.size + StepMessage.elements(self.network, self.addends), self.dtype)
        self.gradients = self.flat_buffer[: layout.size]
        self.message = StepMessage.of(self.flat_buffer[layout.size :], self.addends)
        self.summed = self.message
        self.slots = {name: layout.zeros(self.dtype) for name in self.optimizer.slots}
        self.first_values()

    def first_values(self) -> None:
        """Give all ranks the parameters and statistics of rank 0 (collective)."""
        layout = self.layout
        layout.initialize(self.parameters, self.seed)
        self.p, self.g, self.region = layout.views(self.parameters), layout.views(self.gradients), layout.region()
        if self.mesh.communicator:
            self.mesh.communicator.Bcast(self.parameters, root=0)
            self.mesh.communicator.Bcast(self.buffers, root=0)

    # ------------------------------------------------------------------------------------------------ a step

    def begin_step(self, step: int, samples: int, total: int, parts: int) -> dict[str, Callable]:
        """Start a step in which this rank has `samples` of `total` samples, in `parts` micro-batches.

        Return the hooks that take the factors of gradients in place of these: see NetworkContext.product_hooks.
        """
        self.step = step
        for tree in self.trees:
            tree.reset()
        return {}

    def begin_pass(self, micro: Samples | None) -> Callable[[int], None] | None:
        """Start a micro-batch, or a pass that is only forward (None); return the hook for gradients that are ready."""
        return None

    def skip_pass(self, micro: Samples | None) -> None:
        """Take part in a pass for which this rank has no samples."""
        if micro and not micro.accumulate:
            self.gradients[:] = 0

    def set_loss(self, loss: float, total: int) -> None:
        """Take the loss of an addend, and its running statistics."""
        self.message.write(loss, total, self.buffers, checksum(self.optimizer))

    def end_addend(self) -> None:
        """Take the gradients of an addend, which are complete."""

    def finish_step(self) -> StepResult:
        """Return the sums over all addends."""
        return self.summed.result()

    @property
    def addends(self) -> int:
        """Number of addends of the sums."""
        return self.forward_backward.addends

    def synchronize(self) -> bool:
        """Synchronize local-update ranks: all have the same parameters, and all gradients are in them.

        Nothing is done if they already are. Return whether any loss since then was not finite: its gradient is in no
        parameters.
        """
        return False

    def show_synchronized(self) -> bool:
        """Show, until `resume`, what `synchronize` would give, for local-update ranks (collective).

        Return whether any loss was not finite, if ranks synchronize meanwhile.
        """
        return self.synchronize()

    def resume(self) -> None:
        """Restore what this rank had before `show_synchronized`, to continue training from it."""

    def before_load(self) -> None:
        """Prepare for another state to be checked, and loaded (collective)."""
        self.synchronize()

    def reset(self) -> None:
        """Forget what belongs to the state before: another one was loaded (collective)."""

    def epoch_record(self) -> dict[str, object]:
        """Return what local-update ranks have counted since the last call, for an epoch's record (collective)."""
        return {}

    def update(self) -> None:
        """Make one step of the optimizer."""
        self.optimizer.update(self.parameters, self.gradients, self.slots, self.step, self.region, self.sum_model)

    def detach(self, changes: Sequence[tuple[int, int]]) -> None:
        """Detach from shared memory after the death of a rank: after this call only the state may be read.

        This rank gets arrays of its own, as they were after the last of the `changes` that is complete on any rank.
        """

    # ------------------------------------------------------------------------------------------------ the state

    def barrier(self, what: str) -> None:
        """Return when all ranks have come that read what this one writes."""

    def rescale(self, slot: str, factor: float) -> None:
        """Multiply a slot of the optimizer. No rank reads it meanwhile: there is a barrier before and after."""
        self.barrier("what was there before a slot is rescaled")
        if slot in self.slots:
            self.slots[slot][self.share] *= factor
        self.barrier("the slot that was rescaled")

    def placed(self) -> Iterator[PlacedArray]:
        """Yield all arrays of this rank, the rows of the trainer's table: state is nothing but these."""
        yield PlacedArray("param", "parameters", self.parameters, self.layout)
        yield PlacedArray("", "gradients", self.gradients, self.layout)
        for name, slot in self.slots.items():
            yield PlacedArray(f"optimizer/{name}", "moments", slot, self.layout)
        yield from in_transit(*(tree.sums for tree in self.trees))

    def loaded(self, steps: int, anew: Container[str] = ()) -> None:
        """Follow arrays that were loaded; kinds of private state that are `anew` were not in it, and are zero."""

    def set_epoch_steps(self, steps: int) -> None:
        """Take the number of steps in an epoch, for methods of compression that warm up."""

    def bytes_sent(self) -> dict[str, float]:
        """Return the bytes of gradients that a rank sent in a step: the mean over ranks and steps (collective).

        "bytes_sent" is counted, "bytes_dense" what uncompressed gradients would take; empty where nothing counts.
        """
        return {}

    sends = ""  # the formula's Psi that a rank sends in a step, in words
    notes = ""  # what `bytes` counts more than once, in words

    def describe(self) -> str:
        """Describe how gradients are summed, for the log."""
        return ""

    def close(self) -> None:
        """Free what is held beside arrays."""
        for tree in self.trees:
            tree.release()
