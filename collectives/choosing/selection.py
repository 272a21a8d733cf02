"""Which algorithm runs: what the caller says, else the environment, else a small table by message size.

Order of precedence: `algorithm=` of the call; the keyword given to Communicator(...); RINGPROP_<OPERATION> in the
environment (RINGPROP_ALLREDUCE=ring); "auto". "auto" is the first row of the table that is for this length and whose
needs the call meets (registry.py, Need); "schedule" is the same without the library's own, "messages" without node
memory too.

The table is that of the file that RINGPROP_TUNE names; on one node, where that is not set, the one that `bench.py
collectives --tune` has left in the user's cache for this processor and MPI library; else the one below. Beside the
names in ALGORITHMS there are

- `native`, for every operation: the MPI library's own;
- `shared`, for some: the schedules of algorithms/shared.py, which move data through the memory that the ranks of a node
  share, and between nodes, for an allreduce, by rings of ranks that each carry a part;
- `shared_arrays`, in tables only: the same, where ranks have been given arrays in memory that they share. A call on
  private ones goes through slots then, or is the library's, if the row behind is `native`.
"""

import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from collectives.algorithms import ALGORITHMS
from collectives.algorithms.registry import COMMUTATIVE, EQUAL_BLOCKS, SHARED_MEMORY, Algorithm, by_messages
from collectives.reading import read_json

ANY = float("inf")
Rows = list[tuple[float, str]]  # (longest message in bytes for which it holds, algorithm), shortest first
SHARED = {op for op, entries in ALGORITHMS.items() if any(SHARED_MEMORY in entry.needs for entry in entries.values())}

# One node: measured with two ranks and Open MPI; LIBRARIES has what differs with others. Arrays that ranks share are
# read where they lie from 8 KiB on: in 0.2 to 0.85 of the library's time (16 KiB ... 64 MiB).
# Private arrays are reduced through slots (`shared`), which is right for cores that share a cache: on two virtual cores
# of an AMD EPYC an allreduce of 1 MiB took 66 us, the library's 104; of 256 KiB 32 and 40; of 64 KiB 12.7 and 14.1; a
# reduce of 1 MiB 54 and 120. The same program, minutes later, when the hypervisor had moved the cores to different
# caches: allreduce of 1 MiB 480 and 370, of 256 KiB 105 and 96, reduce of 1 MiB 450 and 185. So no table is right in
# both states; `bench.py collectives --tune` measures the state that it finds.
# Networks: what the simulation derives for "infiniband", one rank on each node and two (derive.py; a test compares).
# For other networks: bench.py network --table; measured: bench.py collectives --tune. Several nodes: private arrays of
# more than 64 KiB go by messages inside nodes too, as the link would wait for copies into slots and out of them: a
# twentieth of the time of 16 MiB (2 x 2 and 3 x 2 ranks, 400 Mbit/s).
# place -> operation -> rows. Places: all ranks on one node; one rank on each node; several on each of several nodes.
TABLE: dict[str, dict[str, Rows]] = {
    "node": {
        "allgather": [(8 << 10, "native"), (ANY, "shared_arrays"), (ANY, "native"), (ANY, "shared")],
        "allreduce": [(4 << 10, "native"), (ANY, "shared")],
        "alltoall": [(ANY, "pairwise")],
        "barrier": [(ANY, "native"), (ANY, "shared")],
        "broadcast": [(8 << 10, "native"), (ANY, "shared_arrays"), (ANY, "native"), (ANY, "shared")],
        "exscan": [(ANY, "doubling")],
        "gather": [(ANY, "flat")],
        "reduce": [(256 << 10, "native"), (ANY, "shared")],
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
        "allreduce": [(16 << 10, "doubling"), (64 << 10, "shared"), (ANY, "shared_arrays"), (ANY, "two_level")],
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
        "broadcast": [
            (8 << 10, "native"),
            (ANY, "shared_arrays"),
            (256 << 10, "native"),
            (4 << 20, "shared"),
            (ANY, "native"),
            (ANY, "shared"),
        ],
        "reduce": [(4 << 10, "native"), (ANY, "shared")],
    },
}

# The library counts elements in 32 bits. A message of n bytes has at most n elements, whatever their datatype.
COUNTED = (1 << 31) - 1

AUTOMATIC = "auto", "schedule", "messages"  # what a table stands for
NODE_MEMORY = "shared", "shared_arrays"  # what of a table runs in the memory of a node


class Call(NamedTuple):
    """What of a call decides its algorithm: the same on all ranks.

    nbytes : of the whole vector; not used where `vector`, as ranks may know different numbers: it counts as long
    ordered : operands must be combined in rank order
    shareable : elements and operation are such that node memory can do it
    float16 : elements that the library cannot reduce, and which must not be rounded at every addition
    numpy : the library may reduce some values otherwise than NumPy (reduction.py)
    private : its arrays are known not to be in memory that ranks share
    """

    operation: str
    nbytes: int
    vector: bool = False
    ordered: bool = False
    shareable: bool = True
    float16: bool = False
    numpy: bool = False
    private: bool = False


