"""Parameters leave a master in every step, and gradients come back to it: it alone updates."""

from __future__ import annotations

from dataclasses import replace

from mpi4py.MPI import IN_PLACE

from parallel.passes.dealt import MASTER
from parallel.state.placed import Shard
from parallel.sync.base import GradientSync
from parallel.sync.fixed_tree import TreeSum


class Master(GradientSync):
    """Workers have the parameters of the last broadcast, and no moments: the state is the master's."""

    phases = (
        ("scatter", "forward_backward.select_samples", True),
        ("broadcast", "sync.broadcast", True),
        ("forward", "forward", False),
        ("gather", "forward_backward.gather_outputs", True),
        ("loss", "forward_backward.compute_loss", False),
        ("scatter gradient", "forward_backward.scatter_gradient", True),
        ("backward", "backward", False),
        ("reduce", "sync.finish_step", True),
        ("update", "sync.update", False),
    )

    def allocate(self):
        super().allocate()
        self.master, count = self.mesh.rank == MASTER, len(self.flat_buffer)
        if not self.master:
            self.slots = {}
        if self.forward_backward.fixed:
            for_master = [(0, count)] + [(count, count)] * (self.mesh.size - 1)
            self.trees = (
                TreeSum(self.forward_backward.addends, count, self.dtype, self.mesh.communicator, for_master),
            )

    def broadcast(self) -> None:
        """Send the master's parameters and running statistics to all."""
        self.mesh.communicator.Bcast(self.parameters, root=MASTER)
        if len(self.buffers):
            self.mesh.communicator.Bcast(self.buffers, root=MASTER)

    def begin_step(self, step, samples, total, parts):
        self.broadcast()
        return super().begin_step(step, samples, total, parts)

    def end_addend(self):
        for tree in self.trees:
            tree.add(self.flat_buffer)

    def finish_step(self):
        """Sum all on the master, which sends the sums of the message to all ranks."""
        communicator = self.mesh.communicator
        if self.trees:
            mine = self.trees[0].reduce_scatter()
            if self.master:
                self.flat_buffer[:] = mine
        elif self.master:
            communicator.Reduce(IN_PLACE, self.flat_buffer, root=MASTER)
        else:
            communicator.Reduce(self.flat_buffer, None, root=MASTER)
        communicator.Bcast(self.flat_buffer[self.layout.size :], root=MASTER)
        return super().finish_step()

    def update(self):
        """Update on the master; others get its parameters with the next broadcast and learn if a clip fails."""
        refused = None
        if self.master:
            try:
                super().update()
            except FloatingPointError as error:
                refused = str(error)
        if self.optimizer.clip:
            refused = self.mesh.bcast(refused)
        if refused:
            raise FloatingPointError(refused)

    def show_synchronized(self):
        """Bring the present parameters to the workers, which have those of the last step's begin."""
        self.broadcast()
        return False

    def placed(self):
        for row in super().placed():
            yield replace(row, placement=Shard(1)) if row.kind == "moments" else row

    def describe(self):
        return f"rank {MASTER} is the master: it reads, computes the loss and updates"
