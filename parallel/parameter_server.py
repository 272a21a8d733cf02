"""Parameter servers, synchronous: workers push gradients, servers add them up and update, workers pull parameters.

The parameters are cut into slices, one for each server, on ranks that do nothing else (place "own") or on the workers
themselves (place "workers"). A server holds its slice and the optimizer's moments for it; a worker holds a copy of all
parameters and no moments. Servers add in worker order, so the sum has the same bits for any number of servers.

Cost of a step over one process's for n bytes, w workers and s servers, push and pull each:
own ranks      w n / s beta at every server: one server is the bottleneck, and as many servers as workers are none
on the workers max((w-1) n / s, n) beta: with s = w as much as a ring allreduce moves, 2 (p-1)/p n in all
and alpha for each pair of worker and server. A server has room for w segments of what arrives.
Sources: Smola and Narayanamurthy 2010; Dean et al. 2012; Li et al. 2014.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from mpi4py.MPI import IN_PLACE

from nn.losses import Loss
from nn.network import Network
from nn.optimizers import Optimizer
from nn.serial import check_state, state_kinds
from parallel.push_pull import cut, pull, push, roles
from parallel.synchronous import Synchronous, agree, differ

TAIL = 3  # numbers behind every vector: the loss, and what ranks were told of the batch's size (Synchronous.totals)


class ParameterServer(Synchronous):
    """`Serial` on many ranks with synchronous parameter servers.

    `shard` is a worker's part of every batch; a rank that only serves has index None, and no samples.

    Parameters
    ----------
    network, loss, optimizer, communicator, seed
        As for Synchronous.
    servers : int
        Among which the parameters are cut, on bounds of 16 elements.
    place : {"own", "workers"}
        Whether servers have ranks of their own, the last ones, or live on workers.

    Attributes
    ----------
    workers, hosts : sequences of int
        Ranks that compute, and that serve.
    slices : list of (lo, hi)
        Of every server in the vector of parameters and running statistics.
    addends : int
        Vectors that servers add up in a step.
    held : array or None
        A server's slice, and the tail behind it.

    Raises
    ------
    ValueError
        Servers that there are no ranks or no parameters for.
    """

    phases = (
        ("compute", "compute_gradients", False),
        ("push", "push", True),
        ("update", "serve", False),
        ("pull", "pull", True),
    )

    def __init__(
        self,
        network: Network,
        loss: Loss,
        optimizer: Optimizer,
        communicator,
        seed: int = 0,
        servers: int = 1,
        place: str = "own",
    ):
        rank = communicator.rank
        agree(communicator, {"parameter servers": f"{servers} on {place}"})
        self.workers, self.hosts = roles(communicator.size, servers, place)
        self.server_place, self.addends = place, len(self.workers)
        self.works, self.serves = rank in self.workers, rank in self.hosts
        self.slices = cut(network.layout.size + network.state_layout.size, servers)
        super().__init__(network, loss, optimizer, communicator, seed)
        self.shard = (self.workers.index(rank) if self.works else None, len(self.workers))
        everyone = len(self.workers) == communicator.size
        self.between_workers = communicator if everyone else communicator.Split(self.works)
        self.between_servers = communicator.Split(self.serves) if everyone else self.between_workers
        self.start_alike()
        self._take_slice()
        arguments = rank, communicator.size, self.slices, servers, place, TAIL
        vectors = {"x": (self.message, self.replica)} if self.works else {}
        vectors |= {"y": (self.sums, self.held)} if self.serves else {}
        self.pushing = communicator.compile(push(*arguments), **{name: pair[0] for name, pair in vectors.items()})
        self.pulling = communicator.compile(pull(*arguments), **{name: pair[1] for name, pair in vectors.items()})

    def allocate(self) -> None:
        """A worker's vectors: gradients or parameters, then running statistics, then the tail."""
        layout, count = self.network.layout, self.slices[-1][1]
        self.message, self.replica = np.zeros((2, count + TAIL), self.network.dtype)
        self.gradients, self.parameters = self.message[: layout.size], self.replica[: layout.size]

    def _take_slice(self) -> None:
        """A server's own: its slice, the moments for it and room for sums; what it has no use for goes."""
        layout, dtype = self.network.layout, self.network.dtype
        self.held = self.sums = None
        self.slots = {}
        if self.serves:
            lo, hi = self.slices[self.hosts.index(self.communicator.rank)]
            self.held = np.append(self.replica[lo:hi], self.replica[-TAIL:])
            self.sums = np.zeros_like(self.held)
            self.own = slice(lo, max(lo, min(hi, layout.size)))  # of the parameters
            self.region = layout.region(self.own.start, self.own.stop)
            self.slots = {name: np.zeros(self.own.stop - lo, dtype) for name in self.optimizer.slots}
        if not self.works:
            self.parameters = self.held[: self.own.stop - self.own.start]
            del self.message, self.replica, self.gradients, self.p, self.g

    def all_sum(self, array):
        """Over the workers: servers have no samples to take statistics of."""
        self.between_workers.Allreduce(IN_PLACE, array)

    def sum(self, values):
        total = np.array(values, np.float64)
        self.communicator.Allreduce(IN_PLACE, total)
        return total

    def compute_gradients(self, x, y, total):
        if self.works:
            return super().compute_gradients(x, y, total)
        if len(x):
            raise ValueError(
                f"rank {self.communicator.rank} only serves, and was given {len(x)} samples: give them to workers "
                f"(ranks {self.workers[0]} to {self.workers[-1]}), or let workers be servers"
            )
        return 0.0

    def combine(self, loss):
        """Push, let the servers update, pull: the loss comes back with the parameters, as it was when they decided."""
        if self.works:
            np.divide(self.statistics, len(self.workers), out=self.message[self.network.layout.size : -TAIL])
            self.message[-TAIL:] = loss, *self.totals(first=self.shard[0] == 0)
        self.push()
        self.refused, refusal = None, -float(np.finfo(self.network.dtype).max)  # no loss is that
        if self.serves:
            try:
                self.serve()
            except FloatingPointError as error:  # nothing was updated: the workers, who wait for an answer, are told
                self.refused, self.held[-TAIL] = error, refusal
        self.pull()
        if self.works:
            self.statistics[:] = self.replica[self.network.layout.size : -TAIL]
        loss, told, first = map(float, (self.replica if self.works else self.held)[-TAIL:])
        self.refuse_other_totals(told / self.addends, first)
        if loss == refusal:
            self.refused = self.refused or FloatingPointError("the servers found a norm that is not finite")
            return 0.0
        return loss

    def push(self) -> None:
        """Gradients, statistics and tail from the workers to the servers, which add them up."""
        if self.serves:
            self.sums[:] = 0
        self.communicator.Run(self.pushing, "push")

    def serve(self) -> None:
        """Update this server's slice, unless the tail forbids it: every server has it, and all do the same."""
        n = self.own.stop - self.own.start
        self.held[n:] = self.sums[n:]  # statistics and tail are sums already
        loss, told, first = map(float, self.sums[-TAIL:])
        if math.isfinite(loss) and not differ(told / self.addends, first):
            sum_over_ranks = self._sum_small if len(self.hosts) > 1 else None
            self.optimizer.update(self.held[:n], self.sums[:n], self.slots, self.steps, self.region, sum_over_ranks)

    def pull(self) -> None:
        """Parameters, statistics and tail from the servers to the workers."""
        self.communicator.Run(self.pulling, "pull")

    def update(self):
        """The servers have done it, or could not."""
        if self.refused:
            raise self.refused

    def _sum_small(self, array: np.ndarray) -> None:
        self.between_servers.Allreduce(IN_PLACE, array)

    def look(self, parts):
        return super().look(parts) if self.works else None

    def replicated(self):
        """What workers have alike; a rank that only serves is asked about nothing."""
        if self.works:
            yield from super().replicated()

    def check_replicas(self):
        """Of the workers, by what they hold; ranks that only serve take no part."""
        if self.works:
            kept, self.communicator = self.communicator, self.between_workers
            try:
                super().check_replicas()
            finally:
                self.communicator = kept

    def entries(self) -> Iterator[tuple[str, np.ndarray]]:
        """Moments come from the servers to rank 0, one after the other; elsewhere an entry is empty."""
        network, first = self.network, self.communicator.rank == 0
        yield "steps", np.array(self.steps)
        yield from self._named("param/", network.layout, self.parameters if first else None)
        for slot in self.optimizer.slots:
            yield from self._named(f"optimizer/{slot}/", network.layout, self._gathered(slot))
        yield from self._named("state/", network.state_layout, self.statistics if first else None)

    def _named(self, prefix: str, layout, buffer: np.ndarray | None) -> Iterator[tuple[str, np.ndarray]]:
        nothing = np.empty(0, self.network.dtype)
        entries = layout.items(buffer) if buffer is not None else ((name, nothing) for name in layout.specs)
        yield from ((prefix + name, array) for name, array in entries)

    def _gathered(self, slot: str) -> np.ndarray | None:
        """A moment's slices from all servers, on rank 0."""
        size, first = self.network.layout.size, self.communicator.rank == 0
        whole = self.network.layout.zeros(self.network.dtype) if first else None
        counts, places = [0] * self.communicator.size, [0] * self.communicator.size
        for host, (lo, hi) in zip(self.hosts, self.slices, strict=True):
            counts[host], places[host] = max(0, min(hi, size) - lo), min(lo, size)
        mine = self.slots[slot] if self.serves else np.empty(0, self.network.dtype)
        self.communicator.Gatherv(mine, [whole, counts, places, None] if first else None, root=0)
        return whole

    def state(self):
        """Everything that training continues from, on rank 0 (collective); elsewhere entries are empty."""
        return dict(self.entries())

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over what `state` of any strategy returned on rank 0; each rank takes its own from it."""
        layout, dtype = self.network.layout, self.network.dtype
        if problem := check_state(state_kinds(self.network, self.optimizer.slots), state):
            raise ValueError(problem)

        def whole(kind, layout):
            buffer = layout.zeros(dtype)
            for name, array in layout.items(buffer):
                array[...] = state[f"{kind}/{name}"]
            return buffer

        self.statistics[:] = whole("state", self.network.state_layout)
        vector = np.concatenate([whole("param", layout), self.statistics])
        if self.works:
            self.replica[:-TAIL] = vector
        if self.serves:
            self.held[:-TAIL] = vector[slice(*self.slices[self.hosts.index(self.communicator.rank)])]
            for slot, mine in self.slots.items():
                mine[:] = whole(f"optimizer/{slot}", layout)[self.own]
        self.steps = int(state["steps"])

    def snapshot(self):
        mine = {"steps": np.array(self.steps), "statistics": self.statistics, **self.slots}
        mine |= {"replica": self.replica} if self.works else {}
        mine |= {"held": self.held} if self.serves else {}
        return {name: array.copy() for name, array in mine.items()}

    def restore(self, snapshot):
        self.steps, self.statistics[:] = int(snapshot["steps"]), snapshot["statistics"]
        for slot, mine in self.slots.items():
            mine[:] = snapshot[slot]
        if self.works:
            self.replica[:] = snapshot["replica"]
        if self.serves:
            self.held[:] = snapshot["held"]

    def memory(self) -> dict[str, int]:
        """Of vectors as they are: a server's slice and its sums have running statistics and the tail in them."""
        values = self.held.nbytes if self.serves else 0
        vectors = self.replica.nbytes + self.message.nbytes if self.works else 0
        moments = sum(slot.nbytes for slot in self.slots.values())
        return {
            "parameters": vectors // 2 + values,
            "gradients": vectors // 2 + values,
            "moments": moments,
            "in transit": 0,
        }

    def describe(self) -> str:
        one, own = len(self.hosts) == 1, self.hosts[0] not in self.workers
        place = ("on a rank of its own" if one else "on ranks of their own") if own else "on workers"
        servers = "1 parameter server" if one else f"{len(self.hosts)} parameter servers"
        workers = "1 worker" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        return f"{workers}, {servers} {place}, {self.slices[0][1]:,} values each"

    def close(self):
        self.pushing.free()
        self.pulling.free()
        if self.between_servers is not self.between_workers:
            self.between_servers.Free()
        if self.between_workers is not self.communicator:
            self.between_workers.Free()
