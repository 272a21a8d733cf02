"""Parameter servers: push and pull are right for any number of ranks, and training computes what one process does."""

import itertools
import re
from contextlib import nullcontext

import numpy as np
import pytest
from conftest import PATIENCE, longer
from equality import (
    CLIPS,
    OPTIMIZERS,
    SEED,
    assert_equals_one_process,
    batches,
    cnn,
    dataset,
    difference,
    mlp,
    one_process,
    train,
)

import nn
from collectives import Deadlock, price, simulate
from collectives.pricing.networks import Network
from parallel.command.options import Options
from parallel.command.rules import check_strategy
from parallel.launch import launcher
from parallel.sync.push_pull import pull, push, roles, server_slices


def servers_of(size, place):
    """All numbers of servers among up to 8 ranks; of more, few, half of the ranks, and all that there is room for."""
    most = size - 1 if place == "dedicated" else size
    return [s for s in range(1, most + 1) if size <= 8 or s in (1, 2, size // 2, most)]


def layouts_of(sizes):
    return [(p, s, place) for p in sizes for place in ("dedicated", "workers") for s in servers_of(p, place)]


def prove(size, servers, place, segment=2, program=push, back=pull, synchronous=True):
    """Simulate a push and a pull; every server's sum has each worker once, in order, and every worker gets all."""
    workers, hosts = roles(size, servers, place)
    count = servers + servers // 2 + 1
    slices = [list(range(lo, hi)) for lo, hi in (slice_of(count, servers, j) for j in range(servers))]
    held = {host: [*own, count] for host, own in zip(hosts, slices, strict=True)}
    options = {"servers": servers, "place": place, "tail": 1, "segment": segment}

    buffers = [{"x": [((r, i),) for i in range(count + 1)]} if r in workers else {} for r in range(size)]
    for host, own in held.items():
        buffers[host]["y"] = [()] * len(own)
    simulate(lambda r: program(r, size, count, **options), buffers, synchronous)
    for host, own in held.items():
        assert buffers[host]["y"] == [tuple((w, i) for w in workers) for i in own]

    buffers = [{"x": [((-1, i),) for i in range(count + 1)]} if r in workers else {} for r in range(size)]
    for host, own in held.items():
        buffers[host]["y"] = [((host, i),) for i in own]
    simulate(lambda r: back(r, size, count, **options), buffers, synchronous)
    want = [((host, i),) for host, own in held.items() for i in own[:-1]] + [((hosts[0], count),)]
    assert all(buffers[worker]["x"] == want for worker in workers)


def slice_of(count, servers, j):
    from collectives import chunk

    return chunk(count, servers, j)


@pytest.mark.parametrize(
    "sizes", [[*range(1, 10), 12, 16, 17], pytest.param([*range(18, 34)], marks=pytest.mark.exhaustive)], ids=max
)
def test_push_and_pull_for_any_number_of_ranks_and_servers(sizes):
    for size, servers, place in layouts_of(sizes):
        prove(size, servers, place)
    for size, servers, place in layouts_of(sizes)[:40]:
        prove(size, servers, place, segment=100, synchronous=False)


def test_controls_of_the_proof():
    """A server that leaves out a worker, and servers that send before they receive, are found."""

    def forgetful(rank, size, count, **options):
        return ([s for s in steps if getattr(s, "peer", 0) != 1] for steps in push(rank, size, count, **options))

    def in_turn(rank, size, count, **options):
        for steps in push(rank, size, count, **options):
            sends = tuple(s for s in steps if type(s).__name__ == "Send")
            yield from (sends, tuple(s for s in steps if s not in sends))

    with pytest.raises(AssertionError):
        prove(3, 1, "dedicated", program=forgetful)
    with pytest.raises(Deadlock):
        prove(3, 3, "workers", program=in_turn)


def test_prices_say_why_one_server_does_not_scale():
    beta, n = 1e-9, 1 << 20
    network = Network.hockney(0, beta)
    one = [price(push, w + 1, n, 1, network, servers=1).seconds for w in (1, 2, 4, 8)]
    assert one == pytest.approx([w * n * beta for w in (1, 2, 4, 8)], rel=1e-6), "the server takes in w vectors"
    for w in (2, 4, 8):
        many = price(push, 2 * w, n, 1, network, servers=w).seconds
        here = price(push, w, n, 1, network, servers=w, place="workers")
        assert many == pytest.approx(n * beta, rel=0.1)
        assert here.seconds == pytest.approx((w - 1) / w * n * beta, rel=0.2)
        assert here.busiest == pytest.approx((w - 1) / w * n, rel=1e-3), "what a ring reduce-scatter sends"
    assert price(pull, 9, n, 1, network, servers=1).busiest == 8 * n


def test_bad_layouts_are_refused_by_name():
    with pytest.raises(
        ValueError, match="3 parameter servers on 3 ranks: there is room for at most 2 beside one worker"
    ):
        roles(3, 3, "dedicated")
    with pytest.raises(ValueError, match="4 parameter servers on 3 ranks"):
        roles(3, 4, "workers")
    with pytest.raises(ValueError, match="place 'nowhere' of parameter servers: expected one of dedicated, workers"):
        roles(3, 1, "nowhere")
    with pytest.raises(ValueError, match="5 servers for 60 values: slices are multiples of 16, so use at most 4"):
        server_slices(60, 5)
    assert server_slices(60, 4) == [(0, 16), (16, 32), (32, 48), (48, 60)]
    with pytest.raises(nn.data.BatchTooSmall):
        nn.Loader(dataset("mlp"), 2, shard=(None, 3))


def test_as_many_servers_are_refused_before_there_are_ranks_as_by_the_strategy():
    """Running statistics are among what is cut."""
    network = nn.Network(nn.Sequential(nn.BatchNorm1d(3)), (3,))
    values = network.layout.size + network.buffer_layout.size
    most = values // 16
    assert most > network.layout.size // 16
    for servers in most, most + 1:
        options = Options(strategy="ps", servers=servers, server_place="workers")
        with nullcontext() if servers == most else pytest.raises(ValueError, match=f"{servers} servers for {values}"):
            assert check_strategy(options, servers, network, nn.SGD(0.1)) == servers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--strategy ddp --servers 2", "--servers has no effect"),
        ("--strategy dp --server-place workers", "--server-place has no effect"),
        ("--strategy ps --servers 0", "--servers must"),
    ],
)
def test_bad_options_are_refused_by_name(options, words):
    from parallel.command.parsing import parse
    from parallel.settings import OptionError

    with pytest.raises(OptionError, match=words):
        parse(options.split())


