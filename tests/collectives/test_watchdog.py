"""Hanging programs are told as who waits for whom; calls that do not fit are refused by all ranks."""

import math
import threading
import time
import types

import numpy as np
import pytest
from conftest import PATIENCE, longer

from parallel.launch import launcher

PROGRAM = """
import sys, time
import numpy as np
from mpi4py import MPI
from collectives import Communicator
c = Communicator(MPI.COMM_WORLD, watch=LIMIT)
x = np.ones(1000, "f4")
y, long = x.copy(), np.ones(100_000)
c.Allreduce(x, y)

def deadlock():
    c.Ssend(x, (c.rank + 1) % 3)

def missing():
    if c.rank == 1:
        compute()
    c.Allreduce(x, y, MPI.MAX)

def again():
    for _ in range(3):
        c.Allreduce(MPI.IN_PLACE, long)
    if c.rank == 1:
        compute()
    c.Allreduce(MPI.IN_PLACE, long)

def compute():
    time.sleep(1000)

def mixed():
    if c.rank == 2:
        c.Recv(x, source=0, tag=5)
    c.Bcast(x, root=1)
    c.Barrier()

def nonblocking():
    first, second = c.Iallreduce(None, y), None
    if c.rank != 1:
        second = c.Iallreduce(x, y)
        second.Wait()
    compute()

def persistent():
    request = c.Allreduce_init(x, y)
    if c.rank != 1:
        request.Start()
        request.Wait()
    compute()

def refused():
    try:
        c.Allreduce(x[:-1] if c.rank == 1 else x, y, MPI.MAX)
    except ValueError:
        compute()

def elsewhere():
    other = Communicator(MPI.COMM_WORLD, watch=30)
    request = c.Iallreduce(None, long, algorithm="ring")
    if c.rank == 1:
        other.Recv(x, source=0)
    request.Wait()

def trainer():
    import nn
    from parallel import DistributedDataParallel
    network = nn.Network(nn.Linear(4, 2), (4,))
    trained = DistributedDataParallel(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.1), c, node_memory="on")
    batch = np.ones((1, 4), "f4"), np.zeros(1, "i8"), 3
    trained.step(*batch)
    if c.rank == 1:
        compute()
    trained.step(*batch)

WHAT()
"""

CASES = {
    "deadlock": ["Ssend((1000,) float32, 1), after collective 1", "in deadlock", "cycle: 0 -> 1 -> 2 -> 0"],
    "missing": [
        "rank 0: Allreduce((1000,) float32, (1000,) float32, MAX), collective 2",
        "rank 1: not in a call, after collective 1",
        "in compute",
        "missing from Allreduce: rank 1",
    ],
    "again": [
        "rank 0: Allreduce(IN_PLACE, (100000,) float64), collective 5",
        "in again",
        "rank 1: not in a call, after collective 4",
        "in compute",
        "missing from Allreduce: rank 1",
    ],
    "nonblocking": [
        "rank 0: Iallreduce((1000,) float32, (1000,) float32), collective 3",
        "in nonblocking",
        "rank 1: not in a call, after collective 2",
        "missing from Iallreduce: rank 1",
    ],
    "persistent": [
        "rank 0: persistent allreduce((1000,) float32, (1000,) float32), collective 3",
        "rank 1: not in a call, after collective 2",
        "missing from persistent allreduce: rank 1",
    ],
    "refused": [
        "rank 0: Allreduce((1000,) float32, (1000,) float32, MAX), collective 2",
        "rank 1: not in a call, after collective 2",
        "aborted Allreduce, collective 2, with ValueError: ",
        "at program.py",
        "missing from Allreduce: rank 1",
    ],
    "elsewhere": [
        "rank 0: Iallreduce(None, (100000,) float64, algorithm='ring'), collective 2",
        "rank 1: in Recv of another communicator, after collective 2, at program.py",
        "begun and not done: Iallreduce, collective 2, at program.py",
    ],
    "trainer": ["rank 0: a wait in node memory('", "rank 1: not in a call", "in compute", "memory: rank 1"],
    "mixed": ["rank 2: Recv((1000,) float32, source=0, tag=5)", "cycle: 0 -> 2 -> 0"],
}


@pytest.mark.parametrize("what", CASES)
def test_a_hanging_program_is_reported_once_and_ended(what, tmp_path):
    program, ranks = tmp_path / "program.py", 3 if what in ("deadlock", "mixed") else 2
    for limit in longer(0.6):
        program.write_text(PROGRAM.replace("WHAT", what).replace("LIMIT", str(limit)))
        said: list[str] = []
        status = launcher.run([program], ranks=ranks, timeout=PATIENCE, stdout=said.append)
        text = "".join(said)
        assert status == 86 and text.count("watchdog: rank") <= 1, text
        missing = [words for words in CASES[what] if words not in text]
        if not missing:
            break
    assert not missing and "watchdog: rank" in text, text


