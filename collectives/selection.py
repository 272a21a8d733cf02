"""Which algorithm runs: what the caller says, else the environment, else a small table by message size.

Order of precedence: `algorithm=` of the call; the keyword given to Communicator(...); RINGPROP_<OPERATION> in
the environment (RINGPROP_ALLREDUCE=ring); "auto", the table. `native` is the MPI library's own, for every operation.
"""

import os

from collectives.algorithms import ALGORITHMS

# operation -> rows (longest message in bytes for which it holds, algorithm), shortest first.
ANY = float("inf")
AUTO = {
    "allgather": [(32 << 10, "bruck"), (ANY, "ring")],
    "allreduce": [(16 << 10, "doubling"), (ANY, "ring")],
    "alltoall": [(4 << 10, "bruck"), (ANY, "pairwise")],
    "barrier": [(ANY, "dissemination")],
    "broadcast": [(ANY, "binomial")],
    "exscan": [(ANY, "doubling")],
    "gather": [(32 << 10, "binomial"), (ANY, "flat")],
    "reduce": [(64 << 10, "binomial"), (ANY, "halving_gather")],
    "reduce_scatter": [(32 << 10, "halving"), (ANY, "ring")],
    "scan": [(ANY, "doubling")],
    "scatter": [(32 << 10, "binomial"), (ANY, "flat")],
}
# Where every rank knows its own block only (the vector forms): one for all sizes.
VECTOR = {"allgather": "ring", "alltoall": "pairwise", "gather": "flat", "scatter": "flat"}
# What runs in place of an algorithm that does not keep rank order, for an operation that does not commute.
ORDERED = {"allreduce": "doubling", "reduce_scatter": "doubling"}


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


def choose(operation: str, name: str, nbytes: int, size: int, vector: bool = False, ordered: bool = False) -> str:
    """The algorithm that runs where `name` is asked for.

    Parameters
    ----------
    nbytes : int
        of the whole vector; not used where `vector`, as ranks may know different numbers
    size : int
        ranks
    ordered : bool
        whether operands must meet in rank order: an algorithm that does not keep it is replaced by one that does
    """
    if name == "auto":
        name = VECTOR[operation] if vector else next(row for limit, row in AUTO[operation] if nbytes <= limit)
    entries = ALGORITHMS[operation]
    if name == "native" or not ordered or entries[name].ordered:
        return name
    return ORDERED[operation]