class Selection:
    """Chooses for one communicator.

    Parameters
    ----------
    algorithms : operation -> name
        what was requested; the environment and "auto" fill in the rest
    nodes : the node of each rank
    library : the MPI library's name and version, as MPI.Get_library_version() says them
    memory : whether ranks may share memory; if not, "auto" stands for schedules that send messages

    Raises
    ------
    ValueError
        for an unknown operation or name, or a table file that is none
    """

    def __init__(self, algorithms: dict[str, str], nodes: list, library: str = "", memory: bool = True):
        for operation, name in algorithms.items():
            check_name(operation, name)
        self.algorithms = dict(algorithms)
        self.names = {}
        for op in ALGORITHMS:
            self.names[op] = algorithms.get(op) or from_environment(op)
        distinct = len(set(nodes))
        self.place = "node" if distinct == 1 else "network" if distinct == len(nodes) else "nodes"
        self.size, self.memory = len(nodes), memory
        self.file = tuned_file(self.place, library)
        self.refused = ""  # why the ranks may have no shared memory, where that was found
        # makes node memory and returns whether all ranks have it; None once it is made
        self.make_window: Callable[[], bool] | None = None
        self.arrays = False  # whether the ranks were ever given arrays in shared memory: alike on all
        self.measured = load(self.file) if self.file else {}
        places = [self.place, "network"]
        tables = [(self.measured.get(place, {}), self.file) for place in places]
        tables += [(default_table(place, library), "the default table") for place in places]
        self.rows = {
            op: [(limit, name, source) for table, source in tables for limit, name in table.get(op, ())]
            for op in ALGORITHMS
        }

    def requested(self, operation: str, algorithm: str | Callable | None) -> str | Callable:
        """What a call asks for: a name, also for an entry of ALGORITHMS; or a function that the caller wrote."""
        if isinstance(algorithm, Algorithm) and by_messages(operation).get(algorithm.name) == algorithm:
            return algorithm.name
        if callable(getattr(algorithm, "rounds", algorithm)):
            return getattr(algorithm, "rounds", algorithm)
        name = self.names[operation] if algorithm is None else check_name(operation, algorithm)
        return name if self.memory or name not in AUTOMATIC else "messages"

    def native_below(self, operation: str) -> float:
        """The length in bytes up to which every call that does not ask for an algorithm is native; -1 for none."""
        requested = self.requested(operation, None)
        if requested != "auto":
            return ANY if requested == "native" else -1
        limit, name, _ = self.rows[operation][0]
        return min(limit, COUNTED) if name == "native" else -1

    def choose(self, requested: str | Callable, call: Call) -> str | Callable:
        """The algorithm that runs where `requested` is requested; a function of the caller's stands for itself.

        Collective when node memory is chosen for the first time: `make_window` then makes it.
        """
        if callable(requested):
            return requested
        name = self.reason(requested, call)[0]
        if name in NODE_MEMORY and self.make_window is not None and not self.make_window():
            name = self.reason(requested, call)[0]
        return name

    def library_for_private(self, name: str, requested: str, call: Call) -> bool:
        """Whether a call for which `shared_arrays` was chosen is the library's where its arrays are private."""
        return name == "shared_arrays" and self.reason(requested, call._replace(private=True))[0] == "native"

    def reason(self, requested: str, call: Call) -> tuple[str, str]:
        """(algorithm, why): the first that is for this length and whose needs the call meets."""
        if requested == "native":
            return requested, "requested"
        unfit = ""
        for name, why in self.candidates(requested, call):
            if not (lacking := self.lacks(name, requested, call)):
                return name, unfit or why
            unfit = unfit or f"{name} needs {lacking}"
        raise ValueError(f"no algorithm for {call}: {unfit}")

    def candidates(self, requested: str, call: Call) -> Iterator[tuple[str, str]]:
        """Yield (algorithm, reason): the requested one, the rows for this length, those for a network, the registry."""
        if requested not in AUTOMATIC:
            yield requested, "requested"
        nbytes = ANY if call.vector else call.nbytes
        for limit, name, source in self.rows[call.operation]:
            if nbytes <= limit:
                yield (
                    name,
                    f"{source} says so" + (f" up to {limit:,} bytes" if limit < ANY else " for all longer messages"),
                )
        for name in by_messages(call.operation):
            yield name, "it is the first of the registry that fits the call"

    def lacks(self, name: str, requested: str, call: Call) -> str:
        """What an algorithm needs and this call has not; empty where it has all."""
        automatic = requested in AUTOMATIC
        if name == "native":
            unmet = {
                "to be requested": requested != "auto",
                "a wider type than float16, which would be rounded after every round": call.float16,
                "at most 2**31 - 1 elements": call.vector or call.nbytes > COUNTED,
                "values that the library reduces as NumPy does": call.numpy,
            }
        elif name in NODE_MEMORY:
            near = self.place == "node" or (self.place == "nodes" and call.operation == "allreduce")
            unmet = {
                "a wider type than float16, which would be rounded after every round": call.float16
                and automatic
                and self.place == "nodes",
                "all ranks on one node": not near,
                "node memory: only messages are sent": requested == "messages" or not self.memory,
                f"node memory: {self.refused}": bool(self.refused),
                "the same number of elements on every rank": call.vector,
                "SUM, PROD, MAX or MIN of NumPy's numbers": not call.shareable,
                "arrays in memory that ranks share": name == "shared_arrays" and (call.private or not self.arrays),
            }
        else:
            entry = ALGORITHMS[call.operation][name]
            unmet = {
                COMMUTATIVE.value: COMMUTATIVE in entry.needs and call.ordered,
                EQUAL_BLOCKS.value: EQUAL_BLOCKS in entry.needs and call.vector,
                "a wider type than float16, which would be rounded after every round": call.float16
                and automatic
                and not entry.rounds_once,
            }
        return next((need for need, lacking in unmet.items() if lacking), "")


