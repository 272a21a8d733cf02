"""Which algorithm runs: what the caller says, else the environment, else a small table by message size.

Order of precedence: `algorithm=` of the call; the keyword given to Communicator(...); RINGPROP_<OPERATION> in
the environment (RINGPROP_ALLREDUCE=ring); "auto", the table; "schedule" is the same without the library's own. The
table is the one below, or that of the file that RINGPROP_TUNE names. Beside the names in ALGORITHMS there are, for
every operation, `native`, the MPI library's own; and for some `shared`: the schedules of algorithms/shared.py, which
move data through the memory that the ranks of a node share, and between nodes, for an allreduce, by rings of ranks that
each carry a part.
"""

import json
import os
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import NamedTuple

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import COMMUTATIVE, EQUAL_BLOCKS, Algorithm, Need, by_messages
from collectives.reading import read_json

ANY = float("inf")
Rows = list[tuple[float, str]]  # (longest message in bytes for which it holds, algorithm), shortest first
SHARED = {"allgather", "allreduce", "barrier", "broadcast", "reduce", "reduce_scatter"}

# One node: measured with two ranks and Open MPI; LIBRARIES has what differs with others. Networks: what the clock
# derives for "infiniband", one rank on each node and two (derive.py; a test compares). For other networks: bench.py
# network --table; measured: bench.py collectives --tune.
# place -> operation -> rows. Places: all ranks on one node; one rank on each node; several on each of several nodes.
TABLE: dict[str, dict[str, Rows]] = {
    "node": {
        "allgather": [(ANY, "native")],
        "allreduce": [(4 << 10, "native"), (ANY, "shared")],
        "alltoall": [(ANY, "pairwise")],
        "barrier": [(ANY, "native")],
        "broadcast": [(ANY, "native")],
        "exscan": [(ANY, "doubling")],
        "gather": [(ANY, "flat")],
        "reduce": [(16 << 20, "native"), (ANY, "shared")],
        "reduce_scatter": [(4 << 10, "native"), (ANY, "shared")],
        "scan": [(ANY, "doubling")],
        "scatter": [(ANY, "flat")],
    },
    "network": {
        "allgather": [(64 << 10, "bruck"), (ANY, "ring")],
        "allreduce": [
            (16 << 10, "doubling"),
            (64 << 10, "rabenseifner"),
            (256 << 10, "ring"),
            (ANY, "segmented_ring"),
        ],
        "alltoall": [(4 << 10, "bruck"), (ANY, "pairwise")],
        "barrier": [(ANY, "dissemination")],
        "broadcast": [
            (4 << 10, "flat"),
            (64 << 10, "binomial"),
            (256 << 10, "scatter_allgather"),
            (ANY, "chain"),
        ],
        "exscan": [(ANY, "doubling")],
        "gather": [(ANY, "flat")],
        "reduce": [(16 << 10, "flat"), (ANY, "halving_gather")],
        "reduce_scatter": [(64 << 10, "halving"), (ANY, "ring")],
        "scan": [(ANY, "doubling")],
        "scatter": [(ANY, "flat")],
    },
    "nodes": {
        "allgather": [(64 << 10, "doubling"), (ANY, "ring")],
        "allreduce": [(16 << 10, "doubling"), (ANY, "shared")],
        "alltoall": [(16 << 10, "bruck"), (ANY, "pairwise")],
        "barrier": [(ANY, "dissemination")],
        "broadcast": [(64 << 10, "binomial"), (1 << 20, "scatter_allgather"), (ANY, "chain")],
        "exscan": [(ANY, "doubling")],
        "gather": [(16, "flat"), (4 << 10, "binomial"), (ANY, "flat")],
        "reduce": [(16 << 10, "binomial"), (ANY, "halving_gather")],
        "reduce_scatter": [(64 << 10, "halving"), (ANY, "ring")],
        "scan": [(ANY, "doubling")],
        "scatter": [(16, "flat"), (4 << 10, "binomial"), (ANY, "flat")],
    },
}

