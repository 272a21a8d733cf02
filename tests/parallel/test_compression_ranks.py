"""Compressed data parallelism on ranks: equal to one process where nothing is left out, alike on all ranks always."""

import math

import equality
import numpy as np
import pytest

import nn

METHODS = (
    "fp16", "qsgd:4", "terngrad", "onebit", "signsgd", "topk:0.05", "threshold:0.02", "dgc:0.05,epoch=2,clip=5",
    "powersgd:2",
)  # fmt: skip


def compressed(comm, text: str, network=equality.mlp, optimizer=None, loss=None):
    from collectives import Communicator
    from parallel import DistributedDataParallel
    from parallel.sync.compression import parse

    communicator = Communicator(comm)
    optimizer = optimizer or nn.SGD(0.1, weight_decay=1e-3)
    return DistributedDataParallel(
        network(), loss or nn.CrossEntropyLoss(), optimizer, communicator, equality.SEED, compressor=parse(text)
    )


def wire(comm):
    from collectives import Communicator
    from parallel.sync.compression.wire import Wire

    return Wire(Communicator(comm))


def same_everywhere(comm, *arrays) -> bool:
    return len(set(comm.allgather(b"".join(array.tobytes() for array in arrays)))) == 1


@pytest.mark.mpi(ranks=[1, 3], more=[2, 4, 5])
def test_equals_one_process_where_all_is_sent(comm):
    def make(text):
        def trainer(network, loss, optimizer):
            many = compressed(comm, text, lambda: network, optimizer, loss)
            whole = many.state_dict
            many.state_dict = lambda: {k: v for k, v in whole().items() if not k.startswith("compress/")}
            return many

        return trainer

    equality.assert_equals_one_process(make("topk:1"), ("mlp", "cnn"), clips=(0,))
    equality.assert_equals_one_process(make("topk:1"), ("transformer",), ("adam", "lars"), (0,))
    equality.assert_equals_one_process(make("none"), ("mlp", "cnn"), ("momentum", "lamb"), (1, 2))
    equality.assert_equals_one_process(make("threshold:0"), ("mlp",), ("momentum", "lamb"), (0,))
    equality.assert_equals_one_process(make("dgc:1"), ("cnn",), ("sgd",), (1,))
    equality.assert_equals_one_process(make("powersgd:64"), ("cnn",), ("nesterov",), (1,))
    with pytest.raises(AssertionError):  # the comparison can fail
        equality.assert_equals_one_process(make("topk:0.5"), ("mlp",), ("sgd",), (0,))


@pytest.mark.mpi(ranks=[3], more=[4])
def test_all_ranks_hold_the_same_bits_and_send_fewer_bytes(comm):
    shares = {}
    for text in METHODS:
        for network in (equality.mlp, equality.cnn):
            many = compressed(comm, text, network)
            losses = equality.train(many, "mlp")
            assert all(map(math.isfinite, losses))
            many.check_replicas()
            assert same_everywhere(comm, many.flat_parameters, many.buffers), text
            alone = many.alone()
            assert alone is None if comm.rank else np.array_equal(alone.flat_parameters, many.flat_parameters), text
            sent, dense = many.bytes_sent().values()
            shares[text] = sent / dense
            assert shares[text] < 0.7, text  # the equality of networks is float64
            many.communicator.release()
    assert shares["fp16"] == pytest.approx(1 / 4, rel=0.1)
    assert min(shares.values()) < 0.05


@pytest.mark.mpi(ranks=3)
def test_bytes_are_those_of_the_arrays_that_were_sent(comm):
    many = compressed(comm, "topk:0.05")
    lengths, encode = [], many.sync.compressor.encode
    many.sync.compressor.encode = lambda *given: lengths.append(encode(*given)) or lengths[-1]
    equality.train(many, "mlp", 3)
    others = 2 * many.sync.together.nbytes * 2 // 3  # an allreduce of the loss
    sent, dense = many.bytes_sent().values()
    assert sent == 2 * np.mean([len(message) for message in lengths]) + others
    assert dense * 3 == 4 * (many.gradients.nbytes + many.sync.together.nbytes)


