"""PipeDream computes its own stale-weight equations, to the last bit, and learns."""

import numpy as np
import pytest
from pipelines import SEED, batches, mlp, resnet, transformer

import nn
from nn.core.run import MicroBatch
from nn.core.stages import stages
from nn.optim import clipping
from nn.training.serial import NonFiniteLoss, micro_batches


def simulate(network, optimizer, cuts, mini_batches, vertical_sync=False, stale=True):
    """(losses, parameters by name, most versions that each stage needs at once) in one process.

    Stage s of n meets mini-batch b with the weights after max(0, b - (n - 1 - s)) updates of the step; with vertical
    sync all stages with those of the first.
    """
    parts = stages(network, cuts)
    n = len(parts)
    names = [list(part.layout.specs) for part in parts]
    layout = network.layout
    w, statistics = layout.zeros(network.dtype), network.state_layout.zeros(network.dtype)
    layout.initialize(w, SEED)
    network.state_layout.initialize(statistics, SEED)
    slots = {name: layout.zeros(network.dtype) for name in optimizer.slots}
    run, loss, losses = network.run(statistics, SEED), nn.CrossEntropyLoss(), []
    for step, (x, y, total) in enumerate(batches(network)):
        history, value = [w.copy()], 0.0
        for rows in micro_batches(total, min(total, mini_batches)):
            b, mixed, g = len(history) - 1, layout.zeros(network.dtype), layout.zeros(network.dtype)
            for s in range(n):
                old = max(0, b - (n - 1 - (0 if vertical_sync else s))) if stale else b
                for name in names[s]:
                    mixed[layout.slices[name]] = history[old][layout.slices[name]]
            p, batch = layout.views(mixed), MicroBatch(step=step, sample=rows.start)
            z, saved = network.forward(p, x[rows], run, batch)
            part, gz = loss(z, y[rows], len(z) * loss.rows(network.out_shape), run)
            value += float(part) * (len(z) / total)
            network.backward(p, layout.views(g), gz, saved, run, batch)
            optimizer.update(w, g, slots, step * mini_batches + b, layout.region())
            history.append(w.copy())
        losses.append(value)
    return losses, dict(layout.items(w))


def dream(comm, network, optimizer, **options):
    from collectives import Communicator
    from parallel import PipeDream

    return PipeDream(network, nn.CrossEntropyLoss(), optimizer, Communicator(comm), SEED, **options)


def untied():
    layers = nn.Embedding(9, 8), *(nn.TransformerBlock(8, 2, causal=True, dropout=0.2) for _ in range(3))
    return nn.Network(nn.Sequential(*layers, nn.Linear(8, 9)), (6,), np.float64)


OPTIMIZERS = (
    lambda: nn.SGD(0.3, 0.9),
    lambda: nn.Adam(0.01),
    lambda: nn.LAMB(0.01, clip=clipping.ClipNorm(0.2)),
)


@pytest.mark.mpi(ranks=[3], more=[1, 2])
def test_it_is_its_equations_exactly(comm):
    found = {}
    for build in mlp, resnet, untied:
        for number, optimizer in enumerate(OPTIMIZERS if build is mlp else OPTIMIZERS[:1]):
            for sync in False, True:
                many = dream(comm, build(), optimizer(), mini_batches=5, vertical_sync=sync)
                losses, expected = simulate(build(), optimizer(), many.pass_.placement.cuts, 5, sync)
                assert [many.step(*batch) for batch in batches(many.network)] == losses, (build.__name__, number, sync)
                state = many.state()
                for name, array in expected.items() if comm.rank == 0 else ():
                    assert np.array_equal(state[f"param/{name}"], array), (build.__name__, number, sync, name)
                found[build, number, sync] = many.digest()
                many.close()
    if comm.size > 2:  # controls: what is not stale, or stale in another way, is another network
        fresh, _ = simulate(mlp(), OPTIMIZERS[0](), [6, 12], 5, stale=False)
        assert fresh != simulate(mlp(), OPTIMIZERS[0](), [6, 12], 5)[0]
        assert all(found[mlp, i, True] != found[mlp, i, False] for i in range(3))


@pytest.mark.mpi(ranks=3)
def test_a_stage_keeps_as_many_versions_as_mini_batches_in_flight(comm):
    for sync, versions in (False, [3, 2, 1]), (True, [3, 3, 3]):
        many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=10, vertical_sync=sync)
        kept = [1]

        def counted(*given, exchange=many.exchange, apply=many.exchange.apply, kept=kept):
            apply(*given)
            kept.append(1 + len(exchange.stash))

        many.exchange.apply = counted
        many.step(*next(batches(mlp())))
        assert max(kept) == versions[comm.rank], sync
        many.close()


@pytest.mark.mpi(ranks=2)
def test_it_learns_digits(comm):
    data = nn.data.load("digits", limit=400, validation=0.0)
    network = nn.models.build("mlp:64,32,10", data.in_shape, 10)
    many = dream(comm, network, nn.Adam(0.003), mini_batches=8)
    train = nn.Loader(data.train, batch=64, shard=many.shard)
    test = nn.Loader(data.test, batch=100, shuffle=False, shard=many.shard)
    training = nn.fit(many, train, 12, test=test)
    assert training.result["accuracy"] > 0.85
    many.close()


@pytest.mark.mpi(ranks=2)
def test_a_refused_step_leaves_nothing(comm):
    many = dream(comm, mlp(), nn.SGD(0.1, 0.9), mini_batches=5)
    x, y, total = next(batches(mlp()))
    many.step(x, y, total)
    before, state = many.digest(), many.snapshot()
    bad = x.copy()
    bad[9] = np.inf
    with pytest.raises(NonFiniteLoss, match=r"is in the input on rank 0 \(samples \[9\]"):
        many.step(bad, y, total)
    assert many.digest() == before
    for name, array in many.snapshot().items():
        assert np.array_equal(array, state[name]), name
    many.close()
    with pytest.raises(ValueError, match=r"0\.W: stages share it, and would update it at different times"):
        dream(comm, transformer(), nn.SGD(0.1))
    with pytest.raises(ValueError, match="the norm of the whole gradient is never known"):
        dream(comm, mlp(), nn.SGD(0.1, clip=clipping.ClipGlobalNorm(1.0)))
