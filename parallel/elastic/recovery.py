"""Runs of which ranks may die: the same training, begun again by those that live, from where they were.

A run is a function of a `Survivor`, from a communicator to result.json. Where a rank dies it is called again: it makes
a communicator of the members, a trainer, loaders that deal the samples anew, and goes on from the latest `Point` that
a member has. So whatever strategy can take over a state can survive, and none knows of it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mpi4py import MPI

from collectives import Communicator
from collectives.failures.job_end import HANGING, abort, rank_of_world
from nn.training.checkpoint_callback import Terminated, Termination
from parallel.elastic import points
from parallel.elastic.heartbeat import Heartbeat, identity
from parallel.elastic.ledger import Ledger, Place
from parallel.elastic.membership import Membership, count
from parallel.elastic.mirrors import Mirrors
from parallel.elastic.points import Keeper, Point
from parallel.elastic.policy import Policy
from parallel.launch import launcher

AGAIN = 10  # recoveries at most, without that training goes on from a later step
IDLE = 0.05  # seconds between two looks of a member that is one too many
DONE = 913  # tag with which it is told that the others are done
Result = TypeVar("Result")
current: Survivor | None = None  # of this process, for whoever ends it


class TooOften(RuntimeError):
    """Ranks die again and again, and training comes no further."""


class Survivor:
    """What lasts from one attempt to the next.

    Parameters
    ----------
    policy : Policy
    joins : bool
        Whether this process was started in place of a lost one.

    Attributes
    ----------
    members : Membership
    keeper, ledger : callbacks of `nn.fit`
        The keeper is the first; `ledger` is there when it is known where the run is kept.
    trained : bool
        Whether all steps were made, and what follows is to be done again, from the last checkpoint.
    recoveries : list of float
        Seconds from when this member knew of a death until it trained on.
    """

    def __init__(self, policy: Policy, joins: bool = False):
        self.members = Membership(policy, joins)
        self.keeper, self.ledger, self.trained = Keeper(Mirrors(policy.buddy)), None, False
        self.recoveries: list[float] = []
        self.noticed = 0.0
        self.termination = Termination()  # who was asked to end, and recovers first, still is
        self.heart: Heartbeat | None = None
        self.identities: dict[int, str] = {}  # number of each member -> its process
        self.held = ""  # what the lock of the run's directory says of its holder
        self.idle: list[int] = []  # ranks that are too many for the mesh
        self.tried = -1, 0  # the furthest step from which training has gone on; deaths since then

    @property
    def again(self) -> bool:
        """Whether this is not the first attempt."""
        return self.members.generation > 0

    def begin(self, out: str | None) -> tuple[str | None, Point | None]:
        """An attempt begins: (the directory of the run, the point to go on from) as all have them (collective).

        Raises
        ------
        TooOften
            On all members.
        """
        root = self.members.root
        if self.again:
            outs, tried = zip(*root.allgather((out, self.tried)), strict=True)
            out, (step, times) = next(filter(None, outs), None), max(tried)
            self.tried = step, times + 1
            if times >= AGAIN:
                since = f"training went on from step {step}" if step >= 0 else "the beginning"
                raise TooOften(
                    f"ranks have died {times + 1} times since {since}, and it came no further: given up; mend what "
                    f"they died of, as said above, and continue with --resume {out}"
                )
        point, self.trained = points.share(root, self.keeper) if self.again else (None, False)
        self.retired = self.keeper.training  # messages of the last attempt may still come into its memory
        self.keeper.begin(self.members.generation, point, self._trains)
        return out, point

    def _trains(self) -> None:
        policy = self.members.policy
        self.heart = Heartbeat(
            self.ledger.directory.with_name("beats"),
            self.members.number,
            policy.heartbeat,
            policy.loop,
            policy.silent == "kill",
            lambda: self.keeper.training.trainer.steps,
            self.identities,
        )
        self.heart.start()
        if self.noticed:
            self.recoveries.append(round(time.monotonic() - self.noticed, 3))
            self.noticed = 0.0

    def communicator(self, ranks: int, **settings) -> Communicator | None:
        """Of the first so many members; None on the others, which wait for a death (collective).

        By messages: a collective in memory that ranks share can be half made.
        """
        self.idle = list(range(ranks, self.members.root.size))
        with bounded(settings.get("watch", 0.0), "to make a communicator"):  # whose watchdog is not there yet
            root = self.members.root
            self.identities = dict(root.allgather((self.members.number, identity())))
            comm = self.members.work(ranks)
            return Communicator(comm, memory=False, **settings) if comm != MPI.COMM_NULL else None

    def wait(self) -> None:
        """This member is one too many: return when the others are done; MPI's exception, where one dies.

        Raises
        ------
        Terminated
            It was asked to end, as the others were, which save.
        """
        root = self.members.root
        with self.termination:
            self.termination.start()
            while not root.Iprobe(0, DONE):
                if self.termination.requested:
                    raise Terminated("ended by SIGTERM")
                time.sleep(IDLE)
        root.Recv(bytearray(0), 0, DONE)

    def write_down(self, out: Path, step: int = 0, progress: dict | None = None) -> Ledger:
        """The ledger of this attempt, which goes on from there, as the first member knows (collective)."""
        told = progress or {}
        place: Place = told.get("epoch", 0), told.get("batch", 0)
        root = self.members.root
        if self.ledger is None:
            self.ledger = Ledger(out / "ledger", self.members.number)
        known = root.allgather(self.ledger.known)
        if not any(begun for begun, *_ in known):  # nobody goes on from what may be there, of a run that was killed
            if root.rank == 0:
                self.ledger.close()
            root.Barrier()
        step, place = root.bcast((step, place))
        if self.again and step > self.tried[0]:
            self.tried = step, 0
        self.ledger.begin(step, place, known)
        return self.ledger

    def relax(self) -> None:
        """No more is trained: who makes no step now is in no loop."""
        if self.heart:
            self.heart.stuck.limit = 0

    def rest(self) -> None:
        """Nobody waits for another one from now on, or it begins anew."""
        if self.heart:
            self.heart.stop()
            self.heart = None

    def close(self) -> None:
        """All is written: on the first rank, tell who waits, and remove what was for the others."""
        for rank in self.idle:
            self.members.root.Send(bytearray(0), rank, DONE)
        self.ledger.close()
        shutil.rmtree(self.ledger.directory.with_name("beats"), ignore_errors=True)

    def told(self) -> str:
        """Who was lost, who goes on, in words."""
        members, after = self.members, f" after {time.monotonic() - self.noticed:.2f} s" * bool(self.noticed)
        lost = f"lost so far: rank {', '.join(map(str, members.lost))}"
        ranks = members.root.size - len(self.idle)
        goes = "goes" if ranks == 1 else "go"
        waiting = f", {count(len(self.idle))} too many for the mesh" * bool(self.idle)
        came = f"; {count(len(members.joined))} came in their place" * bool(members.joined)
        return f"{lost}{came}; {count(ranks)} {goes} on{waiting}{after}"

    def facts(self) -> dict:
        """For result.json."""
        members, ledger = self.members, self.ledger
        return {
            "lost": members.lost,
            "joined": members.joined,
            "recovery_seconds": self.recoveries,
            "ledger": {"epochs": len(ledger.checked), "samples": sum(ledger.checked.values())},
        }


@contextmanager
def bounded(limit: float, what: str) -> Iterator[None]:
    """In this block members do that together; where it takes more than so many seconds (0: ever), all ranks end."""
    said = f"{rank_of_world()}: has waited {limit:g} s for others {what}: stopped, busy, or in a loop"
    timer = threading.Timer(limit, abort, (HANGING, said))
    timer.daemon = True
    if limit:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def survive(policy: Policy, run: Callable[[Survivor], Result], limit: float) -> Result:
    """What `run` returns where it has gone well on all members at last; `limit` as of `bounded`.

    Raises
    ------
    TooFew
        Fewer ranks are left than the policy asks for.
    """
    global current
    survivor = current = Survivor(policy, launcher.joins())
    members, result = survivor.members, None
    while True:
        try:
            result, fine = run(survivor), True
        except Exception as error:
            if not members.died(error):
                raise
            fine = False
        survivor.noticed = time.monotonic()
        survivor.relax()
        with bounded(limit, "to agree that ranks have died, or to take their places"):
            if members.agree(fine):
                return result
            members.recover()
        survivor.rest()
