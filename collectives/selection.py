"""Which algorithm runs: what the caller says, else the environment, else a small table by message size.

Order of precedence: `algorithm=` of the call; the keyword given to Communicator(...); RINGPROP_<OPERATION> in
the environment (RINGPROP_ALLREDUCE=ring); "auto", the table. `native` is the MPI library's own, for every operation.
"""

import os

from collectives.algorithms import ALGORITHMS

# operation -> rows (longest message in bytes for which it holds, algorithm), shortest first.
AUTO = {
    "allreduce": [(16 << 10, "doubling"), (float("inf"), "ring")],
    "barrier": [(float("inf"), "dissemination")],
    "broadcast": [(float("inf"), "binomial")],
    "gather": [(32 << 10, "binomial"), (float("inf"), "flat")],
    "reduce": [(float("inf"), "binomial")],
    "scatter": [(32 << 10, "binomial"), (float("inf"), "flat")],
}


def check_name(operation: str, name: str) -> str:
    """The name, if there is such an algorithm; otherwise an error that lists those there are."""
    if operation not in AUTO:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(sorted(AUTO))}")
    known = ["auto", "native", *ALGORITHMS[operation]]
    if name not in known:
        raise ValueError(f"no {operation} algorithm {name!r}: there are {', '.join(known)}")
    return name


def settings(given: dict[str, str]) -> dict[str, str]:
    """operation -> name, from what was given and the environment."""
    for operation, name in given.items():
        check_name(operation, name)
    return {op: given.get(op) or check_name(op, os.environ.get(f"RINGPROP_{op.upper()}", "auto")) for op in AUTO}


def choose(operation: str, name: str, nbytes: int, ordered: bool = False) -> str:
    """The algorithm that runs where `name` is asked for; one that keeps rank order where `ordered`."""
    if name == "auto":
        name = next(row_name for limit, row_name in AUTO[operation] if nbytes <= limit)
    if name == "native" or not ordered or ALGORITHMS[operation][name].ordered:
        return name
    return next(entry.name for entry in reversed(ALGORITHMS[operation].values()) if entry.ordered)
