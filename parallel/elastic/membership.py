"""Who takes part in a run that survives: ranks that die are left out, or others take their places.

All members make the same calls. What they do together is an **attempt**: it ends in a vote (`agree`), of which all that
live have one result, whatever has happened to whom. Where it says no, all leave what they were doing (every
communicator is revoked, so nobody waits for one that does not come), and `recover`:

    shrink     a communicator of those that live (MPI_Comm_shrink)
    respawn    as many processes as are missing are started, and get the numbers of the lost ones
    agree      whether that has worked; a death meanwhile begins it anew

A member's number is its first rank, and stays; its rank changes. Needs MPI's fault tolerance (ULFM; Bland et al. 2013,
Post-failure recovery of MPI communication capability).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI
from threadpoolctl import threadpool_info, threadpool_limits

from collectives.failures import revocation
from collectives.progress import in_flight
from parallel.elastic.policy import Policy
from parallel.launch import launcher, processes

NAME = "RINGPROP_NEWCOMER"  # in the environment of a process that takes the place of a lost rank
COMES = 60.0  # seconds within which it must have joined
LOOK = 0.05  # seconds between two looks whether it lives
PAUSE = 0.002  # seconds between two looks whether a process has come
SEEN = 1.0  # seconds within which a death shows that has ended a call in another way than MPI's


class TooFew(RuntimeError):
    """Fewer ranks are left than the run goes on with."""


class Membership:
    """The ranks of a run, as they come and go.

    Parameters
    ----------
    policy : Policy
    joins : bool
        Whether this process was started in place of a lost one.

    Attributes
    ----------
    root : MPI.Intracomm
        Of those that were there at the last recovery; used to agree and to tell, never to train.
    numbers : list of int
        Of the members, in the order of their ranks.
    number : int
        This one's.
    generation : int
        How many times there were others.
    lost, joined : list of int
        Numbers of members, as they went and came.
    """

    def __init__(self, policy: Policy, joins: bool = False):
        self.policy, self.generation = policy, 0
        self.lost: list[int] = []
        self.joined: list[int] = []
        revocation.begin()
        if joins:
            self._join()
            return
        self.root = revocation.note(MPI.COMM_WORLD)
        self.numbers, self.number = list(range(self.root.size)), self.root.rank
        self.size = len(self.numbers)  # as it was begun

    # ------------------------------------------------------------------------------------------------- an attempt

    def work(self, ranks: int) -> MPI.Intracomm:
        """A communicator of the first so many ranks to train on; COMM_NULL on others (collective)."""
        trains = self.root.rank < ranks
        return revocation.note(self.root.Split(0 if trains else MPI.UNDEFINED, self.root.rank))

    def died(self, error: BaseException) -> bool:
        """Whether an exception is the consequence of a death."""
        if revocation.of_a_death(error):
            return True
        end = time.monotonic() + SEEN
        while time.monotonic() < end:
            try:
                self.root.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # which lets MPI look, too
            except MPI.Exception:
                return True
            time.sleep(0.01)
        return False

    def agree(self, fine: bool) -> bool:
        """Whether the attempt has gone well for all members, and all live (collective)."""
        if not fine:
            for queue in tuple(in_flight):
                queue.abandon()
            revocation.revoke_all()
        return agree(self.root, fine)

    # -------------------------------------------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Have members that live (collective over these).

        Raises
        ------
        TooFew
            On all of them.
        """
        while True:
            living = self.root.Shrink()
            done, numbers = False, self.numbers
            try:
                numbers = living.allgather(self.number)
                found = self._refill(living, numbers) if self.policy.kind == "respawn" else living
                done = True
            except MPI.Exception:
                living.Revoke()
            if agree(living, done):
                break
            self.root = living
        self.lost += sorted(set(self.numbers) - set(numbers))
        if len(numbers) < self.policy.min and found is living:
            self.root, self.numbers = living, numbers  # those that end together
            raise TooFew(f"{count(len(numbers))} left, and --elastic has min={self.policy.min}")
        if found is not living:
            self.joined += sorted(set(range(self.size)) - set(numbers))
            numbers = list(range(self.size))
        self.root, self.numbers = revocation.note(found), numbers
        self.generation += 1

    def _refill(self, living: MPI.Intracomm, numbers: list[int]) -> MPI.Intracomm:
        """Start a process for every member that is missing; those that live, and they (collective).

        Where none can be started, those that live alone.
        """
        missing = sorted(set(range(self.size)) - set(numbers))
        lost, joined = [*self.lost, *missing], [*self.joined, *missing]
        found = living
        for place in range(len(missing)):  # one by one: mpirun ends with one process all that were started with it
            found = self._grow(found)
            if found is None:
                return living
            found.bcast((missing, place, self.size, self.generation + 1, lost, joined, threads()), 0)
        return found.Split(0, self.number) if missing else living

    def _grow(self, comm: MPI.Intracomm) -> MPI.Intracomm | None:
        """The ranks of a communicator and a process that is started; None where that cannot be (collective)."""
        name = comm.bcast(os.urandom(8).hex())
        with looking_for(name) as gone:
            between = self._spawn(comm, name)
            if between is None:
                return None
            come = between.Irecv(bytearray(0), 0)  # in Merge nobody would know of its death
            while not come.Test():
                if gone.is_set():
                    raise MPI.Exception(MPI.ERR_PROC_FAILED)
                time.sleep(PAUSE)  # who comes has much to load, and needs the core
        return between.Merge(high=False)

    def _spawn(self, comm: MPI.Intracomm, name: str) -> MPI.Intercomm | None:
        """Start one process, with this name in its environment (collective); None where that cannot be."""
        info = MPI.Info.Create()
        info.Set("wdir", os.getcwd())
        try:
            command = [f"{launcher.JOINS}={self.size}", f"{NAME}={name}", sys.executable, *sys.orig_argv[1:]]
            return comm.Spawn("env", command, 1, info, root=0)
        except MPI.Exception as error:
            if revocation.of_a_death(error):
                raise
            return None
        finally:
            info.Free()

    def _join(self) -> None:
        """This process takes the place of a lost one: the other half of `_refill`."""
        between = MPI.Comm.Get_parent()
        for living in range(between.Get_remote_size()):
            between.Send(bytearray(0), living)
        merged = between.Merge(high=True)
        missing, place, self.size, self.generation, self.lost, self.joined, limit = merged.bcast(None, 0)
        threadpool_limits(limit)  # as those that live: bits depend on it
        self.number = missing[place]
        for _ in missing[place + 1 :]:
            merged = self._grow(merged)
            if merged is None:
                raise RuntimeError("no process can be started for another lost rank")
            merged.bcast((), 0)
        self.root, self.numbers = revocation.note(merged.Split(0, self.number)), list(range(self.size))

    def leave(self, status: int = 0) -> None:
        """End this process, when all have agreed: without MPI_Finalize, which would wait for the dead."""
        if self.root.rank == 0:
            launcher.ended(status)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def agree(comm: MPI.Intracomm, fine: bool) -> bool:
    """One answer for all ranks of a communicator that live: whether all are fine, and none has died."""
    try:
        return bool(comm.Agree(int(fine)))
    except MPI.Exception:
        return False


@contextmanager
def looking_for(name: str) -> Iterator[threading.Event]:
    """In this block an event says that the process of that name has been there, and has died; or that it never comes.

    MPI does not tell of the death of one that has not joined.
    """
    ended, gone, end = threading.Event(), threading.Event(), time.monotonic() + COMES

    def look():
        seen = False
        while not ended.wait(LOOK) and not gone.is_set():
            here = bool(processes.find(name, variable=NAME))
            if (seen and not here) or time.monotonic() > end:
                gone.set()
            seen = seen or here

    thread = threading.Thread(target=look, name="newcomer", daemon=True)
    thread.start()
    try:
        yield gone
    finally:
        ended.set()
        thread.join()


def threads() -> int:
    """With how many threads BLAS works here."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)


def count(ranks: int) -> str:
    """So many ranks, in words."""
    return f"{ranks} rank{'s' * (ranks != 1)}"
