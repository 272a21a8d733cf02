"""`ringprop doctor`: healthy ranks pass, and each fault that can be injected is found, named and given its advice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

from collectives import Communicator
from parallel.command import acceptance, doctor, trials
from parallel.command.findings import FAILED, OK, WARNING, Finding
from parallel.launch import launcher

ROOT = Path(__file__).parents[2]


def facts(**others) -> dict:
    """A healthy rank of two on a host of two cores."""
    return {
        "host": "a", "python": "3.12.1", "executable": "python", "ringprop": "1", "commit": "c" * 40, "numpy": "2.1",
        "mpi4py": "4.0", "mpi": "Open MPI v5", "threads_of_mpi": True, "blas": "openblas 0.3", "processor": "EPYC",
        "threads": 1, "cores": 2, "affinity": [0, 1], "node_memory": 1 << 30, "loaded": 1.0, "load": 0.3,
    } | others  # fmt: skip


def judged(ranks: list[dict]) -> list[Finding]:
    found = [acceptance.hello(ranks), *acceptance.versions(ranks), acceptance.threads_of_mpi(ranks)]
    found += [*acceptance.threads(ranks, "Open MPI"), acceptance.node_memory(ranks)]
    found += [acceptance.start(ranks), acceptance.load(ranks)]
    return found


def test_healthy_ranks_have_nothing_to_set():
    found = judged([facts(), facts(), facts(host="b"), facts(host="b")])
    assert {finding.status for finding in found} == {OK} and not any(finding.advice for finding in found)
    assert found[0].text == "4 ranks on 2 hosts: a: ranks 0-1; b: ranks 2-3"
    assert found[1].text.startswith("ringprop 1 (cccccccccccc), Python 3.12.1, NumPy 2.1")


def test_an_installed_wheel_has_no_commit():
    (found,) = acceptance.versions([facts(commit=None), facts(commit=None)])
    assert found.status == OK and found.text.startswith("ringprop 1, Python 3.12.1, ")


@pytest.mark.parametrize(
    ("other", "check", "status", "words", "advice"),
    [
        ({"mpi": "MPICH 4"}, "versions", FAILED, "mpi is Open MPI v5 on rank 0 (a), MPICH 4 on rank 1", "environment"),
        ({"commit": "d"}, "versions", FAILED, "commit is", "environment"),
        ({"numpy": "1.26"}, "versions", WARNING, "numpy is 2.1 on rank 0 (a), 1.26 on rank 1 (a)", "environment"),
        ({"processor": "Xeon"}, "versions", WARNING, "processor is EPYC", "equal processors"),
        ({"threads_of_mpi": False}, "MPI", WARNING, "one thread", "MPI_THREAD_MULTIPLE"),
        ({"threads": 2}, "threads", WARNING, "2 ranks with 3 BLAS threads on 2 cores", "OMP_NUM_THREADS=1"),
        ({"node_memory": 64 << 20}, "/dev/shm", WARNING, "64 MiB are free in /dev/shm on a", "--shm-size"),
        ({"loaded": 99.0}, "start", WARNING, "99.0 s on rank 1", "container image"),
        ({"load": 8.0}, "load", WARNING, "a had a load of 8.0 on 2 cores", "times say little"),
    ],
)
def test_what_is_wrong_on_one_rank_is_named(other, check, status, words, advice):
    (found,) = [finding for finding in judged([facts(), facts(**other)]) if finding.status != OK]
    assert (found.check, found.status) == (check, status)
    assert words in found.text and advice in found.advice


def test_more_ranks_than_cores_and_ranks_on_one_core_are_told_apart():
    crowd = [facts() for _ in range(3)]
    (found,) = [finding for finding in judged(crowd) if finding.status != OK]
    assert "at most 2 ranks on a" in found.advice
    bound = [facts(affinity=[rank], cores=1, threads=4) for rank in range(2)]
    found = {finding.check: finding for finding in judged(bound) if finding.status != OK}
    assert "rank 0 is bound to 1 core, and has 4 BLAS threads" in found["binding"].text
    assert "mpirun --map-by slot:PE=4 --bind-to core" in found["binding"].advice
    same = [facts(affinity=[5], cores=1) for _ in range(2)]
    found = [finding for finding in judged(same) if finding.check == "binding"]
    assert "ranks 0 and 1 are bound to the same core 5" in found[0].text


def test_ranks_without_a_known_blas_library_are_named():
    (found,) = [finding for finding in judged([facts(blas="")] * 2) if finding.status != OK]
    assert found.text.startswith("no BLAS library that threadpoolctl knows on ranks 0-1")


def test_ranks_in_words():
    assert acceptance.spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_the_bits_of_other_numbers_of_ranks_must_be_equal():
    ranks = [facts(), facts()]
    assert trials.same_bits({1: "ab", 2: "ab"}, ranks).status == OK
    wrong = trials.same_bits({1: "ab", 2: "cd"}, ranks)
    assert wrong.status == FAILED and "ab on 1 ranks, cd on 2 ranks" in wrong.text
    mixed = trials.same_bits({1: "ab", 2: "cd"}, [facts(), facts(processor="Xeon")])
    assert mixed.status == WARNING and "--constraint" in mixed.advice


@pytest.mark.mpi(ranks=[2, 3])
def test_collectives_are_right_and_a_wrong_one_is_named(comm, ranks, monkeypatch):
    class Wrong(Communicator):
        def Allreduce(self, x, y, *others, **more):
            super().Allreduce(x, y, *others, **more)
            y[0] += 1

    communicator = Communicator(comm)
    (found,) = trials.collectives_checked(communicator, 0.1)
    assert found.status in (OK, WARNING), found.text
    assert [row["case"].partition(",")[0] for row in found.rows[:4]] == [
        "allreduce", "broadcast", "reduce_scatter", "allgather",
    ]  # fmt: skip
    monkeypatch.setattr(trials, "SLOWER", 0.0)
    for quiet in (True, False):
        (found,) = trials.collectives_checked(communicator, 0.1, quiet)
        assert found.status == WARNING and bool(found.advice) == quiet, "nothing is tuned by times of a busy machine"
    assert all(row["ours_us"] > 0 and row["library_us"] > 0 for row in found.rows)
    communicator.release()
    wrong = Wrong(comm)
    (found,) = trials.collectives_checked(wrong, 0.1)
    assert found.status == FAILED and f"allreduce of 64 KiB by ours is wrong on ranks 0-{ranks - 1}" in found.text
    assert "broadcast" not in found.text and "--allreduce native" in found.advice
    wrong.release()


@pytest.mark.mpi(ranks=3)
def test_a_training_has_the_same_bits_on_one_two_and_all_ranks(comm, ranks):
    found = trials.digests(comm, 60.0)
    assert sorted(found) == [1, 2, 3] and len(set(found.values())) == 1
    assert len(found[1]) == 64


@pytest.mark.mpi(ranks=2)
def test_a_directory_that_another_host_does_not_see_is_named(comm, ranks, shared_tmp_path, tmp_path, monkeypatch):
    hosts = [facts(), facts(host="b")]
    monkeypatch.setattr(trials, "SHOWN_SOON", 0.2)
    monkeypatch.chdir(shared_tmp_path)
    assert trials.shared_directory(comm, hosts).status == OK
    comm.Barrier()
    assert not list(shared_tmp_path.iterdir())
    comm.Barrier()
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: comm.rank == 0 and exists(path))
    found = trials.shared_directory(comm, hosts)
    assert found.status == WARNING and found.text.startswith("b do not see what a writes into")


def run(*args, status=0) -> str:
    command = [sys.executable, "scripts/doctor.py", *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_ranks_of_this_machine(tmp_path, nothing_left):
    said = run("--ranks", "2", "--seconds", "1", "--json", tmp_path / "doctor.json")
    for words in ("hello", "2 ranks on 1 host", "collectives", "allreduce, 4 MiB", "training", "on 1 and 2 ranks"):
        assert words in said
    record = json.loads((tmp_path / "doctor.json").read_text())
    assert record["status"] in (OK, WARNING) and len(record["ranks"]) == 2
    checks = [finding["check"] for finding in record["findings"]]
    assert checks[0] == "hello" and checks[-1] == "training"
    assert "nothing failed" in said.splitlines()[-1]


def test_ranks_that_mpiexec_starts(tmp_path, nothing_left):
    mpiexec = launcher.find_mpiexec()
    command = [mpiexec, "-n", "2", sys.executable, "-m", "mpi4py", ROOT / "scripts/doctor.py", "--seconds", "1"]
    env = launcher.settings(2, mpiexec) | os.environ
    done = subprocess.run(
        command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks on 1 host") == 1, "one rank prints"


def test_a_number_of_ranks_that_the_launcher_did_not_start_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(doctor, "examine", lambda options, rank: 0)
    assert doctor.main(["--ranks", "2"]) == doctor.main([]) == 0
    assert doctor.main(["--ranks", "3"]) == doctor.WRONG
    assert "as one of 2: leave --ranks to it" in capsys.readouterr().err


def test_a_failed_check_is_the_exit_status(monkeypatch, capsys):
    from types import SimpleNamespace

    found = [Finding("hello", OK, "1 rank"), Finding("training", FAILED, "the digest differs", "do this")]
    monkeypatch.setattr(doctor, "checks", lambda options, world, ranks: iter(found))
    options = SimpleNamespace(watch=0.0, json=None)
    assert doctor.report(options, facts()) == 1
    said = capsys.readouterr().out
    assert "failed   training     the digest differs" in said and "  do this" in said
    assert said.splitlines()[-1].startswith("1 of 2 checks failed")
    found.pop()
    assert doctor.report(options, facts()) == 0


def test_one_rank_is_told_that_nothing_was_sent():
    assert "there is one rank" in run("--ranks", "1", "--seconds", "1")


def test_cases_see_a_result_that_is_wrong():
    """The control of the checks, on one rank."""
    from types import SimpleNamespace

    rank = SimpleNamespace(size=1, rank=0)

    class Nothing:
        def __getattr__(self, name):
            return lambda *args: None

    for _, call, right in trials.cases(rank, 4):
        steps = call(Nothing())
        next(steps)
        next(steps, None)
        assert call.__name__ == "broadcast" or not right(), "a root has what it sends"