@pytest.mark.mpi(ranks=1)
def test_the_stack_of_a_rank_that_computes_is_left_alone(comm, monkeypatch):
    """A long epoch in node-shared memory makes no calls: its stack is not looked at."""
    from collectives import Communicator
    from collectives.failures import watchdog

    looks, stacks = [], []
    look, outside = watchdog.Watchdog.doing, watchdog.outside
    monkeypatch.setattr(watchdog.Watchdog, "doing", lambda self: looks.append(1) or look(self))
    monkeypatch.setattr(watchdog, "outside", lambda *given: stacks.append(1) or outside(*given))
    communicator = Communicator(comm, watch=0.1)
    while len(looks) < 3:
        time.sleep(0.1)
    communicator.release()
    assert not stacks


@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize("asked", [False, True], ids=["alone", "another rank reports"])
def test_one_call_is_reported_once_and_by_one_rank(comm, capfd, asked):
    from collectives import Communicator

    communicator = Communicator(comm, watch=0.2, abort=False)
    watchdog, looks, reported = communicator.watchdog, [], threading.Event()
    look, report = watchdog.look, watchdog.report
    watchdog.report = lambda states: reported.set() or report(states)
    watchdog.questioned = math.inf if asked else 0.0
    x = np.zeros(3)

    def answer():
        asked or reported.wait()
        watchdog.look = lambda: looks.append(1) or look()
        while len(looks) < 12:
            time.sleep(0.01)
        comm.Send(np.ones(3), 0)

    answering = threading.Thread(target=answer)
    answering.start()
    communicator.Recv(x, 0)
    answering.join()
    communicator.release()
    assert capfd.readouterr().err.count("watchdog: rank 0 has been in Recv") == (not asked)


@pytest.mark.mpi(ranks=1)
def test_time_in_which_a_rank_stood_still_does_not_count(comm, monkeypatch):
    """Of a job that was suspended all ranks find their calls too long when it goes on."""
    from collectives import Communicator
    from collectives.failures import awake

    passed, looks = [0.0], []
    monkeypatch.setattr(awake, "time", types.SimpleNamespace(monotonic=lambda: passed[0]))
    communicator = Communicator(comm, watch=8, abort=False)
    watchdog = communicator.watchdog
    look, reported = watchdog.look, threading.Event()

    def suspended():
        if watchdog.calls.current and not reported.is_set():
            looks.append(1)
            passed[0] += 1000.0
        look()

    monkeypatch.setattr(watchdog, "look", suspended)
    monkeypatch.setattr(watchdog, "report", lambda states: reported.set() or "")
    answering = threading.Thread(target=lambda: reported.wait(PATIENCE) and comm.Send(np.ones(3), 0))
    answering.start()
    communicator.Recv(np.zeros(3), 0)
    answering.join()
    communicator.release()
    assert len(looks) > 8, "a second for each"
    clock = awake.Awake(largest_step=3)
    for moved, now in ((0.5, 0.5), (2, 2.5), (100, 5.5), (0, 5.5)):
        passed[0] += moved
        assert clock.now() == now


def test_who_is_missing_from_a_collective():
    """Whoever has not come so far, is in another one in its place, or left it with an error; not who is done with it,
    or past it."""
    from collectives.failures.watchdog import Watchdog

    states = {
        rank: {"collectives": number, "aborted": (5, "") if rank == 7 else None} | ({"name": name} if name else {})
        for rank, number, name in (
            (0, 5, "Allreduce"),
            (1, 5, "Bcast"),
            (2, 5, "Allreduce"),
            (3, 6, "Bcast"),
            (4, 5, None),
            (5, 4, "Allreduce"),
            (6, 4, None),
            (7, 6, "Allreduce"),
        )
    }
    assert Watchdog.missing(types.SimpleNamespace(size=9), states[0], states) == [1, 5, 6, 7, 8]


@pytest.mark.mpi(ranks=[2])
def test_going_on_after_a_report(comm, ranks, monkeypatch):
    from collectives import Communicator
    from collectives.failures import watchdog

    said = []
    monkeypatch.setattr(watchdog, "print", lambda text, **_: said.append(text) or comm.send("go on", 1), raising=False)
    first = Communicator(comm, watch=0.3, abort=False)
    communicator = first.Split()  # with the same settings
    if communicator.rank:
        comm.recv(source=0)
    x = np.ones(3)
    communicator.Allreduce(None, x)
    assert (x == 2).all()
    assert len(said) == (comm.rank == 0)
    assert all("missing from Allreduce: rank 1" in text for text in said)
    communicator.Free()
    first.release()
    first.Allreduce(None, x)


