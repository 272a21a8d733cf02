"""A communicator on which a rank has ended a call early: what every later call raises."""

ADVICE = (
    "and its messages may still come: go on with another Communicator, or with this one after release() on all ranks"
)


class Aborted(RuntimeError):
    """A rank has aborted a collective, so that no later one can be trusted.

    Attributes
    ----------
    cause : str
        which rank, which call and why, as the rank saw it that was the first to leave
    death : bool
        whether MPI had told that rank of a death
    """

    def __init__(self, cause: str, death: bool = False):
        super().__init__(f"{cause}, {ADVICE}")
        self.cause, self.death = cause, death


def cause_of(error: BaseException, rank: str, what: str, place: str = "") -> str:
    """Return, in one line, why a call ended early; of an `Aborted` the cause that it already has."""
    if isinstance(error, Aborted):
        return error.cause
    message = " ".join(str(error).split())  # MPICH's error stacks have several lines
    return f"{rank} has aborted {what} ({place}{type(error).__name__}{': ' * bool(message)}{message})"
