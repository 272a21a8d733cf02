"""Every order of arrival: the code of servers and workers runs on all schedules of a small case; checks the rules.

    explore(workers=2, servers=1, steps=3, bound=1)              Explored(states=1234, ahead=1)
    explore(workers=2, servers=1, steps=3, bound=1, server=MyServer)       the shortest way to what it does wrong

Messages of a pair arrive in the order in which they were sent; of different pairs in any. A state is that of workers,
servers and messages in flight, and it continues wherever a worker can act or a message can arrive. The explorer visits
each state once, breadth first, so the first mistake has a shortest schedule:

bound         what a worker computes with has every update of all others stamped <= clock - bound - 1, from every server
its own       and all that it had pushed itself when it asked
conservation  in the end every server has applied every push once, and every worker has read them all
progress      somebody can always go on, until all are done
looking       when all look at one clock (`looks`) they read every push; the rules hold when they go on
a bad loss    when worker 0 has one at a clock (`fails`), all workers learn of it before they end

An update is named by what is in it, (worker, step), not by the clocks in messages. One worker may die at any moment;
what it had sent arrives, then its death, and the others must come to their end.

It is for small cases: with w workers some 10^w states for each message in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from parallel.sync.asynchronous.clock import ClockTable
from parallel.sync.asynchronous.server import Server
from parallel.sync.asynchronous.worker import Worker
from parallel.sync.mailbox import Message

EVENTS = {"push": "push", "read": "question", "done": "end", "death": "death", "fail": "bad loss"}  # by kind of message
BEGINS, ENDS, FINISHED, DEAD = "the begin of a step", "the end", "done", "dead"  # where a worker is
LOOKS, LOOKED = "the begin of a look", "a look"


class Broken(AssertionError):
    """A schedule breaks a rule; the message lists it, arrival by arrival."""


class Symbolic(Server):
    """A server whose gradients are names: (worker, step). What it does, and when, is `Server.handle`."""

    def __init__(self, number: int, clock_table: ClockTable):
        self.role, self.clock_table, self.pushes_in_step, self.broken = ("server", number), clock_table, {}, False
        self.applied: tuple = ()
        self.sent: list[Message] = []
        self.mailbox = ServerMailbox()

    def apply(self, worker, body, version, rate, steps):
        self.applied += tuple((worker, int(step)) for step in body)

    def answer(self, worker):
        header = len(self.applied), self.clock_table.least, self.clock_table.reached[worker], self.broken
        self.sent.append(Message("answer", self.role, ("worker", worker), header, frozenset(self.applied)))

    def copy(self) -> Symbolic:
        """Return a copy of this server, to be changed."""
        other = type(self)(self.role[1], replace(self.clock_table))
        other.clock_table.clocks, other.clock_table.reached = (
            dict(self.clock_table.clocks),
            dict(self.clock_table.reached),
        )
        other.clock_table.waiting = dict(self.clock_table.waiting)
        other.clock_table.pausing = set(self.clock_table.pausing)
        other.pushes_in_step, other.applied, other.broken = dict(self.pushes_in_step), self.applied, self.broken
        other.mailbox.serving = self.mailbox.serving
        return other

    def key(self) -> tuple:
        """Return all that makes it another state."""
        clock_table = self.clock_table
        kept = tuple((worker, tuple(body)) for worker, (body, *_) in sorted(self.pushes_in_step.items()))
        clocks = (
            tuple(clock_table.clocks.values()),
            tuple(clock_table.reached.values()),
            tuple(clock_table.waiting.items()),
            tuple(sorted(clock_table.pausing)),
        )
        return *clocks, kept, tuple(sorted(self.applied)), self.broken, self.mailbox.serving


class ServerMailbox:
    """The mailbox of a symbolic server: the explorer delivers messages while it serves."""

    serving = True

    def wait(self, done, reason) -> None:
        """Check that nothing is missing: the explorer lets a server rest when all workers have left."""
        if not done():
            raise Broken(reason())

    def flush(self) -> None:
        """Do nothing: messages have left."""


@dataclass(frozen=True)
class Case:
    """A case to explore, in the terms of served.py."""

    workers: int
    servers: int
    steps: int
    bound: float = math.inf
    ahead: bool = False
    push_every: int = 1
    fetch_every: int = 1
    warm: int = 0
    looks: int = 0  # the clock at which all look; 0: never
    fails: int | None = None  # the clock at which worker 0 has a bad loss


class SentMessages(list):
    """The mailbox of a symbolic worker: the messages that it has sent; the explorer delivers them."""

    send = list.append

    def poll(self) -> bool:
        return False


class SymbolicWorker(Worker):
    """A worker whose parameters are names of updates. What it does, and when it waits, is `Worker`'s."""

    def __init__(self, rank: int, case: Case):
        self.role, self.hosts, self.replica, self.mailbox = ("worker", rank), range(case.servers), None, SentMessages()
        self.bound, self.ahead, self.warm = case.bound, case.ahead, case.warm
        self.push_every, self.fetch_every, self.unpushed, self.gradients = case.push_every, case.fetch_every, (), ()
        self.names = [frozenset() for _ in self.hosts]
        self.looks, self.fails = case.looks, case.fails if rank == 0 else None
        self.has_new_parameters, self.blocking, self.looked, self.trained = False, False, False, ()
        self.computed: list[tuple] = []  # of each read: clock, names, and what it must have of its own
        self.open(0, 0)

    def train(self, steps: int) -> Iterator[str]:
        """Run a worker from its first step to its end; yield where others may act before it goes on."""
        for _ in range(steps):
            yield BEGINS
            yield from self.read_steps()
            if self.broken:
                break
            self.read_versions = [0 for _ in self.hosts]  # servers here count no staleness: as many states less
            self.computed.append((self.clock, tuple(self.names), self.pushed_at if self.blocking else 0))
            if self.clock == self.fails:
                self.fail()
                break
            self.end_step(1, 0.0)
            if self.clock == self.looks:
                yield from self.look()
        yield ENDS
        yield from self.finish_steps(0.0)

    def look(self) -> Iterator[str]:
        """Do what `Asynchronous` does when ranks look, and when they go on."""
        yield LOOKS
        if self.asked:
            yield from self.await_answers("waits before a look")
        self.trained = tuple(self.names)
        yield from self.pause_steps()
        self.looked = True
        yield LOOKED
        self.names, self.trained = list(self.trained), ()
        self.resume()

    def write(self, number, array):
        self.names[number] = array

    def accumulate(self, samples, rate):
        """Do nothing: there are no arrays."""

    def slices(self):
        return [tuple(range(self.pushed_at, self.clock)) for _ in self.hosts]


