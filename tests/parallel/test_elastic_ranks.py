"""Ranks are killed at every moment of a run, and it ends as if nothing had been: the same bits, each sample once."""

import errno
import io
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import types
from functools import partial

import numpy as np
import pytest
from conftest import PATIENCE
from deadly import OPTIONS, ROOT, assert_as_if_nothing_had_been, needs_survivors, run_to_death, run_undisturbed

import nn
from collectives import Communicator
from collectives.failures.job_end import HANGING
from parallel import FullyShardedDataParallel, ZeRO1, ZeRO2
from parallel.command.main import TERMINATED, without_banners
from parallel.command.parsing import parse
from parallel.elastic.chaos import Chaos, result
from parallel.elastic.heartbeat import Heartbeat, Stuck, born
from parallel.elastic.partner_checkpoints import PartnerCheckpoints
from parallel.elastic.policy import Policy, check_ranks
from parallel.elastic.sample_log import SampleLog, SampleLogError
from parallel.elastic.supervisor import RESTARTS
from parallel.launch import launcher
from parallel.settings import OptionError

sys.path.insert(0, str(ROOT / "scripts"))
import netlab

more = partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """result.json of one process that computes the same bits."""
    return run_undisturbed(tmp_path_factory.mktemp("undisturbed"), "--reproducible", "6")


@pytest.fixture
def survive(tmp_path, nothing_left):
    """`run_to_death` in a directory of its own."""
    return partial(run_to_death, tmp_path)


@needs_survivors
def test_the_others_go_on_down_to_one(survive, undisturbed):
    """At the start; with the sum of a step there, on rank 0; while it writes a checkpoint, the next rank 0."""
    faults = (0, 3, "start"), (1, 0, "sum of step 4"), (2, 1, "checkpoint")
    done = survive(4, "shrink:min=1", *faults)
    found = assert_as_if_nothing_had_been(done, undisturbed, [3, 0, 1])
    assert "lost so far: rank 3, 0; 2 ranks go on" in done[1] and found["ranks"] == 1
    assert "lost so far: rank 3, 0, 1; 1 rank goes on" in done[1]


@needs_survivors
def test_others_come_in_their_place(survive, undisturbed):
    """In an update, an evaluation, when the network is written; while others recover; who has come before, too."""
    faults = [(0, 1, "update of step 3"), (0, 0, "recovery"), (1, 1, "evaluation after step 7"), (2, 0, "result")]
    done = survive(3, "respawn", *faults)
    found = assert_as_if_nothing_had_been(done, undisturbed, [0, 1, 1, 0])
    assert found["ranks"] == 3 and found["elastic"]["joined"] == [0, 1, 1, 0]


@needs_survivors
@pytest.mark.skipif(bool(netlab.reason_against()), reason=str(netlab.reason_against()))
@pytest.mark.parametrize(("elastic", "joined"), [more("shrink", []), ("respawn", [1])])
def test_ranks_of_other_hosts_go_on(disk_path, nothing_left, undisturbed, elastic, joined):
    """Who comes in the place of another one is on the first rank's host. mpirun's exit status tells of the death.

    Tried again where mpirun's own daemon has crashed: on the dead rank's host it does in one case of ten ("free():
    invalid pointer"), and at times before the job is done, which ends with it.
    """
    for attempt in map(str, range(5)):
        disk_path.joinpath(attempt).mkdir()
        _, said, out = run_to_death(disk_path / attempt, 3, elastic, (0, 1, "update of step 3"), hosts=True)
        if "PRTE has lost communication with a remote daemon" not in said:
            break
    found = assert_as_if_nothing_had_been((0, said, out), undisturbed, [1])
    assert found["elastic"]["joined"] == joined and "rank 1" in said


@needs_survivors
@pytest.mark.exhaustive
def test_more_die_while_the_others_recover(survive, undisturbed):
    """One as it comes to agree, and the first, which is to start the processes that take their places."""
    faults = (0, 1, "update of step 3"), (0, 2, "agreement"), (0, 0, "others are brought in")
    found = assert_as_if_nothing_had_been(survive(4, "respawn:min=1", *faults), undisturbed, [0, 1, 2])
    assert found["ranks"] == 4 and found["elastic"]["joined"] == [0, 1, 2]