@pytest.mark.mpi(ranks=3)
def test_the_sum_of_what_is_decoded_is_what_all_ranks_get(comm):
    from parallel.sync.compression import parse

    region = equality.mlp().layout.region()
    everyone = [random(region, rank) for rank in range(3)]
    for text in ("topk:0.1", "threshold:1.5", "onebit", "qsgd:3"):
        g, total = everyone[comm.rank].copy(), np.zeros(region.hi)
        parse(text).attach(region, "f8", 1, (comm.rank, 3)).reduce(g, wire(comm), 7)
        for rank in range(3):
            other = parse(text).attach(region, "f8", 1, (rank, 3))
            other.decode(other.encode(everyone[rank].copy(), 7), total)
        assert (g == total).all(), text


@pytest.mark.mpi(ranks=[1, 3], more=[4])
def test_fp16_rounds_the_sum_once(comm):
    from parallel.sync.compression import parse

    region = equality.mlp().layout.region()
    everyone = [random(region, rank) * 1e-7 for rank in range(comm.size)]
    g = everyone[comm.rank].copy()
    parse("fp16").attach(region, "f8", 1, (comm.rank, comm.size)).reduce(g, wire(comm), 0)
    # Each rank's gradient and the sum are rounded to 11 bits, all in units of the largest gradient where they are tiny.
    sizes = np.abs(everyone).sum(0) + np.abs(np.sum(everyone, 0))
    assert (np.abs(g - np.sum(everyone, 0)) <= 2**-11 * sizes + np.abs(everyone).max() * comm.size * 2**-24).all()
    assert same_everywhere(comm, g)


@pytest.mark.mpi(ranks=3)
def test_terngrad_shares_the_largest_gradient(comm):
    from parallel.sync.compression import parse

    region = equality.mlp().layout.region()
    g = random(region, comm.rank)
    largest = [comm.allreduce(float(np.abs(clipped(g[part])).max()), max_of()) for _, part, _ in region.tensors]
    parse("terngrad").attach(region, "f8", 1, (comm.rank, 3)).reduce(g, wire(comm), 0)
    for s, (_, part, _) in zip(largest, region.tensors, strict=True):
        np.testing.assert_allclose(g[part] / s, np.round(g[part] / s), atol=1e-6)
        assert np.abs(g[part]).max() > 0.5 * s


def max_of():
    from mpi4py import MPI

    return MPI.MAX


def clipped(x):
    limit = 2.5 * math.sqrt(float((x**2).mean()))
    return np.clip(x, -limit, limit)


def random(region, seed: int) -> np.ndarray:
    rng, g = np.random.default_rng(seed), np.zeros(region.hi)
    for _, part, _ in region.tensors:
        g[part] = rng.standard_normal(part.stop - part.start)
    return g


