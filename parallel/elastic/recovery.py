"""Runs whose ranks may die: the ranks that live start the same training again, from the latest step.

A run is a function of an `ElasticContext`, from a communicator to result.json. When a rank dies it is called again: it
makes a communicator of the members, a trainer, loaders that distribute the samples again, and continues from the latest
`RecoveryPoint` of any member. So every strategy that can load a state survives, without code of its own.
"""

from __future__ import annotations

import shutil
import sys
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
from parallel.elastic import recovery_points
from parallel.elastic.heartbeat import Heartbeat, identity
from parallel.elastic.membership import Membership, count
from parallel.elastic.partner_checkpoints import PartnerCheckpoints
from parallel.elastic.policy import Policy
from parallel.elastic.recovery_points import RecoveryPoint, StepTracker
from parallel.elastic.sample_log import Place, SampleLog
from parallel.launch import launcher

AGAIN = 10  # recoveries at most from one step
IDLE = 0.05  # seconds between two looks of a member that waits
DONE = 913  # tag of the message that the others are done
Result = TypeVar("Result")
current: ElasticContext | None = None  # of this process, for whoever ends it


class TooManyDeaths(RuntimeError):
    """Ranks die again and again, and training makes no progress."""


class ElasticContext:
    """The state that lasts from one attempt to the next.

    Parameters
    ----------
    policy : Policy
    replacement : bool
        Whether this process was started in place of a lost one.

    Attributes
    ----------
    members : Membership
    tracker, sample_log : callbacks of `nn.fit`
        The tracker is the first; the sample log is there once the directory of the run is known.
    trained : bool
        Whether all steps were made, and what follows is to be done again, from the last checkpoint.
    recoveries : list of float
        Seconds from when this member knew of a death until it trained on.
    """

    def __init__(self, policy: Policy, replacement: bool = False):
        self.members = Membership(policy, replacement)
        self.tracker, self.sample_log, self.trained = StepTracker(PartnerCheckpoints(policy.buddy)), None, False
        self.recoveries: list[float] = []
        self.noticed = 0.0
        self.termination = Termination()  # who was asked to end, and recovers first, still is
        self.heart: Heartbeat | None = None
        self.identities: dict[int, str] = {}  # number of each member -> its process
        self.lock_content = ""  # what the lock of the run's directory says of its holder
        self.idle: list[int] = []  # ranks that are too many for the mesh
        self.tried = -1, 0  # the furthest step from which training has gone on; deaths since then

    @property
    def again(self) -> bool:
        """Return whether this is not the first attempt."""
        return self.members.generation > 0

    def start_attempt(self, out: str | None) -> tuple[str | None, RecoveryPoint | None]:
        """Start an attempt; return (directory of the run, recovery point), alike on all members (collective).

        Raises
        ------
        TooManyDeaths
            On all members.
        """
        root = self.members.root
        if self.again:
            outs, tried = zip(*root.allgather((out, self.tried)), strict=True)
            out, (step, times) = next(filter(None, outs), None), max(tried)
            self.tried = step, times + 1
            if times >= AGAIN:
                since = f"training went on from step {step}" if step >= 0 else "the beginning"
                raise TooManyDeaths(
                    f"ranks have died {times + 1} times since {since}, and it came no further: given up; mend what "
                    f"they died of, as said above, and continue with --resume {out}"
                )
        point, self.trained = recovery_points.share(root, self.tracker) if self.again else (None, False)
        self.retired = self.tracker.training  # messages of the last attempt may still come into its memory
        self.tracker.start_attempt(self.members.generation, point, self._trains)
        return out, point

    def _trains(self) -> None:
        policy = self.members.policy
        self.heart = Heartbeat(
            self.sample_log.directory.with_name("beats"),
            self.members.number,
            policy.heartbeat,
            policy.loop,
            policy.silent == "kill",
            lambda: self.tracker.training.trainer.steps,
            self.identities,
        )
        self.heart.start()
        if self.noticed:
            self.recoveries.append(round(time.monotonic() - self.noticed, 3))
            self.noticed = 0.0

    def communicator(self, ranks: int, **settings) -> Communicator | None:
        """Return a communicator of the first members; None on the others, which wait for a death (collective).

        By messages: a collective in memory that ranks share can be half made.
        """
        sys.audit("ringprop.make_communicator", self)
        self.idle = list(range(ranks, self.members.root.size))
        with bounded(settings.get("watch", 0.0), "to make a communicator"):  # whose watchdog is not there yet
            root = self.members.root
            self.identities = dict(root.allgather((self.members.number, identity())))
            comm = self.members.work(ranks)
            return Communicator(comm, memory=False, **settings) if comm != MPI.COMM_NULL else None

    def wait(self) -> None:
        """Wait, as a member too many, until the others are done; raise MPI's exception if one dies.

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

    def open_sample_log(self, out: Path, step: int = 0, progress: dict | None = None) -> SampleLog:
        """Return the sample log of this attempt, which continues at the first member's step (collective)."""
        progress = progress or {}
        place: Place = progress.get("epoch", 0), progress.get("batch", 0)
        root = self.members.root
        if self.sample_log is None:
            self.sample_log = SampleLog(out / "ledger", self.members.number)
        known = root.allgather(self.sample_log.known)
        if not any(begun for begun, *_ in known):  # nobody goes on from what may be there, of a run that was killed
            if root.rank == 0:
                self.sample_log.close()
            root.Barrier()
        step, place = root.bcast((step, place))
        if self.again and step > self.tried[0]:
            self.tried = step, 0
        self.sample_log.begin_generation(step, place, known)
        return self.sample_log

    def stop_loop_detection(self) -> None:
        """Stop looking for endless loops: training is over, so no rank makes steps."""
        if self.heart:
            self.heart.stuck.limit = 0

    def stop_heartbeat(self) -> None:
        """Stop the heartbeat: no rank waits for another one from now on, or a new attempt starts."""
        if self.heart:
            self.heart.stop()
            self.heart = None

    def close(self) -> None:
        """Tell the members that wait, and remove the files for other members; all is written (on the first rank)."""
        for rank in self.idle:
            self.members.root.Send(bytearray(0), rank, DONE)
        self.sample_log.close()
        shutil.rmtree(self.sample_log.directory.with_name("beats"), ignore_errors=True)

    def describe(self) -> str:
        """Return which ranks were lost and which continue, in words."""
        members, after = self.members, f" after {time.monotonic() - self.noticed:.2f} s" * bool(self.noticed)
        lost = f"lost so far: rank {', '.join(map(str, members.lost))}"
        ranks = members.root.size - len(self.idle)
        goes = "goes" if ranks == 1 else "go"
        waiting = f", {count(len(self.idle))} too many for the mesh" * bool(self.idle)
        came = f"; {count(len(members.joined))} came in their place" * bool(members.joined)
        return f"{lost}{came}; {count(ranks)} {goes} on{waiting}{after}"

    def summary(self) -> dict:
        """Return the entry of result.json."""
        members, log = self.members, self.sample_log
        return {
            "lost": members.lost,
            "joined": members.joined,
            "recovery_seconds": self.recoveries,
            "ledger": {"epochs": len(log.checked), "samples": sum(log.checked.values())},
        }


@contextmanager
def bounded(limit: float, what: str) -> Iterator[None]:
    """End all ranks if this block takes longer than `limit` seconds (0: never)."""
    said = f"{rank_of_world()}: has waited {limit:g} s for others {what}: stopped, busy, or in a loop"
    timer = threading.Timer(limit, abort, (HANGING, said))
    timer.daemon = True
    if limit:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_elastic(policy: Policy, run: Callable[[ElasticContext], Result], limit: float) -> Result:
    """Call `run` again after each death, until all members have succeeded; return its result. `limit`: see `bounded`.

    Raises
    ------
    TooFew
        Fewer ranks are left than the policy asks for.
    """
    global current
    elastic = current = ElasticContext(policy, launcher.is_replacement())
    members, result = elastic.members, None
    while True:
        try:
            result, fine = run(elastic), True
        except Exception as error:
            if not members.died(error):
                raise
            fine = False
        elastic.noticed = time.monotonic()
        elastic.stop_loop_detection()
        with bounded(limit, "to agree that ranks have died, or to take their places"):
            if members.agree(fine):
                return result
            members.recover()
        elastic.stop_heartbeat()