@pytest.mark.mpi(ranks=[3])
def test_ranks_that_do_not_agree_are_refused_with_both_sides(comm, ranks):
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm, debug=True)
    counts = [1] * 400 + [comm.rank]  # more than there is room for in what a rank says, and different at the end only
    with pytest.raises(ValueError, match=r"the ranks do not agree: .*counts \[1, 1.* \.\.\. [0-9a-f]{8}"):
        communicator.Reduce_scatter(np.ones(400), np.ones(1), counts)
    odd = communicator.rank == 1
    f4, f8 = np.ones(6, "f4"), np.ones(3, "f8")
    for call, said in (
        (lambda: communicator.Allreduce(None, f4[: 5 if odd else 6]), r"Allreduce\(6 of MPI_FLOAT, SUM\) at"),
        (lambda: communicator.Allreduce(None, f8 if odd else f4), r"rank 1 calls Allreduce\(3 of MPI_DOUBLE, SUM\)"),
        (lambda: communicator.Bcast(f8.view("i8") if odd else f8), r"rank 1 calls Bcast\(3 of MPI_LONG, root 0\)"),
        (lambda: communicator.Bcast(f8, root=odd), "root 0.*root 1"),
        (lambda: communicator.Allreduce(None, f4, MPI.MAX if odd else MPI.MIN), "MIN.*MAX"),
        (lambda: communicator.Barrier() if odd else communicator.Bcast(f8), r"Bcast.*rank 1 calls Barrier\(\)"),
        (lambda: communicator.bcast(1) if odd else communicator.allgather(1), "allgather.*bcast"),
        (lambda: communicator.Gather(f8[: 1 + odd], np.ones(6)), "Gather.1 of MPI_DOUBLE.*2 of"),
        (lambda: communicator.Bcast(f4[:: 2 if odd else 1]), "with a mistake: .*contiguous"),
    ):
        with pytest.raises(ValueError, match=f"(?s)the ranks do not agree: rank 0 calls.*{said}"):
            call()
    root = communicator.rank == 0
    whole, part = np.arange(6.0), np.empty(2)
    communicator.Scatter(whole if root else None, MPI.IN_PLACE if root else part)
    communicator.Gather(MPI.IN_PLACE if root else part, whole if root else None)
    communicator.Allgather(part.copy() if not root else whole[:2], np.empty(6))
    communicator.Alltoall(whole.copy(), np.empty(6))
    communicator.Reduce_scatter(np.ones(6), part, [2, 2, 2])
    communicator.Reduce_scatter_block(np.ones(6), part)
    communicator.Gatherv(np.ones(communicator.rank), [np.empty(3), [0, 1, 2]] if root else None)
    assert communicator.allreduce(1) == 3
    communicator.release()


@pytest.mark.mpi(ranks=[3])
@pytest.mark.parametrize("progress", [False, True], ids=["poked", "thread"])
def test_nonblocking_ones_that_do_not_agree_are_refused_before_data_moves(comm, ranks, progress):
    """And right programs run as ever, also where a rank starts a collective only after another has waited for it."""
    from mpi4py import MPI

    from collectives import Communicator

    communicator = Communicator(comm, progress=progress, debug=True).Dup()
    odd = communicator.rank == 1
    x, y, whole = np.ones(6, "f4"), np.zeros(6, "f4"), np.zeros(18, "f4")
    for start, said in (
        (
            lambda: communicator.Iallreduce(x, y, MPI.MAX if odd else MPI.SUM),
            "6 of MPI_FLOAT, SUM.*6 of MPI_FLOAT, MAX",
        ),
        (lambda: communicator.Iallreduce(x[:5], y[:5]) if odd else communicator.Iallreduce(x, y), r"Iallreduce\(5 of"),
        (lambda: communicator.Ibcast(y, root=odd), "Ibcast.*root 0.*rank 1 calls Ibcast.*root 1"),
        (lambda: communicator.Iallgather(x, whole) if odd else communicator.Ibcast(y), "Iallgather"),
        (lambda: communicator.Ireduce_scatter(x, y, [3, 1 + odd, 2 - odd]), r"counts \[3, 1, 2\].*counts \[3, 2, 1\]"),
    ):
        request, after = start(), communicator.Iallreduce(x, whole[:6])
        after.Wait()  # what comes behind is done
        assert (whole[:6] == 3).all()
        with pytest.raises(ValueError, match=f"(?s)the ranks do not agree: rank 0 calls.*{said}"):
            request.Wait()
        assert not y.any()
    before = communicator.Iallreduce(x, y)
    with pytest.raises(ValueError, match=r"Iallreduce.*Allreduce"):
        communicator.Allreduce(None, x) if odd else communicator.Iallreduce(None, x).Wait()
    before.Wait()
    assert (y == 3).all()
    if odd:
        communicator.recv(source=0)
    request = communicator.Iallreduce(None, x)
    if communicator.rank == 0:
        communicator.send("I have begun", 1)
    communicator.Ibcast(y, root=2).Wait()
    assert request.Test() and (x == 3).all()
    request = communicator.Iallreduce(None, np.ones(1 << 16))
    if odd:
        request.Wait()  # before it comes to what the others call
    communicator.Barrier()
    assert request.Test()
    with pytest.raises(ValueError, match=r"SUM.*MAX"):
        communicator.Iallreduce(x, y, MPI.MAX if odd else MPI.SUM, algorithm="native")
    communicator.Free()


