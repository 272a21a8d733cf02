"""Who waits for whom: a report when a call to MPI lasts too long, and a check that ranks agree on what they call.

    communicator = Communicator(MPI.COMM_WORLD, watch=60)     # or RINGPROP_WATCH=60 in the environment

    watchdog: rank 0 has been in Allreduce for 60 s
      rank 0: Allreduce((1000,) float32, (1000,) float32, SUM), collective 812, at train.py:88 in step, 60.0 s
      rank 1: Recv((4,) float64, 0), after collective 811, at train.py:91 in step, 60.1 s
      rank 2: not in a call, after collective 811, at layers.py:17 in forward
      missing from Allreduce: ranks 1, 2
      cycle: 0 -> 1 -> 0

Each rank has a thread that looks a few times a second at what the main thread is in, and answers the threads of other
ranks, over a communicator of its own. While nothing is wrong a call of 4 bytes costs 3.5 microseconds more, most of it
because shortcuts past the plans are not taken; at 1 MiB it is below the noise. Needs MPI.THREAD_MULTIPLE, which mpi4py
asks for by default.

With debug=True, or RINGPROP_DEBUG=1, all ranks tell each other what they are about to call before each collective, and
refuse it together where that does not fit: a nonblocking one when it is tested or waited for, as ranks may start it at
different times. It costs an allgather of short texts a call.
"""

import atexit
import inspect
import sys
import threading
import time
from pathlib import Path
from zlib import crc32

import numpy as np
from mpi4py import MPI

from collectives.messages import is_in_place, name_of, outgoing
from collectives.nonblocking import Request
from collectives.simulator import find_cycle

LOOK = 0.1  # seconds between two looks at the main thread
ANSWER = 2.0  # seconds that others get to answer
STATUS = 86  # with which a hanging program is aborted
QUESTION, REPLY = 1, 2  # tags
TEXT = 1024  # bytes in which a rank says what it calls

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