@needs_survivors
@pytest.mark.exhaustive
def test_who_has_a_copy_dies_with_whom_it_is_of(survive, tmp_path):
    """Then all go on from the last checkpoint: of step 10, or of step 7 where a thread was still writing that one."""
    options = ["--strategy", "zero1", "--optimizer", "adam", "--lr", "0.01", "--reproducible", "6"]
    undisturbed = run_undisturbed(tmp_path, *options)
    faults = (0, 1, "update of step 13"), (0, 2, "agreement")
    done = survive(4, "respawn:min=1,buddy=4", *faults, options=options)
    assert_as_if_nothing_had_been(done, undisturbed, [1, 2])
    went_on = r"lost so far: rank 1, 2; .*, from the last checkpoint\ncontinuing from .*step-000000(07|10)"
    assert re.search(went_on, done[1]), done[1]


@needs_survivors
@pytest.mark.parametrize("place", ["before MPI starts", *map(more, ("before it says so", "after it was taken in"))])
def test_who_dies_before_it_has_joined_neither_ends_nor_stops_the_others(survive, undisturbed, place):
    done = survive(3, "respawn", (0, 1, "update of step 3"), JOINING=place)
    found = assert_as_if_nothing_had_been(done, undisturbed, [1])
    assert (found["ranks"], found["elastic"]["joined"]) == (3, [1])


def assert_started_again(done, undisturbed):
    status, said, out = done
    assert status == 0, said
    assert "all ranks have ended, or MPI has failed: started again" in said and "continuing from" in said, said
    assert result(out)["parameters_sha256"] == undisturbed["parameters_sha256"], said
    assert not (out / "ledger").exists() and not (out / "beats").exists()


@needs_survivors
def test_who_dies_as_all_take_it_in_ends_a_job_that_is_started_again(survive, undisturbed):
    """MPI fails, or waits for it."""
    fault = 0, 1, "update of step 13"
    assert_started_again(survive(2, "respawn:min=1", fault, JOINING="when all take it in"), undisturbed)


@needs_survivors
@pytest.mark.exhaustive
def test_where_all_ranks_die_they_are_started_again(survive, undisturbed, tmp_path):
    faults = [(0, rank, "update of step 13", "dies, once") for rank in range(2)]
    assert_started_again(survive(2, "shrink:min=1", *faults, ONCE=str(tmp_path / "once")), undisturbed)


@needs_survivors
def test_who_dies_again_and_again_is_not_replaced_for_ever(survive):
    """Where a process that has come in another's place dies of the same, as of a full disk."""
    faults = [(generation, 1, "step 3") for generation in range(3)]
    status, said, out = survive(2, "respawn:min=1", *faults, AGAIN="1")
    assert status == 1 and f"continue with --resume {out}" in said, said
    assert said.count("error: ranks have died 2 times since training went on from step 3") == 1, said
    assert "; 2 ranks came in their place" in said and "; 3 ranks came" not in said, said


@needs_survivors
@pytest.mark.exhaustive
def test_where_a_rank_is_stopped_as_a_communicator_is_made_the_job_is_started_again(survive, undisturbed, tmp_path):
    """No heartbeat and no watchdog is there yet."""
    fault, options = (0, 1, "start", "stops, once"), ["--reproducible", "6", "--watch", "5"]
    done = survive(2, "shrink:min=1,heartbeat=2", fault, options=options, ONCE=str(tmp_path / "once"))
    assert_as_if_nothing_had_been(done, undisturbed, [])
    assert "has waited 5 s for others to make a communicator: stopped" in done[1], done[1]
    assert "all ranks have ended, as some waited too long for others: started again" in done[1], done[1]


