"""Training on two ranks with a BLAS thread each, against one process, two independent processes, and PyTorch:
its DDP on the same ranks, and one process of it with the whole batch of both and a thread for each core.

Every side has the same work a rank. In one job of two ranks all sides take turns, a block of steps each, in an order
that changes; the median over the rounds of the median step of a block counts. **The control** is two processes that
train without knowing of each other: what sharing the machine costs by itself. Ranks that wait for each other feel every
disturbance of either: beside the share of the control's speed stands that of the control with every step as long as
the slower one's of the pair, which tells what the disturbances cost and what we do; and the shares by the mean step.

Then the time that LeNet-5 takes to 99% on MNIST, the median of several seeds, and in the lab of several hosts
(netlab.py) what part of the communication hides behind backprop.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from statistics import mean, median

import netlab
from bench_engine import Case, make_batches
from benchmarking import ETHERNET, Row, arguments, in_lab

from parallel.launch import blas, launcher

RANKS = 2
CASES = {
    "mlp 784-512-512-10, batch 64 a rank": Case("mlp:784,512,512,10", (784,), 10, 64),
    "lenet5, batch 64 a rank": Case("lenet5", (28, 28, 1), 10, 64),
    "vgg-small, batch 32 a rank": Case("vgg-small", (32, 32, 3), 10, 32),
    "resnet20, batch 32 a rank": Case("resnet20", (32, 32, 3), 10, 32),
    "transformer, batch 16 a rank": Case("transformer:128,4,2", (64,), 256, 16),
}
TARGET, EVERY, MOST = 0.99, 100, 3000  # accuracy; steps between two evaluations; steps after which it is given up
SEEDS = 5  # of first parameters and of the order of samples; both sides have the same
ACCURACY = "lenet5, MNIST to 99%"
LAB_MODEL, LAB_SHAPE, LAB_BATCH, LAB_RATE = "vgg-small", (32, 32, 3), 64, 100  # Mbit/s
OVERLAP = f"overlap, {LAB_MODEL}, 2 hosts, {LAB_RATE} Mbit/s"


def rows(quick: bool = False, only: str = "") -> Iterator[Row]:
    """Each case's step against all peers; time to accuracy (not where quick); overlap in the lab."""
    for case in CASES:
        if only in case:
            yield from speed_rows(case, run({"case": case, "quick": quick}))
    if only in ACCURACY and not quick:
        yield accuracy_row()
    if only in OVERLAP:
        yield from overlap_rows(quick)


