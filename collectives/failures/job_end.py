"""How the job ends: when one rank fails all of them end, within seconds, with rank and cause.

MPI does not see to it: an exception on one rank leaves the others waiting for it for ever. In order of what they catch:

| what ends a rank | what ends the others |
|---|---|
| an exception, Ctrl-C, SIGTERM, an exit whose status is not 0 | `install_excepthooks` (scripts), `abort_on_exit` |
| nothing: it waits for others as MPI ends | an alarm (`finalize_timeout`) |
| nothing: it is stopped (SIGSTOP) | the system's timer (`kill_in`) |
"""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

HANGING = 86  # exit status of ranks that wait for others too long
GRACE = 2.0  # seconds that a signalled rank gets to leave MPI and clean up
finalize_limits: list[float] = []  # seconds that MPI may take to end, as each watched communicator has it


def install_excepthooks():
    """Let every failure of this rank end all ranks, with its rank and traceback on stderr.

    An exception on the main or another thread aborts with status 1, Ctrl-C with 130, SIGTERM with 143, an exit with its
    own status where that is not 0. A signal first interrupts Python as KeyboardInterrupt does, so that `finally` is
    honoured; where the rank is inside an MPI call, and so deaf, it aborts after two seconds. A program that takes a
    signal for itself meanwhile, as one does that saves first, is left alone.

    Examples
    --------
    >>> from collectives import install_excepthooks
    >>> install_excepthooks()  # at the start of a program: an exception of one rank ends all
    """
    place = rank_of_world()
    received: list[int] = []  # signals that Python has seen

    def failed_in_thread(arguments):
        kind, error, trace, thread = arguments
        if not issubclass(kind, SystemExit):
            message = "".join(traceback.format_exception(kind, error, trace))
            abort(1, f"{place}, thread {thread.name if thread else '?'}: {kind.__name__}: {error}\n{message}")
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

    abort_on_failure(received)
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
        abort_on_failure()


def finalize_timeout(limit: float):
    """Let MPI's end, in which a rank waits for all others, last `limit` seconds at most; then all ranks end.

    A program that ends MPI itself is left alone. Otherwise MPI ends behind the interpreter, where no thread of Python
    and no handler can look after it: what is left is the system's alarm, SIGALRM, of which the launcher tells. A rank
    that is stopped when the others have gone is killed.
    """
    from mpi4py import MPI

    def set_alarm():
        if not MPI.Is_finalized():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(finalize_limits))
            kill_in(max(finalize_limits) + GRACE)

    if not finalize_limits:
        atexit.register(set_alarm)
    finalize_limits.append(limit)


def abort_on_failure(received: Sequence[int] = ()):
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
        message = "".join(traceback.format_exception(kind, error, trace))
        abort(1, f"{place}: {kind.__name__}: {error}\n{message}")

    def at_exit():
        code = statuses[-1] if statuses else None
        if status_of(code) and sys.excepthook is failed and not MPI.Is_finalized():
            abort(status_of(code), f"{place}: sys.exit({code!r}) ends all ranks")

    sys.excepthook = failed
    call_with_exit_status(statuses.append)
    atexit.register(at_exit)


def call_with_exit_status(call: Callable[[object], object]):
    """Call `call`(argument of the exit) when sys.exit, exit() or a SystemExit, raised anyhow, ends the program.

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
                call(code)
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


def abort(status: int, message: str):
    """Say why, and end all ranks."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.write(message if message.endswith("\n") else message + "\n")
    sys.stderr.flush()
    if not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)  # MPICH's Abort returns while mpiexec is about to end this rank


def status_of(code) -> int:
    """Return the exit status that the interpreter gives for sys.exit(code)."""
    return code & 0xFF if isinstance(code, int) else int(code is not None)


class Event(ctypes.Structure):
    """What a timer does: struct sigevent, 64 bytes."""

    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("_", ctypes.c_int * 12)]


class Times(ctypes.Structure):
    """Struct itimerspec: each time is seconds and nanoseconds."""

    _fields_ = [("again", ctypes.c_long * 2), ("first", ctypes.c_long * 2)]


def kill_in(seconds: float):
    """Have the system kill this process in `seconds`, if it has not ended by then.

    A process that is stopped runs no thread and no handler, an alarm waits until it goes on, and mpiexec waits for it
    for ever, once the other ranks have ended. SIGKILL alone reaches it, and a timer of the system's (POSIX,
    timer_create) can send that.

    Raises
    ------
    OSError
        The system has no more timers.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "timer_create"):  # in the C library itself since glibc 2.34
        library = ctypes.CDLL("librt.so.1", use_errno=True)
    timer, event = ctypes.c_void_p(), Event(signal=signal.SIGKILL)
    times = Times(first=(int(seconds), int(seconds % 1 * 1e9)))
    if library.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) or library.timer_settime(  # 1: monotonic
        timer, 0, ctypes.byref(times), None
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"no timer that ends this process: {os.strerror(number)}")
