"""The communicators that a program works on, so that all of them can be revoked when a rank has died.

MPI's fault tolerance (ULFM, of MPI 5's proposals; Bland et al. 2013) reports a death to ranks that wait for the dead
one. A rank that waits for a live one, which has left its call for that report, gets one only if the communicator is
revoked. A `Communicator` works on duplicates of its own: they are registered here from when they are made until freed.

Nothing is registered before `begin`.
"""

from __future__ import annotations

from mpi4py import MPI

from collectives.failures.aborted import Aborted

_made: dict[int, MPI.Intracomm] | None = None


def begin() -> None:
    """Register communicators from now on."""
    global _made
    _made = {}


def register(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Register a communicator that was made; return it."""
    if _made is not None and comm != MPI.COMM_NULL:
        _made[comm.handle] = MPI.Intracomm(comm)
    return comm


def unregister(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Unregister a communicator that is about to be freed; return it."""
    if _made is not None:
        _made.pop(comm.handle, None)
    return comm


def is_rank_death(error: BaseException) -> bool:
    """Return whether MPI reports by an error that a rank has died, or that a communicator was revoked."""
    if _made is not None and isinstance(error, Aborted):
        return error.death
    kinds = MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED
    return _made is not None and isinstance(error, MPI.Exception) and error.Get_error_class() in kinds


def revoke_all() -> None:
    """Revoke all: every rank in a call of one of them, or that comes to one, gets an error. None can be used again."""
    for comm in list((_made or {}).values()):
        comm.Revoke()
    if _made:
        _made.clear()
