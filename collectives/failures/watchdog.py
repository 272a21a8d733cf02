"""Who waits for whom: a report when a call to MPI lasts too long, and a check that ranks agree on what they call.

    communicator = Communicator(MPI.COMM_WORLD, watch=60)     # or RINGPROP_WATCH=60 in the environment

    watchdog: rank 0 has been in Allreduce for 60 s
      rank 0: Allreduce((1000,) float32, (1000,) float32, SUM), collective 812, at train.py:88 in step, 60.0 s
      rank 1: Recv((4,) float64, 0), after collective 811, at train.py:91 in step, 60.1 s
      rank 2: not in a call, after collective 811, at layers.py:17 in forward
      missing from Allreduce: ranks 1, 2
      cycle: 0 -> 1 -> 0

Each rank has a thread that looks ten times a second how many calls have begun, and answers the threads of other ranks,
over a communicator of its own. Every call registers itself, with its arguments (`counting`, some 0.3 us); only where
there have been no more for so long does the thread look where in the program that is. Needs MPI.THREAD_MULTIPLE, which
mpi4py asks for by default.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable

from mpi4py import MPI

from collectives.failures.awake import Awake
from collectives.failures.cycle import find_cycle
from collectives.failures.job_end import HANGING
from collectives.failures.revocation import is_rank_death
from collectives.progress import Calls, Doing, in_flight, outside, where

LOOK = 0.1  # seconds between two looks at the main thread
ANSWER = 2.0  # seconds that others get to answer
QUESTION, REPLY = 1, 2  # tags

# Calls that wait for a peer: name -> (its parameter, its place).
PEER = {
    "Send": ("dest", 1),
    "Ssend": ("dest", 1),
    "send": ("dest", 1),
    "ssend": ("dest", 1),
    "Recv": ("source", 1),
    "recv": ("source", 1),
    "Sendrecv": ("source", 4),
    "sendrecv": ("source", 4),
    "Probe": ("source", 0),
    "probe": ("source", 0),
}
NAMES = ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MINLOC", "MAXLOC"]
NAMES = {getattr(MPI, name).handle: name for name in NAMES}  # of the operations of MPI


def describe(value) -> str:
    """Return an argument in a few words."""
    if isinstance(value, MPI.Op):
        return NAMES.get(value.handle, "an operation of the user")
    if value is MPI.IN_PLACE:
        return "IN_PLACE"
    if isinstance(value, MPI.Datatype):
        return value.Get_name() or "a derived datatype"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe, value)) + "]"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def counting(name: str, method: Callable, calls: Calls, agree: Callable | None = None) -> Callable:
    """Return a method that registers its calls; `agree(name, method, args, kwargs)` precedes each collective."""
    collective = name not in PEER

    def call(*args, **kwargs):
        if calls.current is not None:  # a call within a call
            return method(*args, **kwargs)
        if collective:
            calls.collectives += 1
        else:
            calls.others += 1
        doing = calls.current = Doing(name, args, kwargs)
        try:
            if collective and agree is not None:
                agree(name, method, args, kwargs)
            result = method(*args, **kwargs)
            if hasattr(result, "started"):  # a nonblocking collective of ours
                result.started = calls, doing._replace(number=calls.collectives)
            return result
        except Exception as error:
            if collective:
                words = f"{type(error).__name__}: {error}, at {where(outside())}"
                calls.aborted = calls.collectives, f"aborted {name}, collective {calls.collectives}, with {words}"
            raise
        finally:
            calls.current = None

    return call


def begun(queue, calls: Calls) -> list[str]:
    """Return the nonblocking collectives in a queue that `calls` counts, in words."""
    started = [(*request.started, request.place) for request in tuple(queue.waiting) if request.started]
    return [f"{one.name}, collective {one.number}, at {at}" for counted, one, at in started if counted is calls]


class Watchdog(threading.Thread):
    """The thread that answers other ranks and reports for this one.

    Parameters
    ----------
    calls : Calls
    comm : MPI.Intracomm
        of its own
    limit : float
        seconds that a call may take
    abort : bool
        end all ranks after the report, with status 86; else go on
    """

    def __init__(self, calls: Calls, comm: MPI.Intracomm, limit: float, abort: bool = True):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError("the watchdog needs an MPI library that was started with MPI.THREAD_MULTIPLE")
        super().__init__(name="watchdog", daemon=True)
        self.calls, self.comm, self.limit, self.abort = calls, comm, limit, abort
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        group = comm.Get_group()
        self.world = group.Translate_ranks(range(self.size), MPI.COMM_WORLD.Get_group())  # each rank's in COMM_WORLD
        group.Free()
        self.main = threading.get_ident()
        self.ended = threading.Event()
        self.clock = Awake()
        self.questioned = 0.0  # when another rank last asked: it reports, for all
        self.seen, self.since = (0, 0), 0.0  # calls begun at the last look, and when that count was first seen
        self.sending: list[MPI.Request] = []

    def run(self):
        try:
            self.look_after()
        except MPI.Exception as error:
            if not is_rank_death(error):
                raise

    def look_after(self):
        """What the thread does, until it is to end, or ranks have died: then no rank can answer."""
        patience = self.limit + min(0.3 * self.rank, self.limit)  # so that as a rule one rank reports
        reported = None  # the call that was reported
        while not self.ended.wait(LOOK):
            self.answer()
            self.look()
            early = self.questioned > self.since or self.clock.now() - self.since < patience
            if self.seen == reported or early or self.doing() is None:  # None where it computes
                continue
            reported = self.seen
            print(self.report(self.ask()), file=sys.stderr, flush=True)
            if self.abort:
                self.comm.Abort(HANGING)

    def look(self):
        """See whether another call has begun."""
        begun = self.calls.collectives, self.calls.others
        if begun != self.seen:
            self.seen, self.since = begun, self.clock.now()

    def doing(self) -> Doing | None:
        """Return the call that the rank is in, at the count `seen`."""
        while True:
            self.look()
            seen, doing = self.seen, self.calls.current
            self.look()
            if seen == self.seen:
                return doing

    def place(self) -> str:
        """Where in the program the main thread is."""
        return where(outside(sys._current_frames().get(self.main)))

    def start(self):
        super().start()
        atexit.register(self.stop)
        self.key = MPI.Comm.Create_keyval(delete_fn=self.end)
        MPI.COMM_SELF.Set_attr(self.key, self.name)

    def stop(self):
        """End the thread."""
        atexit.unregister(self.stop)
        if not self.ended.is_set():
            MPI.COMM_SELF.Delete_attr(self.key)  # calls `end`
            MPI.Comm.Free_keyval(self.key)

    def end(self, *_):
        """MPI calls this when the attribute goes: in `stop`, or as the first act of MPI_Finalize."""
        self.ended.set()
        self.join()

    def answer(self):
        """Answer the questions of other ranks: which call this rank is in."""
        status = MPI.Status()
        while self.comm.iprobe(MPI.ANY_SOURCE, QUESTION, status):
            number = self.comm.recv(source=status.Get_source(), tag=QUESTION)
            self.questioned = self.clock.now()
            self.send((number, self.state()), status.Get_source(), REPLY)

    def send(self, what, rank: int, tag: int):
        """Send without waiting for the rank: where that has died between hosts, Open MPI 4.1 would wait for ever."""
        self.sending = [request for request in self.sending if not request.Test()]
        self.sending.append(self.comm.isend(what, rank, tag))

    def ask(self) -> dict[int, dict]:
        """Return the states of all ranks that answer in time."""
        number, states = time.monotonic(), {self.rank: self.state()}
        for rank in range(self.size):
            if rank != self.rank:
                self.send(number, rank, QUESTION)
        status = MPI.Status()
        while len(states) < self.size and time.monotonic() < number + ANSWER:
            self.answer()
            while self.comm.iprobe(MPI.ANY_SOURCE, REPLY, status):
                to, state = self.comm.recv(source=status.Get_source(), tag=REPLY)
                if to == number:
                    states[status.Get_source()] = state
            time.sleep(0.01)
        return states

    def state(self) -> dict:
        """Return what this rank is in."""
        doing, at = self.doing(), self.place()
        state = {"collectives": self.seen[0], "call": "", "at": at, "aborted": self.calls.aborted}
        state["begun"] = [call for queue in tuple(in_flight) for call in begun(queue, self.calls)]
        if doing is None:
            others = [getattr(calls(), "current", None) for calls in tuple(Calls.instances)]
            state |= next(({"elsewhere": other.name} for other in others if other), {})
            return state
        name, args, kwargs, number, late = doing
        words = [describe(a) for a in args] + [f"{key}={describe(a)}" for key, a in kwargs.items()]
        state |= {"name": name, "call": f"{name}({', '.join(words)})", "at": at}
        state["seconds"] = self.clock.now() - self.since
        if number is not None:
            state["collectives"] = number
        if name in PEER:
            key, place = PEER[name]
            peer = kwargs.get(key, args[place] if len(args) > place else MPI.ANY_SOURCE)
            state["peers"] = [peer] if isinstance(peer, int) and peer >= 0 else []
        elif late is not None:
            state["peers"] = state["late"] = [self.world.index(rank) for rank in late() if rank in self.world]
        return state

    def report(self, states: dict[int, dict]) -> str:
        """Return the states in words: who is where, who is missing, and the cycle if there is one."""
        own = states[self.rank]
        lines = [f"watchdog: rank {self.rank} has been in {own.get('name', 'a call')} for {self.limit:g} s"]
        waits: dict[int, list[int]] = {}
        for rank in range(self.size):
            state = states.get(rank)
            if state is None:
                lines.append(
                    f"  rank {rank}: no answer in {ANSWER:g} s: dead, stopped, or in code that holds the interpreter"
                )
            elif not state["call"]:
                call = f"in {state['elsewhere']} of another communicator" if "elsewhere" in state else "not in a call"
                lines.append(f"  rank {rank}: {call}, after collective {state['collectives']}, at {state['at']}")
            else:
                collective = "peers" not in state
                number = f"{'collective' if collective else 'after collective'} {state['collectives']}"
                lines.append(
                    f"  rank {rank}: {state['call']}, {number}, at {state['at']}, for {state['seconds']:.1f} s"
                )
                waits[rank] = self.missing(state, states) if collective else state["peers"]
            if state is not None and state["aborted"]:
                lines.append(f"    {state['aborted'][1]}")
            if state is not None and state["begun"]:
                lines.append(f"    begun and not done: {', '.join(state['begun'])}")
        if missing := own.get("late", []) if "peers" in own else self.missing(own, states):
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            lines.append(f"  missing from {own.get('name', 'the call')}: {ranks}")
        if cycle := find_cycle(waits):
            lines.append("  cycle: " + " -> ".join(map(str, cycle)))
        return "\n".join(lines)

    def missing(self, own, states) -> list[int]:
        """Return the ranks that are not in the collective that one is in, nor past it, or that aborted it."""
        number, name = own["collectives"], own.get("name")
        return [
            rank
            for rank in range(self.size)
            if (state := states.get(rank)) is None
            or state["collectives"] < number
            or (state["collectives"] == number and state.get("name", name) != name)
            or (state["aborted"] or [None])[0] == number
        ]
