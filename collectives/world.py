"""The ranks as one program: all of them start, and when one fails all of them end.

MPI itself does neither. Started by a launcher that the MPI library does not know, every process believes to be alone;
and an exception on one rank leaves the others waiting for it for ever.
"""

import atexit
import os
import signal
import sys
import threading
import time
import traceback

# Where launchers say how many ranks they started: Open MPI, MPICH and Intel MPI, Cray, Slurm.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PALS_SIZE", "SLURM_STEP_NUM_TASKS")
GRACE = 2.0  # seconds that a signalled rank gets to leave MPI and clean up


class WorldError(RuntimeError):
    """The ranks that were launched do not form one MPI world."""


def nodes_of(comm) -> list[int]:
    """For each rank the first rank on its node (collective)."""
    from mpi4py import MPI

    node = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED))
    first = node.bcast(comm.Get_rank())
    node.Free()
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


def install_excepthooks():
    """Let every failure of this rank end all ranks, with its rank and traceback on stderr.

    An exception on the main or another thread aborts with status 1, Ctrl-C with 130, SIGTERM with 143, sys.exit with
    its own status where that is not 0. A signal first interrupts Python as KeyboardInterrupt does, so that `finally` is
    honoured; where the rank is inside an MPI call, and so deaf, it aborts after two seconds.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    place = f"rank {world.Get_rank()} of {world.Get_size()}"
    received: list[int] = []  # signals that Python has seen
    status: list = []  # the argument of the sys.exit that ended the program

    def abort(status, said):
        sys.stdout.flush()
        sys.stderr.write(said if said.endswith("\n") else said + "\n")
        sys.stderr.flush()
        if not MPI.Is_finalized():
            world.Abort(status)
        os._exit(status)  # MPICH's Abort returns while mpiexec is about to end this rank

    def failed(kind, error, trace):
        if issubclass(kind, KeyboardInterrupt):
            number = received[0] if received else signal.SIGINT
            abort(128 + number, f"{place}: ended by {signal.Signals(number).name}")
        said = "".join(traceback.format_exception(kind, error, trace))
        abort(1, f"{place}: {kind.__name__}: {error}\n{said}")

    def failed_in_thread(arguments):
        kind, error, trace, thread = arguments
        if not issubclass(kind, SystemExit):
            said = "".join(traceback.format_exception(kind, error, trace))
            abort(1, f"{place}, thread {thread.name if thread else '?'}: {kind.__name__}: {error}\n{said}")
        if error.code:
            abort(status_of(error.code), f"{place}, thread {thread.name if thread else '?'}: sys.exit({error.code!r})")

    class Exit(SystemExit):
        """What sys.exit raises. It is dropped where it is caught, in a frame, or last of all by the interpreter."""

        def __del__(self):
            if sys._getframe().f_back is None:
                status.append(self.code)

    def leave(code=None):
        raise Exit(code)

    def at_exit():
        if status and status[0]:
            abort(status_of(status[0]), f"{place}: sys.exit({status[0]!r}) ends all ranks")

    def interrupted(number, frame):
        received.append(number)
        raise KeyboardInterrupt

    def listen(pipe):
        """A signal writes its number here at once, even while the main thread is inside an MPI call."""
        while True:
            number = os.read(pipe, 1)[0]
            if number in (signal.SIGINT, signal.SIGTERM):
                time.sleep(GRACE)
                if number not in received:
                    abort(128 + number, f"{place}: ended by {signal.Signals(number).name} during an MPI call")

    sys.excepthook, threading.excepthook, sys.exit = failed, failed_in_thread, leave
    atexit.register(at_exit)
    if threading.current_thread() is threading.main_thread():
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, interrupted)
        signal.signal(signal.SIGTERM, interrupted)
        threading.Thread(target=listen, args=(reading,), name="signals", daemon=True).start()


def status_of(code) -> int:
    """The exit status that the interpreter gives for sys.exit(code)."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)
