"""A server: applies gradients as they come, and answers reads as soon as the bound allows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from nn.core.layout import Region
from nn.optim.optimizers import Optimizer
from parallel.sync.asynchronous.clock import ClockTable
from parallel.sync.asynchronous.compensation import Compensation
from parallel.sync.asynchronous.wire import DONE, FAIL, PUSH, SERVERS, TO_WORKER, Arrivals, Incoming, Outgoing, wait
from parallel.sync.compression.base import Compressor


class Server:
    """One slice of the parameters, and the moments for it.

    Parameters
    ----------
    wire : collectives.Communicator
        Of this family's messages alone.
    clock_table : ClockTable
    held : flat array
        The slice, with its first values.
    region : Region
        Of the slice.
    optimizer : Optimizer
    decoder : Compressor or None
        Of what workers push.
    compensate : bool
    limit : float
        Seconds after which to give up to which nothing comes.

    Attributes
    ----------
    slots : dict of flat arrays
    sums : flat array
        The gradients of the push that is being applied.
    updates : int
        Made so far.
    staleness : Counter
        Of the updates since it was read last: how many others were made between their read and them.
    broken : bool
        Whether training has ended in an error, which everybody is told who asks.
    error : str
        What went wrong here.
    beside : Incoming or None
        What this rank as a worker waits for from itself.
    """

    def __init__(
        self,
        wire,
        clock_table: ClockTable,
        held: np.ndarray,
        region: Region,
        optimizer: Optimizer,
        decoder: Compressor | None,
        compensate: bool,
        limit: float,
    ):
        self.wire, self.clock_table, self.held, self.region, self.optimizer = wire, clock_table, held, region, optimizer
        self.decoder, self.limit = decoder, limit
        self.sums = np.zeros_like(held)
        self.slots = {name: np.zeros_like(held) for name in optimizer.slots}
        self.compensation = Compensation(len(held), held.dtype) if compensate else None
        self.arrivals = Arrivals(wire, clock_table.workers)
        self.answering = {w: Outgoing(wire, w, TO_WORKER, held.nbytes) for w in clock_table.workers if w != wire.rank}
        self.beside: Incoming | None = None
        self.updates, self.staleness = 0, Counter()
        self.serving = self.busy = False  # between `open` and the end; while an answer leaves
        SERVERS.add(self)
        self.broken, self.error = False, ""
        self.kept: dict[int, tuple[np.ndarray, int, float]] = {}  # pushes of a clock that not all have reached

    def open(self, clock: int) -> None:
        """All workers are there, at this clock, with what is held here."""
        self.broken, self.error, self.serving = False, "", True
        self.clock_table.open(clock)
        if self.compensation:
            self.compensation.sent.clear()
            for worker in self.clock_table.workers:
                self.compensation.remember(worker, self.updates, self.held)

    def rest(self) -> None:
        """Answer all workers when all have left, and serve no more until `open` or `resume`."""
        self.serve(math.inf)
        self.leave()
        self.serving = False

    def resume(self) -> None:
        """All workers that have paused go on."""
        for worker in sorted(self.clock_table.pausing):
            self.clock_table.returns(worker)
        self.serving = True

    def move(self) -> bool:
        """Do what has come from workers, in turn; says whether there was anything."""
        found = False
        for worker, head, body in self.arrivals.take():
            self.take(worker, head, body)
            found = True
        while self.arrivals.dead:
            self.forget(self.arrivals.dead.pop())
            found = True
        return found

    def serve(self, clock: float) -> None:
        """Serve until the slowest worker has pushed up to this clock, or all have left.

        Raises
        ------
        TimeoutError
            Nothing comes from a worker; the message names it.
        """

        def waiting() -> str:
            late = [f"{worker} (clock {at:g})" for worker, at in self.clock_table.clocks.items() if at < clock]
            return f"the server on rank {self.wire.rank} waits for the workers on ranks {', '.join(late)}"

        wait(lambda: self.clock_table.least >= clock, self.move, self.limit, waiting)

    def take(self, worker: int, head: Sequence[float], body: np.ndarray) -> None:
        """Do what one message says."""
        kind, clock, version, rate = head[:4]
        if kind == PUSH:
            self.clock_table.pushed(worker, int(clock))
            if body.size and self.clock_table.in_step(clock):
                self.kept[worker] = body.copy(), int(version), float(rate)
            elif body.size and not self.broken:
                self.apply(worker, body, int(version), float(rate))
        elif kind == FAIL:
            self.broken = True
        else:
            if kind == DONE:
                self.clock_table.leaves(worker, pauses=bool(head[3]))
            self.clock_table.asks(worker, math.inf if kind == DONE else clock)
        self.go_on()

    def forget(self, worker: int) -> None:
        """A worker is dead: what it has pushed stays, and nobody waits for it."""
        self.clock_table.leaves(worker)
        self.clock_table.waiting.pop(worker, None)
        self.answering.pop(worker, None)
        self.go_on()

    def go_on(self) -> None:
        """Apply what all have reached, and answer who may read now."""
        if self.kept and self.clock_table.least >= max(self.clock_table.reached[worker] for worker in self.kept):
            for each in sorted(self.kept):
                if not self.broken:
                    self.apply(each, *self.kept[each])
            self.kept.clear()
        for reader in self.clock_table.answers(self.broken):
            self.answer(reader)

    def apply(self, worker: int, body: np.ndarray, version: int, rate: float) -> None:
        """One update, with gradients that a worker computed with this version, at the rate that it had."""
        g, optimizer = self.sums, self.optimizer
        if self.decoder:
            g[:] = 0
            self.decoder.decode(body.view(np.uint8), g)
        else:
            g[:] = body.view(g.dtype)
        self.staleness[self.updates - version] += 1
        if self.compensation:
            self.compensation(g, self.held, worker, version)
        own = optimizer.lr, optimizer.weight_decay
        optimizer.lr, optimizer.weight_decay = (
            rate,
            own[1] / len(self.clock_table.reached),
        )  # of a batch all pushes together
        try:
            optimizer.update(self.held, g, self.slots, self.updates, self.region)
        except FloatingPointError as error:  # nothing was updated
            self.broken, self.error = True, str(error)
        finally:
            optimizer.lr, optimizer.weight_decay = own  # where this rank is a worker, too, it is at a step of its own
        self.updates += 1

    def answer(self, worker: int) -> None:
        """Send a worker what is held now."""
        head = [self.updates, self.clock_table.least, self.clock_table.reached[worker], self.broken]
        if self.compensation and self.clock_table.least < math.inf:  # else no gradient is computed with this answer
            self.compensation.remember(worker, self.updates, self.held)
        if worker == self.wire.rank:
            self.beside.put(head, self.held)
        else:
            self.leave(worker)
            self.answering[worker].send(head, self.held)

    def leave(self, *workers: int) -> None:
        """Return when answers have left, which were asked for: to these workers, or to all."""
        for worker in workers or list(self.answering):
            out, self.busy = self.answering[worker], True
            why = f"an answer of the server on rank {self.wire.rank} is not taken by the worker on rank {worker}"
            try:
                wait(out.move, nothing, self.limit, lambda why=why: why)
            finally:
                self.busy = False

    @property
    def buffers(self) -> list[np.ndarray]:
        """Messages, and what workers were sent."""
        sent = self.compensation.sent.values() if self.compensation else ()
        kept = [array for versions in sent for array in versions.values()]
        return [*kept, self.arrivals.buffer, *(out.buffer for out in self.answering.values())]


def nothing() -> bool:
    """There is nothing to do while one waits."""
    return False