@needs_survivors
@pytest.mark.exhaustive
def test_what_hangs_again_and_again_ends(survive):
    status, said, _ = survive(2, "shrink:min=1,heartbeat=1", (0, 1, "start", "stops"), options=["--watch", "2"])
    assert status == launcher.HUNG == HANGING and said.count("started again") == RESTARTS, said


@needs_survivors
def test_shards_come_from_neighbours(survive, tmp_path):
    """One dies three steps after the last copies were made, another by a mistake when they were made again."""
    options = ["--strategy", "fsdp", "--optimizer", "adam", "--lr", "0.01", "--reproducible", "6"]
    undisturbed = run_undisturbed(tmp_path, *options)
    faults = (0, 1, "update of step 13"), (1, 2, "evaluation after step 14", "errs")
    done = survive(4, "shrink", *faults, options=options)
    assert_as_if_nothing_had_been(done, undisturbed, [1, 2])
    assert re.search(r"lost so far: rank 1; 3 ranks go on .*, from step 10\n", done[1]), done[1]
    assert "error on rank 2: 'a mistake of one rank alone'" in done[1]


@pytest.mark.mpi(ranks=3)
def test_copies_make_the_state_whole(comm):
    """Of any two of three ranks, for any of the stages; on one alone a part is missing."""
    communicator = Communicator(comm)
    for make in (ZeRO1, ZeRO2, FullyShardedDataParallel):
        network = nn.Network(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), (7,))
        parts = network, nn.CrossEntropyLoss(), nn.Adam(0.01)
        trainer, partners = make(*parts, communicator, unit_bytes=64), PartnerCheckpoints(1)
        rng = np.random.default_rng(0)
        for step in range(3):
            x, y = rng.normal(size=(12, 7)).astype("f4"), rng.integers(0, 3, 12)
            trainer.step(x[comm.rank :: 3], y[comm.rank :: 3], 12)
            partners.copy(nn.Training(trainer, None, 1), {"batch": step + 1}, 0)
        want = communicator.bcast(trainer.state_dict())
        assert [copy.key for copy in partners.copies] == [(2, 0), (3, 0)]
        for lost in range(3):
            living = comm.Split(comm.rank == lost, comm.rank)
            found = partners.latest(living)
            if comm.rank == lost:
                assert found is None, "a part is missing"
            else:
                assert (found.step, found.progress) == (3, {"batch": 3})
                fewer = Communicator(living)
                others = make(*parts, fewer, unit_bytes=64)
                others.load_state_dict(found.state())
                whole = fewer.bcast(others.state_dict())
                assert all(np.array_equal(want[name], whole[name]) for name in want)
                others.close()
                fewer.release()
            living.Free()
        trainer.close()
    communicator.release()


@needs_survivors
@pytest.mark.parametrize(
    ("place", "best", "epochs", "elastic"),
    [("checkpoint", 1, 3, "respawn"), more("another best", 4, 5, "shrink:min=1")],
)
def test_best_weights_that_are_lost_with_their_writer_are_made_again(survive, tmp_path, place, best, epochs, elastic):
    """It is in a thread of the first rank, and all ranks have made other steps meanwhile."""
    options = ["--reproducible", "6", "--lr", "1", "--epochs", str(epochs), "--no-checkpoint-steps"]
    want = run_undisturbed(tmp_path, *options)
    status, said, out = survive(3, elastic, (0, 0, place, "dies two steps later"), options=options)
    assert status == 0 and "cannot be put back" not in said, said
    found = result(out)
    assert found["elastic"]["lost"] == [0] and found["chosen_epoch"] == best == want["chosen_epoch"], said
    assert found["parameters_sha256"] == want["parameters_sha256"]
    assert f"the weights of epoch {best}, the best so far, were lost with the rank that wrote them" in said
    assert len((out / "metrics.jsonl").read_text().splitlines()) == epochs


@needs_survivors
@pytest.mark.exhaustive
def test_what_comes_after_training_is_done_again(survive, undisturbed):
    done = survive(4, "shrink:min=1", (0, 1, "end"), (1, 0, "result"), (2, 3, "close"))
    assert_as_if_nothing_had_been(done, undisturbed, [1, 0, 3])