def default_table(place: str, library: str = "") -> dict[str, Rows]:
    """The rows of a place, with this MPI library."""
    own_rows = next((rows for name, rows in LIBRARIES.items() if library.startswith(name)), {})
    return TABLE[place] | own_rows if place == "node" else TABLE[place]


def tuned_file(place: str, library: str) -> str:
    """The file whose rows stand before the table of a place; empty for none.

    The user's cache counts on one node only: ranks on several might find several of them.
    """
    if (file := os.environ.get("RINGPROP_TUNE")) is not None:
        return file
    return str(file) if place == "node" and (file := cache_file(library)).is_file() else ""


def processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the name of this machine's processor, or where the system does not say it, its architecture."""
    try:
        lines = Path(cpuinfo).read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def cache_file(library: str) -> Path:
    """Where `bench.py collectives --tune` leaves what it has measured on this kind of processor with this MPI library.

    `library` is its name and version, as MPI.Get_library_version() says them, of which the first item counts.
    """
    machine = f"{processor()} {os.cpu_count()} cores {library.splitlines()[0].partition(',')[0] if library else ''}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "ringprop" / f"collectives-{'-'.join(re.findall('[a-z0-9.]+', machine.lower()))}.json"


def from_environment(operation: str) -> str:
    """What RINGPROP_ALLREDUCE and the like ask for."""
    variable = f"RINGPROP_{operation.upper()}"
    try:
        return check_name(operation, os.environ.get(variable, "auto"))
    except ValueError as error:
        raise ValueError(f"{variable} in the environment: {error}") from None


def parse_seconds(text: str, source: str = "RINGPROP_WATCH") -> float:
    """Return a limit that `source` gives, an environment variable or a parameter, as a number."""
    try:
        if (value := float(text)) >= 0:
            return value
    except ValueError:
        pass
    place = " in the environment" if source.isupper() else ""
    raise ValueError(f"{source}={text}{place}: expected seconds, 0 for never")


def check_environment() -> None:
    """Refuse what a Communicator would: settings in the environment that make no sense."""
    for operation in ALGORITHMS:
        from_environment(operation)
    parse_seconds(os.environ.get("RINGPROP_WATCH", "0"))
    if file := os.environ.get("RINGPROP_TUNE"):
        load(file)


def check_name(operation: str, name: str) -> str:
    """The name, if there is such an algorithm; otherwise an error that lists those there are."""
    if operation not in ALGORITHMS:
        raise ValueError(f"no operation {operation!r}: there are {', '.join(sorted(ALGORITHMS))}")
    names = [*AUTOMATIC, "native", *(["shared"] if operation in SHARED else []), *by_messages(operation)]
    if name not in names:
        raise ValueError(f"no {operation} algorithm {name!r}: there are {', '.join(names)}")
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
                fixed = [limit for limit, (_, name) in zip(limits, rows, strict=True) if name != "shared_arrays"]
                if fixed != sorted(set(fixed)) or limits[-1:] != [ANY]:
                    raise ValueError(f"{operation}: the limits {fixed} must rise, and end with null")
                names = [name for _, name in rows]
                for name in names:
                    check_name(operation, "shared" if name == "shared_arrays" else name)
                if set(AUTOMATIC) & set(names):
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


def table_from(times: dict[str, dict[int, float]], slack: float = 1.1) -> Rows:
    """Rows from measured seconds, algorithm -> {bytes: seconds}: of each size the fastest, as few changes as will do.

    An algorithm that takes at most `slack` times as long as the fastest is kept from one size to the next.
    `shared_arrays`, if it is among them, is for some calls only: a row for the others follows it.
    """
    sizes = sorted(set.intersection(*(set(at) for at in times.values())))
    rows: Rows = []
    current: tuple[str, ...] = ()
    for before, size in pairwise([0, *sizes]):
        at = {name: seconds[size] for name, seconds in times.items()}
        arrays = at.pop("shared_arrays", math.inf)
        best = min(at, key=at.__getitem__)
        name = current[-1] if current and at[current[-1]] <= slack * at[best] else best
        chosen = ("shared_arrays", name) if arrays * slack < at[name] else (name,)
        if current and chosen != current:
            rows += [(before, name) for name in current]
        current = chosen
    return [*rows, *((ANY, name) for name in current)]