@dataclass(frozen=True)
class Local:
    """The state of one worker.

    Attributes
    ----------
    place : str
        Where it has yielded, or FINISHED or DEAD.
    answers : tuple
        Of every server, the answer that has come to what it asked, or None.
    looked, broken : bool
        Whether it has read what a look shows, and whether it knows of a bad loss.
    rest : tuple
        All else that its next actions depend on.
    history : tuple
        Its events: a worker is made again from them.
    """

    place: str
    clock: int
    answers: tuple
    looked: bool
    broken: bool
    rest: tuple
    names: tuple
    history: tuple = field(default=(), compare=False)

    @property
    def may_act(self) -> bool:
        waits = self.place not in (FINISHED, DEAD, LOOKED)
        return self.place in (BEGINS, ENDS, LOOKS) or (waits and None not in self.answers)


@dataclass
class Explored:
    """The result for a case in which nothing is wrong.

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
    """Workers, servers, and messages in flight: from worker i to server j in up[i][j], back in down[i][j]."""

    workers: list[Local]
    servers: list[Symbolic]
    up: list[list[tuple]]
    down: list[list[tuple]]
    trace: tuple = ()
    deaths: int = 0

    def key(self) -> tuple:
        """Return the same for states from which the same can follow."""
        up, down = (tuple(map(tuple, row)) for row in (self.up, self.down))
        return tuple(self.workers), tuple(server.key() for server in self.servers), up, down, self.deaths


class Explorer:
    """Goes through all states of a case."""

    def __init__(self, case: Case, server: type[Symbolic], deaths: int):
        self.case, self.server, self.deaths, self.found = case, server, deaths, Explored()
        self.known: dict[tuple, tuple] = {}  # (worker, where it is, what happens) -> where it is then, what it sends

    def run(self, most: int) -> Explored:
        """Look at all states, of which there may be `most`."""
        case = self.case
        ranks = range(case.workers)
        start = State(
            [self.after(i, None, None)[0] for i in ranks],
            [self.server(j, ClockTable(ranks, case.bound, case.warm)) for j in range(case.servers)],
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
        """Yield all states that can follow."""
        all_looked = all(worker.looked for worker in state.workers)
        for j, server in enumerate(state.servers):
            if all_looked and not server.mailbox.serving:
                yield self.resume(state, j)
        for i, worker in enumerate(state.workers):
            alive = worker.place not in (FINISHED, DEAD)
            if worker.may_act or (worker.place == LOOKED and all_looked):
                yield self.act(state, i)
            if state.deaths < self.deaths and alive:
                yield self.die(state, i)
            for j in range(self.case.servers):
                if state.up[i][j] and state.servers[j].mailbox.serving:
                    yield self.arrive_up(state, i, j)
                if state.down[i][j] and alive and worker.answers[j] is None:
                    yield self.arrive_down(state, i, j)

    def changed(self, state: State, event: str) -> State:
        """A copy, in which something happens."""
        up, down = ([list(row) for row in way] for way in (state.up, state.down))
        return State(list(state.workers), list(state.servers), up, down, (*state.trace, event), state.deaths)

    def die(self, state: State, i: int) -> State:
        other = self.changed(state, f"worker {i} dies")
        other.deaths += 1
        other.workers[i] = replace(state.workers[i], place=DEAD)
        for j in range(self.case.servers):
            other.up[i][j] = (*other.up[i][j], Message("death", ("worker", i), ("server", j)))
        return other

    def resume(self, state: State, j: int) -> State:
        other = self.changed(state, f"server {j} serves again")
        other.servers[j] = state.servers[j].copy()
        other.servers[j].resume()
        if not other.servers[j].mailbox.serving:
            self.fail(other, f"server {j} does not serve again after a look")
        return other

    def arrive_up(self, state: State, i: int, j: int) -> State:
        message, *rest = state.up[i][j]
        clock = message.header[0] if message.kind in ("push", "read") else state.workers[i].clock
        other = self.changed(state, f"server {j} takes worker {i}'s {EVENTS[message.kind]} at clock {clock:g}")
        other.up[i][j], server = tuple(rest), state.servers[j].copy()
        other.servers[j] = server
        server.handle(message)
        for answer in server.sent:
            worker = answer.receiver[1]
            other.down[worker][j] = (*other.down[worker][j], answer)
        server.sent = []
        if server.clock_table.pausing and server.clock_table.least == math.inf:
            server.finish_serving()
        return other

    def arrive_down(self, state: State, i: int, j: int) -> State:
        other = self.changed(state, f"worker {i} gets the answer of server {j}")
        answer, *rest = state.down[i][j]
        other.down[i][j] = tuple(rest)
        other.workers[i], *_ = self.after(i, state.workers[i], answer)
        return other

    # ------------------------------------------------------------------------------------------------ a worker acts

    def act(self, state: State, i: int) -> State:
        """A worker goes on to where it waits next."""
        before = state.workers[i]
        other = self.changed(state, f"worker {i} goes on from {before.place} at clock {before.clock}")
        other.workers[i], sent, computed, error = self.after(i, before, None)
        if error:
            self.fail(other, error)
        for message in sent:
            j = message.receiver[1]
            other.up[i][j] = (*other.up[i][j], message)
        for read in computed:
            self.check_read(other, i, *read)
        worker = other.workers[i]
        if worker.place == LOOKED:
            self.check_all(other, i, worker, [each.rest[0] for each in other.workers])
        if worker.place == FINISHED and self.case.fails is not None and not worker.broken:
            self.fail(other, f"worker {i} ends and does not know of a bad loss")
        if worker.place == FINISHED and not self.deaths and self.case.fails is None:
            self.check_all(other, i, worker, [self.case.steps for _ in other.workers])
        return other

    def after(self, i: int, local: Local | None, event: Message | None) -> tuple[Local, list, list, str]:
        """Return a worker's state after an answer has come, or, None, it has gone on; and what it has done.

        A generator cannot be copied, so the worker is made anew and does again all that it has done.
        """
        key = (i, local, event)
        if key not in self.known:
            worker = SymbolicWorker(i, self.case)
            waits, place, error = worker.train(self.case.steps), "", ""
            history = (*local.history, event) if local else (event,)
            for answer in history:
                worker.mailbox.clear()
                worker.computed = []
                if answer:
                    worker.handle(answer)
                    continue
                try:
                    place = next(waits, FINISHED)
                except RuntimeError as problem:
                    place, error = FINISHED, str(problem)
            answers = tuple(worker.answers) if worker.asked else (None,) * self.case.servers
            rest = (
                worker.pushed_at,
                worker.asked_at,
                worker.asked,
                tuple(worker.copies),
                worker.blocking,
                worker.samples,
            )
            rest += worker.trained, *map(str, (worker.paused or {}).values())
            flags = worker.looked, worker.broken
            after = Local(place, worker.clock, answers, *flags, rest, tuple(worker.names), history)
            self.known[key] = after, list(worker.mailbox), worker.computed, error
        return self.known[key]

    # ------------------------------------------------------------------------------------------------ the rules

    def check_read(self, state: State, i: int, clock: int, names: tuple, own: int) -> None:
        """Check that a worker computes with parameters that are new enough, by the updates in them."""
        case = self.case
        bound = 0 if clock <= case.warm else case.bound
        dead = {j for j, each in enumerate(state.workers) if each.place == DEAD}
        for j, updates in enumerate(names):
            for k in range(case.workers):
                must = max(0, clock - bound) if k != i else own
                missing = [(k, t) for t in range(int(must)) if (k, t) not in updates]
                if missing and k not in dead:
                    self.fail(state, f"worker {i} computes at clock {clock} without {missing} of server {j}")
        for k, other in enumerate(state.workers):
            if k != i and k not in dead:
                self.found.ahead = max(self.found.ahead, clock - other.clock)

    def check_all(self, state: State, i: int, worker: Local, pushed: list[int]) -> None:
        """Check that a worker has read every push: of each worker, those of so many steps."""
        everything = {(k, t) for k, steps in enumerate(pushed) for t in range(steps)}
        for j, names in enumerate(worker.names):
            if missing := sorted(everything - names):
                self.fail(state, f"worker {i} comes to {worker.place} without {missing} of server {j}")

    def check_end(self, state: State) -> None:
        """Check a state after which nothing can happen: all are done, and every push is applied once."""
        for i, worker in enumerate(state.workers):
            if worker.place not in (FINISHED, DEAD):
                self.fail(state, f"worker {i} waits for ever ({worker.place}, clock {worker.clock})")
        for j, server in enumerate(state.servers):
            alive = [k for k, worker in enumerate(state.workers) if worker.place == FINISHED]
            pushed = sorted((k, t) for k in alive for t in range(self.case.steps))
            applied = sorted(name for name in server.applied if name[0] in alive)
            complete = applied == pushed or self.case.fails is not None
            if not complete or len(set(server.applied)) != len(server.applied):
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
    looks, fails
        As of Case.

    Raises
    ------
    Broken
        A rule does not hold on some schedule; the message lists a shortest one.
    ValueError
        More states than `most`.
    """
    return Explorer(Case(**case), server, deaths).run(most)