def make(comm, network, optimizer="momentum", servers=1, place="dedicated", clip=0, **options):
    from collectives import Communicator
    from parallel import ParameterServer

    rule = OPTIMIZERS[optimizer](CLIPS[clip])
    communicator = Communicator(comm, **options)
    return ParameterServer(network(), nn.CrossEntropyLoss(), rule, communicator, SEED, servers, place)


def layouts(size):
    """(servers, place) for so many ranks."""
    own = sorted({1, size // 2, size - 1} - {0})
    return [(s, "dedicated") for s in own] + [(s, "workers") for s in sorted({1, (size + 1) // 2, size})]


@pytest.mark.mpi(ranks=[1, 2, 3], more=[4, 5], timeout=120)
def test_equals_one_process(comm, ranks, thorough):
    """Three ranks take every clip and every layout in turn; the others one clip."""
    from collectives import Communicator
    from parallel import ParameterServer

    turn = itertools.cycle(layouts(ranks) if ranks > 1 else [(1, "workers")])

    def strategy(network, loss, optimizer):
        servers, place = next(turn)
        return ParameterServer(network, loss, optimizer, Communicator(comm), SEED, servers, place)

    assert_equals_one_process(strategy, clips=(0, 1, 2) if ranks == 3 else (ranks % 3,), thorough=thorough)


@pytest.mark.mpi(ranks=5)
def test_the_same_bits_for_any_number_of_servers_anywhere(comm):
    """Four workers: servers add in worker order, wherever they are."""
    ends = {}
    four = comm.Split(comm.rank < 4)
    for place, servers, ranks in [("dedicated", 1, comm), *(("workers", s, four) for s in (1, 2, 3, 4))]:
        if place == "workers" and comm.rank == 4:
            continue
        many = make(ranks, mlp, "adam", servers, place)
        train(many, "mlp")
        many.check_replicas()
        ends[place, servers] = many.flat_parameters.tobytes()
    if comm.rank < 4:
        assert len(set(ends.values())) == 1 and len(ends) == 5
        assert len(set(four.allgather(ends["dedicated", 1]))) == 1


@pytest.mark.mpi(ranks=3)
def test_controls_differ(comm):
    """The comparison above can fail: a server that takes its own gradient for the sum, statistics not shared."""
    one, _ = one_process("mlp", "momentum")
    many = make(comm, mlp, servers=2, place="workers")
    served = many.sync
    whole = served.push

    def own_only():
        whole()
        if many.sync.is_server:
            many.sync.sums[: -many.sync.behind] = many.sync.pushed[
                slice(*many.sync.slices[many.sync.hosts.index(comm.rank)])
            ]

    many.sync.push = own_only
    train(many, "mlp")
    assert difference(comm.bcast(many.flat_parameters), one.flat_parameters) > 1e-6
    many = make(comm, lambda: cnn(synchronized=False))
    train(many, "cnn", steps=2)
    assert (
        difference(comm.bcast(many.flat_parameters), one_process("cnn", "momentum", steps=2)[0].flat_parameters) > 1e-6
    )
    kept = comm.allgather(many.buffers.tobytes() if many.sync.is_worker else None)
    assert kept[0] == kept[1], "workers keep the same running statistics"
    if comm.rank == 1:
        many.flat_parameters[3] = np.nextafter(many.flat_parameters[3], 1)
    if many.sync.is_worker:
        from parallel import ReplicaError

        with pytest.raises(ReplicaError, match=r"\[1\]"):
            many.check_replicas()


@pytest.mark.mpi(ranks=3)
def test_memory_evaluation_and_resuming(comm):
    from collectives import Communicator
    from parallel import DataParallel

    one, losses = one_process("cnn", "adam")
    many = make(comm, cnn, "adam", 1)
    history = batches("cnn", many.shard)
    for batch in history[:3]:
        many.step(*batch)
    size = many.network.layout.size
    assert sum(slot.size for slot in many.slots.values()) == (2 * size if comm.rank == 2 else 0), "moments are servers'"
    assert hasattr(many, "gradients") == many.sync.is_worker, "a rank that only serves has room for no gradients"
    kept = comm.bcast({name: array.copy() for name, array in many.state_dict().items()})
    assert kept.keys() == one.state_dict().keys()
    ends = []
    for servers, place in [(1, "dedicated"), (1, "dedicated"), (2, "dedicated"), (3, "workers")]:
        trainer = many if not ends else make(comm, cnn, "adam", servers, place)
        if ends:  # the first one goes on as if nothing had been
            trainer.load_state_dict(kept)
        found = [trainer.step(*batch) for batch in batches("cnn", trainer.shard)[3:]]
        assert found == pytest.approx(losses[3:], rel=1e-12)
        ends.append(comm.bcast(trainer.flat_parameters.tobytes()))
    assert ends[0] == ends[1], "the same layout continues with the same bits"
    other = DataParallel(cnn(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), Communicator(comm), SEED)
    other.load_state_dict(kept)
    assert [other.step(*b) for b in batches("cnn", other.shard)[3:]] == pytest.approx(losses[3:], rel=1e-12)
    with pytest.raises(ValueError, match="optimizer/velocity/"):
        make(comm, cnn, "momentum").load_state_dict(kept)

    before = many.snapshot()
    many.step(*history[3])
    many.restore(before)
    loaders = [nn.Loader(dataset("cnn"), 16, shuffle=False, shard=t.shard, dtype=np.float64) for t in (one, many)]
    a, b = nn.evaluate(one, loaders[0]), nn.evaluate(many, loaders[1])
    assert a["accuracy"] == b["accuracy"] and abs(a["loss"] - b["loss"]) < 1e-12


@pytest.mark.mpi(ranks=4)
def test_nan_on_one_worker_is_told_by_all_before_any_update(comm):
    for network, servers, place in [(mlp, 2, "dedicated"), (cnn, 1, "dedicated"), (mlp, 3, "workers")]:
        many = make(comm, network, servers=servers, place=place)
        before = {name: [each.array.copy() for each in found] for name, found in many.table.held().items()}
        n = 4 if many.sync.is_worker else 0
        x, y = np.zeros((n, 8, 8, 1)), np.zeros(n, int)
        if comm.rank == 1:
            x[2] = np.nan
        with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 1"):
            many.step(x, y, 4 * many.shard[1])
        for name, found in many.table.held().items():  # a worker's copies, and a server's slices
            assert all((a.array == b).all() for a, b in zip(found, before[name], strict=True)), name


def test_a_lost_worker_is_told_and_ends_the_run(tmp_path):
    program = tmp_path / "program.py"
    source = """
import time
import numpy as np
import nn
from mpi4py import MPI
from nn.core.layer import Sequential
from collectives import Communicator
from parallel import ParameterServer

c = Communicator(MPI.COMM_WORLD, watch=LIMIT)
network = nn.Network(Sequential(nn.Linear(4, 3)), (4,))
trainer = ParameterServer(network, nn.CrossEntropyLoss(), nn.SGD(0.1), c)
x, y = np.ones((2 * trainer.sync.is_worker, 4), "f4"), np.zeros(2 * trainer.sync.is_worker, int)

def lost():
    time.sleep(1000)

for step in range(3):
    if (step, c.rank) == (2, 1):
        lost()
    trainer.step(x, y, 4)
"""
    for limit in longer(0.6):
        program.write_text(source.replace("LIMIT", str(limit)))
        said: list[str] = []
        status = launcher.run([program], ranks=3, timeout=PATIENCE, stdout=said.append)
        text = "".join(said)
        assert status == 86, text
        if told := "Run(Plan, 'push')" in text and "in lost" in text and re.search("missing from Run: ranks? 1", text):
            break
    assert told, text


@pytest.mark.mpi(ranks=3)
def test_memory_and_bytes_of_workers_and_servers(comm):
    """What each rank keeps and sends is what the formulas say, and the report tells both; of zeros in float32."""
    from collectives import Communicator
    from parallel import ParameterServer
    from parallel.reports.memory_report import MemoryReport
    from parallel.reports.traffic import Traffic

    network = nn.Network(nn.core.layer.Sequential(nn.Linear(480, 480, bias=False)), (480,))
    psi = network.layout.count * 4
    for servers, place, sent, messages in [
        (1, "dedicated", (1, 1, 2), (1, 1, 2)),
        (3, "workers", (4 / 3,) * 3, (4, 2, 2)),
    ]:
        traffic = Traffic(Communicator(comm))
        many = ParameterServer(network, nn.CrossEntropyLoss(), nn.Adam(0.01), traffic, SEED, servers, place)
        memory = MemoryReport(many, traffic, 0)
        rows = 2 if many.sync.is_worker else 0
        x, y = np.zeros((rows, 480), np.float32), np.zeros(rows, int)
        many.step(x, y, 12, 2)
        found, formula = many.memory(), many.formula()
        assert all(found[kind] == pytest.approx(size, abs=100) for kind, size in formula.items())
        assert sum(formula.values()) == pytest.approx(
            (2 * many.sync.is_worker + 4 / servers * many.sync.is_server) * psi
        )
        behind = many.sync.behind * 4  # bytes of loss and size of the batch, with every message
        assert traffic.bytes["run"] == sent[comm.rank] * psi + messages[comm.rank] * behind
        report = memory.report()
        if comm.rank == 0:
            told = ", ".join(f"{times:.2f}" for times in sent)
            assert f"sent in a step by each rank: {told} Psi elements" in report
            assert report.count("formula") == (3 if place == "dedicated" else 1)
        many.close()