@needs_survivors
@pytest.mark.exhaustive
def test_the_first_rank_is_stopped_as_others_wait_for_its_last_lines(survive, undisturbed):
    done = survive(3, "shrink:heartbeat=4", (0, 0, "last lines", "stops"))
    assert_as_if_nothing_had_been(done, undisturbed, [0])
    assert re.search(r"rank 0 .* has been silent for .*: killed", done[1])


@pytest.mark.mpi(ranks=3)
def test_a_rank_says_that_it_waits_for_the_first_one(comm, capfd, monkeypatch):
    """It draws and writes, for as long as that takes, but no hour."""
    from parallel.command import training_run
    from parallel.command.training_run import wait_for_writer

    communicator = Communicator(comm)
    if comm.rank == 0:
        time.sleep(1.0)
    wait_for_writer(communicator, 0.3)
    said = "rank 1 of 3: has waited 0.3 s for rank 0, which draws and writes\n"
    assert capfd.readouterr().err == (said if comm.rank == 1 else "")
    wait_for_writer(communicator, 0.0)
    monkeypatch.setattr(training_run, "WRITING", 0.4)
    if comm.rank:
        with pytest.raises(TimeoutError):
            wait_for_writer(communicator, 0.1)
    comm.Barrier()
    if comm.rank == 0:
        communicator.Ibarrier().Wait()
    comm.Barrier()
    communicator.release()


@needs_survivors
@pytest.mark.exhaustive
def test_a_job_that_dies_before_mpi_starts_is_started_again(survive, undisturbed, tmp_path):
    done = survive(2, "shrink", EARLY=str(tmp_path / "early"))
    assert_as_if_nothing_had_been(done, undisturbed, [])
    assert "started again" in done[1]


@needs_survivors
def test_a_stopped_rank_is_found_and_killed(survive, undisturbed):
    """In buckets of messages, which are no virtual shards: the same up to rounding."""
    options = "--node-memory", "off"
    done = survive(3, "shrink:heartbeat=4,loop=0", (0, 1, "step 6", "stops"), options=options)
    assert done[0] == 0, done[1]
    assert "gradients summed by messages, one bucket" in done[1] and "lost so far: rank 1; 2 ranks go on" in done[1]
    found = result(done[2])
    assert found["loss"] == pytest.approx(undisturbed["loss"], rel=1e-4) and found["elastic"]["lost"] == [1]
    assert found["elastic"]["ledger"] == {"epochs": 3, "samples": 600}
    assert re.search(r"heartbeat: rank 1 \(process \d+ on \S+\) has been silent for .* s: killed", done[1]), done[1]


@needs_survivors
@pytest.mark.exhaustive
def test_the_heartbeat_comes_before_the_watchdog(survive, tmp_path):
    """Of a rank for which others wait in a call, longer than --watch says."""
    options = ["--strategy", "fsdp", "--optimizer", "adam", "--lr", "0.01", "--reproducible", "6", "--watch", "2"]
    undisturbed = run_undisturbed(tmp_path, *options)
    done = survive(3, "respawn:heartbeat=15", (0, 1, "update of step 13", "stops"), options=options)
    assert_as_if_nothing_had_been(done, undisturbed, [1])
    assert "has been silent" in done[1] and "watchdog" not in done[1], done[1]


@needs_survivors
@pytest.mark.exhaustive
def test_a_rank_in_an_endless_loop_is_found_and_killed(survive, undisturbed):
    done = survive(3, "shrink:loop=10", (0, 2, "step 6", "loops"))
    assert_as_if_nothing_had_been(done, undisturbed, [2])
    assert re.search(r"heartbeat: rank 2 has computed for .* s at \S+ in come_to, and made no step: killed", done[1])


def test_who_waits_or_is_slow_is_in_no_loop():
    stuck = Stuck(5)
    assert not stuck.look(0, 1, False) and not stuck.look(5, 1, False) and stuck.look(5.5, 1, False)
    assert not stuck.look(100, 1, True) and not stuck.look(104, 1, False), "it waits for others"
    assert not stuck.look(108, 2, False) and not stuck.look(187, 2, False) and stuck.look(189, 2, False), "a slow one"
    forever = Stuck(0)
    assert not forever.look(0, 1, False) and not forever.look(1e9, 1, False)


