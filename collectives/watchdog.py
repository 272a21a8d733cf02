"""Who waits for whom: a report when a call to MPI lasts too long, and a check that ranks agree on what they call.

    communicator = Communicator(MPI.COMM_WORLD, watch=60)     # or RINGPROP_WATCH=60 in the environment

    watchdog: rank 0 has been in Allreduce for 60 s
      rank 0: Allreduce((1000,) float32, (1000,) float32, SUM), collective 812, at train.py:88 in step, 60.0 s
      rank 1: Recv((4,) float64, 0), after collective 811, at train.py:91 in step, 60.1 s
      rank 2: not in a call, after collective 811, at layers.py:17 in forward
      missing from Allreduce: ranks 1, 2
      cycle: 0 -> 1 -> 0

Each rank has a thread that looks ten times a second how many calls the main thread has begun, and answers the threads
of other ranks, over a communicator of its own. Only where there have been no more for so long does it look for the call
on the main thread's stack, with its arguments and place. So the main thread does no more than count, which cannot be
measured: 4 bytes in 2.6 us, with a watchdog and without. Needs MPI.THREAD_MULTIPLE, which mpi4py asks for by default.
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from mpi4py import MPI

from collectives.nonblocking import Request
from collectives.shortcuts import Calls, shortcuts
from collectives.simulator import find_cycle

LOOK = 0.1  # seconds between two looks at the main thread
ANSWER = 2.0  # seconds that others get to answer
STATUS = 86  # with which a hanging program is aborted
QUESTION, REPLY = 1, 2  # tags

# fmt: off
COLLECTIVE = (
    "Barrier", "Bcast", "Scatter", "Scatterv", "Gather", "Gatherv", "Allgather", "Allgatherv", "Alltoall",
    "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
    "Ibcast", "Iallreduce", "Iallgather", "Ireduce_scatter", "Ireduce_scatter_block",
    "Run", "barrier", "bcast", "scatter", "gather", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan",
)
# fmt: on
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
OPERATIONS = ["SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MINLOC", "MAXLOC"]
OPERATIONS = {getattr(MPI, name).handle: name for name in OPERATIONS}


def describe(value) -> str:
    """An argument in a few words."""
    if isinstance(value, MPI.Op):
        return OPERATIONS.get(value.handle, "an operation of the user")
    if value is MPI.IN_PLACE:
        return "IN_PLACE"
    if isinstance(value, MPI.Datatype):
        return value.Get_name() or "a derived datatype"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe, value)) + "]"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__


def where(frame: FrameType | None) -> str:
    """File, line and function of a frame."""
    if frame is None:
        return "its end"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def watched(base: type) -> type:
    """A subclass of a communicator class that counts its calls, of those that wait for other ranks."""
    return type(base.__name__, (base,), {name: counting(name, getattr(base, name)) for name in (*COLLECTIVE, *PEER)})


def counting(name: str, method: Callable) -> Callable:
    """A method that counts its calls."""
    collective = name in COLLECTIVE

    def call(self, *args, **kwargs):
        calls = self._calls
        if calls.inside:  # a call within a call
            return method(self, *args, **kwargs)
        if collective:
            calls.collectives += 1
        else:
            calls.others += 1
        calls.inside = True
        try:
            if collective and self._agreement:
                self._agreement.check(name, method, self, args, kwargs, sys._getframe(1))
            result = method(self, *args, **kwargs)
            if type(result) is Request:
                result.started = Started(calls, name, (args, kwargs), calls.collectives)
            return result
        finally:
            calls.inside = False

    return call


class Started(NamedTuple):
    """What the watchdog has to know of a nonblocking collective."""

    calls: Calls
    name: str
    arguments: tuple[tuple, dict]
    number: int


class Doing(NamedTuple):
    """A call that a thread is in: method, arguments and place; where it waits for a nonblocking one, which that is."""

    name: str
    args: list
    kwargs: dict
    at: str
    number: int | None = None


CALL, WAIT, SHORTCUTS = counting("", None).__code__, Request.Wait.__code__, shortcuts.__code__.co_filename


def read_stack(frame: FrameType | None, calls: Calls) -> Doing | None:
    """The outermost call that `calls` counts, of the thread with this frame; None if it is in none."""
    doing = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename == SHORTCUTS or code in (CALL, WAIT):
            values, caller = frame.f_locals, frame.f_back
            if code is WAIT:
                if (started := values["self"].started) and started.calls is calls:
                    doing = Doing(started.name, *started.arguments, where(caller), started.number)
            elif values.get("calls") is calls:
                if code is CALL:
                    doing = Doing(values["name"], values["args"], values["kwargs"], where(caller))
                else:  # a shortcut has the method's name and its parameters
                    names = code.co_varnames[: code.co_argcount]
                    args = [values[name] for name in names if name != "algorithm"]
                    doing = Doing(code.co_name, args, {}, where(caller))
        frame = frame.f_back
    return doing


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
        self.main = threading.get_ident()
        self.ended = threading.Event()
        self.asked = 0.0  # when another rank last asked: it reports, for all
        self.seen, self.since = (0, 0), 0.0  # calls begun at the last look, and when so many were first seen

    def run(self):
        patience = self.limit + min(0.3 * self.rank, self.limit)  # so that as a rule one rank reports
        said = None  # the call that was reported
        while not self.ended.wait(LOOK):
            self.answer()
            self.look()
            if self.seen == said or self.asked > self.since or time.monotonic() - self.since < patience:
                continue
            if self.doing() is None:  # it computes: look at its stack again after as long, not ten times a second
                self.since = time.monotonic()
                continue
            said = self.seen
            print(self.report(self.ask()), file=sys.stderr, flush=True)
            if self.abort:
                self.comm.Abort(STATUS)

    def look(self):
        """See whether another call has begun."""
        begun = self.calls.collectives, self.calls.others
        if begun != self.seen:
            self.seen, self.since = begun, time.monotonic()

    def doing(self) -> Doing | None:
        """What the main thread is in, at the count `seen`."""
        while True:
            self.look()
            seen, doing = self.seen, read_stack(sys._current_frames().get(self.main), self.calls)
            self.look()
            if seen == self.seen:
                return doing

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
        """Tell whoever asked what this rank is in."""
        status = MPI.Status()
        while self.comm.iprobe(MPI.ANY_SOURCE, QUESTION, status):
            number = self.comm.recv(source=status.Get_source(), tag=QUESTION)
            self.asked = time.monotonic()
            self.comm.send((number, self.state()), status.Get_source(), REPLY)

    def ask(self) -> dict[int, dict]:
        """The states of all ranks that answer in time."""
        number, states = time.monotonic(), {self.rank: self.state()}
        for rank in range(self.size):
            if rank != self.rank:
                self.comm.send(number, rank, QUESTION)
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
        """What this rank is in."""
        doing, frame = self.doing(), sys._current_frames().get(self.main)
        state = {"collectives": self.seen[0], "call": "", "at": where(frame)}
        if doing is None:
            return state
        name, args, kwargs, at, number = doing
        said = [describe(a) for a in args] + [f"{key}={describe(a)}" for key, a in kwargs.items()]
        state |= {"name": name, "call": f"{name}({', '.join(said)})", "at": at}
        state["seconds"] = time.monotonic() - self.since
        if number is not None:
            state["collectives"] = number
        if name in PEER:
            key, place = PEER[name]
            peer = kwargs.get(key, args[place] if len(args) > place else MPI.ANY_SOURCE)
            state["peers"] = [peer] if isinstance(peer, int) and peer >= 0 else []
        return state

    def report(self, states: dict[int, dict]) -> str:
        """The states in words: who is where, who is missing, and the cycle if there is one."""
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
                lines.append(f"  rank {rank}: not in a call, after collective {state['collectives']}, at {state['at']}")
            else:
                collective = "peers" not in state
                number = f"{'collective' if collective else 'after collective'} {state['collectives']}"
                lines.append(
                    f"  rank {rank}: {state['call']}, {number}, at {state['at']}, for {state['seconds']:.1f} s"
                )
                waits[rank] = self.missing(state, states) if collective else state["peers"]
        if "peers" not in own and (missing := self.missing(own, states)):
            ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            lines.append(f"  missing from {own.get('name', 'the call')}: {ranks}")
        if cycle := find_cycle(waits):
            lines.append("  cycle: " + " -> ".join(map(str, cycle)))
        return "\n".join(lines)

    def missing(self, own, states) -> list[int]:
        """The ranks that are not in the collective that one is in, nor past it."""
        number, name = own["collectives"], own.get("name")
        return [
            rank
            for rank in range(self.size)
            if (state := states.get(rank)) is None
            or state["collectives"] < number
            or (state["collectives"] == number and state.get("name", name) != name)
        ]
