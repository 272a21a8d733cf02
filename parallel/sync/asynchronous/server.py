"""A server: applies gradients as they come, and answers reads as soon as the bound allows.

Messages, with their headers:

push   (clock, version, rate)   from a worker: gradients of its steps up to this clock; the clock alone without samples
read   (clock)                  from a worker: the parameters, when the bound allows it
done   (pauses)                 from a worker: it leaves the clocks; the parameters, when all have left
fail   ()                       from a worker: its loss is not finite
answer (version, least, own, broken)   to a worker: the slice, the updates made, the clocks of the slowest worker and of
                                this one, and whether training has ended in an error
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from nn.core.layout import Region
from nn.optim.optimizers import Optimizer
from parallel.sync.asynchronous.clock import ClockTable
from parallel.sync.asynchronous.compensation import Compensation
from parallel.sync.compression.base import Compressor
from parallel.sync.local_update import temporarily
from parallel.sync.mailbox import Actor, Mailbox, Message

KINDS = ("push", "read", "done", "fail", "answer")


class Server(Actor):
    """One slice of the parameters, and the moments for it.

    Parameters
    ----------
    mailbox : Mailbox
    rank : int
        Of the server.
    clock_table : ClockTable
    parameters : flat array
        The slice, with its first values.
    region : Region
        Of the slice.
    optimizer : Optimizer
    decoder : Compressor or None
        Of what workers push.
    compensate : bool

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
        Whether training has ended in an error, which every answer says.
    error : str
        What went wrong here.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        rank: int,
        clock_table: ClockTable,
        parameters: np.ndarray,
        region: Region,
        optimizer: Optimizer,
        decoder: Compressor | None,
        compensate: bool,
    ):
        super().__init__(mailbox, ("server", rank))
        self.clock_table, self.parameters, self.region = clock_table, parameters, region
        self.optimizer, self.decoder = optimizer, decoder
        self.sums = np.zeros_like(parameters)
        self.slots = {name: np.zeros_like(parameters) for name in optimizer.slots}
        self.compensation = Compensation(len(parameters), parameters.dtype) if compensate else None
        self.updates, self.staleness = 0, Counter()
        self.broken, self.error = False, ""
        self.undecayed = 0  # steps of workers whose share of weight decay no update has applied yet
        # Worker -> its push (as for `apply`), of a clock that not all workers have reached.
        self.pushes_in_step: dict[int, tuple] = {}

    def open(self, clock: int) -> None:
        """Start to serve: all workers are at this clock, with the parameters of this server."""
        self.broken, self.error, self.mailbox.serving = False, "", True
        self.clock_table.open(clock)
        if self.compensation:
            self.compensation.sent.clear()
            for worker in self.clock_table.workers:
                self.compensation.remember(worker, self.updates, self.parameters)

    def finish_serving(self) -> None:
        """Answer all workers when all have left, and serve no more until `open` or `resume`."""
        self.serve(math.inf)
        self.mailbox.flush()
        self.mailbox.serving = False

    def resume(self) -> None:
        """Serve again: all workers that have paused go on."""
        for worker in sorted(self.clock_table.pausing):
            self.clock_table.restore(worker)
        self.mailbox.serving = True

    def serve(self, clock: float) -> None:
        """Serve until the slowest worker has pushed up to this clock, or all have left.

        Raises
        ------
        TimeoutError
            Nothing comes from a worker; the message names it.
        """

        def waiting() -> str:
            late = [f"{worker} (clock {at:g})" for worker, at in self.clock_table.clocks.items() if at < clock]
            return f"the server on rank {self.role[1]} waits for the workers on ranks {', '.join(late)}"

        self.mailbox.wait(lambda: self.clock_table.least >= clock, waiting)

    def handle(self, message: Message) -> None:
        """Do what a worker asks for."""
        worker, clocks = message.sender[1], self.clock_table
        match message.kind:
            case "push":
                clock, version, rate = message.header
                push = message.array, int(version), rate, int(clock) - clocks.reached[worker]
                clocks.record_push(worker, int(clock))
                if clocks.is_synchronous(clock):
                    self.pushes_in_step[worker] = push
                elif not self.broken:
                    self.apply(worker, *push)
            case "fail":
                self.broken = True
            case "read":
                clocks.add_read(worker, *message.header)
            case "done":
                clocks.remove(worker, *map(bool, message.header))
                clocks.add_read(worker, math.inf)
            case "death":  # what the worker has pushed stays, and nobody waits for it
                clocks.remove(worker)
                clocks.waiting.pop(worker, None)
        self.apply_and_answer()

    def apply_and_answer(self) -> None:
        """Apply what all workers have reached; answer the workers that may read."""
        pushes, clocks = self.pushes_in_step, self.clock_table
        if pushes and clocks.least >= max(clocks.reached[worker] for worker in pushes):
            for worker in sorted(pushes, key=lambda worker: (has_samples(pushes[worker][0]), worker)):
                if not self.broken:
                    self.apply(worker, *pushes[worker])
            pushes.clear()
        for reader in self.clock_table.pop_readable(self.broken):
            self.answer(reader)

    def apply(self, worker: int, body: np.ndarray | None, version: int, rate: float, steps: int) -> None:
        """Update with gradients that a worker computed in these `steps`, with this version, at the rate that it had.

        All workers' steps of one batch together are one step, with one weight decay: an update applies the share
        steps / workers of it. A push without samples makes no update, so its steps stay `undecayed`: the next update
        applies their share too.
        """
        self.undecayed += steps
        if not has_samples(body):
            return
        g, optimizer = self.sums, self.optimizer
        if self.decoder:
            g[:] = 0
            self.decoder.decode(body.view(np.uint8), g)
        else:
            g[:] = body.view(g.dtype)
        self.staleness[self.updates - version] += 1
        if self.compensation:
            self.compensation(g, self.parameters, worker, version)
        decay = optimizer.weight_decay * self.undecayed / len(self.clock_table.reached)
        self.undecayed = 0
        try:
            with temporarily(optimizer, lr=rate, weight_decay=decay):
                optimizer.update(self.parameters, g, self.slots, self.updates, self.region)
        except FloatingPointError as error:  # nothing was updated
            self.broken, self.error = True, str(error)
        self.updates += 1

    def answer(self, worker: int) -> None:
        """Send a worker the parameters."""
        header = self.updates, self.clock_table.least, self.clock_table.reached[worker], self.broken
        if self.compensation and self.clock_table.least < math.inf:  # else no gradient is computed with this answer
            self.compensation.remember(worker, self.updates, self.parameters)
        self.send(("worker", worker), "answer", header, self.parameters)

    @property
    def buffers(self) -> list[np.ndarray]:
        """Copies of what workers were sent."""
        sent = self.compensation.sent.values() if self.compensation else ()
        return [array for versions in sent for array in versions.values()]


def has_samples(body: np.ndarray | None) -> bool:
    """Return whether a push has gradients; without samples it has the clock alone."""
    return body is not None and len(body) > 0