def run(task: dict, timeout: float = 300, suite: str = __file__, ranks: int = RANKS) -> dict:
    """Carry out a task of a suite on some ranks; returns what rank 0 tells. All else that ranks say goes to stderr."""
    told: list[str] = []

    def receive(line: str) -> None:
        if line.startswith("{"):
            told.append(line)
        else:
            print(line, end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as directory:
        task |= {"meeting": f"{directory}/gloo"}
        with launcher.Job([suite, json.dumps(task)], ranks, env=os.environ | blas.settings(1), stdout=receive) as job:
            status = job.wait(timeout)
    if status is None or status:
        name = os.path.basename(suite)
        raise RuntimeError(f"{name}: {launcher.ending(status) if status else f'no result after {timeout:g} s'}")
    return json.loads(told[-1])


def speed_rows(case: str, result: dict) -> Iterator[Row]:
    """A step of ours against every other side's."""
    step = {side: 1e3 * median(each for each, _ in blocks) for side, blocks in result["seconds"].items()}
    means = {side: 1e3 * median(each for _, each in blocks) for side, blocks in result["seconds"].items()}

    def share(of: str, to: str) -> str:
        """Samples/s of one side as a share of another's."""
        return f"{step[to] / step[of]:.1%} (by means {means[to] / means[of]:.1%})"

    batch = CASES[case].batch
    speed = f"ours {1e3 * RANKS * batch / step['ddp']:,.0f} samples/s"
    note = f"{speed}, {share('ddp', 'one')} of twice one process's"
    yield Row(f"{case}: ddp, one process", step["ddp"], step["one"], "one process", "ms", RANKS, 1, note)
    note = f"{speed}, {share('ddp', 'control')} of two independent processes'; "
    note += f"{1e3 * median(result['lockstep']) / step['ddp']:.1%} of theirs if each step waited for the slower one"
    yield Row(f"{case}: ddp, control", step["ddp"], step["control"], "two alone", "ms", RANKS, 1, note)
    if "torch" not in step:
        yield Row(f"{case}: ddp, PyTorch", step["ddp"], note="PyTorch is not installed", ranks=RANKS)
        return
    note = f"{speed}, PyTorch DDP over gloo {1e3 * RANKS * batch / step['torch']:,.0f}"
    note += f", which is {share('torch', 'control')} of our control; {result['notes']['torch']}"
    yield Row(f"{case}: ddp, PyTorch", step["ddp"], step["torch"], result["torch"], "ms", RANKS, 1, note)
    note = f"one global batch of {RANKS * batch}: ours on {RANKS} ranks of a thread, PyTorch in one process with "
    note += f"{RANKS} threads, by means {means['ddp'] / means['threads']:.2f}; {result['notes']['threads']}"
    yield Row(f"{case}: ddp, threads of PyTorch", step["ddp"], step["threads"], result["torch"], "ms", RANKS, 1, note)


def accuracy_row(
    target: float = TARGET, limit: int | None = None, most: int = MOST, every: int = EVERY, seeds: int = SEEDS
) -> Row:
    """Seconds of training until the test data is classified so accurately, medians over seeds.

    At most `limit` samples of each split are used, `most` steps made, and the test data looked at `every` so many.
    """
    try:
        load_mnist(limit)
    except FileNotFoundError as error:
        return Row(ACCURACY, None, note=f"no data: {str(error).splitlines()[0]}")
    runs = []
    for seed in range(seeds):
        task = {"case": ACCURACY, "target": target, "limit": limit, "most": most, "every": every, "seed": seed}
        runs.append(run(task, timeout=900))
    notes, medians = [], {}
    for side in runs[0]:
        ends = [one[side] for one in runs]
        reached = [end["accuracy"] >= target for end in ends]
        seconds = [end["seconds"] if there else math.inf for end, there in zip(ends, reached, strict=True)]
        medians[side] = median(seconds)
        each = (f"{end['steps']} ({s:.1f} s)" for end, s in zip(ends, seconds, strict=True))
        notes.append(f"{side} after {', '.join(each)} steps")
    ours, peer = (side if side < math.inf else None for side in (medians["ddp"], medians.get("torch", math.inf)))
    note = f"{'; '.join(notes)}: a seed each, looked at every {every}; inf: not reached; batch 64 a rank"
    return Row(ACCURACY, ours, peer if ours else None, "PyTorch DDP", "s", RANKS, 1, note)


def overlap_rows(quick: bool) -> Iterator[Row]:
    """Each way of overlapping against none."""
    if reason := netlab.reason_against():
        yield Row(OVERLAP, None, note=reason)
        return
    try:
        found = in_lab(__file__, [json.dumps({"case": OVERLAP, "quick": quick})], 2, LAB_RATE, options=ETHERNET)
    except RuntimeError as error:
        yield Row(OVERLAP, None, note=f"failed: {error}")
        return
    after, talk, plain = (found[key] for key in ("after", "communication", "none"))
    for way in ("thread", "poke"):
        hidden, hidable = plain - found[way], min(after, talk)
        note = f"hides {hidden:.0f} of {hidable:.0f} ms that could be: {hidden / hidable:.0%}; "
        note += f"backprop after the first bucket takes {after:.0f} ms, communication {talk:.0f} ms"
        yield Row(f"{OVERLAP}: {way}", found[way], plain, "no overlap", "ms", 2, 1, note)


def load_mnist(limit: int | None = None):
    """MNIST as the engine reads it."""
    import nn

    return nn.data.load("mnist", None, limit=limit)


# ------------------------------------------------------------------------------------- what runs on the ranks


def work(task: dict) -> None:
    """Carry out a task; rank 0 prints what was found."""
    from mpi4py import MPI

    from collectives import Communicator

    world = Communicator(MPI.COMM_WORLD)
    if task["case"] == OVERLAP:
        found = overlap(world, 3 if task["quick"] else 9)
    elif task["case"] == ACCURACY:
        found = to_accuracy(
            world, **{name: task[name] for name in ("meeting", "target", "limit", "most", "every", "seed")}
        )
    else:
        found = speeds(world, task["case"], task["quick"], task["meeting"])
    if world.rank == 0:
        print(json.dumps(found), flush=True)


def network_of(case: Case):
    import numpy as np

    import nn

    return nn.models.build(case.model, case.in_shape, case.classes, np.float32)


def speeds(world, name: str, quick: bool, meeting: str) -> dict:
    """Seconds a step of every side, (median, mean) for each round."""
    import numpy as np

    import nn
    from parallel import DistributedDataParallel

    case, loss = CASES[name], nn.CrossEntropyLoss()
    batches = make_batches(case)
    alone = nn.Trainer(network_of(case), loss, nn.SGD(case.lr))
    many = DistributedDataParallel(network_of(case), loss, nn.SGD(case.lr), world)
    sides: dict[str, tuple[Callable, list]] = {
        "one": (lambda x, y: alone.step(x, y), batches),
        "control": (lambda x, y: alone.step(x, y), batches),
        "ddp": (lambda x, y: many.step(x, y, world.size * case.batch), batches),
    }
    found = {"notes": {}, "seconds": {}, "lockstep": []}
    peer = Torch.start(world, meeting)
    if peer:
        found["torch"] = peer.name
        sides["torch"], found["notes"]["torch"] = peer.fastest(name, case, batches)
        whole = make_batches(replace(case, batch=world.size * case.batch))
        sides["threads"], found["notes"]["threads"] = peer.fastest(name, case, whole, world.size)
    found["seconds"] = {side: [] for side in sides}
    once = max(world.allgather(median(block(*sides["control"], 10))))
    steps = max(2, round((0.02 if quick else 0.4) / once))
    order = np.random.default_rng(0)  # the same on all ranks
    for number in range(3 if quick else 22):
        for side in order.permutation(list(sides)).tolist():
            quiet_barrier(world)
            taken = None
            if side not in ("one", "threads") or world.rank == number % 2:  # each core, and each model, in turn
                taken = block(*sides[side], steps)
            quiet_barrier(world)
            told = [each for each in world.allgather(taken) if each]
            if number:  # the first round warms up
                found["seconds"][side].append((mean(map(median, told)), mean(map(mean, told))))
            if number and side == "control":  # had each step waited for the slower of the two
                found["lockstep"].append(median(map(max, zip(*told, strict=True))))
    if peer:
        peer.end()
    many.close()
    return found


def block(step: Callable, batches: list, steps: int) -> list[float]:
    """Seconds of so many steps, each."""
    ends = [time.perf_counter()]
    for i in range(steps):
        step(*batches[i % len(batches)])
        ends.append(time.perf_counter())
    return [end - start for start, end in pairwise(ends)]


def quiet_barrier(world) -> None:
    """A barrier in which a rank that waits leaves its core to the others."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(2e-4)


class Torch:
    """PyTorch DistributedDataParallel over gloo on these ranks; or a rank's own, on all of their cores."""

    @classmethod
    def start(cls, world, meeting: str) -> Torch | None:
        """None where PyTorch is not installed."""
        return cls(world, meeting) if find_spec("torch") else None

    def __init__(self, world, meeting: str):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.world, self.dist = world, dist
        self.name = f"PyTorch {torch.__version__.partition('+')[0]}"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=world.rank, world_size=world.size)

    def trainer(self, name: str, lr: float, channels_last: bool, momentum: float = 0.0, alone: bool = False):
        """One of torch_models, its gradients averaged over the ranks unless it is to be alone."""
        import torch
        import torch_models
        from torch.nn.parallel import DistributedDataParallel

        trainer = torch_models.Trainer(name, lr, channels_last)
        if not alone:
            trainer.model = DistributedDataParallel(trainer.model)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=lr, momentum=momentum)
        return trainer

    def fastest(self, name: str, case: Case, batches: list, threads: int = 1) -> tuple[tuple[Callable, list], str]:
        """((step, batches), which memory format): the faster of the two where there are images.

        With several threads every rank has a model of its own, for whole batches, and one at a time is to compute.
        """
        found = []
        for channels_last in (False, True)[: 1 + (len(case.in_shape) == 3)]:
            trainer = self.trainer(name, case.lr, channels_last, alone=threads > 1)
            step = with_threads(trainer.step, threads) if threads > 1 else trainer.step
            ours, taken = (step, [trainer.batch(*batch) for batch in batches]), 0.0
            for rank in range(self.world.size if threads > 1 else 1):
                if threads == 1 or rank == self.world.rank:
                    block(*ours, 3)
                    taken = median(block(*ours, 10))
                quiet_barrier(self.world)
            found.append((self.world.allreduce(taken), channels_last, ours))
        _, channels_last, ours = min(found, key=lambda entry: entry[0])
        return ours, f"peer with channels {'last' if channels_last else 'first'}"

    def end(self) -> None:
        self.dist.barrier()
        self.dist.destroy_process_group()


