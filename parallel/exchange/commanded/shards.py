"""The exchange of Sandblaster: who has which role, and the state that the shards keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from nn.optim.lbfgs import Vectors
from parallel.exchange.base import Exchange
from parallel.exchange.commanded.post import LIMIT, Letter, LocalPost, MPIPost
from parallel.exchange.commanded.roles import COORDINATOR, KINDS, Coordinator, Replica, Shard
from parallel.exchange.push_pull import roles, server_slices
from parallel.state.fragments import Fragment

WORKING = ("d", "w0", "g0")  # vectors that a search needs beside those that last


def parts(size: int, servers: int, place: str) -> tuple[list[int], list[int]]:
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


class Commanded(Exchange):
    """A shard has a slice of every vector, a replica a copy of the parameters, the coordinator neither.

    Parameters
    ----------
    size : int
        Ranks.
    servers, place
        As for push_pull.roles, among the ranks beside the coordinator.
    limit : float
        Seconds that a rank waits for a letter.

    Attributes
    ----------
    workers, hosts : lists of int
        Ranks that compute, and that have a shard; of one process several shards.
    algorithm : LBFGS or None
        The coordinator's.
    """

    from_first = True
    phases = (("compute", "compute_gradients", False), ("wait", "exchange.receive", False))

    def __init__(self, size: int, servers: int, place: str, limit: float = LIMIT):
        self.workers, self.hosts = parts(size, servers, place)
        self.place, self.limit = place, limit

    def allocate(self):
        mesh, layout, count = self.mesh, self.layout, len(self.hosts)
        self.slices = [slice(lo, hi) for lo, hi in server_slices(layout.size, count)]
        self.names = ["w", *self.optimizer.slots, *WORKING]
        first = layout.zeros(self.dtype)
        layout.initialize(first, self.seed)
        if mesh.communicator:
            mesh.communicator.Bcast(first, root=0)
        self.post = self._post()
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
            self.roles["replica", number] = Replica(number, self.slices, *both, self._compute, self.post)
        self.algorithm = None
        if mesh.rank == 0:
            sizes = count, len(self.workers)
            self.roles[COORDINATOR] = self.coordinator = Coordinator(self.names, *sizes, self.post, self.pump)
            self.algorithm = self.optimizer.algorithm(self.coordinator, self.coordinator.evaluate)
        self.kept_apart = self.optimizer.algorithm(self, float).state()  # as kinds of what the coordinator keeps

    def _post(self):
        if self.mesh.size == 1:
            return LocalPost()
        places = {COORDINATOR: 0}
        places |= {("shard", j): rank for j, rank in enumerate(self.hosts)}
        places |= {("replica", i): rank for i, rank in enumerate(self.workers)}
        return MPIPost(self.mesh.communicator, places, self.dtype, KINDS, self.limit)

    def _shard(self, number: int, w: np.ndarray) -> Shard:
        vectors = Vectors(w, np.zeros_like(w))
        for name in self.names:
            vectors.arrays.setdefault(name, np.zeros_like(w))
        return Shard(number, vectors, self.names, len(self.workers), self.post)

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
        self.compute, self.told = compute, [math.nan, ""]
        for role in self.roles.values():
            role.begin()
        if self.algorithm:
            self.told = self._coordinate(chunks, same)
        while not all(role.done for role in self.roles.values()):
            self.pump()
        loss, done = self.mesh.bcast(self.told)
        self.finished = done
        return loss

    def _coordinate(self, chunks: int, same: bool) -> list:
        """The coordinator's part: (the loss before the step, why there is nothing more to do)."""
        algorithm, coordinator = self.algorithm, self.coordinator
        coordinator.chunks = chunks
        if not same:
            algorithm.loss, algorithm.done = math.nan, ""
        try:
            algorithm.step()
            loss = algorithm.start
        except FloatingPointError:
            loss, algorithm.loss = algorithm.loss, math.nan
        if not coordinator.current:
            coordinator.refresh()
        coordinator.stop()
        return [loss, algorithm.done]

    def pump(self) -> None:
        """Wait for one letter, and let the role that it is for do what it says."""
        letter = self.receive()
        self.roles[letter.receiver].handle(letter)

    def receive(self) -> Letter:
        """The next letter for a role of this rank."""
        return self.post.receive()

    def _compute(self, chunk: int) -> float:
        return self.compute(chunk)

    def skip(self, micro):
        """Nobody waits for a rank that computes nothing."""

    # ------------------------------------------------------------------------------------------------ the state

    def gathered(self, name: str) -> np.ndarray | None:
        """A vector's slices from all shards, on rank 0 (collective)."""
        mine = [role.vectors.arrays[name] for (kind, _), role in self.roles.items() if kind == "shard"]
        mine = np.concatenate([np.empty(0, self.dtype), *mine])
        if self.mesh.size == 1:
            return mine
        first, counts, places = self.mesh.rank == 0, [0] * self.mesh.size, [0] * self.mesh.size
        for host, share in zip(self.hosts, self.slices, strict=True):
            counts[host], places[host] = share.stop - share.start, share.start
        whole = self.layout.zeros(self.dtype) if first else None
        self.mesh.communicator.Gatherv(mine, [whole, counts, places, None] if first else None, root=0)
        return whole

    def state_items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Vectors come from the shards to rank 0, one after the other; elsewhere an entry is empty."""
        nothing = np.empty(0, self.dtype)
        for name in ("w", *self.optimizer.slots):
            prefix, whole = "param" if name == "w" else f"optimizer/{name}", self.gathered(name)
            yield from (
                self.named(prefix, whole)
                if whole is not None
                else ((f"{prefix}/{each}", nothing) for each in self.layout.specs)
            )
        kept = self.algorithm.state() if self.algorithm else self.kept_apart
        yield from ((f"lbfgs/{name}", array) for name, array in kept.items())

    def fragments(self):
        for (kind, number), role in self.roles.items():
            for name in ("w", *self.optimizer.slots) if kind == "shard" else ():
                prefix = "param" if name == "w" else f"optimizer/{name}"
                yield from self.sliced(prefix, role.vectors.arrays[name], self.slices[number].start)
        if self.algorithm:
            yield from (Fragment(f"lbfgs/{name}", array) for name, array in self.algorithm.state().items())

    def kinds(self):
        return super().kinds() | {f"lbfgs/{name}": (a.shape, a.dtype) for name, a in self.kept_apart.items()}

    def load(self, state):
        """Each rank takes its own."""
        for name in ("w", *self.optimizer.slots):
            prefix, whole = "param" if name == "w" else f"optimizer/{name}", self.layout.zeros(self.dtype)
            for each, array in self.layout.items(whole):
                array[...] = state[f"{prefix}/{each}"]
            for (kind, number), role in self.roles.items():
                if kind == "shard":
                    role.vectors.arrays[name][:] = whole[self.slices[number]]
            if name == "w" and self.p is not None:
                self.parameters[:] = whole
        if self.algorithm:
            self.algorithm.load({name: state[f"lbfgs/{name}"] for name in self.kept_apart})

    def snapshot(self):
        kept = {name: array.copy() for name, array in self.kept()}
        return kept | {f"lbfgs/{name}": a for name, a in (self.algorithm.state() if self.algorithm else {}).items()}

    def restore(self, snapshot):
        for name, array in self.kept():
            array[...] = snapshot[name]
        if self.algorithm:
            self.algorithm.load({name: snapshot[f"lbfgs/{name}"] for name in self.kept_apart})

    def kept(self):
        if self.p is not None:
            yield "parameters", self.parameters
        for (kind, number), role in self.roles.items():
            if kind == "shard":
                for name in ("w", *self.optimizer.slots):
                    yield f"{name} of shard {number}", role.vectors.arrays[name]

    def bad_parameters(self):
        return super().bad_parameters() if self.p is not None else set()

    def digest(self, sha):
        if (whole := self.gathered("w")) is not None:
            sha.update(whole)

    def bytes(self):
        held = [role.vectors.arrays for (kind, _), role in self.roles.items() if kind == "shard"]
        moments = sum(array.nbytes for arrays in held for name, array in arrays.items() if name not in "wg")
        found = {"parameters": self.parameters.nbytes, "gradients": self.gradients.nbytes, "moments": moments}
        for arrays in held:
            found["parameters"] += arrays["w"].nbytes
            found["gradients"] += arrays["g"].nbytes
        return found | {"in transit": 0}

    def formula(self):
        psi = self.layout.count * self.dtype.itemsize
        part = psi * sum(kind == "shard" for kind, _ in self.roles) / len(self.hosts)
        vectors = psi * (self.p is not None) + part
        return {"parameters": vectors, "gradients": vectors, "moments": part * (len(self.names) - 2)}

    def describe(self):
        shards, replicas = len(self.hosts), len(self.workers)
        own = not set(self.hosts) & set(self.workers)
        place = "on ranks of their own" if own else "on replicas"
        return f"a coordinator, {replicas} replica{'s' * (replicas > 1)}, {shards} shard{'s' * (shards > 1)} {place}"

    def close(self):
        self.post.close()
