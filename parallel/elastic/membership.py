"""The members of an elastic run: ranks that die are left out, or replaced.

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
import time

from mpi4py import MPI
from threadpoolctl import threadpool_info, threadpool_limits

from collectives.failures import revocation
from collectives.progress import in_flight
from parallel.elastic import replacements
from parallel.elastic.policy import Policy
from parallel.launch import launcher

SEEN = 1.0  # seconds within which a death shows that has ended a call in another way than MPI's


class TooFew(RuntimeError):
    """Fewer ranks are left than the run continues with."""


class Membership:
    """The ranks of a run, as they leave and join.

    Parameters
    ----------
    policy : Policy
    replacement : bool
        Whether this process was started in place of a lost one.

    Attributes
    ----------
    root : MPI.Intracomm
        Of those that were there at the last recovery; used to agree and to report, never to train.
    numbers : list of int
        Of the members, in the order of their ranks.
    number : int
        This one's.
    generation : int
        How many times there were others.
    lost, joined : list of int
        Numbers of members, as they went and came.
    """

    def __init__(self, policy: Policy, replacement: bool = False):
        self.policy, self.generation = policy, 0
        self.lost: list[int] = []
        self.joined: list[int] = []
        revocation.begin()
        if replacement:
            self._join()
            return
        self.root = revocation.register(MPI.COMM_WORLD)
        self.numbers, self.number = list(range(self.root.size)), self.root.rank
        self.size = len(self.numbers)  # as it was begun

    # ------------------------------------------------------------------------------------------------- an attempt

    def work(self, ranks: int) -> MPI.Intracomm:
        """Return a communicator of the first ranks to train on; COMM_NULL on the others (collective)."""
        trains = self.root.rank < ranks
        return revocation.register(self.root.Split(0 if trains else MPI.UNDEFINED, self.root.rank))

    def died(self, error: BaseException) -> bool:
        """Return whether an exception is the consequence of a death."""
        if revocation.is_rank_death(error):
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
        """Return whether the attempt has succeeded for all members, and all live (collective)."""
        sys.audit("ringprop.agree", self)
        if not fine:
            for queue in tuple(in_flight):
                queue.abandon()
            revocation.revoke_all()
        return agree(self.root, fine)

    # -------------------------------------------------------------------------------------------------- recovery

    def recover(self) -> None:
        """Replace the members by those that live (collective over these).

        Raises
        ------
        TooFew
            On all of them.
        """
        sys.audit("ringprop.recover", self)
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
        self.root, self.numbers = revocation.register(found), numbers
        self.generation += 1

    def _refill(self, living: MPI.Intracomm, numbers: list[int]) -> MPI.Intracomm:
        """Start a process for every missing member; return a communicator of these and the living (collective).

        If none can be started, of the living alone.
        """
        sys.audit("ringprop.replace_ranks", self)
        missing = sorted(set(range(self.size)) - set(numbers))
        facts = self.size, self.generation + 1, [*self.lost, *missing], [*self.joined, *missing], threads()
        come = replacements.start(living, len(missing), self.size)
        if come is None:
            return living
        found = living
        with replacements.watching(come):
            for place, number in enumerate(missing):
                found = replacements.accept(found, come[place] if come else None)
                found.bcast((number, missing[place + 1 :], *facts), 0)
            return found.Split(0, self.number)

    def _join(self) -> None:
        """Join the members as a replacement of a lost one: the other half of `_refill`."""
        with replacements.parent_alive():
            merged = replacements.connect()
            self.number, others, self.size, self.generation, self.lost, self.joined, limit = merged.bcast(None, 0)
            threadpool_limits(limit)  # as those that live: bits depend on it
            for _ in others:
                merged = replacements.accept(merged, None)
                merged.bcast(None, 0)
            self.root, self.numbers = revocation.register(merged.Split(0, self.number)), list(range(self.size))

    def leave(self, status: int = 0) -> None:
        """End this process, when all have agreed: without MPI_Finalize, which would wait for the dead."""
        if self.root.rank == 0:
            launcher.ended(status)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def agree(comm: MPI.Intracomm, fine: bool) -> bool:
    """Return, alike on all living ranks of a communicator, whether all are fine and none has died."""
    try:
        return bool(comm.Agree(int(fine)))
    except MPI.Exception:
        return False


def threads() -> int:
    """Return the number of BLAS threads."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)


def count(ranks: int) -> str:
    """Return a number of ranks in words."""
    return f"{ranks} rank{'s' * (ranks != 1)}"