def where(frame) -> str:
    """File, line and function of a frame."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


class Calls:
    """What the main thread is in: written by it, read by the watchdog's thread.

    now : (name, arguments, when it began, collectives begun by then) of the outermost call to MPI, or None
    collectives : how many have begun
    """

    def __init__(self, agreement=None):
        self.now, self.collectives, self.agreement = None, 0, agreement


def watched(base: type) -> type:
    """A subclass of a communicator class that notes what it is in, for the calls that wait for other ranks."""

    def through(name):
        method, collective = getattr(base, name), name in COLLECTIVE

        def call(self, *args, **kwargs):
            calls = self._calls
            if calls.now is not None:  # a call within a call
                return method(self, *args, **kwargs)
            calls.collectives += collective
            calls.now = name, (args, kwargs), time.monotonic(), calls.collectives
            try:
                if collective and calls.agreement:
                    calls.agreement.check(name, method, self, args, kwargs, sys._getframe(1))
                result = method(self, *args, **kwargs)
                if type(result) is Request:
                    result.waiting = Waiting(calls)
                return result
            finally:
                calls.now = None

        watched.code = call.__code__  # the same for all
        return call

    return type(base.__name__, (base,), {name: through(name) for name in (*COLLECTIVE, *PEER)})


class Waiting:
    """The context of a Wait for the nonblocking collective that `calls` is in."""

    def __init__(self, calls):
        self.calls, (self.name, self.arguments, _, self.number) = calls, calls.now

    def __enter__(self):
        self.outermost = self.calls.now is None
        if self.outermost:
            self.calls.now = self.name, self.arguments, time.monotonic(), self.number

    def __exit__(self, *_):
        if self.outermost:
            self.calls.now = None


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
        self.said = None  # the call that was reported

    def run(self):
        patience = self.limit + min(0.3 * self.rank, self.limit)  # so that as a rule one rank reports
        while not self.ended.wait(LOOK):
            self.answer()
            now = self.calls.now
            if now is None or now is self.said or time.monotonic() - now[2] < patience or self.asked > now[2]:
                continue
            self.said = now
            print(self.report(self.ask()), file=sys.stderr, flush=True)
            if self.abort:
                self.comm.Abort(STATUS)

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
        now, frame = self.calls.now, sys._current_frames().get(self.main)
        state = {"collectives": self.calls.collectives, "call": "", "at": where(frame) if frame else "its end"}
        if now is None:
            return state
        name, (args, kwargs), began, state["collectives"] = now
        while frame is not None and frame.f_code not in (watched.code, Request.Wait.__code__):
            frame = frame.f_back
        said = [describe(a) for a in args] + [f"{key}={describe(a)}" for key, a in kwargs.items()]
        state |= {"name": name, "call": f"{name}({', '.join(said)})", "seconds": time.monotonic() - began}
        if frame is not None and frame.f_back is not None:
            state["at"] = where(frame.f_back)
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
        same = (own["collectives"], own.get("name"))
        return [
            rank
            for rank in range(self.size)
            if (state := states.get(rank)) is None
            or state["collectives"] < own["collectives"]
            or (state["collectives"] == own["collectives"] and (same[0], state.get("name", same[1])) != same)
        ]


class Agreement:
    """Refuses a collective that ranks do not call alike, before any data moves."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm = comm
        self.told = []  # exchanges in flight: what MPI reads and writes must live

    def check(self, name, method, communicator, args, kwargs, frame):
        """Compare what all ranks are about to call: now, or where it is nonblocking, before it begins.

        Raises
        ------
        ValueError
            on every rank, with what two of them call and where
        """
        try:
            must_agree = facts(name, method, communicator, args, kwargs)
        except (ValueError, TypeError, BufferError) as error:
            must_agree = f"{name} with a mistake: {error}"
        if name.startswith("I"):
            communicator._queue.agreed = self.exchange(must_agree, where(frame))
        else:
            communicator._queue.finish()  # others may wait for what is in flight before they come here
            self.exchange(must_agree, where(frame))(True)

    def exchange(self, must_agree: str, at: str):
        """Tell all ranks; a function (whether to wait) -> whether all have told, ValueError where they differ."""
        if len(must_agree) > TEXT // 2:
            must_agree = f"{must_agree[: TEXT // 3]} ... {crc32(must_agree.encode()):08x}"
        lines = [text.replace("\n", " ").encode("ascii", "replace")[: TEXT // 2 - 1] for text in (must_agree, at)]
        own = np.frombuffer(b"\n".join(lines).ljust(TEXT), np.uint8)
        told = np.empty((self.comm.Get_size(), TEXT), np.uint8)
        request = self.comm.Iallgather(own, told)
        self.told = [(r, *buffers) for r, *buffers in self.told if not r.Test()] + [(request, own, told)]

        def agreed(wait: bool) -> bool:
            if not (request.Wait() if wait else request.Test()):
                return False
            calls = [row.tobytes().decode().rstrip().split("\n") for row in told]
            first, first_at = calls[0]
            for rank, (other, there) in enumerate(calls):
                if other != first:
                    raise ValueError(
                        f"the ranks do not agree: rank 0 calls {first} at {first_at}; "
                        f"rank {rank} calls {other} at {there}"
                    )
            return True

        return agreed

    def free(self):
        """Free the communicator (collective)."""
        MPI.Request.Waitall([request for request, *_ in self.told])
        self.comm.Free()


def facts(name, method, communicator, args, kwargs) -> str:
    """What all ranks must say alike of a call: operation, elements, datatype, op and root."""
    if name[0].islower() or name == "Alltoallw":
        return name
    blocking = name.removeprefix("I").capitalize()
    given = inspect.signature(method).bind(communicator, *args, **kwargs)
    given.apply_defaults()
    values = given.arguments
    said = []
    size, rank = communicator.Get_size(), communicator.Get_rank()
    if not blocking.endswith("v"):
        send, recv = values.get("sendbuf", values.get("buf")), values.get("recvbuf")
        own, parts = send, size if blocking in ("Alltoall", "Reduce_scatter_block") else 1
        if blocking == "Scatter":
            own = recv if not is_in_place(recv) else send
            parts = size if own is send and rank == values["root"] else 1
        elif is_in_place(send):
            own, parts = recv, size if blocking in ("Allgather", "Gather", "Alltoall", "Reduce_scatter_block") else 1
        if own is not None:
            message = outgoing(own, parts)
            alike = message.plain
            said.append(f"{message.count} of {name_of(message)}" if alike else f"{message.count * message.size} bytes")
    if "op" in values:
        said.append(describe(values["op"]))
    if "root" in values:
        said.append(f"root {int(values['root'])}")
    if values.get("recvcounts") is not None:
        said.append(f"counts {list(values['recvcounts'])}")
    return f"{name}({', '.join(said)})"
