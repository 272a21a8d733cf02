"""Asynchronous parameter servers: each applies gradients as they arrive, and workers do not wait for each other.

In a step a worker reads (parameters from every server), computes, and pushes; a server applies each push by itself, at
the rate that the worker had, and answers reads as soon as the bound allows (clock.py). A push is a copy that leaves
while the next step begins; what is asked `ahead` comes while the next step computes, too, and is then one step older.

Steps, epochs and losses. A step of a worker is its part of one global batch, its gradient divided by the whole batch:
the pushes of all workers for one batch together are the step that data parallelism makes. So every worker trains its
share of each epoch, in as many steps as there are batches, whatever the order in which they arrive. A step returns this
worker's estimate of the loss: its part, times the workers. Where all must be one (the end of an epoch, a checkpoint:
`synchronize`) each worker sends what it has gathered, and leaves the servers' clocks; when all have, everybody reads,
and all have the same parameters, in which is every gradient that was pushed. Running statistics are each worker's own,
and become their mean there. Looking in between (an evaluation, the state, a digest) shows what servers have when all
pushes have come, and changes nothing but the order in which they come.

A worker and a server go through these calls:

                        worker                              server              with the next step both
    train               open, read, end_step (pushes) ...   open, and serves
    show_synchronized   pause                               finish_serving      resume
    synchronize         finish                              finish_serving      open

A server on a rank of its own is done with a step when the slowest worker is. One on a worker serves between layers and
wherever that rank waits for messages; it costs no thread. Between two steps it answers nobody: call nothing there that
waits for another rank, as `parallel.join` does.

A worker may be some ranks that have a network together, in stages or in parts of layers (replica.py): servers are then
on ranks of their own, and know the first of them.

A loss that is not finite is not pushed: the worker reports it to the servers, which answer all at once, and all end.

Cost of a step, worker: 2 alpha + 2 n beta for each server; the server moves w n / s beta for each round of w workers.
Sources: Li et al. 2014 (parameter server); Dean et al. 2012 (Downpour); Ho et al. 2013 (bounds).
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from parallel.passes.forward_backward import UnevenTotal
from parallel.passes.virtual_shards import refuse_norms
from parallel.state.placed import OWN, PlacedArray, Range, Shard, in_transit
from parallel.state.table import kind_of_private
from parallel.sync.asynchronous.clock import ClockTable
from parallel.sync.asynchronous.replica import ReplicaRanks
from parallel.sync.asynchronous.server import KINDS, Server
from parallel.sync.asynchronous.worker import Worker
from parallel.sync.compression.base import Compressor
from parallel.sync.local_update import LocalUpdate
from parallel.sync.mailbox import LIMIT, Mailbox
from parallel.sync.server_roles import ServerRoles
from parallel.sync.step_result import SizeLog, StepResult, late_disagreement

UPDATES, SQUARES = OWN + "updates", OWN + "mean_square"  # in a checkpoint
# Times the limit of a worker: a replica that waits for a lost member raises first, with the better message.
PATIENCE = 1.5


class Asynchronous(LocalUpdate, ServerRoles):
    """A server applies each worker's gradients when they come.

    Parameters
    ----------
    size, servers, place, compressor
        As for ServerRoles.
    bound : float
        How many clocks a worker may be ahead of the slowest; math.inf for any.
    ahead : bool
        Ask for parameters and go on with those that are there, as far as the bound allows.
    push_every, fetch_every : int
        Steps between pushes, and between reads.
    warm : int
        So many steps are made at first in which no worker is ahead of another.
    local : bool
        Between reads a worker applies its own gradients to its copy, by SGD without momentum.
    compensate : bool
        Correct gradients for what has changed since they were computed; see compensation.py.
    limit : float
        Seconds after which a rank gives up to which nothing comes.

    Attributes
    ----------
    worker : Worker or None
    server : Server or None
        The roles of this rank.
    """

    spans_mesh = True

    def __init__(
        self,
        size: int,
        servers: int,
        place: str,
        compressor: Compressor | None = None,
        *,
        compensate: bool = False,
        limit: float = LIMIT,
        **schedule,
    ):
        super().__init__(size, servers, place, compressor)
        self.compensate, self.limit = compensate, limit
        defaults = {"bound": math.inf, "ahead": False, "push_every": 1, "fetch_every": 1, "warm": 0, "local": False}
        self.schedule = defaults | schedule

    @property
    def phases(self):
        """A rank that only serves updates, and waits; a worker computes, waits for parameters, and pushes."""
        compute = (("compute", "compute_gradients", False),)
        worker = ("wait", "sync.worker.wait_for_answers", False), ("push", "sync.worker.push", False)
        server = ("wait", "sync.server.serve", False), ("update", "sync.server.apply", False)
        return compute + (worker if self.is_worker else ()) + (server if self.is_server else ())

    def allocate(self):
        mesh, layout, own = self.mesh, self.undivided.layout, self.network.layout
        self.layout = layout
        self.divide_parameters()
        self.workers = self.workers[:: mesh.model_size]  # of each replica the first rank
        self.replica = ReplicaRanks(mesh, self.network, layout) if mesh.model else None
        if len(self.hosts) > 1:
            refuse_norms(self.optimizer)
        self.parameters, self.gradients = own.zeros(self.dtype), own.zeros(self.dtype)
        self.first_values()
        self.mailbox = self._mailbox()
        self.slots, self.worker, self.server, self.loss = {}, None, None, 0.0
        self.sizes = SizeLog()
        self.updates = np.zeros((), int)  # of every server, at the last synchronization
        self._allocate_pieces(None)
        if self.is_server:
            self._serve_slice(self.hosts.index(mesh.rank))
        if self.is_worker:
            more = self.parameters, self.gradients, self.pieces, self.replica
            known = (self.hosts, self.shares) if mesh.rank in self.workers else ([], [])
            self.worker = Worker(self.mailbox, mesh.rank, *known, *more, **self.schedule)
        else:
            self.parameters, self.p, self.g = self.server.parameters, None, None
            del self.gradients

    def first_values(self):
        """Draw the parameters on the first rank; where ranks share a network, each takes its part of them."""
        if self.mesh.model_size == 1:
            super().first_values()
            return
        own, whole = self.network.layout, self.layout.zeros(self.dtype)
        self.layout.initialize(whole, self.seed)
        self.mesh.communicator.Bcast(whole, root=0)
        self.write_parameters(whole)
        if self.is_worker:
            self.mesh.data.Bcast(self.buffers, root=0)
        self.p, self.g = own.views(self.parameters), own.views(self.gradients)

    def write_parameters(self, whole: np.ndarray) -> None:
        """Take this rank's parameters from a whole vector."""
        if self.replica:
            self.replica.write_part(whole, self.parameters)
        else:
            self.parameters[:] = whole

    def _mailbox(self) -> Mailbox:
        rank = self.mesh.rank
        roles = [*(("worker", worker) for worker in self.workers), *(("server", host) for host in self.hosts)]
        peers = {*(self.workers if self.is_server else ()), *(self.hosts if rank in self.workers else ())}
        limit = self.limit * (PATIENCE if self.is_server and self.mesh.model_size > 1 else 1)
        return Mailbox(self.mesh.communicator, {role: role[1] for role in roles}, KINDS, peers, limit, mortal="worker")

    def _serve_slice(self, number: int) -> None:
        clock_table = ClockTable(self.workers, self.schedule["bound"], self.schedule["warm"])
        held, decoder = self.parameters[self.own_slice].copy(), self.pieces and self.pieces.decoder
        region, more = self.regions[number], (decoder, self.compensate)
        self.server = Server(self.mailbox, self.mesh.rank, clock_table, held, region, self.optimizer, *more)
        self.slots = self.server.slots

    def before_layer(self, ctx) -> None:
        """Move messages on between layers."""
        if not self.synchronized and not self.showing and self.worker:
            self.mailbox.poll()

    # ------------------------------------------------------------------------------------------------ a step

    def begin_step(self, step, samples, total, parts):
        if isinstance(total, UnevenTotal) and set(self.hosts) & set(self.workers):
            raise ValueError(
                "join lets ranks wait for each other between steps, and a server on a worker answers nobody meanwhile: "
                "give servers ranks of their own (place='dedicated'), or train synchronously"
            )
        if self.synchronized:
            if self.is_server:
                self.server.open(step)
            if self.is_worker:
                self.worker.open(step, int(self.updates))
        hooks = super().begin_step(step, samples, total, parts)
        self.samples, self.loss = samples, 0.0
        self.sizes.add(step, total)
        if self.is_worker:
            self.worker.read()
        return hooks

    def set_loss(self, loss, total):
        self.loss = loss

    def finish_step(self):
        """Push, or report a loss that is not finite; a server on a rank of its own serves as long as the step lasts."""
        worker, server = self.worker, self.server
        if worker and not math.isfinite(self.loss):
            self.bad = True
            worker.fail()
        if worker:
            broken = worker.broken  # what comes while this step ends is for the next: ranks of a replica read it there
            if not broken:
                worker.end_step(self.samples, float(self.optimizer.lr))
                self.pushes += 1
            self.mailbox.poll()
        else:
            server.serve(self.step + 1)
            broken = server.broken or server.clock_table.ended_early(self.step + 1)
        loss = self.loss * len(self.workers)
        if broken and self.synchronize():
            loss = math.nan
        return StepResult(loss, True)

    def show_synchronized(self):
        if self.is_worker and not (self.synchronized or self.showing):
            self.worker.finish_pending_read()
        return super().show_synchronized()

    def trained(self):
        if self.is_worker:
            yield self.parameters
        yield self.buffers

    def write_synchronized(self):
        """Read what the servers have, when all pushes have come; what workers have gathered stays with them.

        If other ranks synchronize meanwhile, for a loss that is not finite, this rank does as well.
        """
        if self.is_worker:
            self.worker.pause()
        if self.is_server:
            self.server.finish_serving()
        self._count_updates()
        # No server answers a worker's next step before all have read.
        everyone = self.mesh.allgather(self._status(synchronizes=False))
        if any(synchronizes for synchronizes, *_ in everyone):
            self.before_showing, self.synchronized = None, True
            if self.is_worker:
                self.worker.forget()
            return self._conclude(everyone)
        self._average_statistics()
        return False

    def resume(self):
        if not self.showing:
            return
        super().resume()
        if self.is_server:
            self.server.resume()
        if self.is_worker:
            self.worker.resume()

    def before_load(self):
        self.show_synchronized()

    def reset(self):
        """Drop what workers have gathered."""
        if self.is_worker:
            self.worker.forget()
        super().reset()
        self.sizes.clear()

    def _average_statistics(self) -> None:
        if self.is_worker and self.buffers.size:
            self.mean(self.buffers)

    def synchronize(self):
        """Finish on all workers, and give all ranks the servers' parameters; see GradientSync.synchronize.

        Raises
        ------
        FloatingPointError
            On all ranks, where a server could not update: a norm that is not finite.
        ValueError
            On all ranks: they were given different sizes of a global batch.
        """
        self.resume()
        if self.synchronized:
            return False
        if self.is_worker:
            self.worker.finish(float(self.optimizer.lr))
        if self.is_server:
            self.server.finish_serving()
        self._count_updates()
        self.synchronized = True
        return self._conclude(self.mesh.allgather(self._status(synchronizes=True)))

    def _count_updates(self) -> None:
        """Note how many updates the servers have made; 0 where this rank neither serves nor reads from them."""
        if self.is_server:
            self.updates[...] = self.server.updates
        else:
            self.updates[...] = self.worker.copies[0].version if self.worker.copies else 0

    def _status(self, synchronizes: bool) -> tuple[bool, str, bool, int]:
        """Return this rank's part of what all ranks exchange when they synchronize, or show it."""
        return synchronizes, self.server.error if self.is_server else "", self.bad, self.sizes.checksum()

    def _conclude(self, everyone: list[tuple[bool, str, bool, int]]) -> bool:
        """Raise the errors of any rank, and return whether a loss was not finite (collective)."""
        _, errors, bad, sizes = zip(*everyone, strict=True)
        self.bad, log = False, self.sizes.drain()
        if refused := next(filter(None, errors), ""):
            raise FloatingPointError(refused)
        if len(set(sizes)) > 1 and (problem := late_disagreement(self.mesh.allgather(log))):
            raise ValueError(problem)
        self._average_statistics()
        return any(bad)

    def update(self):
        """The servers have done it, or will."""

    def epoch_record(self):
        """Staleness of the updates of all servers: how many were made between the read and the push of each."""
        mine: Counter[int] = Counter()
        if self.is_server:
            mine, self.server.staleness = self.server.staleness, Counter()
        found = sum(self.mesh.allgather(mine), Counter())
        if not found:
            return {}
        counts = [found[s] for s in range(max(found) + 1)]
        mean = sum(s * n for s, n in enumerate(counts)) / sum(counts)
        return {"staleness": {"mean": round(mean, 4), "max": len(counts) - 1, "updates": counts}}

    # ------------------------------------------------------------------------------------------------ the state

    def placed(self):
        layout, own, shard = self.layout, self.network.layout, Shard(len(self.hosts))
        if self.is_server:
            server, here = self.server, (Range(self.own_slice.start, self.own_slice.stop, 0),)
            yield PlacedArray("param", "parameters", server.parameters, layout, shard, here)
            yield PlacedArray("", "gradients", server.sums, layout, shard, here)
            for name, slot in self.slots.items():
                yield PlacedArray(f"optimizer/{name}", "moments", slot, layout, shard, here)
            if self.compensate:
                yield PlacedArray(SQUARES, "moments", server.compensation.mean_square, layout, shard, here)
            yield from in_transit(*server.buffers)
        yield from in_transit(*self.mailbox.buffers.values())
        if self.is_worker:
            yield PlacedArray("param", "parameters", self.parameters, own, copy=True)
            for array in {id(array): array for array in (self.gradients, self.worker.unpushed)}.values():
                yield PlacedArray("", "gradients", array, own)
            if self.replica:
                yield from in_transit(self.replica.whole, *self.replica.parts)
        if self.memories:
            yield from self.memories.placed()
        yield PlacedArray(UPDATES, "", self.updates)

    def loaded(self, steps, anew=()):
        if kind_of_private(UPDATES) in anew:
            self.updates[...] = steps * len(self.workers)
        if self.is_server:
            self.server.updates, self.server.undecayed = int(self.updates), 0

    def describe(self):
        s = self.schedule
        how = "asynchronous" if s["bound"] == math.inf else f"at most {s['bound']} clocks apart"
        more = [how, *(["reads ahead"] if s["ahead"] else []), *(["delays compensated"] if self.compensate else [])]
        if (ranks := self.mesh.model_size) > 1:
            more.insert(0, f"a worker is {ranks} ranks")
        if s["local"]:
            more.append(f"pushes every {s['push_every']} steps, reads every {s['fetch_every']}")
        if s["warm"]:
            more.append(f"in step for the first {s['warm']}")
        return f"{super().describe()}; {', '.join(more)}"

    def close(self):
        try:
            self.synchronize()
        except (FloatingPointError, ValueError):  # on all ranks
            self.mailbox.close()
            raise
        self.mailbox.close()
