"""Replacement ranks: one rank starts them, and all accept them.

MPI_Comm_spawn waits for a process that dies before MPI_Init, in a call that nothing ends; called by all members it
would hold all. So the first member alone calls it, in a thread that may be left behind, and sees by a pipe whether the
process lives: that holds one end of it open from its first moment to its last, and sees by it whether the first member
does.

    started      the process holds its end of the pipe
    come         it has sent the first member a message (MPI_Comm_spawn)
    accepted     there is a communicator of it and all members (MPI_Comm_accept, MPI_Comm_connect)

If it dies before it has come, another one is started, and the other members do not notice. Accepting it takes
milliseconds; if it dies then, MPI fails, or waits until the job is ended, and started again from its last checkpoint.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpi4py import MPI

from collectives.failures.job_end import abort, rank_of_world
from parallel.launch import launcher, processes

OPENS, COMES = 15.0, 60.0  # seconds within which it must hold its end of the pipe, and come
TRIES = 3  # processes that are started for one place at most
PAUSE = 0.002  # seconds between two looks whether one has come
STAYS = 3.0  # seconds that members may be in MPI with one that has died
COME, STARTED, PORT = 914, 915, 916  # tags
END = 9  # descriptor of the process's end of the pipe
# The shell opens it before Python is loaded; where who has started it is no more, it ends here.
SHELL = f'exec {END}>"$0" && echo >&{END} && exec "$@"'


class Replacement:
    """A process that replaces a lost rank, as the first member sees it.

    Parameters
    ----------
    size : int
        Ranks of the run, when it was begun.

    Attributes
    ----------
    between : MPI.Intercomm or None
        The first member and the process, as soon as this has come.
    gone : threading.Event
        The process has been there, and has ended.
    """

    def __init__(self, size: int):
        self.size, self.between, self.gone = size, None, threading.Event()
        self.ours, self.theirs = os.pipe()
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._connect, name="replacement", daemon=True)
        self.thread.start()

    def _connect(self) -> None:
        info = MPI.Info.Create()
        info.Set("wdir", os.getcwd())
        info.Set("host", socket.gethostname())  # where the pipe is; on another one Open MPI 5 cannot start it
        info.Set("map_by", "slot:OVERSUBSCRIBE")  # the slot of a dead process stays taken
        pipe = f"/proc/{os.getpid()}/fd/{self.theirs}"
        command = ["env", f"{launcher.REPLACEMENT}={self.size}", sys.executable, *sys.orig_argv[1:]]
        try:
            alone = MPI.COMM_SELF.Dup()
            alone.Set_errhandler(MPI.ERRORS_RETURN)
            between = alone.Spawn("sh", ["-c", SHELL, pipe, *command], 1, info)
            come = between.Irecv(bytearray(0), 0, COME)
            while not come.Test():
                if self.gone.is_set():
                    return
                time.sleep(PAUSE)  # who comes has much to load, and needs the core
            self.between = between
        except MPI.Exception:  # none can be started, or it has died
            pass

    def failed(self) -> bool:
        """Return whether it cannot come any more, or has ended."""
        while not self.gone.is_set() and select.select([self.ours], [], [], 0)[0]:
            if os.read(self.ours, 1):
                os.close(self.theirs)  # the process has opened it, too
                self.theirs = None
            else:
                self.gone.set()
        late = time.monotonic() - self.began > (OPENS if self.theirs else COMES)
        return self.gone.is_set() or (not self.between and (late or not self.thread.is_alive()))

    def close(self) -> None:
        """Stop watching it: if it has not been accepted it sees that, and ends."""
        self.gone.set()
        for end in (self.ours, self.theirs):
            if end is not None:
                os.close(end)


def start(comm: MPI.Intracomm, places: int, size: int) -> list[Replacement] | None:
    """Start processes for the lost ranks; return them on the first rank, None if they cannot be started (collective).

    On the other ranks an empty list: they leave the cores to the processes meanwhile.

    Raises
    ------
    MPI.Exception
        A member has died.
    """
    started = bytearray(1)
    if comm.rank:
        request = comm.Irecv(started, 0, STARTED)
        while not request.Test():
            time.sleep(PAUSE)
        return [] if started[0] else None
    come, left = [Replacement(size) for _ in range(places)], TRIES * places
    try:
        while left >= places and not all(each.between for each in come):
            comm.Iprobe(MPI.ANY_SOURCE, COME)  # raises where a member has died
            for place, each in enumerate(come):
                if each.failed():
                    each.close()
                    left -= 1
                    come[place] = Replacement(size)
            time.sleep(PAUSE)
        started[0] = left >= places
        for rank in range(1, comm.size):
            comm.Send(started, rank, STARTED)
    finally:
        if not started[0]:
            close(come)
    return come if started[0] else None


def close(replacements: Sequence[Replacement]) -> None:
    """Stop watching processes: they are accepted, or never will be."""
    for each in replacements:
        each.close()


def accept(comm: MPI.Intracomm, replacement: Replacement | None) -> MPI.Intracomm:
    """Return a communicator of these ranks and, last, a process, which calls `connect` meanwhile (collective).

    By a port: a communicator of all that MPI_Intercomm_create makes does not know who is on which host.
    """
    port = ""
    if replacement:
        port = MPI.Open_port()
        replacement.between.send(port, 0, PORT)
    found = comm.Accept(port).Merge(high=False)
    if replacement:
        MPI.Close_port(port)
    return found


def connect() -> MPI.Intracomm:
    """Return a communicator of the ranks that accept this process and, last, this process, which replaces a rank."""
    between = MPI.Comm.Get_parent()
    sys.audit("ringprop.come")
    between.Send(bytearray(0), 0, COME)
    port = between.recv(source=0, tag=PORT)
    sys.audit("ringprop.connect")
    merged = MPI.COMM_SELF.Connect(port).Merge(high=True)
    sys.audit("ringprop.join")
    return merged


@contextmanager
def watching(replacements: Sequence[Replacement]) -> Iterator[None]:
    """End all ranks if a process dies while this block accepts it, and MPI still waits after a while."""

    def look(over):
        while not over.wait(PAUSE):
            if any(each.failed() for each in replacements) and not over.wait(STAYS):
                abort(
                    launcher.LOST, f"{rank_of_world()}: a process has died while all took it in, and MPI waits for it"
                )

    try:
        with processes.meanwhile(look, "replacements"):
            yield
    finally:
        close(replacements)


@contextmanager
def parent_alive() -> Iterator[None]:
    """End this process if its parent ends during this block, in which it connects."""

    def look(over):
        pipe = select.poll()
        pipe.register(END, 0)  # whoever reads from it is no more: POLLERR
        while not over.wait(PAUSE):
            if pipe.poll(0) and not over.wait(STAYS):
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        with processes.meanwhile(look, "parent"):
            yield
    finally:
        os.close(END)