@pytest.mark.mpi(ranks=[2])
def test_observing_on_some_ranks_only_is_refused(comm, ranks, monkeypatch):
    from collectives import Communicator

    monkeypatch.setenv("RINGPROP_DEBUG", str(comm.rank))
    with pytest.raises(ValueError, match=r"'debug': False.*'debug': True"):
        Communicator(comm)
    monkeypatch.delenv("RINGPROP_DEBUG")
    with pytest.raises(ValueError, match=r"'watch': 0.0"):
        Communicator(comm, watch=comm.rank * 9.0)


@pytest.mark.mpi(ranks=[2])
def test_other_algorithms_on_some_ranks_are_refused(comm, ranks, monkeypatch, tmp_path):
    """One would send what another does not wait for."""
    from collectives import Communicator
    from collectives.choosing.selection import TABLE, save

    with pytest.raises(ValueError, match=r"ranks disagree on algorithms: rank 0 has .*'ring'.*, rank 1 .*'doubling'"):
        Communicator(comm, allreduce=("ring", "doubling")[comm.rank])
    table = tmp_path / "table.json"
    save(table, {"node": TABLE["network"]})
    if comm.rank:
        monkeypatch.setenv("RINGPROP_TUNE", str(table))
    with pytest.raises(ValueError, match="table"):
        Communicator(comm)


@pytest.mark.mpi(ranks=[2])
def test_ranks_disagree_on_node_memory(comm, ranks):
    from collectives import Communicator

    with pytest.raises(ValueError, match="memory"):
        Communicator(comm, memory=comm.rank == 1)


@pytest.mark.mpi(ranks=[2])
def test_algorithms_that_ranks_ask_for_are_compared(comm, ranks):
    from collectives import ALGORITHMS, Communicator

    communicator, x = Communicator(comm, debug=True), np.ones(9)
    for ours, theirs, said in (
        ("ring", "doubling", "algorithm ring.*algorithm doubling"),
        (None, "ring", r"SUM\) at.*algorithm ring"),
    ):
        with pytest.raises(ValueError, match=f"(?s)the ranks do not agree: .*{said}"):
            communicator.Allreduce(None, x, algorithm=theirs if comm.rank else ours)
    communicator.Allreduce(None, x, algorithm=ALGORITHMS["allreduce"]["ring"] if comm.rank else "ring")
    assert (x == 2).all()
    communicator.release()


@pytest.mark.mpi(ranks=[1])
def test_every_collective_method_is_registered(comm):
    from mpi4py import MPI

    from collectives import Communicator
    from collectives.communicator import COLLECTIVE
    from collectives.failures.watchdog import PEER

    assert not {"explain", "progress", "Create_group", "Free", "release", "_prepare"} & {*COLLECTIVE}
    mpi = [name for name in vars(Communicator) if hasattr(MPI.Intracomm, name) and not name.startswith("_")]
    assert {*mpi, "compile", "Run", "Irun", "empty", "Allreduce_init"} - {"Create_group", "Free"} <= {*COLLECTIVE}
    assert all(hasattr(MPI.Intracomm, name) for name in PEER)
    communicator = Communicator(comm, watch=100)
    seen = communicator.calls.collectives
    communicator.empty(3), communicator.Dup().Free(), communicator.Split().Free(), communicator.Clone().Free()
    assert communicator.calls.collectives == seen + 4
    communicator.release()
