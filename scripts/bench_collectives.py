"""Collectives of float32 on the ranks of one machine, against the MPI library's own and PyTorch's gloo.

    python scripts/bench.py collectives --json FILE
    python scripts/bench.py collectives --all-algorithms
                                                         what is chosen by itself against the best of all algorithms
    python scripts/bench.py collectives --tune           measure every algorithm, once a machine: what is fastest goes
                                                         into the user's cache, by which selection.py then chooses
    python scripts/bench.py collectives --tune FILE      the same into a file, for RINGPROP_TUNE=FILE

All sides but gloo take turns in one job, in another order each time, on the same private array; only shared arrays have
memory of their own. Gloo and ours take turns in a second job: with gloo's turns between them ours of 1 MiB took up to a
third longer, and the library's as long as without. Every array begins at a page, and all its pages have been written.
Before each call that is timed it is rewritten, so that each side finds it alike in the caches. Results are compared
with the right ones before any call is timed. A sample is the slowest rank's mean of some calls. Samples in which a rank
lost its core to another process are not calm, and do not count where there are enough others. Medians of the rest are
compared. Where arrays lie in huge pages (collectives/node_memory/window.py), the note says so.

The floor: two ranks cannot be faster than each of them adds up half of the vector and stores it twice, in memory of its
own and without waiting for anybody. It is measured for vectors that leave the caches.

The control: where `malloc` gives large temporary arrays back to the operating system, each call of a library that makes
one pays for its pages again. Some sizes are measured a second time in a job whose malloc keeps what it has.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarking import Row, arguments

from parallel.launch import launcher

RANKS = 2
KIB, MIB = 1 << 10, 1 << 20
LENGTHS = (4, 64, KIB, 4 * KIB, 8 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
LENGTHS += tuple(k * MIB for k in (1, 4, 16, 32, 64, 128))
SOME = (4 * KIB, 256 * KIB, 16 * MIB)
SIZES = {"allreduce": LENGTHS, "broadcast": SOME, "reduce_scatter": SOME, "allgather": SOME}
QUICK = {"allreduce": (4, 64 * KIB, MIB), "broadcast": (256 * KIB,)}
CONTROL = (MIB, 16 * MIB, 64 * MIB)
KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 * MIB)}

# What takes part: name -> (whether its array is shared, algorithm). The MPI library's own and gloo come on top.
OURS = {"shared arrays": (True, "auto"), "private arrays": (False, "auto")}
SCHEDULES = {f"private arrays, {name}": (False, name) for name in ("shared", "ring", "segmented_ring", "doubling")}
TUNED = ("allgather", "allreduce", "broadcast", "reduce", "reduce_scatter")
TUNE_SIZES = (256, *LENGTHS[2:])  # up to 128 MiB
ALL_SIZES = {op: (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB) for op in TUNED}
GOAL = 1.05  # of the fastest algorithm's time, for what is chosen by itself
SLACK = 1.03  # how much longer an algorithm may take than the fastest, and stays from one size to the next
ENOUGH = 5  # calm samples
FLOOR = "sums alone"


def rows(quick: bool = False, only: str = "", tune: str | None = None, all_algorithms: bool = False) -> Iterator[Row]:
    """Each of ours against the library's own; with `tune` the fastest algorithms against those of the table.

    With `all_algorithms` what is chosen by itself against the fastest.
    """
    if tune or all_algorithms:
        yield from tuning(tune, quick, only) if tune else chosen_and_best(quick, only)
        return
    seconds = 0.02 if quick else 0.5
    cases = [
        {"operation": operation, "nbytes": nbytes, "sides": OURS | SCHEDULES if operation == "allreduce" else OURS}
        for operation, sizes in (QUICK if quick else SIZES).items()
        for nbytes in sizes
        if only in f"{operation}, {length(nbytes)}"
    ]
    for result in measure(cases, seconds):
        yield from compare(result)
    if cases and find_spec("torch") is None:
        yield Row("gloo", None, note="PyTorch is not installed")
    else:
        for result in measure([case | {"sides": OURS} for case in cases], seconds, gloo=True):
            yield from compare_gloo(result)
    control = [
        {"operation": "allreduce", "nbytes": nbytes, "sides": OURS}
        for nbytes in ((MIB,) if quick else CONTROL)
        if only in f"control, {length(nbytes)}"  # an allreduce too
    ]
    for result in measure(control, seconds, environment=KEEPING):
        yield from compare(result | {"operation": "control"}, "malloc keeps its memory")


def compare(result: dict, remark: str = "") -> Iterator[Row]:
    """The rows of one case: each of ours against the library's own."""
    operation, nbytes, times = result["operation"], result["nbytes"], result["times"]
    case, native, ranks = f"{operation}, {length(nbytes)}", times["native"], result["ranks"]
    floor = times[FLOOR]["seconds"] / native["seconds"] if FLOOR in times else 0.0
    for name in result["sides"]:
        ours = times[name]
        judged = verdict(goal(operation, nbytes, name), ours["seconds"] / native["seconds"], floor)
        calm = f"calm samples {ours['calm']}/{ours['all']}, peer {native['calm']}/{native['all']}"
        notes = result["chosen"].get(name), judged, calm, remark
        yield row(f"{case}, {name}", ours, native, result["library"], ranks, *notes)
    if FLOOR in times:
        yield row(f"{case}, {FLOOR}", times[FLOOR], native, result["library"], ranks, "the floor", remark)