# On one node: how the library's name and version begin -> operation -> rows. MPICH's own allreduce takes twice as long
# as Open MPI's (8 us from 16 bytes on), its reduce from 16 KiB on.
LIBRARIES: dict[str, dict[str, Rows]] = {
    "MPICH": {
        "allreduce": [(ANY, "shared")],
        "broadcast": [(256 << 10, "native"), (4 << 20, "shared"), (ANY, "native")],
        "reduce": [(4 << 10, "native"), (ANY, "shared")],
    },
}

# Between nodes private arrays of more bytes go by messages inside nodes too, as the cable would wait for copies into
# slots and out of them: a twentieth of the time of 16 MiB (2 x 2 and 3 x 2 ranks, 400 Mbit/s).
SLOTS_BETWEEN_NODES = 64 << 10

# On one node, once ranks were given shared arrays: longer ones are read where they lie, in 0.2 to 0.85 of the library's
# time (two ranks, 16 KiB ... 64 MiB). The first barrier of a call tells whether all its arrays are such; others
# are the library's after all.
READ_IN_PLACE, READ_ABOVE = {"allgather", "broadcast"}, 8 << 10  # bytes

# The library counts elements in 32 bits. So many bytes are at most so many elements, whatever their datatype is.
COUNTED = (1 << 31) - 1

# What runs where a call does not meet the needs of the row's algorithm: an operation that does not commute, blocks of
# several lengths. The vector forms, in which ranks know different numbers of elements, have no row: it is this one.
FALLBACK = {
    "allgather": "ring",
    "allreduce": "doubling",
    "alltoall": "pairwise",
    "gather": "flat",
    "reduce": "binomial",
    "reduce_scatter": "doubling",
    "scatter": "flat",
}
# What sums float16 between nodes: all operands of an element at once, in float32, so that it is rounded only once.
# Any other algorithm that is asked for rounds after every round in which it adds.
ROUNDED_ONCE = {
    "allreduce": "direct",
    "exscan": "flat",
    "reduce": "direct_gather",
    "reduce_scatter": "direct",
    "scan": "flat",
}


class Call(NamedTuple):
    """What of a call decides its algorithm: the same on all ranks.

    nbytes : of the whole vector; not used where `vector`, as ranks may know different numbers
    ordered : operands must be combined in rank order
    shareable : elements and operation are such that `shared` can do it
    half : float16, which the library cannot reduce, and which must not be rounded at every addition
    numpy : the library may reduce some values otherwise than NumPy (reduction.py)
    """

    operation: str
    nbytes: int
    vector: bool = False
    ordered: bool = False
    shareable: bool = True
    half: bool = False
    numpy: bool = False

    def lacks(self, needs: Iterable[Need]) -> Need | None:
        """Return what an algorithm needs and the call has not; None where it has all. The rest is seen to elsewhere."""
        missing = {COMMUTATIVE: self.ordered, EQUAL_BLOCKS: self.vector}
        return next((need for need in needs if missing.get(need)), None)


