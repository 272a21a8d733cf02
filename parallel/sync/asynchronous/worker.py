"""A worker: reads parameters from every server, gathers gradients, pushes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from parallel.sync.asynchronous.clock import CachedSlice, allowed, fits
from parallel.sync.asynchronous.replica import Replica
from parallel.sync.asynchronous.server import Server, nothing
from parallel.sync.asynchronous.wire import DONE, FAIL, PUSH, READ, TO_SERVER, TO_WORKER, Incoming, Outgoing, wait
from parallel.sync.compression.compressed import Pieces

PAUSED = "asked_at", "asked", "fresh"  # of a worker: what a read changes, beside its copies


class Worker:
    """One replica, with clocks.

    Parameters
    ----------
    wire : collectives.Communicator
        Of this family's messages alone.
    hosts : sequence of int
        Ranks of the servers.
    shares : list of slice
        Theirs of the parameters.
    parameters, gradients : flat arrays
        Whole ones.
    bound, ahead, push_every, fetch_every, warm, local, limit
        See served.py.
    pieces : Pieces or None
        With an encoder for each server.
    server : Server or None
        On this rank.
    replica : Replica or None
        The ranks that have this worker's network together; but for the first they know no servers, and count the same
        clocks.

    Attributes
    ----------
    copies : list of CachedSlice
        Of every server.
    broken : bool
        Whether training has ended in an error, here or elsewhere.
    """

    def __init__(
        self,
        wire,
        hosts: Sequence[int],
        shares: list[slice],
        parameters: np.ndarray,
        gradients: np.ndarray,
        pieces: Pieces | None,
        server: Server | None,
        replica: Replica | None = None,
        *,
        bound: float,
        ahead: bool,
        push_every: int,
        fetch_every: int,
        warm: int,
        local: bool,
        limit: float,
    ):
        self.wire, self.hosts, self.shares, self.parameters, self.gradients = wire, hosts, shares, parameters, gradients
        self.pieces, self.server, self.replica, self.fresh = pieces, server, replica, False
        self.read_into = replica.whole if replica else parameters
        self.bound, self.ahead, self.warm, self.limit = bound, ahead, warm, limit
        self.push_every, self.fetch_every, self.local = push_every, fetch_every, local
        lengths = [self.read_into[share].nbytes for share in shares]
        self.pushing = [Outgoing(wire, host, TO_SERVER, n) for host, n in zip(hosts, lengths, strict=True)]
        self.reading = [Incoming(wire, host, TO_WORKER, n) for host, n in zip(hosts, lengths, strict=True)]
        if server:
            server.beside = self.reading[hosts.index(wire.rank)]
        self.gathered = np.zeros_like(gradients) if push_every > 1 else gradients
        self.open(0, 0)

    paused: tuple[dict, np.ndarray] | None = None

    def open(self, clock: int, version: int) -> None:
        """This worker has the parameters of all servers, at this clock and version."""
        self.copies = [CachedSlice(version, clock, clock) for _ in self.hosts]
        self.clock = self.pushed_at = self.asked_at = clock
        self.asked, self.broken, self.samples = False, False, 0
        self.used: list[int] = []  # versions with which the oldest gradient was computed that is not pushed yet

    def move(self) -> bool:
        """What to do while waiting: serve, where this rank has a server; says whether there was anything."""
        return self.server.move() if self.server else False

    def poke(self) -> None:
        """Between layers: serve, and move what is on its way."""
        self.move()
        for each in self.pushing:
            each.move()
        for each in self.reading:
            each.move()

    # ------------------------------------------------------------------------------------------------ reading

    def complete(self, waits: Iterable[str]) -> None:
        """Do all of `reads`, `finishes` ...: wait for the answers of servers wherever that does."""
        for _ in waits:
            self.wait_for_answers()

    def read(self) -> None:
        """Have parameters that may be computed with at this clock.

        Raises
        ------
        TimeoutError
            A server does not answer.
        RuntimeError
            A server has answered what the bound forbids.
        """
        self.complete(self.reads())

    def reads(self) -> Iterator[str]:
        """As `read`; yields where it waits for answers. The checker explores this (checking.py)."""
        clock = self.clock
        due = clock - self.asked_at >= (1 if clock <= self.warm else self.fetch_every)
        self.blocking = due and not (self.ahead and clock > self.warm)
        self.adopt()
        if self.blocking:
            self.ask(clock)
            yield from self.receives("waits")
        for attempt in range(2):  # what came ahead is too old: then what is on its way, or else what is asked for now
            if not self.broken and not fits(self.copies, clock, self.bound, self.warm):
                self.ask(clock)
                yield from self.receives(f"waits again {attempt}")
        for host, copy in zip(self.hosts, self.copies, strict=True):
            own = copy.own >= self.pushed_at or not self.blocking
            if not self.broken and not (own and allowed(clock, copy.least, self.bound, self.warm)):
                raise RuntimeError(
                    f"the worker on rank {self.wire.rank} reads at clock {clock}, with the bound {self.bound:g}, what "
                    f"the server on rank {host} had at clock {copy.least:g} of the slowest worker, {copy.own:g} of "
                    f"this one: that is too old"
                )
        self.used = self.used or [copy.version for copy in self.copies]
        self.share()

    def share(self) -> None:
        """All ranks of a replica go on with what its first one has taken over, and know whether training has ended."""
        if not self.replica:
            return
        fresh, self.broken = self.replica.tell(self.fresh, self.broken)
        if fresh:
            self.replica.deal(self.parameters)
        self.fresh = False

    def ask(self, clock: float) -> None:
        """Ask every server for its slice, unless an answer is on its way; at math.inf, this worker has finished."""
        if self.asked:
            return
        self.asked, self.asked_at = True, clock
        for number, reply in enumerate(self.reading):
            reply.expect()
            self.send(number, [DONE if clock == math.inf else READ, clock, 0, self.paused is not None])

    def receives(self, place: str) -> Iterator[str]:
        """Wait for the slices that were asked for, and take them over."""
        yield place
        self.adopt()

    def wait_for_answers(self) -> None:
        """Return when every server has answered."""

        def missing() -> str:
            hosts = ", ".join(str(host) for host, reply in zip(self.hosts, self.reading, strict=True) if reply.expected)
            what = "what all have in the end" if self.asked_at == math.inf else f"parameters of clock {self.asked_at}"
            return f"the worker on rank {self.wire.rank} waits for {what}, from the servers on ranks {hosts}"

        wait(self.arrived, self.move, self.limit, missing)

    def arrived(self) -> bool:
        """Whether nothing is expected any more."""
        return all(reply.move() for reply in self.reading)

    def adopt(self) -> None:
        """Take over the slices, where all that were asked for have come."""
        if not self.asked or not self.arrived():
            return
        self.asked = False
        for number, reply in enumerate(self.reading):
            version, least, own, broken = reply.head[:4]
            self.copies[number] = CachedSlice(int(version), least, own)
            self.broken |= bool(broken)
            self.take(number, reply.body)
            self.fresh = True

    def take(self, number: int, body) -> None:
        """Take over the slice of one server."""
        self.read_into[self.shares[number]] = body.view(self.parameters.dtype)

    # ------------------------------------------------------------------------------------------------ pushing

    def gather(self, samples: int, rate: float) -> None:
        """The gradients of a step, of so many samples, are there; it ends."""
        self.samples += samples
        self.accumulate(samples, rate)
        self.clock += 1
        if self.clock - self.pushed_at >= (1 if self.clock <= self.warm else self.push_every):
            self.push(rate)
        if self.ahead and self.clock > self.warm and self.clock - self.asked_at >= self.fetch_every:
            self.adopt()
            self.ask(self.clock)

    def accumulate(self, samples: int, rate: float) -> None:
        """Add the gradients of a step to those that are pushed next."""
        if self.gathered is not self.gradients:
            self.gathered += self.gradients
        if self.local and samples:
            self.parameters -= rate * self.gradients

    def push(self, rate: float) -> None:
        """Send what was gathered to every server; of no samples the clock alone."""
        for number, body in enumerate(self.bodies()):
            self.send(number, [PUSH, self.clock, self.used[number], rate], body)
        if self.gathered is not self.gradients:
            self.gathered[:] = 0
        self.pushed_at, self.samples, self.used = self.clock, 0, []

    def bodies(self) -> Iterator[np.ndarray | None]:
        """What each server is sent; None of no samples."""
        whole = self.replica.join(self.gathered) if self.replica and self.samples else self.gathered
        for number, share in enumerate(self.shares):
            if self.samples and self.pieces:
                body = self.pieces.encoders[number].encode(whole[share], self.clock - 1)
                self.pieces.sent += body.nbytes * (self.hosts[number] != self.wire.rank)
                yield body
            else:
                yield whole[share] if self.samples else None

    def fail(self) -> None:
        """The loss of this step is not finite: nothing is pushed, and everybody is told."""
        self.broken = True
        for number in range(len(self.hosts)):
            self.send(number, [FAIL, self.clock, 0, 0])

    def send(self, number: int, head: list[float], body: np.ndarray | None = None) -> None:
        """A message to one server, when the last one has left."""
        host, out = self.hosts[number], self.pushing[number]
        if host == self.wire.rank:
            self.server.take(host, head, np.empty(0) if body is None else body)
            return
        self.leave(number, self.move)
        out.send(head, body)

    def leave(self, number: int, move: Callable[[], bool] = nothing) -> None:
        """Return when the last message to a server has left."""
        out, host = self.pushing[number], self.hosts[number]
        why = f"a message of the worker on rank {self.wire.rank} is not taken by the server on rank {host}"
        wait(out.move, move, self.limit, lambda: why)

    # ------------------------------------------------------------------------------------------------ the end

    def finish(self, rate: float) -> None:
        """Push what is left, leave the clocks, and read what all have in the end."""
        self.complete(self.finishes(rate))

    def finishes(self, rate: float) -> Iterator[str]:
        """As `finish`; yields where it waits for answers."""
        self.share()
        if not self.broken and self.pushed_at < self.clock:
            self.push(rate)
        if self.asked:
            yield from self.receives("waits before the end")
        yield from self.reads_last()

    def pause(self) -> None:
        """As `finish`, but what is gathered is not pushed, and after `resume` this worker goes on as it was.

        An answer that is on its way is waited for: it might have come by now.
        """
        if self.asked:
            self.complete(self.receives("waits"))
        self.share()
        fields = {name: getattr(self, name) for name in PAUSED} | {"copies": list(self.copies)}
        self.paused = fields, self.parameters.copy()
        self.complete(self.reads_last())

    def resume(self) -> None:
        """Go on after `pause`."""
        fields, parameters = self.paused
        for name, value in fields.items():
            setattr(self, name, value)
        self.parameters[:] = parameters
        self.paused = None

    def forget(self) -> None:
        """Drop what is gathered; all have other parameters."""
        self.gathered[:], self.samples, self.used, self.paused = 0, 0, [], None

    def reads_last(self) -> Iterator[str]:
        """Leave the clocks, and read what all have when all have left; yields where it waits for that."""
        self.ask(math.inf)
        yield from self.receives("waits for the end")
        self.share()
        for number in range(len(self.hosts)):
            self.leave(number, self.move)

    @property
    def buffers(self) -> list[np.ndarray]:
        """Messages, and what ranks of a replica bring together."""
        messages = [each.buffer for each in (*self.pushing, *self.reading)]
        return messages + ([self.replica.whole, *self.replica.rooms] if self.replica else [])