def test_a_heartbeat_survives_failing_disks_and_other_killers(tmp_path, monkeypatch, nothing_left):
    """The thread goes on whatever a file, stderr or a process does, and kills before it says so."""

    class NobodyReads:
        def write(self, text):
            stopped.wait(PATIENCE)
            said.append((text, stopped.returncode))
            raise OSError(errno.EIO, "nobody reads")

        def flush(self):
            pass

    said, failing, kill = [], [], os.kill
    utime = os.utime

    def failing_utime(path):
        failing.append(path)
        if len(failing) < 4:
            raise OSError((errno.ESTALE, errno.EIO, errno.EACCES)[len(failing) - 1], "the disk fails")
        utime(path)

    def killed_by_another_rank_first(pid, number):
        kill(pid, number)
        raise ProcessLookupError

    def wait(until):
        while not until():
            assert heart.thread.is_alive()
            stopped.poll()
            time.sleep(0.01)

    beats = tmp_path / "beats"
    beats.mkdir()
    (beats / "1").mkdir()  # reading it is an OSError
    (beats / "2").write_text("half")
    (beats / "3").write_bytes(b"\xff\xfe")
    others = {number: subprocess.Popen(["sleep", "1000"]) for number in (4, 5)}
    stopped, another = others.values()
    peers = {number: f"{socket.gethostname()} {other.pid} {born(other.pid)}" for number, other in others.items()}
    heart = Heartbeat(beats, 0, 0.2, 0, True, lambda: 0, peers)
    monkeypatch.setattr(sys, "stderr", NobodyReads())
    monkeypatch.setattr(os, "utime", failing_utime)
    heart.start()
    try:
        (beats / "4").write_text(peers[4])
        wait(lambda: said and not (beats / "4").exists())
        assert [status for _, status in said] == [-signal.SIGKILL], "it speaks afterwards"
        monkeypatch.setattr(os, "kill", killed_by_another_rank_first)
        (beats / "5").write_text(peers[5])
        assert another.wait(PATIENCE) == -signal.SIGKILL
        (beats / "0").unlink()  # another rank took this one for dead
        wait(lambda: (beats / "0").exists())
    finally:
        heart.stop()
        for other in others.values():
            other.kill()
            other.wait()


def test_a_silent_rank_may_be_waited_for(tmp_path, capsys):
    """Of a process that is there, one that has gone, and one of another host."""
    other = subprocess.Popen(["sleep", "1000"])
    host = socket.gethostname()
    try:
        files = {"1": f"{host} {other.pid} {born(other.pid)}", "2": f"{host} {other.pid} 0", "3": "elsewhere 1 1"}
        heart, passed = Heartbeat(tmp_path, 0, 5, 0, True, lambda: 0, {int(k): v for k, v in files.items()}), [0.0]
        heart.clock = types.SimpleNamespace(now=lambda: passed[0])
        for name, told in files.items():
            (tmp_path / name).write_text(told)
            os.utime(tmp_path / name, (0, 0))  # clocks of hosts may differ: what counts is whether it is touched again
            heart.look_at(tmp_path / name)
        passed[0] = 4.9
        heart.look_at(tmp_path / "1")
        assert not capsys.readouterr().err, "they may just have shown that they live"
        passed[0], heart.kill = 5.1, False
        heart.look_at(tmp_path / "1")
        heart.look_at(tmp_path / "1")
        assert len(re.findall("rank 1 .* waited for", capsys.readouterr().err)) == 1 and other.poll() is None
        os.utime(tmp_path / "1", (1, 1))
        heart.kill = True
        heart.look_at(tmp_path / "1")
        heart.look_at(tmp_path / "2")
        assert not (tmp_path / "2").exists() and other.poll() is None, "its number is another process's now"
        heart.look_at(tmp_path / "3")
        assert "on elsewhere) has been silent" in (said := capsys.readouterr().err) and said.endswith("waited for\n")
        assert "rank 1" not in said and other.poll() is None, "it was touched"
        passed[0] = 10.2
        heart.look_at(tmp_path / "1")
        assert other.wait(PATIENCE) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait()