def compare_gloo(result: dict) -> Iterator[Row]:
    """What is chosen by itself against gloo."""
    case, times = f"{result['operation']}, {length(result['nbytes'])}", result["times"]
    for name in OURS:
        peer = times.get("gloo")
        yield row(f"{case}, {name}: gloo", times[name], peer, result["gloo_name"], result["ranks"], result["gloo"])


def row(case: str, ours: dict, peer: dict | None, peer_name: str, ranks: int, *notes: str | None) -> Row:
    cores = launcher.cores()
    crowd = f"{ranks} ranks on {cores} cores" if ranks > cores else ""
    ours, peer = (1e6 * side["seconds"] if side else None for side in (ours, peer))
    note = "; ".join(filter(None, [*notes, crowd]))
    return Row(case, ours, peer, peer_name, "us", ranks, max(1, cores // ranks), note)


def goal(operation: str, nbytes: int, name: str) -> float | None:
    """The largest ratio to the library's own time that is good enough; None where there is no goal."""
    if operation != "allreduce":
        return None
    if name == "shared arrays" and nbytes >= 64 * KIB:
        return 1 / 3 if nbytes <= 32 * MIB else 1 / 1.5
    if name == "private arrays" and MIB < nbytes <= 16 * MIB:  # up to 1.07 of the library's time (selection.py)
        return GOAL
    if name in OURS:  # what is chosen by itself
        return 1.0 if name == "private arrays" and nbytes > 16 * KIB else 1.1
    return 2.0 if name.endswith("doubling") and nbytes == 4 else None  # what a plan costs over the library's code


def verdict(limit: float | None, ratio: float, floor: float = 0.0) -> str:
    if limit is None:
        return ""
    below = f", below the floor of {floor:.2f}" if limit < floor else ""
    return f"goal {limit:.2f}{below}: {'met' if ratio <= limit else 'MISSED'}"


def length(nbytes: int) -> str:
    """64 KiB"""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


# --------------------------------------------------------------------------------------------- a table of the fastest


def of_every_algorithm(sizes: dict[str, tuple[int, ...]], seconds: float) -> Iterator[dict]:
    """Measure every algorithm on private arrays, and `shared` on shared ones too, as "shared_arrays"."""
    from collectives.algorithms.registry import NODES, by_messages

    def sides(operation: str) -> dict:
        names = ["shared", *(name for name, entry in by_messages(operation).items() if NODES not in entry.needs)]
        return {name: (False, name) for name in names} | {"shared_arrays": (True, "shared")}

    cases = [
        {"operation": operation, "nbytes": nbytes, "sides": sides(operation)}
        for operation in sizes
        for nbytes in sizes[operation]
    ]
    for result in measure(cases, seconds):
        result["times"].pop(FLOOR, None)  # no algorithm
        yield result


def fastest(times: dict[str, dict]) -> str:
    return min(times, key=lambda name: times[name]["seconds"])


def chosen_and_best(quick: bool, only: str) -> Iterator[Row]:
    """What is chosen by itself, on private and on shared arrays, against the fastest of all algorithms.

    Both are from the same samples: where the fastest is chosen the ratio is 1.
    """
    sizes = {op: tuple(n for n in ALL_SIZES[op] if only in f"{op}, {length(n)}") for op in TUNED}
    if quick:
        sizes = {op: some[3:5] for op, some in sizes.items()}
    near = ratios = 0
    for result in of_every_algorithm(sizes, 0.01 if quick else 0.12):
        times = result["times"]
        for arrays, chosen in result["default"].items():
            of_others = "shared" if arrays == "shared arrays" else "shared_arrays"  # what these arrays cannot run
            best = fastest({name: side for name, side in times.items() if name != of_others})
            chosen = "shared_arrays" if chosen == of_others else chosen
            ratio = times[chosen]["seconds"] / times[best]["seconds"]
            near, ratios = near + (ratio <= GOAL), ratios + 1
            case = f"{result['operation']}, {length(result['nbytes'])}, {arrays}: {chosen}"
            calm = f"calm samples {times[chosen]['calm']}/{times[chosen]['all']}"
            yield row(case, times[chosen], times[best], best, result["ranks"], verdict(GOAL, ratio), calm)
    print(f"within {GOAL - 1:.0%} of the best algorithm: {near} of {ratios} rows")


def tuning(file: str, quick: bool, only: str) -> Iterator[Row]:
    """Write the table of the fastest algorithms.

    A row says what was fastest on private arrays, and its peer is what is chosen without the table that is written.
    """
    from collectives.choosing.selection import save, table_from

    sizes = {op: TUNE_SIZES[2:5] if quick else TUNE_SIZES for op in TUNED if only in op}
    times: dict[str, dict[str, dict[int, float]]] = {}
    place = "node"
    for result in of_every_algorithm(sizes, 0.01 if quick else 0.2):
        op, nbytes, sides, place = (result[key] for key in ("operation", "nbytes", "times", "place"))
        for name, side in sides.items():
            times.setdefault(op, {}).setdefault(name, {})[nbytes] = side["seconds"]
        best = fastest({name: side for name, side in sides.items() if name != "shared_arrays"})
        default = result["default"]["private arrays"]
        case, calm = f"{op}, {length(nbytes)}: {best}", f"calm samples {sides[best]['calm']}/{sides[best]['all']}"
        yield row(case, sides[best], sides[default], f"default {default}", result["ranks"], calm)
        file = result["cache"] if file == "cache" else file
    table = {place: {op: table_from(of, SLACK) for op, of in times.items()}}
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    save(file, table)
    print(f"{file}: {table}")


# -------------------------------------------------------------------------------------------- start the ranks


def measure(cases: list[dict], seconds: float, gloo: bool = False, environment: dict | None = None) -> Iterator[dict]:
    """The results of the cases, as they come, of a job of its own: a line of JSON each. `seconds`: for each side."""
    if not cases:
        return
    results = []

    def take(line: str) -> None:
        if line.startswith("{"):
            results.append(json.loads(line))
        else:
            sys.stderr.write(line)

    with tempfile.TemporaryDirectory() as room:  # where gloo's processes find each other
        task = json.dumps({"cases": cases, "seconds": seconds, "gloo": f"{room}/gloo" if gloo else ""})
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore::FutureWarning"}  # PyTorch renames what we call
        env = os.environ | quiet | (environment or {})
        with launcher.Job([__file__, task], RANKS, env=env, stdout=take) as job:
            while (status := job.wait(0.5)) is None:
                while results:
                    yield results.pop(0)
    yield from results
    if status:
        raise RuntimeError(f"collectives: {launcher.ending(status)}")


# --------------------------------------------------------------------------------------- what runs on each rank


def work(task: dict) -> None:
    """Measure the cases; rank 0 prints each result (collective)."""
    from mpi4py import MPI

    from collectives.choosing.selection import Call, Selection, cache_file
    from collectives.failures.launch_check import nodes_of

    world = MPI.COMM_WORLD
    library = MPI.Get_library_version()
    selection = Selection({}, nodes_of(world), library)
    name, version = MPI.get_vendor()
    facts = {"ranks": world.Get_size(), "place": selection.place, "library": f"{name} {'.'.join(map(str, version))}"}
    facts["cache"] = str(cache_file(library))
    gloo = Gloo(world, task["gloo"]) if task["gloo"] else None
    facts["gloo_name"] = gloo.name if gloo else ""
    keep_to_a_core(world)  # after gloo and MPI have made their threads: those stay free
    for case in task["cases"]:
        facts["default"] = {}
        for arrays in ("private arrays", "shared arrays"):
            selection.arrays = arrays == "shared arrays"
            facts["default"][arrays] = selection.choose("auto", Call(case["operation"], case["nbytes"]))
        result = case | facts | run(world, gloo, task["seconds"], **case)
        if world.Get_rank() == 0:
            print(json.dumps(result), flush=True)
    if gloo:
        gloo.end()


def keep_to_a_core(world) -> None:
    """Bind each rank to a core, as launchers on clusters do, where there are enough: two must not start on one."""
    cores = sorted(set().union(*world.allgather(os.sched_getaffinity(0))))
    if world.Get_size() <= len(cores):
        os.sched_setaffinity(0, {cores[world.Get_rank()]})


def run(world, gloo, seconds: float, operation: str, nbytes: int, sides: dict) -> dict:
    """Time all sides of one case in alternating runs: {times: {side: ...}, chosen: {side: why}, gloo: why not}."""
    from collectives import Communicator

    count = max(nbytes // 4 // world.Get_size(), 1) * world.Get_size() if nbytes > 4 else 1
    private = aligned(count)
    calls, chosen, communicators = {}, {}, []
    calls["native"] = private, *mpi_call(world, operation, private)
    for name, (shared, algorithm) in sides.items():
        communicator = Communicator(world, **{operation: algorithm})
        communicators.append(communicator)
        x = communicator.empty(count, "f4") if shared else private
        calls[name] = x, *mpi_call(communicator, operation, x)
        if algorithm == "auto":
            chosen[name] = communicator.explain(operation, count, "f4").partition(": ")[2].partition(",")[0]
            if (page := page_size(x)) > resource.getpagesize():
                chosen[name] += f", pages of {length(page)}"
    result = {"chosen": chosen}
    if gloo:
        result["gloo"] = gloo.reason_against(operation)
        if not result["gloo"]:
            calls["gloo"] = private, *gloo.call(operation, private)
    for name, (x, call, y) in calls.items():
        check(world, operation, name, x, call, y)
    if operation == "allreduce" and nbytes >= MIB:
        x = communicators[0].empty(count, "f4")
        calls[FLOOR] = x, partial(sum_alone, x), x
    # Shorter calls in which every rank waits for every other need none: a barrier would take longer than the call.
    barrier = world.Barrier if nbytes >= 64 * KIB or operation in ("broadcast", "reduce") else None
    result["times"] = take_turns(world, {name: (x, call) for name, (x, call, _) in calls.items()}, barrier, seconds)
    del calls
    for communicator in communicators:
        communicator.release()
    return result


def aligned(count: int):
    """A private array of float32 that begins at a page, as shared ones do."""
    import numpy as np

    page = resource.getpagesize()
    memory = np.zeros(4 * count + page, np.uint8)
    at = -memory.ctypes.data % page
    return memory[at : at + 4 * count].view(np.float32)


def page_size(x) -> int:
    """Bytes of the pages that an array lies in."""
    address, inside = x.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value, *_ = line.split()
        if not name.endswith(":"):  # a mapping: its addresses
            first, last = (int(end, 16) for end in name.split("-"))
            inside = first <= address < last
        elif inside and name == "KernelPageSize:":
            return int(value) * KIB
    raise LookupError(f"no mapping holds the address {address:#x}")


def mpi_call(comm, operation: str, x):
    """(call, array of the result) on x; the reduce-scatter has a second array, for this rank's block."""
    from mpi4py import MPI

    y, root = x, comm.Get_rank() == 0
    if operation == "reduce_scatter":
        y = aligned(x.size // comm.Get_size())
        return partial(comm.Reduce_scatter_block, x, y), y
    return {
        "allreduce": partial(comm.Allreduce, MPI.IN_PLACE, x),
        "allgather": partial(comm.Allgather, MPI.IN_PLACE, x),
        "broadcast": partial(comm.Bcast, x),
        "reduce": partial(comm.Reduce, MPI.IN_PLACE if root else x, x if root else None),
    }[operation], y


def sum_alone(x) -> None:
    """What an allreduce of two ranks makes each of them do, but alone: add two halves of x, store the sum in both."""
    import numpy as np

    from collectives.node_memory.reduction import PAIR

    step, half = PAIR // x.itemsize, x.size // 2
    for at in range(0, half, step):
        a, b = x[at : min(at + step, half)], x[half + at : half + min(at + step, half)]
        np.add(a, b, a)
        b[...] = a


def check(world, operation: str, name: str, x, call: Callable, y) -> None:
    """Make the call once, with other numbers in every element and on every rank, and compare."""
    import numpy as np

    rank, size = world.Get_rank(), world.Get_size()
    ramp = np.arange(x.size, dtype=np.float32) % 1000
    x[:] = ramp + rank
    world.Barrier()
    call()
    total = size * ramp + size * (size - 1) / 2
    block = x.size // size
    right = {
        "allreduce": lambda: y == total,
        "allgather": lambda: y == ramp + np.arange(x.size) // block,
        "broadcast": lambda: y == ramp,
        "reduce": lambda: rank > 0 or y == total,
        "reduce_scatter": lambda: y == total[rank * block : (rank + 1) * block],
    }[operation]()
    if not np.all(right):
        raise ArithmeticError(f"rank {rank}: {operation} of {x.size} float32 by {name} is wrong")


def take_turns(world, calls: dict[str, tuple], barrier, seconds: float) -> dict[str, dict]:
    """Samples of each in turn, until every one has had its time."""
    import numpy as np

    order = np.random.default_rng(0)  # the same on all ranks
    value = world.Get_rank() + 1.0
    repeats = {}
    for name, (x, call) in calls.items():  # the fastest of some: the first has everything still to fetch
        once = world.allreduce(min(sample(x, call, value, 1, barrier)[0] for _ in range(4)))
        repeats[name] = int(min(max(5e-4 / once, 1), 200))
    taken: dict[str, list] = {name: [] for name in calls}
    end, least = time.monotonic() + seconds * len(calls), 3 * ENOUGH if seconds > 0.1 else 1
    while world.bcast(len(taken["native"]) < least or time.monotonic() < end):
        for name in order.permutation(list(calls)).tolist():  # what ran before leaves its traces in the caches
            x, call = calls[name]
            world.Barrier()
            told = world.allgather(sample(x, call, value, repeats[name], barrier))
            taken[name].append((max(took for took, _ in told), sum(lost for _, lost in told) == 0))
    result = {}
    for name, samples in taken.items():
        calm = [took for took, is_calm in samples if is_calm]
        counted = calm if len(calm) >= ENOUGH else [took for took, _ in samples]
        result[name] = {"seconds": median(counted), "calm": len(calm), "all": len(samples)}
    return result


def sample(x, call: Callable, value: float, repeats: int, barrier) -> tuple[float, int]:
    """Seconds of a call, the mean of some, and how often this process lost its core meanwhile."""
    clock, spent, lost = time.perf_counter, 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    for number in range(repeats + 1):
        x.fill(value)
        if barrier:
            barrier()
        start = clock()
        call()
        if number:  # the first one fetches code and plan, which another side has driven from the caches
            spent += clock() - start
    return spent / repeats, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - lost


class Gloo:
    """PyTorch's collectives for CPUs, over the loopback device."""

    def __init__(self, world, meeting: str):
        self.rank, self.size = world.Get_rank(), world.Get_size()
        import torch
        import torch.distributed as dist

        meeting = world.bcast(meeting)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=self.rank, world_size=self.size)
        self.dist, self.torch = dist, torch
        self.name = f"gloo, PyTorch {torch.__version__.partition('+')[0]}"

    def reason_against(self, operation: str) -> str:
        """Why this operation has no peer here; empty where it has one."""
        try:
            call, _ = self.call(operation, aligned(self.size))
            call()
        except RuntimeError as error:  # on all ranks alike, before anything is sent
            return f"{self.name} has no {operation}: {error}"
        return ""

    def call(self, operation: str, x):
        """As mpi_call."""
        t = self.torch.from_numpy(x)
        if operation == "reduce_scatter":
            y = aligned(x.size // self.size)
            return partial(self.dist.reduce_scatter_tensor, self.torch.from_numpy(y), t), y
        if operation == "allgather":
            block = x.size // self.size
            own = t[self.rank * block : (self.rank + 1) * block]
            return partial(self.dist.all_gather_into_tensor, t, own), x
        return {
            "allreduce": partial(self.dist.all_reduce, t),
            "broadcast": partial(self.dist.broadcast, t, 0),
        }[operation], x

    def end(self) -> None:
        self.dist.barrier()
        self.dist.destroy_process_group()


if __name__ == "__main__":
    work(json.loads(arguments(__doc__)[0]))
