"""A failure of one rank, of whatever kind, ends all ranks soon, with its rank named and a status that is not 0."""

import signal
import subprocess
import sys

import pytest
from conftest import PATIENCE

from collectives.failures.launch_check import WorldError, check_world
from parallel.launch import launcher

PROGRAM = """
import contextlib, os, signal, sys, threading, time
from collectives import check_world, install_excepthooks
install_excepthooks()
check_world()
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()

def leave():
    try:
        sys.exit(9)
    finally:
        print("cleaned up", flush=True)

def fail():
    raise ValueError("no such layer")

def fall(number):
    try:
        os.kill(os.getpid(), number)
        signal.pause()
    finally:
        print("cleaned up", flush=True)

def stay():
    world.recv(source=0)

def fall_in_mpi():
    main = threading.get_ident()
    def kill():
        while sys._current_frames()[main].f_code.co_name != "stay":
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=kill).start()
    stay()

def catch():
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    world.Barrier()
    sys.exit(0)

if world.rank == 1:
    WHAT
elif "catch" in "WHAT":
    world.Barrier()
    sys.exit(0)
world.recv(source=1)  # for ever
"""

CASES = {
    "fail()": (1, ["rank 1 of 2: ValueError: no such layer", "in fail"]),
    "threading.Thread(target=fail, name='loader').start()": (
        1,
        ["rank 1 of 2, thread loader: ValueError: no such layer"],
    ),
    "leave()": (9, ["rank 1 of 2: sys.exit(9)", "cleaned up"]),
    "sys.exit('no data')": (1, ["no data", "rank 1 of 2: sys.exit('no data')"]),
    "threading.Thread(target=sys.exit, args=(4,)).start()": (4, ["sys.exit(4)"]),
    "fall(signal.SIGTERM)": (143, ["rank 1 of 2: ended by SIGTERM", "cleaned up"]),
    "fall(signal.SIGINT)": (130, ["rank 1 of 2: ended by SIGINT", "cleaned up"]),
    "fall_in_mpi()": (143, ["rank 1 of 2: ended by SIGTERM during an MPI call"]),
    "catch()": (0, []),
}


@pytest.mark.parametrize("what", CASES)
def test_all_ranks_end(what, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("WHAT", what))
    status, said = CASES[what]
    lines = []
    got = launcher.run([program], ranks=2, timeout=PATIENCE, stdout=lines.append)
    text = "".join(lines).replace("\0", "")
    assert got == status, text
    for words in said:
        assert words in text
    assert status or "rank 1" not in text


ALONE = """
import sys, threading
from mpi4py import MPI
from collectives import Communicator

if "own hooks" in "WHAT":
    sys.excepthook = lambda *_: (print("my own", flush=True), MPI.COMM_WORLD.Abort(7))
made = Communicator(MPI.COMM_WORLD)
made.Barrier()

def fail():
    raise ValueError("no such layer")

def again():
    try:
        sys.exit(5)
    except SystemExit as error:
        global kept
        kept = error
        raise

def well():
    made.Barrier()
    raise SystemExit(0)

if made.rank == 1:
    WHAT
elif "well" in "WHAT":
    made.Barrier()
    sys.exit()
made.recv(source=1)  # for ever
"""

# What rank 1 does, without `python -m mpi4py` -> status, what is said.
ENDINGS = {
    "fail()": (1, ["rank 1 of 2: ValueError: no such layer", "in fail"]),
    "raise SystemExit(3)": (3, ["rank 1 of 2: sys.exit(3)"]),
    "raise SystemExit('no data')": (1, ["no data", "rank 1 of 2: sys.exit('no data')"]),
    "exit(1)": (1, ["rank 1 of 2: sys.exit(1)"]),
    "again()": (5, ["rank 1 of 2: sys.exit(5)"]),
    "well()": (0, []),
    "fail()  # with own hooks": (7, ["my own"]),
}


@pytest.mark.parametrize("what", ENDINGS)
def test_a_communicator_is_enough_for_all_ranks_to_end(what, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(ALONE.replace("WHAT", what))
    start = subprocess.Popen

    def plainly(command, **more):
        return start([part for part in command if part not in ("-m", "mpi4py")], **more)

    monkeypatch.setattr(launcher.subprocess, "Popen", plainly)
    status, said = ENDINGS[what]
    lines = []
    got = launcher.run([program], ranks=2, timeout=PATIENCE, stdout=lines.append)
    text = "".join(lines)
    assert got == status, text
    assert all(words in text for words in said), text
    assert said or "rank" not in text


STOPPED = """
import atexit, os, signal, sys, time
from mpi4py import MPI
from collectives import communicator

rank = MPI.COMM_WORLD.rank

def last():
    if rank == 1 and "stops" in sys.argv:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and "is slow" in sys.argv:
        time.sleep(3)

communicator.LATER = 1.0
atexit.register(last)  # so it comes after all others
made = communicator.Communicator(MPI.COMM_WORLD, watch=0 if "unwatched" in sys.argv else 1)
made.Barrier()
if "releases" in sys.argv:
    made.release()
if "ends MPI itself" in sys.argv:
    MPI.Finalize()
    time.sleep(3)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["stops"], 128 + signal.SIGALRM),
        (["stops", "releases"], 128 + signal.SIGALRM),
        (["is slow", "unwatched"], 0),
        (["ends MPI itself"], 0),
        ([], 0),
    ],
)
def test_a_rank_that_is_stopped_as_mpi_ends_keeps_no_other_waiting(words, status, tmp_path):
    program, lines = tmp_path / "program.py", []
    program.write_text(STOPPED)
    got, said = launcher.run([program, *words], ranks=2, timeout=PATIENCE, stdout=lines.append), "".join(lines)
    # Where a rank ends by a signal as others end MPI, Open MPI's prterun itself crashes now and then: all end so, too.
    assert got == status or (status and "mpiexec itself was ended by SIGSEGV" in said), said


def test_a_timer_ends_a_process_that_is_stopped_and_lets_one_alone_that_has_ended():
    code = """
import os, signal, sys
from collectives.failures.job_end import kill_in
kill_in(float(sys.argv[1]))
if "stops" in sys.argv:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    for words, status in (["0.3", "stops"], -signal.SIGKILL), (["60"], 0):
        assert subprocess.run([sys.executable, "-c", code, *words], timeout=PATIENCE).returncode == status


def test_an_exit_is_told_once_it_ends_the_program_and_what_is_caught_is_not():
    code = """
import contextlib, sys
from collectives.failures import job_end as world
world.call_with_exit_status(lambda code: print("told", code))
with contextlib.suppress(SystemExit):
    sys.exit(3)
try:
    raise SystemExit(4)
except SystemExit as error:
    print("seen", error.code)
    error.code = 5
    raise
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode, ended.stderr) == ("seen 4\ntold 5\n", 5, "")


def test_a_world_of_singletons_is_refused_with_what_to_do(monkeypatch):
    class Alone:
        def Get_size(self):
            return 1

    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    check_world(Alone())
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(
        WorldError, match=r"4 processes were launched \(PMI_SIZE=4\), but each is alone.*srun --mpi=pmix"
    ):
        check_world(Alone())


def test_importing_collectives_imports_no_mpi():
    seen = "'mpi4py' in sys.modules"
    code = f"import sys, collectives; assert not {seen}; collectives.Communicator; assert {seen}"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