@pytest.mark.mpi(ranks=3)
def test_powersgd(comm):
    from parallel.sync.compression import parse

    region, size = equality.mlp().layout.region(), comm.size
    w = wire(comm)
    spaces = {name: spec.shape for name, _, spec in region.tensors if len(spec.shape) == 2}

    # A gradient whose sum over ranks has rank 2 comes through two columns as it is, and so does every vector.
    low, rng = random(region, 0), np.random.default_rng(5)
    for name, part, _ in region.tensors:
        if name in spaces:
            rows, columns = spaces[name]
            low[part] = (rng.standard_normal((rows, 2)) @ rng.standard_normal((2, columns))).ravel()
    g = low * (comm.rank + 1) / 6
    power = parse("powersgd:2").attach(region, "f8", 1, (comm.rank, size))
    assert {m.name for m in power.matrices} == set(spaces)
    power.reduce(g, w, 0)
    np.testing.assert_allclose(g, low, atol=1e-12)
    assert np.abs(power.memory["error"]).max() < 1e-12

    # In general: nothing is lost, P is orthonormal, vectors are dense.
    power = parse("powersgd:2").attach(region, "f8", 1, (comm.rank, size))
    sent, given = np.zeros(region.hi), np.zeros(region.hi)
    for step in range(4):
        mine = random(region, 10 * step + comm.rank)
        given += np.sum(comm.allgather(mine), axis=0)
        power.reduce(mine, w, step)
        sent += mine
        assert same_everywhere(comm, mine)
        for m in power.matrices:
            p, _ = power.factors(m)
            np.testing.assert_allclose(p.T @ p, np.eye(2), atol=1e-12)
    waiting = np.sum(comm.allgather(power.memory["error"]), axis=0)
    np.testing.assert_allclose(sent + waiting, given, atol=1e-10)
    assert np.abs(waiting).max() > 0.1
    for name, part, _ in region.tensors:
        if name not in spaces:
            np.testing.assert_allclose(sent[part], given[part], rtol=1e-12, atol=1e-14)

    # The warm start follows a gradient that stays: the two largest singular values are found; a cold start is worse.
    constant, errors = random(region, 3), {}
    for warm in (True, False):
        power = parse("powersgd:2").attach(region, "f8", 1, (comm.rank, size))
        start = {name: q.copy() for name, q in power.shared.items()}
        for step in range(12):
            g = constant / size
            power.reduce(g, w, step)
            power.memory["error"][:] = 0
            for name, q in power.shared.items():
                q[:] = q if warm else start[name]
        part = power.matrices[0].part
        best = np.linalg.svd(constant[part].reshape(power.matrices[0].shape), compute_uv=False)[2:]
        errors[warm] = np.linalg.norm(g[part] - constant[part]) / np.linalg.norm(best)
    assert 1 - 1e-9 < errors[True] < 1.02 < errors[False]


@pytest.mark.mpi(ranks=3)
def test_a_resumed_run_has_the_same_bits(comm):
    for text in METHODS:
        batches = equality.batches("mlp", (comm.rank, comm.size), 6)
        straight = compressed(comm, text)
        for batch in batches:
            straight.step(*batch)
        before, after = compressed(comm, text), compressed(comm, text)
        for batch in batches[:3]:
            before.step(*batch)
        kept = {name: array.copy() for name, array in before.state_dict().items()}
        after.load_state_dict(kept)
        for batch in batches[3:]:
            after.step(*batch)
        assert (after.flat_parameters == straight.flat_parameters).all(), text
        found = after.state_dict()
        for name, array in straight.state_dict().items():
            np.testing.assert_array_equal(found[name], array)
        snapshot = before.snapshot()
        for batch in batches[3:]:
            before.step(*batch)
        assert (before.flat_parameters == straight.flat_parameters).all()
        before.restore(snapshot)
        for batch in batches[3:]:
            before.step(*batch)
        assert (before.flat_parameters == straight.flat_parameters).all()
        for trainer in (straight, before, after):
            trainer.communicator.release()


