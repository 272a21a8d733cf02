"""The sync of Sandblaster: who has which role, and the state that the shards keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nn.optim.lbfgs import Vectors
from parallel.state.placed import PlacedArray, Range, Shard, in_transit
from parallel.sync.base import GradientSync
from parallel.sync.coordinator.roles import COORDINATOR, KINDS, Coordinator, ParameterShard, Replica
from parallel.sync.mailbox import LIMIT, LocalMailbox, Mailbox
from parallel.sync.push_pull import roles, server_slices

WORKING = ("d", "w0", "g0")  # vectors that a search needs beside those that last
SCALARS = "lbfgs/"  # begins the names of what the coordinator keeps


def assign_roles(size: int, servers: int, place: str) -> tuple[list[int], list[int]]:
    """(ranks of the replicas, ranks of the shards); rank 0 is the coordinator, and alone it is all of them.

    Raises
    ------
    ValueError
        As push_pull.roles, of the ranks beside the coordinator.
    """
    if size == 1:
        return [0], [0] * servers
    try:
        replicas, shards = roles(size - 1, servers, place)
    except ValueError as error:
        raise ValueError(f"beside the coordinator, rank 0: {error}") from None
    return [rank + 1 for rank in replicas], [rank + 1 for rank in shards]


class Coordinated(GradientSync):
    """A shard has a slice of every vector, a replica a copy of the parameters, the coordinator neither.

    Parameters
    ----------
    size : int
        Ranks.
    servers, place
        As for push_pull.roles, among the ranks beside the coordinator.
    limit : float
        Seconds that a rank waits for a message.

    Attributes
    ----------
    workers, hosts : lists of int
        Ranks that compute, and that have a shard; of one process several shards.
    algorithm : LBFGS or None
        The coordinator's.
    """

    phases = (("compute", "compute_gradients", False), ("wait", "sync.mailbox.wait", False))

    def __init__(self, size: int, servers: int, place: str, limit: float = LIMIT):
        self.workers, self.hosts = assign_roles(size, servers, place)
        self.place, self.limit = place, limit

    def allocate(self):
        mesh, layout, count = self.mesh, self.layout, len(self.hosts)
        self.slices = [slice(lo, hi) for lo, hi in server_slices(layout.size, count)]
        self.names = ["w", *self.optimizer.slots, *WORKING]
        first = layout.zeros(self.dtype)
        layout.initialize(first, self.seed)
        if mesh.communicator:
            mesh.communicator.Bcast(first, root=0)
        self.mailbox = self._mailbox()
        self.roles, self.slots = {}, {}
        for number, (rank, share) in enumerate(zip(self.hosts, self.slices, strict=True)):
            if rank == mesh.rank:
                self.roles["shard", number] = self._shard(number, first[share].copy())
        self.parameters = self.gradients = np.empty(0, self.dtype)
        self.p = self.g = None
        if mesh.rank in self.workers:
            self.parameters, self.gradients = first, layout.zeros(self.dtype)
            self.p, self.g = layout.views(self.parameters), layout.views(self.gradients)
            number, both = self.workers.index(mesh.rank), (self.parameters, self.gradients)
            self.roles["replica", number] = Replica(number, self.slices, *both, self._compute, self.mailbox)
        self.algorithm, self.first_scalars = None, {}
        if mesh.rank == 0:
            sizes = count, len(self.workers)
            self.roles[COORDINATOR] = self.coordinator = Coordinator(self.names, *sizes, self.mailbox)
            self.algorithm = self.optimizer.algorithm(self.coordinator, self.coordinator.evaluate)
            self.scalars = self.algorithm.state()  # what the coordinator keeps, for the state
            self.first_scalars = {SCALARS + name: value.copy() for name, value in self.scalars.items()}

    def _mailbox(self):
        if self.mesh.size == 1:
            return LocalMailbox()
        rank_of = {COORDINATOR: 0}
        rank_of |= {("shard", j): rank for j, rank in enumerate(self.hosts)}
        rank_of |= {("replica", i): rank for i, rank in enumerate(self.workers)}
        return Mailbox(self.mesh.communicator, rank_of, KINDS, limit=self.limit)

    def _shard(self, number: int, w: np.ndarray) -> ParameterShard:
        vectors = Vectors(w, np.zeros_like(w))
        for name in self.names:
            vectors.arrays.setdefault(name, np.zeros_like(w))
        return ParameterShard(number, vectors, self.names, len(self.workers), self.mailbox)

    # ------------------------------------------------------------------------------------------------ a step

    def search(self, compute: Callable[[int], float], chunks: int, same: bool) -> float:
        """One step of the algorithm on a batch of so many chunks; the loss before it (collective).

        Parameters
        ----------
        compute : callable (chunk) -> float
            As for Replica.
        chunks : int
        same : bool
            Whether this batch is that of the step before, so that its loss and gradient are known.

        Returns
        -------
        float
            Not finite where the loss at the start is not: nothing was changed.
        """
        self.compute, self.outcome = compute, [math.nan, ""]
        for role in self.roles.values():
            role.start_search()
        if self.algorithm:
            self.outcome = self._coordinate(chunks, same)
        self.mailbox.wait(lambda: all(role.done for role in self.roles.values()))
        loss, done = self.mesh.bcast(self.outcome)
        self.finished = done
        return loss

    def _coordinate(self, chunks: int, same: bool) -> list:
        """The coordinator's part: (the loss before the step, why there is nothing more to do)."""
        algorithm, coordinator = self.algorithm, self.coordinator
        coordinator.chunks = chunks
        if not same:
            algorithm.loss = math.nan
        try:
            algorithm.step()
            loss = algorithm.start
        except FloatingPointError:
            loss, algorithm.loss = algorithm.loss, math.nan
        if not coordinator.current:
            coordinator.refresh()
        coordinator.stop()
        return [loss, algorithm.done]

    def _compute(self, chunk: int) -> float:
        return self.compute(chunk)

    def skip_pass(self, micro):
        """Do nothing: no rank waits for one that computes nothing."""

    # ------------------------------------------------------------------------------------------------ the state

    def placed(self):
        layout, shard = self.layout, Shard(len(self.hosts))
        if self.p is not None:
            yield PlacedArray("param", "parameters", self.parameters, layout, copy=True)
            yield PlacedArray("", "gradients", self.gradients, layout)
        for (kind, number), role in self.roles.items():
            share = self.slices[number] if kind == "shard" else None
            for name in self.names if share else ():
                entry = {"w": "param", **dict.fromkeys(WORKING, "")}.get(name, f"optimizer/{name}")
                what = {"w": "parameters", "g": "gradients"}.get(name, "moments")
                own = (Range(share.start, share.stop, 0),)
                yield PlacedArray(entry, what, role.vectors.arrays[name], layout, shard, own)
        if self.algorithm:
            for name, value in self.algorithm.state().items():
                self.scalars[name][...] = value
                yield PlacedArray(SCALARS + name, "", self.scalars[name], None, Shard(1))
        yield from in_transit(*self.mailbox.buffers.values())

    def loaded(self, steps, anew=()):
        if self.algorithm:
            self.algorithm.load(self.scalars)

    def describe(self):
        shards, replicas = len(self.hosts), len(self.workers)
        own = not set(self.hosts) & set(self.workers)
        place = "on ranks of their own" if own else "on replicas"
        return f"a coordinator, {replicas} replica{'s' * (replicas > 1)}, {shards} shard{'s' * (shards > 1)} {place}"

    def close(self):
        self.mailbox.close()
