"""Parameters kept by servers: workers push gradients, servers add them up and update, workers pull parameters.

The loss and the size of the batch that ranks were given go to every server, so that all decide alike whether to update;
they come back with the parameters, as they were when the servers decided: a step is one push and one pull.

Sums in a fixed tree: workers send the sums of their virtual shards' subtrees, each server adds those of its slice.
Compressed: a worker has an encoder for each server's slice; what is pulled is not compressed, so of the 2 n that a
worker moves in a step the half that is pushed shrinks.
"""

from __future__ import annotations

import math

import numpy as np
from mpi4py.MPI import IN_PLACE, MAX

from parallel.passes.virtual_shards import refuse_norms
from parallel.state.placed import PlacedArray, Range, Shard, in_transit
from parallel.sync.fixed_tree import TreeSum
from parallel.sync.push_pull import pull, push
from parallel.sync.server_roles import ServerRoles
from parallel.sync.step_result import StepMessage, StepResult, head_elements


class Served(ServerRoles):
    """A server holds a slice of the parameters and the moments for it; a worker a copy of all parameters.

    Attributes
    ----------
    pushed, replica : flat arrays
        What a worker pushes, and what it has pulled: parameters (or gradients), statistics, the step's message.
    held, sums : flat arrays
        A server's slice and, behind it, the step's message; the sums likewise.
    own_count : int
        Parameters in a server's slice.
    """

    phases = (
        ("compute", "compute_gradients", False),
        ("push", "sync.push", True),
        ("update", "sync.serve", False),
        ("pull", "sync.pull", True),
    )

    def allocate(self):
        mesh, layout = self.mesh, self.layout
        # Numbers behind every vector: the step's message, and whether the update was refused.
        self.behind = head_elements(self.addends, self.dtype) + 1
        rank, servers = mesh.rank, len(self.hosts)
        self.divide_parameters()
        count = self.slices[-1][1]
        self.pushed, self.replica = np.zeros((2, count + self.behind), self.dtype)
        self.parameters, self.gradients = self.replica[: layout.size], self.pushed[: layout.size]
        self.first_values()
        self.message, self.summed = (
            StepMessage(vector[count:-1], vector[layout.size : count], self.addends)
            for vector in (self.pushed, self.replica)
        )
        self.between_servers, self.slots, self.refused = mesh.group(self.hosts), {}, None
        if self.is_server:
            self._allocate_server(self.hosts.index(rank))
        self._allocate_sums()
        rest = slice(layout.size if self.compressor else 0, None)  # what is pushed as it is
        vectors = {"x": (self.pushed[rest], self.replica)} if self.is_worker else {}
        if self.is_server:
            vectors["y"] = (self.sums[self.own_count if self.compressor else 0 :], self.held)
        slices = [(max(lo, rest.start) - rest.start, max(hi, rest.start) - rest.start) for lo, hi in self.slices]
        arguments, compile_ = (servers, self.place, self.behind), mesh.communicator.compile
        self.pushing = compile_(push(rank, mesh.size, slices, *arguments), **{k: v[0] for k, v in vectors.items()})
        self.pulling = compile_(pull(rank, mesh.size, self.slices, *arguments), **{k: v[1] for k, v in vectors.items()})
        if not self.is_worker:
            self._forget_vectors()

    def _allocate_server(self, number: int) -> None:
        """Make what a server has: its slice, the moments for it and room for sums."""
        lo, hi = self.slices[number]
        self.held = np.append(self.replica[lo:hi], self.replica[-self.behind :])
        self.sums = np.zeros_like(self.held)
        self.region, self.own_count = self.regions[number], self.own_slice.stop - self.own_slice.start
        self.slots = {name: np.zeros(self.own_count, self.dtype) for name in self.optimizer.slots}

    def _forget_vectors(self) -> None:
        """Free the vectors that only workers need."""
        self.parameters, self.p, self.g = self.held[: self.own_count], None, None
        self.summed = StepMessage(self.held[-self.behind : -1], np.zeros_like(self.buffers), self.addends)
        del self.pushed, self.replica, self.gradients, self.message

    def _allocate_sums(self) -> None:
        """Make what sums in another way than worker after worker: trees, or coded pieces."""
        mesh, count, workers = self.mesh, self.slices[-1][1], len(self.workers)
        self.trees = []
        if self.forward_backward.fixed:
            if len(self.hosts) > 1:
                refuse_norms(self.optimizer)
            cuts, end = [], 0
            for rank in range(mesh.size):
                lo, hi = self.slices[self.hosts.index(rank)] if rank in self.hosts else (end, end)
                cuts.append((lo, hi))
                end = hi
            shards, dtype = self.forward_backward.addends, self.dtype
            self.trees = [TreeSum(shards, count, dtype, mesh.communicator, cuts, workers)]
            # For every server:
            self.trees.append(TreeSum(shards, self.behind, dtype, mesh.communicator, holders=workers))
        self._allocate_pieces(self._maximum)

    # ------------------------------------------------------------------------------------------------ a step

    def end_addend(self):
        if self.trees:
            self.trees[0].add(self.pushed[: -self.behind])
            self.trees[1].add(self.pushed[-self.behind :])

    def finish_step(self):
        """Push, let the servers update, pull."""
        if self.pieces:
            result = self._sum_of_heads()
            # In a step that is not made, what the method has left out stays as it is.
            if result.overflowed or not result.agreed or not math.isfinite(result.loss):
                return result
        self.push()
        self.refused = None
        if self.is_server:
            try:
                self.serve()
            except FloatingPointError as error:  # nothing was updated: the waiting workers get a flag
                self.refused = error
            self.held[-1] = self.refused is not None
        self.pull()
        if self.is_worker and self.replica[-1]:
            self.refused = self.refused or FloatingPointError("the servers found a norm that is not finite")
        return super().finish_step()

    def push(self) -> None:
        """Send gradients, statistics and the message from the workers to the servers, which add them up."""
        if self.trees:
            mine, message = (tree.reduce_scatter() if i == 0 else tree.allreduce() for i, tree in enumerate(self.trees))
            if self.is_server:
                self.sums[: -self.behind], self.sums[-self.behind :] = mine, message
            return
        if self.is_server:
            self.sums[:] = 0
        self.mesh.communicator.Run(self.pushing, "push")
        if self.pieces:
            shares = [self.gradients[share] for share in self.shares] if self.is_worker else []
            self.pieces.reduce(shares, self.sums[: self.own_count] if self.is_server else None, self.step)
            self.pushes += 1

    def serve(self) -> None:
        """Update this server's slice, unless the message forbids it: every server has it, and all do the same."""
        self.held[self.own_count :] = self.sums[self.own_count :]  # statistics and message are sums already
        result = StepMessage(self.sums[-self.behind : -1], np.empty(0), self.addends).result()
        if math.isfinite(result.loss) and not result.overflowed and result.agreed:
            among = self._sum_small if len(self.hosts) > 1 else None
            held, sums = self.held[: self.own_count], self.sums[: self.own_count]
            self.optimizer.update(held, sums, self.slots, self.step, self.region, among)

    def pull(self) -> None:
        """Send parameters, statistics and the message from the servers to the workers."""
        self.mesh.communicator.Run(self.pulling, "pull")

    def update(self):
        """Raise what stopped the servers, which have updated otherwise."""
        if self.refused:
            raise self.refused

    def _sum_small(self, array: np.ndarray) -> None:
        self.between_servers.Allreduce(IN_PLACE, array)

    def _maximum(self, array: np.ndarray) -> None:
        self.mesh.data.Allreduce(IN_PLACE, array, MAX)

    def _sum_of_heads(self) -> StepResult:
        """Return what the messages of all workers say, without running statistics."""
        head = np.zeros(self.behind - 1, self.dtype)
        if self.is_worker:
            head[:] = self.message.head
        self.mesh.sum_all(head)
        return StepMessage(head, np.empty(0), self.addends).result()

    # ------------------------------------------------------------------------------------------------ the state

    def placed(self):
        layout, shard = self.layout, Shard(len(self.hosts))
        if self.is_server:
            own = (Range(self.own_slice.start, self.own_slice.stop, 0),)
            yield PlacedArray("param", "parameters", self.held, layout, shard, own)
            yield PlacedArray("", "gradients", self.sums, layout, shard, own)
            for name, slot in self.slots.items():
                yield PlacedArray(f"optimizer/{name}", "moments", slot, layout, shard, own)
        if self.is_worker:
            yield PlacedArray("param", "parameters", self.replica, layout, copy=True)
            yield PlacedArray("", "gradients", self.pushed, layout)
        if self.memories:
            yield from self.memories.placed()
        yield from in_transit(*(tree.sums for tree in self.trees))

    def close(self):
        self.pushing.free()
        self.pulling.free()
        super().close()
