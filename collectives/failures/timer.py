"""A process that is stopped ends nevertheless: the system itself kills it.

It runs no thread and no handler, an alarm waits until it goes on, and mpiexec waits for it for ever, once the other
ranks have ended. SIGKILL alone reaches it, and a timer of the system's (POSIX, timer_create) can send that.
"""

import ctypes
import os
import signal


class Event(ctypes.Structure):
    """What a timer does: struct sigevent, 64 bytes."""

    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("_", ctypes.c_int * 12)]


class Times(ctypes.Structure):
    """Struct itimerspec: each time is seconds and nanoseconds."""

    _fields_ = [("again", ctypes.c_long * 2), ("first", ctypes.c_long * 2)]


def kill_in(seconds: float):
    """Have the system kill this process in so many seconds, if it has not ended by then.

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