@needs_survivors
@pytest.mark.exhaustive
def test_too_few_end_and_can_be_continued(survive, undisturbed):
    """The first rank dies, so another one says it; what the ledger had beyond the last checkpoint counts no more."""
    status, said, out = survive(2, "shrink", (0, 0, "step 9"))
    assert status == 1, said
    assert "error: 1 rank left, and --elastic has min=2" in said
    (out / "ledger" / "1-7.bin").write_bytes(np.array([5, 8, 0, 200]).tobytes())  # of a fifth generation
    command = [sys.executable, "scripts/train.py", "--resume", str(out), "--ranks", "2", "--elastic", "shrink"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE)
    assert result(out)["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert not (out / "ledger").exists() and not (out / "beats").exists()


@needs_survivors
def test_who_was_asked_to_end_and_recovers_still_ends(survive):
    status, said, out = survive(
        2, "shrink:min=1", (0, 0, "update of step 7", "is asked to end"), (0, 1, "sum of step 8")
    )
    assert status == TERMINATED and re.search(r"ended by SIGTERM after step \d+, which is saved", said), said
    assert not (out / "result.json").exists()


@needs_survivors
@pytest.mark.exhaustive
def test_who_is_one_too_many_lets_the_others_save_when_all_are_asked_to_end(survive):
    options = "--mesh", "data=2,pipeline=2", "--model", "mlp:64,16,16,10"
    faults = (0, 3, "update of step 3"), (1, 0, "update of step 12", "all are asked to end")
    status, said, _ = survive(4, "shrink", *faults, options=options)
    assert status == TERMINATED and "1 rank too many for the mesh" in said, said
    assert re.search(r"ended by SIGTERM after step \d+, which is saved", said) and "error" not in said, said


@needs_survivors
@pytest.mark.parametrize(
    ("skew", "times"), [("1", "0 times"), pytest.param("-1", "2 times", marks=pytest.mark.exhaustive)]
)
def test_control_samples_that_are_left_out_or_trained_twice_are_found(survive, skew, times):
    status, said, _ = survive(2, "shrink:min=1", (0, 1, "step 3"), SKEW=skew)
    assert status == 1 and re.search(rf"error: epoch 1: 32 samples .* \({times}\)", said), said


@needs_survivors
@pytest.mark.exhaustive
def test_ranks_are_killed_at_any_moment(tmp_path, nothing_left):
    train = [sys.executable, str(ROOT / "scripts" / "train.py")]
    options = [*OPTIONS, "--reproducible", "6", "--ranks", "3"]
    for strategy, elastic in ("ddp", "shrink:min=1"), ("zero1", "respawn"):
        given = [*options, "--strategy", strategy, "--elastic", elastic]
        chaos = Chaos(given, tmp_path / strategy, seed=1, kinds=["kill a rank"], program=train)
        chaos.undisturbed()
        for number in range(10):
            chaos.run(number, 1)
        assert chaos.injected.total() + chaos.missed.total() == 10 and chaos.injected


# ------------------------------------------------------------------------------------------------ the ledger alone


def lines(ledger, *parts):
    for part in parts:
        ledger.log_slice(*part)


def test_the_ledger_counts_every_sample_once(tmp_path):
    first, second = SampleLog(tmp_path / "ledger", 0), SampleLog(tmp_path / "ledger", 1)
    for ledger in (first, second):
        ledger.begin_generation(0, (0, 0))
    lines(first, (0, 0, 0, 2), (0, 1, 4, 6), (0, 2, 8, 10))
    lines(second, (0, 0, 2, 4), (0, 1, 6, 8))  # and is killed in the batch 2, which begins anew
    first.begin_generation(2, (0, 2))
    lines(first, (0, 2, 8, 11))
    assert first.check(0, 4, 11) == 11
    lines(first, *((1, 3 + batch, 4 * batch, min(4 * batch + 4, 11)) for batch in range(3)))
    assert first.check(1, 4, 11) == 11
    assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["1-0.bin"], "what is done with goes"
    first.close()
    assert not (tmp_path / "ledger").exists()


def test_who_goes_back_into_an_epoch_that_was_checked_finds_its_lines_gone(tmp_path):
    """Copies of parts may be older than an epoch is long: twice, and with another process in a place."""
    first = SampleLog(tmp_path, 0)
    first.begin_generation(0, (0, 0))
    for epoch in range(3):
        lines(first, *((epoch, 2 * epoch + batch, 4 * batch, 4 * batch + 4) for batch in range(2)))
        first.checked[epoch + 1] = first.check(epoch, 4, 8)
    joins = SampleLog(tmp_path, 1)
    joins.begin_generation(3, (1, 1), [first.known])
    lines(joins, (1, 3, 4, 8))
    assert joins.checked == {1: 8}
    joins.begin_generation(3, (1, 1), [joins.known])
    with pytest.raises(SampleLogError, match=r"4 samples .* 4 \(0 times\)"):
        joins.check(1, 4, 8)
    lines(joins, (1, 3, 4, 8), (2, 4, 0, 4), (2, 5, 4, 8))
    assert joins.check(1, 4, 8) == 8 and joins.check(2, 4, 8) == 8


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ((0, 1, 4, 7), "1 samples were not trained exactly once: in its order 7 (0 times)"),
        ((0, 1, 3, 8), "1 samples were not trained exactly once: in its order 3 (2 times)"),
    ],
)
def test_control_the_ledger_finds_what_is_wrong(tmp_path, part, said):
    ledger = SampleLog(tmp_path, 0)
    ledger.begin_generation(0, (0, 0))
    lines(ledger, (0, 0, 0, 4), part)
    with pytest.raises(SampleLogError, match=re.escape(said)):
        ledger.check(0, 4, 8)


