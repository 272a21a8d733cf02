"""A worker: reads parameters from every server, gathers gradients, pushes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from parallel.sync.asynchronous.clock import CachedSlice, allowed, fits
from parallel.sync.asynchronous.replica import ReplicaRanks
from parallel.sync.compression.compressed import CompressedReduceScatter
from parallel.sync.mailbox import Actor, Mailbox, Message

PAUSED = "asked_at", "asked", "has_new_parameters"  # of a worker: what a read changes, beside its copies


class Worker(Actor):
    """One replica, with clocks.

    Parameters
    ----------
    mailbox : Mailbox
    rank : int
        Of the worker.
    hosts : sequence of int
        Ranks of the servers.
    shares : list of slice
        Theirs of the parameters.
    parameters, gradients : flat arrays
        Whole ones.
    bound, ahead, push_every, fetch_every, warm, local
        See served.py.
    pieces : CompressedReduceScatter or None
        With an encoder for each server.
    replica : ReplicaRanks or None
        The ranks that have this worker's network together; but for the first they know no servers, and count the same
        clocks.

    Attributes
    ----------
    copies : list of CachedSlice
        Of every server.
    answers : list of Message or None
        Of every server, the answer to what was asked last; None until it has come.
    broken : bool
        Whether training has ended in an error, here or elsewhere.
    paused : dict or None
        While this worker pauses: what it goes on from.
    """

    paused: dict | None = None

    def __init__(
        self,
        mailbox: Mailbox,
        rank: int,
        hosts: Sequence[int],
        shares: list[slice],
        parameters: np.ndarray,
        gradients: np.ndarray,
        pieces: CompressedReduceScatter | None,
        replica: ReplicaRanks | None = None,
        *,
        bound: float,
        ahead: bool,
        push_every: int,
        fetch_every: int,
        warm: int,
        local: bool,
    ):
        super().__init__(mailbox, ("worker", rank))
        self.hosts, self.shares, self.pieces = hosts, shares, pieces
        self.parameters, self.gradients = parameters, gradients
        self.replica, self.has_new_parameters = replica, False
        self.read_into = replica.whole if replica else parameters
        self.bound, self.ahead, self.warm = bound, ahead, warm
        self.push_every, self.fetch_every, self.local = push_every, fetch_every, local
        self.unpushed = np.zeros_like(gradients) if push_every > 1 else gradients
        self.open(0, 0)

    def open(self, clock: int, version: int) -> None:
        """Start at a clock with the parameters of all servers, of this version."""
        self.copies = [CachedSlice(version, clock, clock) for _ in self.hosts]
        self.answers: list[Message | None] = [None for _ in self.hosts]
        self.clock = self.pushed_at = self.asked_at = clock
        self.asked, self.broken, self.samples = False, False, 0
        self.read_versions: list[int] = []  # with which the oldest gradient was computed that is not pushed yet

    def handle(self, message: Message) -> None:
        """Keep a server's answer until `use_answers`."""
        if message.kind == "answer":
            self.answers[self.hosts.index(message.sender[1])] = message

    # ------------------------------------------------------------------------------------------------ reading

    def complete(self, waits: Iterable[str]) -> None:
        """Run `read_steps`, `finish_steps` ... to the end; wait for the servers' answers wherever it yields."""
        for _ in waits:
            self.wait_for_answers()

    def read(self) -> None:
        """Read parameters that this worker may compute with at this clock.

        Raises
        ------
        TimeoutError
            A server does not answer.
        RuntimeError
            A server has answered what the bound forbids.
        """
        self.complete(self.read_steps())

    def read_steps(self) -> Iterator[str]:
        """Do `read`, and yield wherever it waits for answers. The checker explores this (checking.py)."""
        clock = self.clock
        due = clock - self.asked_at >= (1 if clock <= self.warm else self.fetch_every)
        self.blocking = due and not (self.ahead and clock > self.warm)
        self.use_answers()
        if self.blocking:
            self.ask(clock)
            yield from self.await_answers("waits")
        for attempt in range(2):  # too old, though read ahead: wait for the answer in flight, or else ask now
            if not self.broken and not fits(self.copies, clock, self.bound, self.warm):
                self.ask(clock)
                yield from self.await_answers(f"waits again {attempt}")
        for host, copy in zip(self.hosts, self.copies, strict=True):
            own = copy.own >= self.pushed_at or not self.blocking
            if not self.broken and not (own and allowed(clock, copy.least, self.bound, self.warm)):
                raise RuntimeError(
                    f"the worker on rank {self.role[1]} reads at clock {clock}, with the bound {self.bound:g}, what "
                    f"the server on rank {host} had at clock {copy.least:g} of the slowest worker, {copy.own:g} of "
                    f"this one: that is too old"
                )
        self.read_versions = self.read_versions or [copy.version for copy in self.copies]
        self.share_answers()

    def share_answers(self) -> None:
        """Give what the first rank of a replica has read, and whether training has ended, to its other ranks."""
        if not self.replica:
            return
        self.has_new_parameters, self.broken = self.replica.broadcast(self.has_new_parameters, self.broken)
        if self.has_new_parameters:
            self.replica.scatter(self.parameters)
        self.has_new_parameters = False

    def ask(self, clock: float) -> None:
        """Ask every server for its slice, unless answers are in flight; at math.inf this worker has finished."""
        if self.asked:
            return
        self.asked, self.asked_at = True, clock
        self.answers = [None for _ in self.hosts]
        for host in self.hosts:
            if clock == math.inf:
                self.send(("server", host), "done", (self.paused is not None,))
            else:
                self.send(("server", host), "read", (clock,))

    def await_answers(self, label: str) -> Iterator[str]:
        """Yield to wait for the answers, and use them."""
        yield label
        self.use_answers()

    def wait_for_answers(self) -> None:
        """Return when every server has answered."""

        def missing() -> str:
            late = [str(host) for host, answer in zip(self.hosts, self.answers, strict=True) if answer is None]
            what = "what all have in the end" if self.asked_at == math.inf else f"parameters of clock {self.asked_at}"
            return f"the worker on rank {self.role[1]} waits for {what}, from the servers on ranks {', '.join(late)}"

        self.mailbox.wait(lambda: None not in self.answers, missing)

    def use_answers(self) -> None:
        """Write the slices into the parameters, if all answers have come."""
        if not self.asked:
            return
        self.mailbox.poll()
        if None in self.answers:
            return
        self.asked = False
        for number, answer in enumerate(self.answers):
            version, least, own, broken = answer.header
            self.copies[number] = CachedSlice(int(version), least, own)
            self.broken |= bool(broken)
            self.write(number, answer.array)
            self.has_new_parameters = True
        self.answers = [None for _ in self.hosts]

    def write(self, number: int, array) -> None:
        """Write the slice of one server."""
        self.read_into[self.shares[number]] = array.view(self.parameters.dtype)

    # ------------------------------------------------------------------------------------------------ pushing

    def end_step(self, samples: int, rate: float) -> None:
        """End a step of this many samples, whose gradients are complete: push them if it is time."""
        self.samples += samples
        self.accumulate(samples, rate)
        self.clock += 1
        if self.clock - self.pushed_at >= (1 if self.clock <= self.warm else self.push_every):
            self.push(rate)
        if self.ahead and self.clock > self.warm and self.clock - self.asked_at >= self.fetch_every:
            self.use_answers()
            self.ask(self.clock)

    def accumulate(self, samples: int, rate: float) -> None:
        """Add the gradients of a step to those that are pushed next."""
        if self.unpushed is not self.gradients:
            self.unpushed += self.gradients
        if self.local and samples:
            self.parameters -= rate * self.gradients

    def push(self, rate: float) -> None:
        """Send what was gathered to every server; without samples only the clock."""
        slices = self.slices()  # on every rank of a replica, also where there is no server to send them to
        for host, version, array in zip(self.hosts, self.read_versions, slices, strict=True):
            self.send(("server", host), "push", (self.clock, version, rate), array)
        if self.unpushed is not self.gradients:
            self.unpushed[:] = 0
        self.pushed_at, self.samples, self.read_versions = self.clock, 0, []

    def slices(self) -> list[np.ndarray | None]:
        """Return what each server is sent, None if there were no samples; all ranks of a replica take part."""
        if not self.samples:
            return [None for _ in self.shares]
        whole = self.replica.gather(self.unpushed) if self.replica else self.unpushed
        slices = [whole[share] for share in self.shares]
        if self.pieces:
            pairs = zip(self.pieces.encoders, slices, strict=True)
            slices = [encoder.encode(part, self.clock - 1) for encoder, part in pairs]
            sent = zip(self.hosts, slices, strict=True)
            self.pieces.sent += sum(message.nbytes for host, message in sent if host != self.role[1])
        return slices

    def fail(self) -> None:
        """Report to the servers that the loss of this step is not finite; push nothing."""
        self.broken = True
        for host in self.hosts:
            self.send(("server", host), "fail")

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self, rate: float) -> None:
        """Push what is left, leave the clocks, and read the servers' final parameters."""
        self.complete(self.finish_steps(rate))

    def finish_steps(self, rate: float) -> Iterator[str]:
        """Do `finish`, and yield wherever it waits for answers."""
        self.share_answers()
        if not self.broken and self.pushed_at < self.clock:
            self.push(rate)
        if self.asked:
            yield from self.await_answers("waits before the end")
        yield from self.leave_and_read()

    def pause(self) -> None:
        """Leave the clocks and read as `finish` does, but push nothing; `resume` goes on where this worker was."""
        self.complete(self.pause_steps())

    def pause_steps(self) -> Iterator[str]:
        """Do `pause`, and yield wherever it waits for answers."""
        self.paused = {name: getattr(self, name) for name in PAUSED} | {"copies": list(self.copies)}
        yield from self.leave_and_read()

    def resume(self) -> None:
        """Go on after `pause`, with the parameters of then."""
        vars(self).update(self.paused)
        self.paused = None

    def finish_pending_read(self) -> None:
        """Wait for answers in flight, which might have come by now, and use them."""
        if self.asked:
            self.complete(self.await_answers("waits"))
        self.share_answers()

    def forget(self) -> None:
        """Drop what is gathered: other parameters were loaded."""
        self.unpushed[:], self.samples, self.read_versions, self.paused = 0, 0, [], None

    def leave_and_read(self) -> Iterator[str]:
        """Leave the clocks, and read the parameters when all workers have left; yield where it waits for them."""
        self.ask(math.inf)
        yield from self.await_answers("waits for the end")
        self.share_answers()