@pytest.mark.mpi(ranks=4)
def test_another_number_of_ranks_keeps_what_waits(comm):
    pairs = comm.Split(comm.rank // 2, comm.rank)
    four, two = compressed(comm, "dgc:0.05"), compressed(pairs, "dgc:0.05")
    equality.train(four, "mlp")
    kept = comm.bcast(four.state_dict())
    assert kept["compress/v/1.W"].shape == (4, *four.network.layout.specs["1.W"].shape)
    two.load_state_dict(kept)
    for memory in ("u", "v"):
        waiting = np.sum(comm.allgather(four.sync.compressor.memory[memory]), axis=0)
        now = np.sum(pairs.allgather(two.sync.compressor.memory[memory]), axis=0)
        np.testing.assert_allclose(now, waiting, rtol=1e-13, atol=1e-18)
        assert np.abs(waiting).max() > 0
        assert two.sync.compressor.memory[memory].any() == (pairs.rank == 0)
    fresh = compressed(comm, "topk:0.1")  # a checkpoint of any strategy will do
    fresh.load_state_dict({name: array for name, array in kept.items() if not name.startswith("compress/")})
    assert (fresh.flat_parameters == four.flat_parameters).all() and not fresh.sync.compressor.memory["error"].any()
    equality.train(fresh, "mlp", 1)
    assert fresh.sync.compressor.memory["error"].any()
    fresh.load_state_dict(kept)  # residuals of another method: this one's begin anew
    assert not fresh.sync.compressor.memory["error"].any()


@pytest.mark.mpi(ranks=2)
def test_what_cannot_be_is_told_by_all_ranks(comm):
    from parallel import ReplicaError

    with pytest.raises(ValueError, match="dgc"):
        compressed(comm, "dgc", optimizer=nn.SGD(0.1, 0.9))
    with pytest.raises(ReplicaError, match=r"TopK.*OneBit"):
        compressed(comm, ["topk:0.1", "onebit"][comm.rank])
    many = compressed(comm, "topk:0.1")
    assert many.memory()["moments"] == many.flat_parameters.nbytes, "of SGD none, and the error"
    equality.train(many, "mlp", 2)
    before = many.state_dict()
    x, y = np.zeros((4, 8, 8, 1)), np.zeros(4, int)
    x[2] = [0, np.nan][comm.rank]
    with pytest.raises(nn.NonFiniteLoss, match="rank 1"):
        many.step(x, y, 8)
    after = many.state_dict()
    assert all((array == after[name]).all() for name, array in before.items()), "memories stay as they were"
    assert "compress/error/1.W" in before or comm.rank, "on rank 0, which gathers them"


SOME, OTHERS = ("fp16", "topk:0.02", "powersgd:2"), ("qsgd:4", "terngrad", "onebit", "signsgd", "threshold:0.002")


@pytest.mark.mpi(ranks=3)
@pytest.mark.parametrize(
    "methods",
    [SOME, pytest.param((*OTHERS, "dgc:0.02,momentum=0.5,epoch=30"), marks=pytest.mark.exhaustive)],
    ids=["some", "others"],
)
def test_training_converges(comm, methods):
    """Digits, a small network: within a few points of dense; without its error memory top-k does worse."""
    data = nn.data.load("digits")
    train, test = data.train, data.test

    def accuracy(text: str, forget: bool = False) -> float:
        network = lambda: nn.models.build("mlp:64,32,10", data.in_shape, data.classes)
        many = compressed(comm, text, network, nn.SGD(0.3))
        loader = nn.Loader(train, 48, seed=1, shard=many.shard)
        for epoch in range(6):
            for batch in loader.epoch(epoch):
                many.step(*batch)
                if forget:
                    many.sync.compressor.memory["error"][:] = 0
        many.check_replicas()
        score = nn.evaluate(many, nn.Loader(test, 360, shuffle=False, shard=many.shard))["accuracy"]
        many.communicator.release()
        return score

    dense = accuracy("topk:1")
    assert dense > 0.93
    scores = {text: accuracy(text) for text in methods}
    assert min(scores.values()) > dense - 0.04, (dense, scores)
    with_memory, without = accuracy("topk:0.002"), accuracy("topk:0.002", forget=True)
    assert without < with_memory - 0.02, (dense, with_memory, without)


@pytest.mark.mpi(ranks=2)
def test_a_rank_that_sends_no_gradients_is_not_waited_for_without_end(comm):
    from collectives import Communicator
    from parallel.sync.compression import parse
    from parallel.sync.compression.compressed import TAG, CompressedReduceScatter

    layout, communicator = equality.mlp().layout, Communicator(comm)
    half = layout.size // 2
    regions = [layout.region(0, half), layout.region(half, layout.size)]
    pieces = CompressedReduceScatter(communicator, parse("topk:1"), regions, (0, 1), (0, 1), np.float64, 0)
    gradients = np.arange(1.0, layout.size + 1)
    parts, mine = (gradients[:half], gradients[half:]), np.zeros(half if comm.rank == 0 else layout.size - half)
    pieces.reduce(parts, mine, 0)
    assert np.array_equal(mine, 2 * parts[comm.rank])
    if comm.rank == 0:
        communicator.planner.deadline.seconds = 0.3
        with pytest.raises(TimeoutError, match="for the compressed gradients of rank 1"):
            pieces.reduce(parts, mine, 1)
    comm.Barrier()
    if comm.rank:  # what rank 0 has sent is still there
        communicator.Recv(np.empty(1 << 20, np.uint8), 0, TAG)
    communicator.release()
