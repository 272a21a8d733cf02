"""A check that all ranks call the same collective, before any data moves: debug=True, or RINGPROP_DEBUG=1.

Before each collective all ranks exchange what they are about to call, and all refuse it where that does not fit: a
nonblocking one when it is tested or waited for, as ranks may start it at different times. It costs an allgather of
short texts a call.
"""

import inspect
from collections.abc import Callable
from zlib import crc32

import numpy as np
from mpi4py import MPI

from collectives.failures.unfinished import keep_alive
from collectives.failures.watchdog import describe

MESSAGE_BYTES = 1024  # bytes in which a rank says what it calls


class Agreement:
    """Refuses a collective that ranks call with arguments that differ, before any data moves.

    Parameters
    ----------
    comm : of its own
    wait : function (request, for what) that waits for it; may raise TimeoutError
    """

    def __init__(self, comm: MPI.Intracomm, wait: Callable[[MPI.Request, str], object]):
        self.comm, self.wait = comm, wait
        self.pending = []  # exchanges in flight: what MPI reads and writes must live

    def exchange(self, must_agree: str, at: str):
        """Send what this rank calls; return a function (whether to wait) -> whether all have. It raises ValueError."""
        if len(must_agree) > MESSAGE_BYTES // 2:
            must_agree = f"{must_agree[: MESSAGE_BYTES // 3]} ... {crc32(must_agree.encode()):08x}"
        lines = [
            text.replace("\n", " ").encode("ascii", "replace")[: MESSAGE_BYTES // 2 - 1] for text in (must_agree, at)
        ]
        own = np.frombuffer(b"\n".join(lines).ljust(MESSAGE_BYTES), np.uint8)
        gathered = np.empty((self.comm.Get_size(), MESSAGE_BYTES), np.uint8)
        request = self.comm.Iallgather(own, gathered)
        self.pending = [(r, *buffers) for r, *buffers in self.pending if not r.Test()] + [(request, own, gathered)]

        def agreed(wait: bool) -> bool:
            if wait:
                self.wait(request, "for what the other ranks are about to call")
            elif not request.Test():
                return False
            calls = [row.tobytes().decode().rstrip().split("\n") for row in gathered]
            first, first_at = calls[0]
            for rank, (other, there) in enumerate(calls):
                if other != first:
                    raise ValueError(
                        f"the ranks do not agree: rank 0 calls {first} at {first_at}; "
                        f"rank {rank} calls {other} at {there}"
                    )
            return True

        return agreed

    def free(self, aborted: bool):
        """Free the communicator (collective); where a call was aborted it stays, as exchanges may never end."""
        if aborted:
            keep_alive(self.pending)
        else:
            MPI.Request.Waitall([request for request, *_ in self.pending])
            self.comm.Free()


def absent(spec) -> bool:
    """Return whether a rank has no buffer of its own here."""
    return spec is None or spec is MPI.IN_PLACE


def describe_call(name, method, communicator, args, kwargs, in_words, blocks) -> str:
    """Return what must be the same on all ranks of a call: operation, elements, datatype, op, root and algorithm.

    `in_words(buffer, parts)` says how many elements of what a buffer has; `blocks` has by the name of the blocking
    method which of its buffers, "send" or "recv", hold a block for each rank.
    """
    if name[0].islower() or name == "Alltoallw":
        return name
    blocking = name.removeprefix("I").removesuffix("_init").capitalize()
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    values = bound.arguments
    words = []
    if not blocking.endswith("v"):
        buffers = {"send": values.get("sendbuf", values.get("buf")), "recv": values.get("recvbuf")}
        in_blocks = blocks.get(blocking, ())
        by_blocks = sorted(buffers, key=lambda side: side in in_blocks)  # first one of which all ranks have their own
        if (side := next((side for side in by_blocks if not absent(buffers[side])), None)) is not None:
            words.append(in_words(buffers[side], communicator.Get_size() if side in in_blocks else 1))
    if "op" in values:
        words.append(describe(values["op"]))
    if "root" in values:
        words.append(f"root {int(values['root'])}")
    if (algorithm := values.get("algorithm")) is not None:
        own = getattr(algorithm, "name", getattr(algorithm, "__name__", type(algorithm).__name__))
        words.append(f"algorithm {algorithm if isinstance(algorithm, str) else own}")
    if values.get("recvcounts") is not None:
        words.append(f"counts {list(values['recvcounts'])}")
    return f"{name}({', '.join(words)})"