class Selection:
    """Chooses for one communicator.

    Parameters
    ----------
    given : operation -> name
        what was asked for; the environment and "auto" fill in the rest
    nodes : the node of each rank
    library : the MPI library's name and version, as MPI.Get_library_version() says them

    Raises
    ------
    ValueError
        for an unknown operation or name, or a table file that is none
    """

    def __init__(self, given: dict[str, str], nodes: list, library: str = ""):
        for operation, name in given.items():
            check_name(operation, name)
        self.given = dict(given)
        self.names = {}
        for op in ALGORITHMS:
            self.names[op] = given.get(op) or from_environment(op)
        distinct = len(set(nodes))
        self.place = "node" if distinct == 1 else "network" if distinct == len(nodes) else "nodes"
        self.size = len(nodes)
        self.file = os.environ.get("RINGPROP_TUNE", "")
        self.refused = ""  # why the ranks may have no shared memory, where that was found
        self.arrays = False  # whether the ranks were ever given arrays in shared memory: alike on all
        self.messages_only = False  # whether "auto" stands for schedules that send messages, and for nothing else
        self.measured = load(self.file) if self.file else {}
        self.own = self.measured.get(self.place, {})  # rows of the file: operation -> rows
        self.table = default_table(self.place, library) | self.own

    def without_memory(self) -> "Selection":
        """The same for nonblocking collectives, which only send messages, and which the library would not advance.

        Where the file has no rows for this place, those for a network hold.
        """
        other = copy(self)
        other.place, other.messages_only = "network", True
        other.own = self.measured.get("network", {}) | self.own
        other.table = TABLE["network"] | other.own
        return other

    def asked(self, operation: str, algorithm: str | Callable | None) -> str | Callable:
        """What a call asks for: a name, also for an entry of ALGORITHMS; or a function that the caller wrote."""
        if isinstance(algorithm, Algorithm) and by_messages(operation).get(algorithm.name) == algorithm:
            return algorithm.name
        if callable(getattr(algorithm, "rounds", algorithm)):
            return getattr(algorithm, "rounds", algorithm)
        return self.names[operation] if algorithm is None else check_name(operation, algorithm)

    def native_below(self, operation: str) -> float:
        """The length in bytes up to which every call that does not ask for an algorithm is native; -1 for none."""
        if self.names[operation] != "auto":
            return ANY if self.names[operation] == "native" else -1
        limit, name = self.table[operation][0]
        if self.reads_in_place(operation):
            limit = min(limit, READ_ABOVE)
        return min(limit, COUNTED) if name == "native" else -1

    def reads_in_place(self, operation: str) -> bool:
        """Whether the default table's `native` is `shared` for long arrays."""
        return self.arrays and self.place == "node" and operation in READ_IN_PLACE and operation not in self.own

    def choose(self, asked: str, call: Call) -> str:
        """The algorithm that runs where `asked` is asked for."""
        return self.reason(asked, call)[0]

    def without_arrays(self) -> "Selection":
        """The same for a call whose arrays are not in memory that ranks share."""
        other = copy(self)
        other.arrays = False
        return other

    def reason(self, asked: str, call: Call) -> tuple[str, str]:
        """(algorithm, why)"""
        operation, name, why = call.operation, asked, "asked for"
        automatic = asked in ("auto", "schedule")
        if automatic:
            if call.vector:
                name, why = FALLBACK[operation], "ranks know different numbers of elements"
            else:
                limit, name = next(row for row in self.table[operation] if call.nbytes <= row[0])
                source = self.file if operation in self.own else "the default table"
                why = f"{source} says so" + (f" up to {limit:,} bytes" if limit < ANY else " from here on")
                if name == "native" and (call.nbytes > COUNTED or call.numpy):
                    long = "the library counts elements in 32 bits"
                    why = "the library differs from NumPy for NaN and short integers" if call.numpy else long
                    name = "shared" if self.place == "node" and operation in SHARED else self.by_messages(call)
                elif name == "native" and call.nbytes > READ_ABOVE and self.reads_in_place(operation):
                    name, why = "shared", "ranks were given shared arrays; with any other it is native"
        if asked == "schedule" and name == "native":
            near = self.place == "node" and operation in SHARED and not self.cannot_share(call)
            name, why = "shared" if near else self.by_messages(call), f"{why}, but it is the library's own"
        if automatic and self.messages_only and name in ("native", "shared"):
            name, why = self.by_messages(call), f"{why}, but only messages are sent"
        if automatic and call.half and operation in ROUNDED_ONCE:
            shared = self.place == "node" and operation in SHARED and call.shareable and not self.refused
            name, why = "shared" if shared else ROUNDED_ONCE[operation], "float16 is summed in float32 and rounded once"
        slots = name == "shared" and automatic and self.place == "nodes" and not self.arrays
        if slots and call.nbytes > SLOTS_BETWEEN_NODES:
            name, why = "two_level", "no array is in memory that ranks share"
        if name == "shared" and (reason := self.cannot_share(call)):
            name, why = self.by_messages(call), f"shared is {why}, but {reason}"
        if name not in ("native", "shared") and (lacking := call.lacks(ALGORITHMS[operation][name].needs)):
            name, why = FALLBACK[operation], f"{name} needs {lacking.value}"
        return name, why

    def by_messages(self, call: Call) -> str:
        """What runs where neither the library nor shared memory does it."""
        return next(name for limit, name in TABLE["network"][call.operation] if call.nbytes <= limit)

    def cannot_share(self, call: Call) -> str:
        """Why `shared` cannot do a call; empty where it can."""
        if call.vector:
            return "ranks know different numbers of elements"
        if self.place == "network" or (self.place == "nodes" and call.operation != "allreduce"):
            return "the ranks are on different nodes"
        if not call.shareable:
            return "it has SUM, PROD, MAX and MIN of NumPy's numbers only"
        return self.refused