def test_only_a_process_of_the_job_is_killed(tmp_path, capsys):
    """Whoever may write into the directory names any process of the user; a FIFO there would hold the thread."""
    victim, passed = subprocess.Popen(["sleep", "1000"]), [0.0]
    try:
        forged = f"{socket.gethostname()} {victim.pid} {born(victim.pid)}"
        heart = Heartbeat(tmp_path, 0, 5, 0, True, lambda: 0, {0: "a 1 1", 1: "b 2 2", 2: forged})
        heart.clock = types.SimpleNamespace(now=lambda: passed[0])
        (tmp_path / "77").write_text(forged)
        (tmp_path / "1").write_text(forged)  # in place of a member's own
        os.mkfifo(tmp_path / "3")
        for passed[0] in (0.0, 100.0, 200.0):
            for path in tmp_path.iterdir():
                heart.look_at(path)
        assert victim.poll() is None and not capsys.readouterr().err
        (tmp_path / "2").write_text(forged)  # control: this is a member's
        for passed[0] in (300.0, 400.0):
            heart.look_at(tmp_path / "2")
        assert victim.wait(10) == -signal.SIGKILL and "rank 2" in capsys.readouterr().err
    finally:
        victim.kill()
        victim.wait()


def test_a_full_disk_is_named(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ledger, heart = SampleLog(tmp_path / "ledger", 3), Heartbeat(tmp_path / "beats", 3, 9.0, 0, False, lambda: 0, {})
    ledger.begin_generation(0, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))  # a file can grow no larger
    try:
        ledger.log_slice(0, 0, 0, 8)
        with pytest.raises(OSError, match=r"cannot write to .*ledger/0-3\.bin \(No space"):
            ledger.log_slice(0, 1, 8, 16)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises(OSError, match=r"cannot write .*beats/3 \(File too large"):
            heart.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "beats").iterdir())