def with_threads(step: Callable, threads: int) -> Callable:
    """A step of PyTorch by so many threads on all cores: ranks have one each, which their threads would share."""
    import torch

    def call(x, y):
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(os.cpu_count()))
        torch.set_num_threads(threads)
        try:
            return step(x, y)
        finally:
            torch.set_num_threads(1)
            os.sched_setaffinity(0, own)

    return call


def to_accuracy(world, meeting: str, target: float, limit: int | None, most: int, every: int, seed: int) -> dict:
    """{side: seconds of training, steps, accuracy} until the test data is classified well enough."""
    import numpy as np

    import nn
    from parallel import DistributedDataParallel

    data, case = load_mnist(limit), CASES["lenet5, batch 64 a rank"]
    shard, lr, momentum = (world.rank, world.size), 0.05, 0.9
    train = nn.Loader(data.train, case.batch * world.size, seed, shard=shard)
    test = list(nn.Loader(data.test, 1000, shuffle=False, shard=shard).epoch(0))
    many = DistributedDataParallel(network_of(case), nn.CrossEntropyLoss(), nn.SGD(lr, momentum), world, seed)
    sides = {"ddp": (many.step, lambda x: many.predict(x).argmax(axis=1))}
    peer = Torch.start(world, meeting)
    if peer:
        import torch

        trainer = peer.trainer("lenet5", lr, False, momentum)
        start_alike(trainer.model.module, many)

        def predict(x):
            with torch.no_grad():
                return trainer.model.module(trainer.batch(x, np.zeros(1, int))[0]).argmax(dim=1).numpy()

        sides["torch"] = (lambda x, y, total: trainer.step(*trainer.batch(x, y))), predict
    found = {}
    for side, (step, classes) in sides.items():
        spent, steps, accuracy, epoch = 0.0, 0, 0.0, 0
        while accuracy < target and steps < most:
            start = time.perf_counter()
            for x, y, total in train.epoch(epoch):
                step(x, y, total)
                steps += 1
                if steps % every:
                    continue
                spent += time.perf_counter() - start
                right = sum(int((classes(x) == y).sum()) for x, y, _ in test)
                accuracy = world.allreduce(right) / len(data.test)
                if world.rank == 0:
                    print(f"{side}: step {steps}, {spent:.1f} s, accuracy {accuracy:.2%}", flush=True)
                if accuracy >= target or steps >= most:
                    break
                start = time.perf_counter()
            else:
                spent += time.perf_counter() - start
            epoch += 1
        found[side] = {"seconds": spent, "steps": steps, "accuracy": accuracy}
    if peer:
        peer.end()
    return found