def default_table(place: str, library: str = "") -> dict[str, Rows]:
    """The rows of a place, with this MPI library."""
    others = next((rows for name, rows in LIBRARIES.items() if library.startswith(name)), {})
    return TABLE[place] | others if place == "node" else TABLE[place]


def from_environment(operation: str) -> str:
    """What RINGPROP_ALLREDUCE and the like ask for."""
    variable = f"RINGPROP_{operation.upper()}"
    try:
        return check_name(operation, os.environ.get(variable, "auto"))
    except ValueError as error:
        raise ValueError(f"{variable} in the environment: {error}") from None


def seconds(text: str) -> float:
    """RINGPROP_WATCH as a number."""
    try:
        if (found := float(text)) >= 0:
            return found
    except ValueError:
        pass
    raise ValueError(f"RINGPROP_WATCH={text} in the environment: expected seconds, 0 for never")


def check_environment() -> None:
    """Refuse what a Communicator would: settings in the environment that make no sense."""
    for operation in ALGORITHMS:
        from_environment(operation)
    seconds(os.environ.get("RINGPROP_WATCH", "0"))
    if file := os.environ.get("RINGPROP_TUNE"):
        load(file)


def check_name(operation: str, name: str) -> str:
    """The name, if there is such an algorithm; otherwise an error that lists those there are."""
    if operation not in ALGORITHMS:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(sorted(ALGORITHMS))}")
    known = ["auto", "schedule", "native", *(["shared"] if operation in SHARED else []), *by_messages(operation)]
    if name not in known:
        raise ValueError(f"no {operation} algorithm {name!r}: there are {', '.join(known)}")
    return name


def load(file: str | Path) -> dict[str, dict[str, Rows]]:
    """A table that `save` wrote.

    Raises
    ------
    ValueError
        where the file holds none, names what there is not, or its rows do not rise; the message names the file
    """
    try:
        table = read_json(file)
        for place, operations in table.items():
            if place not in TABLE:
                raise ValueError(f"no place {place!r}: there are {', '.join(TABLE)}")
            for operation, rows in operations.items():
                limits = [ANY if limit is None else limit for limit, _ in rows]
                if not all(type(limit) is int and limit >= 0 for limit in limits if limit is not ANY):
                    raise ValueError(f"{operation}: the limits {limits} must be whole numbers of bytes")
                if limits != sorted(set(limits)) or limits[-1:] != [ANY]:
                    raise ValueError(f"{operation}: the limits {limits} must rise, and end with null")
                names = [check_name(operation, name) for _, name in rows]
                if {"auto", "schedule"} & set(names):
                    raise ValueError(f"{operation}: the table is what auto stands for; name an algorithm")
                operations[operation] = list(zip(limits, names, strict=True))
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{file}: no table of algorithms: {error}") from error
    return table


def save(file: str | Path, table: dict[str, dict[str, Rows]]) -> None:
    """Write a table as JSON: {place: {operation: [[longest message in bytes or null, name], ...]}}."""
    plain = {
        place: {
            op: [[None if limit == ANY else limit, name] for limit, name in rows] for op, rows in operations.items()
        }
        for place, operations in table.items()
    }
    Path(file).write_text(json.dumps(plain, indent=1) + "\n")


def table_from(times: dict[str, dict[int, float]]) -> Rows:
    """Rows from measured seconds, algorithm -> {bytes: seconds}: of each size the fastest, as few changes as will do.

    An algorithm that is at most a tenth slower than the fastest is kept from one size to the next.
    """
    sizes = sorted(set.intersection(*(set(at) for at in times.values())))
    rows: Rows = []
    current = ""
    for i, size in enumerate(sizes):
        best = min(times, key=lambda name: times[name][size])
        if not current or times[current][size] > 1.1 * times[best][size]:
            if current:
                rows.append((sizes[i - 1], current))
            current = best
    return [*rows, (ANY, current)]