def test_a_continued_run_answers_for_what_it_has_trained(tmp_path):
    ledger = SampleLog(tmp_path, 0)
    ledger.begin_generation(7, (2, 1))
    lines(ledger, (2, 7, 4, 8), (2, 8, 8, 9))
    assert ledger.check(2, 4, 9) == 5
    lines(ledger, (3, 9, 0, 4))
    joins = SampleLog(tmp_path, 1)
    joins.begin_generation(9, (3, 0), [ledger.known])  # back to before it
    assert (joins.begun, joins.start) == ([7, 9], (2, 1))
    with pytest.raises(SampleLogError, match="9 samples"):
        joins.check(3, 4, 9)


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_wait_leaves_the_heartbeat_its_time():
    patience = {text: Policy.parse(f"shrink:{text}").patience(10) for text in ("heartbeat=30", "heartbeat=4")}
    assert patience == {"heartbeat=30": 60, "heartbeat=4": 10}
    assert Policy().patience(0) == 0, "for ever"
    assert Policy.parse("shrink:silent=wait").patience(10) == 10, "nobody is killed"


def test_what_cannot_be_is_refused(monkeypatch):
    assert Policy.parse("shrink") == Policy() and Policy.parse("respawn:3,0") == Policy(3, 0, kind="respawn")
    for given, said in (
        ("grow", "expected one of shrink, respawn"),
        ("shrink:min=0", "min must"),
        ("shrink:most=3", "what is 'most=3'"),
        ("shrink:silent=shout", "silent"),
        ("shrink:heartbeat=-1", "heartbeat"),
        ("shrink:heartbeat=inf", "given inf"),
        ("shrink:loop=0.1", "loop"),
    ):
        with pytest.raises(ValueError, match=said):
            Policy.parse(given)
    for given, said in (
        (
            "--strategy dp",
            "cannot be combined with --strategy dp: state that only one rank has would be lost with it: use",
        ),
        ("--strategy owt", "--strategy owt: state"),
        ("--mesh pipeline=2 --pipeline pipedream", "weights of several steps are in its stages"),
        ("--compress topk:0.1", "what a rank has left out so far"),
        ("--allreduce shared", "what dies in it leaves sums half made"),
        ("--find-lr", "trying rates makes no run"),
    ):
        with pytest.raises(OptionError, match=said):
            parse(["--elastic", "shrink", *given.split()])
    with pytest.raises(ValueError, match="expected one of shrink, respawn"):
        check_ranks(parse(["--elastic", "grow"]), 0)
    check_ranks(parse(["--elastic", "shrink"]), 0)
    options = parse(["--elastic", "shrink:min=3", "--ranks", "2"])
    monkeypatch.setattr(launcher, "reason_all_end", lambda: "")
    with pytest.raises(OptionError, match="2 ranks are fewer than min=3: start more"):
        check_ranks(options, 2)
    monkeypatch.setattr(launcher, "reason_all_end", lambda: "this MPI has no fault tolerance")
    with pytest.raises(OptionError, match="no fault tolerance; or leave it out, and start the run by scripts/superv"):
        check_ranks(options, 4)


def test_noise_of_the_launcher_is_left_out():
    out = io.StringIO()
    for line in (
        "[vm:7] pmix_ptl_base: send_msg: write failed: Broken pipe (32) [sd = 24]\n",
        "Abort is in progress...hit ctrl-c again to forcibly terminate\n",
        "prterun: abort is already in progress...hit ctrl-c again to forcibly terminate\n",
        "[vm:7] pmix: other\n",
    ):
        without_banners(out, [])(line)
    receive = without_banners(out, [])
    for line in (80 * "=", "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   PID 7", 80 * "="):
        receive(line + "\n")  # of MPICH and Intel MPI
    receive("YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n")
    assert out.getvalue() == "[vm:7] pmix: other\n"


def test_a_job_that_ends_with_any_rank_is_found_out(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.delenv(launcher.FAULT_TOLERANT, raising=False)
    assert "mpirun --with-ft ulfm" in launcher.reason_all_end()
    monkeypatch.setenv(launcher.FAULT_TOLERANT, "1")
    assert launcher.reason_all_end() == ""