def start_alike(model, many) -> None:
    """PyTorch's LeNet-5 gets our first parameters: else luck would tell who is first."""
    import torch

    ours = dict(many.network.layout.items(many.flat_parameters))
    layers = {name.rpartition(".")[0] for name in ours}
    for layer, theirs in zip(sorted(layers, key=int), (m for m in model if hasattr(m, "weight")), strict=True):
        weight = ours[f"{layer}.W"]
        if weight.ndim == 2 and weight.shape[0] == 800:  # images are flattened channels first there
            weight = weight.reshape(4, 4, 50, -1).transpose(2, 0, 1, 3).reshape(800, -1)
        weight = weight.T if weight.ndim == 2 else weight.transpose(3, 2, 0, 1)
        with torch.no_grad():
            theirs.weight.copy_(torch.from_numpy(weight.copy()))
            theirs.bias.copy_(torch.from_numpy(ours[f"{layer}.b"].copy()))


def overlap(world, steps: int) -> dict:
    """Milliseconds, medians: a step with each way of overlapping, and what there is to hide where."""
    import nn
    from parallel import DistributedDataParallel

    case = Case(LAB_MODEL, LAB_SHAPE, 10, LAB_BATCH)
    x, y = make_batches(case)[0]
    sizes = {"bucket": 1.0, "first_bucket": 0.5}
    ways = {
        way: DistributedDataParallel(
            network_of(case), nn.CrossEntropyLoss(), nn.SGD(case.lr), world, overlap=way, node_memory="off", **sizes
        )
        for way in ("none", "thread", "poke")
    }
    plain = ways["none"]
    times: dict[str, list[float]] = {way: [] for way in (*ways, "after", "communication")}
    first: list[float] = []

    def ready(end: int) -> None:
        if end >= plain.sync.buckets.stops[0] and not first:
            first.append(time.perf_counter())

    for _ in range(steps + 1):
        for way, trainer in ways.items():
            quiet_barrier(world)
            times[way].append(-time.perf_counter())
            trainer.step(x, y, world.size * case.batch)
            times[way][-1] += time.perf_counter()
        first.clear()
        (micro,) = plain.forward_backward.divide(len(x), world.size * case.batch, 1)
        plain.sync.begin_pass = lambda micro: ready
        plain.compute_gradients(x, y, world.size * case.batch, micro)
        times["after"].append(time.perf_counter() - first[0])
        del plain.sync.begin_pass
        quiet_barrier(world)
        start = time.perf_counter()
        plain.sync.buckets.sum()
        times["communication"].append(time.perf_counter() - start)
    return {name: 1e3 * max(world.allgather(median(each[1:]))) for name, each in times.items()}


if __name__ == "__main__":
    work(json.loads(arguments(__doc__)[0]))
