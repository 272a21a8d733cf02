"""The ranks as one program: all of them start, and when one fails all of them end.

MPI itself does neither. Started by a launcher that the MPI library does not know, every process believes to be alone;
and an exception on one rank leaves the others waiting for it for ever.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence

from collectives.failures.timer import kill_in

# Where launchers say how many ranks they started: Open MPI, MPICH and Intel MPI, Cray, Slurm.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")
START = 912  # tag with which ranks tell the first one that they have come
ends: list[float] = []  # seconds that MPI may take to end, as each watched communicator has it
HANGING = 86  # exit status of ranks that wait for others too long, as the watchdog's
GRACE = 2.0  # seconds that a signalled rank gets to leave MPI and clean up


class WorldError(RuntimeError):
    """The ranks that were launched do not form one MPI world."""


def nodes_of(comm) -> list[int]:
    """For each rank the first rank on its node (collective)."""
    from mpi4py import MPI

    from collectives.failures.revocation import register, unregister

    node = register(MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED)))
    first = node.bcast(comm.Get_rank())
    unregister(node).Free()
    return comm.allgather(first)


def check_world(comm=None):
    """Refuse to run as N separate worlds of one rank.

    Raises
    ------
    WorldError
        where the launcher started several ranks and this one is alone in COMM_WORLD
    """
    from mpi4py import MPI

    size = (comm or MPI.COMM_WORLD).Get_size()
    for name in SIZE_VARIABLES:
        launched = int(os.environ.get(name, 1))
        if launched > 1 and size == 1:
            library = MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
            raise WorldError(
                f"{launched} processes were launched ({name}={launched}), but each is alone: the launcher does not "
                f"belong to the MPI library of this Python, {library}. Start the ranks with that library's own "
                f"mpiexec (of a wheel: the one beside {sys.executable}); under Slurm with `srun --mpi=pmix` or "
                f"`srun --mpi=pmi2`, one of those that `srun --mpi=list` names and the library was built with."
            )


@contextlib.contextmanager
def starting(limit: float) -> Iterator[None]:
    """In this block the ranks meet for the first time; where some do not come, say who, and end all ranks.

    Parameters
    ----------
    limit : seconds that a rank waits; 0 for ever
    """
    from mpi4py import MPI

    world, met = MPI.COMM_WORLD, threading.Event()
    rank, others = world.Get_rank(), range(1, world.Get_size())
    hello = world.Isend(bytearray(0), 0, START) if rank else MPI.REQUEST_NULL

    def watch():
        if met.wait(limit + GRACE * (rank > 0)):  # the first rank knows more
            return
        late = [other for other in others if not world.Iprobe(other, START)] if rank == 0 else [0]
        ranks = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        what = f"for {ranks}: stopped, or busy" if late else "for ranks that are here, and do not go on"
        abort(HANGING, f"{rank_of_world()}: start-up has waited {limit:g} s {what}")

    if limit and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        threading.Thread(target=watch, name="start-up", daemon=True).start()
    try:
        yield
    finally:
        met.set()
    hello.Wait()
    for other in others if rank == 0 else ():
        world.Recv(bytearray(0), other, START)


def install_excepthooks():
    """Let every failure of this rank end all ranks, with its rank and traceback on stderr.

    An exception on the main or another thread aborts with status 1, Ctrl-C with 130, SIGTERM with 143, an exit with its
    own status where that is not 0. A signal first interrupts Python as KeyboardInterrupt does, so that `finally` is
    honoured; where the rank is inside an MPI call, and so deaf, it aborts after two seconds. A program that takes a
    signal for itself meanwhile, as one does that saves first, is left alone.
    """
    place = rank_of_world()
    received: list[int] = []  # signals that Python has seen

    def failed_in_thread(arguments):
        kind, error, trace, thread = arguments
        if not issubclass(kind, SystemExit):
            said = "".join(traceback.format_exception(kind, error, trace))
            abort(1, f"{place}, thread {thread.name if thread else '?'}: {kind.__name__}: {error}\n{said}")
        if error.code:
            abort(status_of(error.code), f"{place}, thread {thread.name if thread else '?'}: sys.exit({error.code!r})")

    def interrupted(number, frame):
        received.append(number)
        raise KeyboardInterrupt

    def listen(pipe):
        """A signal writes its number here at once, even while the main thread is inside an MPI call."""
        while True:
            number = os.read(pipe, 1)[0]
            if number in (signal.SIGINT, signal.SIGTERM):
                time.sleep(GRACE)
                if number not in received and signal.getsignal(number) is interrupted:  # else somebody else's to heed
                    abort(128 + number, f"{place}: ended by {signal.Signals(number).name} during an MPI call")

    end_together(received)
    threading.excepthook = failed_in_thread
    if threading.current_thread() is threading.main_thread():
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, interrupted)
        threading.Thread(target=listen, args=(reading,), name="signals", daemon=True).start()


def abort_on_exit():
    """Let an exception or an exit of this rank end all ranks, where nothing else sees to it.

    A Communicator of several ranks asks for this. A program that has an excepthook of its own is left alone, and so is
    one that `python -m mpi4py` runs: that does the same.
    """
    of_mpi4py = "mpi4py.run" in sys.modules or "mpi4py.run" in sys.orig_argv
    if sys.excepthook is sys.__excepthook__ and not of_mpi4py:
        end_together()


def finalize_timeout(limit: float):
    """Let MPI's end, in which a rank waits for all others, last so many seconds at most; then all ranks end.

    A program that ends MPI itself is left alone. Otherwise MPI ends behind the interpreter, where no thread of Python
    and no handler can look after it: what is left is the system's alarm, SIGALRM, of which the launcher tells. A rank
    that is stopped when the others have gone is killed.
    """
    from mpi4py import MPI

    def set_alarm():
        if not MPI.Is_finalized():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(ends))
            kill_in(max(ends) + GRACE)

    if not ends:
        atexit.register(set_alarm)
    ends.append(limit)


def end_together(received: Sequence[int] = ()):
    """Abort all ranks when an exception or an exit whose status is not 0 ends this one.

    Parameters
    ----------
    received : the signals that have been raised as KeyboardInterrupt
    """
    from mpi4py import MPI

    place = rank_of_world()
    statuses: list = []  # the argument of the exit that has ended the program

    def failed(kind, error, trace):
        if MPI.Is_finalized():
            sys.__excepthook__(kind, error, trace)
            return
        if issubclass(kind, KeyboardInterrupt):
            number = received[0] if received else signal.SIGINT
            abort(128 + number, f"{place}: ended by {signal.Signals(number).name}")
        said = "".join(traceback.format_exception(kind, error, trace))
        abort(1, f"{place}: {kind.__name__}: {error}\n{said}")

    def at_exit():
        code = statuses[-1] if statuses else None
        if status_of(code) and sys.excepthook is failed and not MPI.Is_finalized():
            abort(status_of(code), f"{place}: sys.exit({code!r}) ends all ranks")

    sys.excepthook = failed
    tell_of_exit(statuses.append)
    atexit.register(at_exit)


def tell_of_exit(tell: Callable[[object], object]):
    """Call tell(argument of the exit) when sys.exit, exit() or a SystemExit, raised anyhow, ends the program.

    Python has no hook for that. But the interpreter itself then reads the exception's attribute `code`, below all
    frames, where no program can: so this attribute is one that looks from where it is read.
    """
    attributes = gc.get_referents(SystemExit.__dict__)[0]  # the dict behind its read-only view
    own = attributes["code"]

    class Code:
        def __get__(self, error, kind=None):
            if error is None:
                return own
            code = own.__get__(error)
            if sys._getframe().f_back is None:
                tell(code)
            return code

        def __set__(self, error, code):
            own.__set__(error, code)

        def __delete__(self, error):
            own.__delete__(error)

    attributes["code"] = Code()
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))


def rank_of_world() -> str:
    """Such as "rank 1 of 4"."""
    from mpi4py import MPI

    return f"rank {MPI.COMM_WORLD.Get_rank()} of {MPI.COMM_WORLD.Get_size()}"


def abort(status: int, said: str):
    """Say why, and end all ranks."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.write(said if said.endswith("\n") else said + "\n")
    sys.stderr.flush()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)  # MPICH's Abort returns while mpiexec is about to end this rank


def status_of(code) -> int:
    """The exit status that the interpreter gives for sys.exit(code)."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)
