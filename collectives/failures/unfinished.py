"""Memory of messages that not all ranks have come to: MPI may read or write it after the wait for them has failed."""

from collections.abc import Iterable

_KEPT: list[list] = []


def keep_alive(requests: Iterable) -> None:
    """Keep the memory of messages that may still come, for as long as the process lives: a request holds its buffer."""
    _KEPT.append(list(requests))
