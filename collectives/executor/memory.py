"""Memory as bytes (MPI.buffer) and as arrays, and the calls that copy it."""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from mpi4py import MPI


def allocate(nbytes: int) -> MPI.buffer:
    """Return new memory."""
    return MPI.buffer.frombuffer(np.empty(nbytes, np.uint8))


def array(memory: MPI.buffer, dtype=np.uint8) -> np.ndarray:
    """Return memory as an array."""
    return np.frombuffer(memory, dtype) if memory.nbytes else np.empty(0, dtype)


def copying(target: MPI.buffer, source: MPI.buffer) -> Callable[[], None]:
    """Return the call target[:] = source."""
    return partial(target.__setitem__, slice(None), source)


def memory_of(kept: Iterable) -> int:
    """Return the bytes of memory among what a plan keeps alive."""
    return sum(getattr(m, "nbytes", 0) for m in kept)
