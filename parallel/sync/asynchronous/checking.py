"""Every order of arrival: the servers' own text is run on all schedules of a small case; what breaks a rule is told.

    explore(workers=2, servers=1, steps=3, bound=1)              Explored(states=1234, ahead=1)
    explore(workers=2, servers=1, steps=3, bound=1, server=MyServer)       the shortest way to what it does wrong

Messages of a pair arrive in the order in which they were sent; of different pairs in any. So a state is what workers,
servers and messages on their way are in, and from each it goes on wherever a worker can act or a message can arrive.
All states that can be reached are looked at once, breadth first, so that the first mistake has a shortest schedule:

bound         what a worker computes with has every update of all others stamped <= clock - bound - 1, from every server
its own       and all that it had pushed itself when it asked
conservation  in the end every server has applied every push once, and everybody has read them all
progress      somebody can always go on, until all are done

Updates are told by what is in them, (worker, step), not by the clocks that servers tell. One worker may die at any
moment; what had left it arrives, then its death, and the others must come to their end.

It is for small cases: with w workers some 10^w states for each message that one has on its way.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from parallel.sync.asynchronous.clock import Book, Copy, fits
from parallel.sync.asynchronous.server import Server
from parallel.sync.asynchronous.wire import DONE, PUSH, READ

DEATH = -1


class Broken(AssertionError):
    """A schedule on which a rule does not hold; the message tells it, arrival by arrival."""


class Symbolic(Server):
    """A server whose gradients are names: (worker, step). What it does when is `Server.take`."""

    def __init__(self, book: Book):
        self.book, self.kept, self.broken = book, {}, False
        self.applied: tuple = ()
        self.answering: dict = {}
        self.sent: list[tuple[int, tuple]] = []

    def apply(self, worker, body, version, rate):
        self.applied += tuple((worker, int(step)) for step in body)

    def answer(self, worker):
        head = len(self.applied), self.book.least, self.book.reached[worker]
        self.sent.append((worker, (*head, frozenset(self.applied))))

    def copy(self) -> Symbolic:
        """This server, to be changed."""
        other = type(self)(replace(self.book))
        other.book.clocks, other.book.reached = dict(self.book.clocks), dict(self.book.reached)
        other.book.waiting = dict(self.book.waiting)
        other.kept, other.applied = dict(self.kept), self.applied
        return other

    def key(self) -> tuple:
        """What makes it another state."""
        book = self.book
        kept = tuple((worker, tuple(body)) for worker, (body, _, _) in sorted(self.kept.items()))
        clocks = tuple(book.clocks.values()), tuple(book.reached.values()), tuple(book.waiting.items())
        return *clocks, kept, tuple(sorted(self.applied))


@dataclass(frozen=True)
class Case:
    """What is explored; as of served.py."""

    workers: int
    servers: int
    steps: int
    bound: float = math.inf
    ahead: bool = False
    push_every: int = 1
    fetch_every: int = 1
    warm: int = 0


@dataclass(frozen=True)
class Step:
    """Where one worker is: what worker.py does, cut where it waits.

    Attributes
    ----------
    place : str
        "begin" of a step, "waiting" for answers, "finish", "last" answers, "done", "dead".
    copies : tuple
        Of every server (Copy, names of the updates in it).
    inbox : tuple
        Answers that have come, or None.
    """

    place: str = "begin"
    clock: int = 0
    pushed_at: int = 0
    asked_at: float = 0
    asked: bool = False
    blocking: bool = False
    copies: tuple = ()
    inbox: tuple = ()


@dataclass
class Explored:
    """What was found of a case in which nothing is wrong.

    Attributes
    ----------
    states : int
    ahead : int
        The most steps that a worker began before another one had pushed.
    """

    states: int = 0
    ahead: int = 0


@dataclass
class State:
    """Workers, servers, and messages on their way: to server j from worker i at [i][j], and back."""

    workers: list[Step]
    servers: list[Symbolic]
    up: list[list[tuple]]
    down: list[list[tuple]]
    trace: tuple = ()
    deaths: int = 0

    def key(self) -> tuple:
        """The same for states from which the same can come."""
        up, down = (tuple(tuple(map(tuple, row)) for row in way) for way in (self.up, self.down))
        return tuple(self.workers), tuple(server.key() for server in self.servers), up, down, self.deaths


@dataclass
class Explorer:
    """Goes through all states of a case."""

    case: Case
    server: type[Symbolic]
    deaths: int
    found: Explored = field(default_factory=Explored)

    def run(self, most: int) -> Explored:
        """Look at all states, of which there may be `most`."""
        case = self.case
        ranks = range(case.workers)
        nothing = (Copy(), frozenset())
        start = State(
            [Step(copies=(nothing,) * case.servers, inbox=(None,) * case.servers) for _ in ranks],
            [self.server(Book(ranks, case.bound, case.warm)) for _ in range(case.servers)],
            [[() for _ in range(case.servers)] for _ in ranks],
            [[() for _ in range(case.servers)] for _ in ranks],
        )
        waiting, seen = deque([start]), {start.key()}
        while waiting:
            state = waiting.popleft()
            after = list(self.next(state))
            if not after:
                self.check_end(state)
            for other in after:
                if (key := other.key()) not in seen:
                    seen.add(key)
                    waiting.append(other)
                    if len(seen) > most:
                        raise ValueError(f"{case} has more than {most:,} states: explore a smaller one")
        self.found.states = len(seen)
        return self.found

    def next(self, state: State):
        """All states that can follow."""
        for i, worker in enumerate(state.workers):
            if worker.place in ("waiting", "last"):
                if None not in worker.inbox:
                    yield self.act(state, i)
            elif worker.place not in ("done", "dead"):
                yield self.act(state, i)
            if state.deaths < self.deaths and worker.place not in ("done", "dead"):
                yield self.die(state, i)
            for j in range(self.case.servers):
                if state.up[i][j]:
                    yield self.arrive_up(state, i, j)
                if state.down[i][j] and state.workers[i].inbox[j] is None:
                    yield self.arrive_down(state, i, j)

    def changed(self, state: State, event: str) -> State:
        """A copy, in which something happens."""
        up, down = ([list(row) for row in way] for way in (state.up, state.down))
        return State(list(state.workers), list(state.servers), up, down, (*state.trace, event), state.deaths)

    def die(self, state: State, i: int) -> State:
        other = self.changed(state, f"worker {i} dies")
        other.deaths += 1
        other.workers[i] = replace(state.workers[i], place="dead")
        for j in range(self.case.servers):
            other.up[i][j] = (*other.up[i][j], (DEATH, 0, ()))
        return other

    def arrive_up(self, state: State, i: int, j: int) -> State:
        (kind, clock, steps), *rest = state.up[i][j]
        what = {PUSH: "push", READ: "question", DONE: "end", DEATH: "death"}[kind]
        other = self.changed(state, f"server {j} takes worker {i}'s {what} at clock {clock:g}")
        other.up[i][j], server = tuple(rest), state.servers[j].copy()
        other.servers[j] = server
        if kind == DEATH:
            server.forget(i)
        else:
            server.take(i, (kind, clock, 0, 0.0), np.array(steps, int))
        for worker, answer in server.sent:
            other.down[worker][j] = (*other.down[worker][j], answer)
        server.sent = []
        return other

    def arrive_down(self, state: State, i: int, j: int) -> State:
        other = self.changed(state, f"worker {i} gets the answer of server {j}")
        answer, *rest = state.down[i][j]
        other.down[i][j] = tuple(rest)
        inbox = list(state.workers[i].inbox)
        inbox[j] = answer
        other.workers[i] = replace(state.workers[i], inbox=tuple(inbox))
        return other

    # ------------------------------------------------------------------------------------------------ a worker acts

    def act(self, state: State, i: int) -> State:
        """What worker.py does up to where it waits next."""
        case, worker = self.case, state.workers[i]
        other = self.changed(state, f"worker {i} goes on from {worker.place} at clock {worker.clock}")
        if worker.place == "finish":
            if worker.pushed_at < worker.clock:
                worker = self.push(other, i, worker)
            if worker.asked and None in worker.inbox:
                other.workers[i] = replace(worker, place="waiting")
                return other
            worker = self.ask(other, i, self.adopt(worker), math.inf)
            other.workers[i] = replace(worker, place="last")
            return other
        before, worker = worker, self.adopt(worker)
        if before.place == "last":
            if not self.deaths:
                self.check_all(other, i, worker)
            other.workers[i] = replace(worker, place="done")
            return other
        if worker.clock == case.steps:
            other.workers[i] = replace(worker, place="finish")
            return other
        if before.place == "begin":
            due = worker.clock - worker.asked_at >= (1 if worker.clock <= case.warm else case.fetch_every)
            worker = replace(worker, blocking=due and not (case.ahead and worker.clock > case.warm))
        if (before.place == "begin" and worker.blocking) or not fits(
            [copy for copy, _ in worker.copies], worker.clock, case.bound, case.warm
        ):
            asked_now = worker.asked_at == worker.clock and before.place == "waiting"
            if asked_now:
                self.fail(other, f"worker {i} gets an answer that is too old for its clock {worker.clock}")
            worker = self.ask(other, i, worker, worker.clock)
            other.workers[i] = replace(worker, place="waiting")
            return other
        self.check_read(other, i, worker)
        worker = replace(worker, clock=worker.clock + 1, place="begin")
        if worker.clock - worker.pushed_at >= (1 if worker.clock <= case.warm else case.push_every):
            worker = self.push(other, i, worker)
        if case.ahead and worker.clock > case.warm and worker.clock - worker.asked_at >= case.fetch_every:
            worker = self.adopt(worker)
            worker = self.ask(other, i, worker, worker.clock)
        other.workers[i] = worker
        return other

    def adopt(self, worker: Step) -> Step:
        if not worker.asked or None in worker.inbox:
            return worker
        copies = tuple((Copy(version, least, own), names) for version, least, own, names in worker.inbox)
        return replace(worker, copies=copies, inbox=(None,) * len(copies), asked=False)

    def ask(self, state: State, i: int, worker: Step, clock: float) -> Step:
        if worker.asked:
            return worker
        self.send(state, i, (DONE if clock == math.inf else READ, clock, ()))
        return replace(worker, asked=True, asked_at=clock)

    def push(self, state: State, i: int, worker: Step) -> Step:
        self.send(state, i, (PUSH, worker.clock, tuple(range(worker.pushed_at, worker.clock))))
        return replace(worker, pushed_at=worker.clock)

    def send(self, state: State, i: int, message: tuple) -> None:
        for j in range(self.case.servers):
            state.up[i][j] = (*state.up[i][j], message)

    # ------------------------------------------------------------------------------------------------ the rules

    def check_read(self, state: State, i: int, worker: Step) -> None:
        """What a worker computes with is new enough, by what is in it."""
        case, clock = self.case, worker.clock
        bound = 0 if clock <= case.warm else case.bound
        dead = {j for j, each in enumerate(state.workers) if each.place == "dead"}
        for j, (_, names) in enumerate(worker.copies):
            for k in range(case.workers):
                must = max(0, clock - bound) if k != i else (worker.pushed_at if worker.blocking else 0)
                missing = [(k, t) for t in range(int(must)) if (k, t) not in names]
                if missing and k not in dead:
                    self.fail(state, f"worker {i} computes at clock {clock} without {missing} of server {j}")
        for k, other in enumerate(state.workers):
            if k != i and k not in dead:
                self.found.ahead = max(self.found.ahead, clock - other.clock)

    def check_all(self, state: State, i: int, worker: Step) -> None:
        everything = {(k, t) for k in range(self.case.workers) for t in range(self.case.steps)}
        for j, (_, names) in enumerate(worker.copies):
            if missing := sorted(everything - names):
                self.fail(state, f"worker {i} ends without {missing} of server {j}")

    def check_end(self, state: State) -> None:
        """Nothing can happen any more: all are done, and every push is applied once."""
        for i, worker in enumerate(state.workers):
            if worker.place not in ("done", "dead"):
                self.fail(state, f"worker {i} waits for ever ({worker.place}, clock {worker.clock})")
        for j, server in enumerate(state.servers):
            alive = [k for k, worker in enumerate(state.workers) if worker.place == "done"]
            pushed = sorted((k, t) for k in alive for t in range(self.case.steps))
            applied = sorted(name for name in server.applied if name[0] in alive)
            if applied != pushed or len(set(server.applied)) != len(server.applied):
                self.fail(state, f"server {j} has applied {sorted(server.applied)}")

    def fail(self, state: State, why: str) -> None:
        """Tell the schedule."""
        raise Broken(f"{why}, after\n  " + "\n  ".join(state.trace))


def explore(*, server: type[Symbolic] = Symbolic, deaths: int = 0, most: int = 1_000_000, **case) -> Explored:
    """Look at every order of arrival of a case.

    Parameters
    ----------
    server : Symbolic or a class of its kind
    deaths : int
        So many workers may die.
    most : int
        States after which to give up.
    workers, servers, steps, bound, ahead, push_every, fetch_every, warm
        As of served.py.

    Raises
    ------
    Broken
        A rule does not hold on some schedule; the message tells a shortest one.
    ValueError
        More states than `most`.
    """
    return Explorer(Case(**case), server, deaths).run(most)
