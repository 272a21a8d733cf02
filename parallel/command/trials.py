"""The checks of `ringprop doctor` that run something on all ranks: files, collectives, a training."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from parallel.command.acceptance import hosts_of, spans
from parallel.command.findings import FAILED, OK, WARNING, Finding

KIB, MIB = 1 << 10, 1 << 20
LENGTHS = (4, 64 * KIB, 4 * MIB)  # bytes of the whole vector
SLOWER = 1.5  # times the library's own time, from which a collective is pointed out
JUDGED = 64 * KIB  # bytes from which it is: below, a call of Python is a good part of the time
SHOWN_SOON = 10.0  # seconds until a file that one host wrote must be seen by the others
SHARDS = 8  # virtual shards of the training that is repeated on 1, 2 and all ranks
STEPS = 5


def shared_directory(comm, ranks: Sequence[dict]) -> Finding:
    """Look whether all hosts see what rank 0 writes into the current directory (collective)."""
    hosts = hosts_of(ranks)
    if len(hosts) == 1:
        return Finding("directory", OK, f"all ranks are on one host, in {os.getcwd()}")
    name, error = "", ""
    if comm.rank == 0:
        try:
            file, name = tempfile.mkstemp(prefix=".ringprop-doctor-", dir=os.getcwd())
            os.close(file)
        except OSError as failure:
            error = str(failure)
    name, error = comm.bcast((name, error))
    if error:
        return Finding(
            "directory", WARNING, f"rank 0 cannot write {os.getcwd()}: {error}", "name another place by --out"
        )
    until = time.monotonic() + SHOWN_SOON
    while not (seen := os.path.exists(name)) and time.monotonic() < until:
        time.sleep(0.1)
    blind = [ranks[rank]["host"] for rank, there in enumerate(comm.allgather(seen)) if not there]
    if comm.rank == 0:
        os.unlink(name)
    if blind:
        text = f"{', '.join(dict.fromkeys(blind))} do not see what {ranks[0]['host']} writes into {os.getcwd()}"
        return Finding(
            "directory",
            WARNING,
            text,
            "checkpoints of sharded strategies need --out on a file system that all hosts share",
        )
    return Finding("directory", OK, f"all hosts see what is written into {os.getcwd()}")


def cases(comm, count: int) -> Iterator[tuple[str, Callable, Callable[[], bool]]]:
    """Yield (operation, call of a communicator, whether the result is right) for vectors of `count` elements.

    All numbers are whole, and their sums exact in float32.
    """
    size, rank = comm.size, comm.rank
    own = max(1, count // size)  # elements of a rank's block
    pattern = np.arange(own * size, dtype="f4") % 7
    of_all = pattern * size + size * (size - 1) // 2
    x, y, block = np.empty_like(pattern), np.empty_like(pattern), np.empty(own, "f4")
    mine = slice(own * rank, own * (rank + 1))

    def fill(value):
        x[:] = value
        y[:], block[:] = -1, -1

    def allreduce(by):
        fill(pattern + rank)
        yield
        by.Allreduce(x, y)

    def broadcast(by):
        fill(pattern if rank == 0 else -1)
        yield
        by.Bcast(x, 0)

    def reduce_scatter(by):
        fill(pattern + rank)
        yield
        by.Reduce_scatter_block(x, block)

    def allgather(by):
        fill(-1)
        block[:] = pattern[mine]
        yield
        by.Allgather(block, y)

    yield "allreduce", allreduce, lambda: np.array_equal(y, of_all)
    yield "broadcast", broadcast, lambda: np.array_equal(x, pattern)
    yield "reduce_scatter", reduce_scatter, lambda: np.array_equal(block, of_all[mine])
    yield "allgather", allgather, lambda: np.array_equal(y, pattern)


def collectives_checked(communicator, seconds: float, quiet: bool = True) -> Iterator[Finding]:
    """Check collectives of three lengths, and time them in turns with the MPI library's own (collective).

    Parameters
    ----------
    communicator : collectives.Communicator
    seconds : float
        To spend on it, about.
    quiet : bool
        Whether the cores are free of other programs; if not, times are no reason to tune.
    """
    from mpi4py import MPI

    from collectives.pricing.measure import typical

    native, rows, wrong = MPI.Intracomm(communicator), [], []
    library = MPI.get_vendor()[0]
    each = seconds / (4 * len(LENGTHS))
    for nbytes in LENGTHS:
        for operation, call, right in cases(communicator, nbytes // 4):
            sides = {"ours": communicator, library: native}
            for name, by in sides.items():
                clocked(call, by, native)
                bad = [rank for rank, fine in enumerate(native.allgather(right())) if not fine]
                if bad:
                    wrong.append(f"{operation} of {length(nbytes)} by {name} is wrong on ranks {spans(bad)}")
            times: dict[str, list[float]] = {name: [] for name in sides}
            end = time.perf_counter() + each
            while native.bcast(len(times["ours"]) < 3 or (time.perf_counter() < end and len(times["ours"]) < 200)):
                for name, by in sides.items():
                    times[name].append(clocked(call, by, native))
            ours, theirs = (1e6 * typical(of) for of in times.values())
            rows.append(
                {"case": f"{operation}, {length(nbytes)}", "ours_us": ours, "library_us": theirs, "nbytes": nbytes}
            )
    if wrong:
        advice = "try --allreduce native, and report this with the output of `ringprop doctor --json`"
        yield Finding("collectives", FAILED, "; ".join(wrong), advice, rows)
        return
    slow = [row["case"] for row in rows if row["nbytes"] >= JUDGED and row["ours_us"] > SLOWER * row["library_us"]]
    if slow:
        text = f"right, but more than {SLOWER:g} times as long as by {library}: {'; '.join(slow)}"
        advice = "python scripts/bench.py collectives --tune, once a machine; or --allreduce native" * quiet
        yield Finding("collectives", WARNING, text, advice, rows)
    else:
        yield Finding(
            "collectives", OK, f"right at {', '.join(map(length, LENGTHS))}, and not slow beside {library}", "", rows
        )


def clocked(call: Callable, by, native) -> float:
    """Return the seconds that a call took on the slowest rank (collective)."""
    from mpi4py import MPI

    steps = call(by)
    next(steps)  # fills the buffers
    native.Barrier()
    begin = time.perf_counter()
    next(steps, None)
    return native.allreduce(time.perf_counter() - begin, MPI.MAX)


def length(nbytes: int) -> str:
    """Return bytes in words."""
    return f"{nbytes} B" if nbytes < KIB else f"{nbytes // KIB} KiB" if nbytes < MIB else f"{nbytes // MIB} MiB"


def digests(world, watch: float) -> dict[int, str]:
    """Train the same network on 1, 2 and all ranks with fixed virtual shards; return the digests (collective).

    The two ranks are on two hosts where there are two.
    """
    from collectives.failures.launch_check import nodes_of
    from collectives.pricing.measure import quietly

    nodes = nodes_of(world)
    other = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), min(1, world.size - 1))
    shards = max(SHARDS, 1 << (world.size - 1).bit_length())
    found = {}
    for members in ([0], [0, other], range(world.size)):
        members = sorted(set(members))
        if len(members) in found:
            continue
        part = world.Split(0 if world.rank in members else 1)
        digest = trained(part, shards, watch) if world.rank in members else ""
        part.Free()
        quietly(world)
        found[len(members)] = world.bcast(digest)
    return found


def trained(comm, shards: int, watch: float) -> str:
    """Return the digest of the parameters after some steps on these ranks (collective)."""
    import nn
    from collectives import Communicator
    from parallel.strategies.data_parallel import DistributedDataParallel

    random = np.random.default_rng(0)
    batch = max(64, shards)
    x, y = random.standard_normal((batch, 64), dtype="f4"), random.integers(0, 10, batch)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    network, optimizer = nn.Network(layers, (64,)), nn.SGD(0.1, momentum=0.9)
    ranks = Communicator(comm, watch=watch) if comm.size > 1 else None
    trainer = DistributedDataParallel(network, nn.CrossEntropyLoss(), optimizer, ranks, shards=shards)
    loader = nn.Loader(nn.data.Dataset(x, y, classes=10), batch, shard=trainer.shard)
    nn.fit(trainer, loader, STEPS, verbose=False)
    digest = trainer.digest()
    trainer.close()
    if ranks:
        ranks.release()
    return digest


def same_bits(found: dict[int, str], ranks: Sequence[dict]) -> Finding:
    """Judge the digests of a training by its number of ranks."""
    rows = [{"ranks": count, "sha256": digest} for count, digest in found.items()]
    names = [str(count) for count in found]
    counts = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    if len(set(found.values())) == 1:
        digest = next(iter(found.values()))
        return Finding(
            "training", OK, f"on {counts} rank{'s' * (len(names) > 1)}: the same bits, {digest[:16]}", "", rows
        )
    text = "the digest differs: " + ", ".join(f"{digest[:16]} on {count} ranks" for count, digest in found.items())
    if len({each["processor"] for each in ranks}) > 1:
        advice = "for equal bits choose hosts with equal processors, as by sbatch --constraint"
        return Finding("training", WARNING, f"{text}; the hosts' processors differ", advice, rows)
    return Finding("training", FAILED, text, "report this with the output of `ringprop doctor --json`", rows)
