"""PipeDream computes its own stale-weight equations, to the last bit, and learns."""

import numpy as np
import pytest
from pipelines import SEED, batches, cnn, mlp, resnet, transformer

import nn
from nn.core.context import MicroBatch
from nn.optim import clipping
from nn.training.trainer import NonFiniteLoss, micro_batches
from parallel.mesh import ReplicaError
from parallel.state.stages import stages

SIZES = 10, 10, 3  # of batches; 5 mini-batches divide neither the last one nor two replicas


def simulate(
    network, optimizer, cuts, mini_batches, replicas=None, vertical_sync=False, stale=True, drained=(), sizes=SIZES
):
    """(losses, state by name) of the equations in one process, stage by stage, a mini-batch after the other.

    A stage on r ranks makes one update for r mini-batches, with the sum of their gradients; mini-batch b meets it after
    b // r - u updates, or 0, where u is how many forward passes a rank of it makes first. After the steps in `drained`
    nothing is in flight.
    """
    parts = stages(network, cuts)
    replicas = replicas or (1,) * len(parts)
    first = [sum(replicas[:s]) for s in range(len(parts))]
    warm_up = [(sum(replicas) - 1 - first[s]) // replicas[s] for s in range(len(parts))]
    w = [part.layout.zeros(network.dtype) for part in parts]
    slots = [{name: part.layout.zeros(network.dtype) for name in optimizer.slots} for part in parts]
    runs, buffers = [], []
    for s, part in enumerate(parts):
        part.layout.initialize(w[s], SEED)
        buffers.append([part.buffer_layout.zeros(network.dtype) for _ in range(replicas[s])])
        for each in buffers[s]:
            part.buffer_layout.initialize(each, SEED)
        runs.append([part.context(each, SEED) for each in buffers[s]])
        for ctx in runs[s]:
            ctx.network_context.input_gradient = s > 0

    def seen(b, s):
        if not stale:
            return b // replicas[s]
        at = 0 if vertical_sync else s
        return max(0, b // replicas[at] - warm_up[at]) * replicas[at] // replicas[s]

    def update(s, rate):
        optimizer.lr, part = rate, parts[s]
        optimizer.update(w[s], sums[s], slots[s], made[s], part.layout.region())
        history[s].append(w[s].copy())
        made[s] += 1
        sums[s] = part.layout.zeros(network.dtype)

    loss, losses, b, made = nn.CrossEntropyLoss(), [], 0, [0] * len(parts)
    for step, (x, y, total) in enumerate(batches(network, sizes=sizes)):
        if not b:
            history = [[each.copy()] for each in w]
            sums, rates = [part.layout.zeros(network.dtype) for part in parts], []
        value = 0.0
        for rows in micro_batches(total, min(total, mini_batches)):
            rates.append(rate(step))
            z, saved = x[rows], []
            for s, part in enumerate(parts):
                p, ctx = part.layout.views(history[s][seen(b, s)].copy()), runs[s][b % replicas[s]]
                batch = MicroBatch(step=step, start=rows.start)
                z, kept = part.forward(p, z, ctx, batch)
                saved.append((p, kept, ctx, batch))
            each, gy = loss(z, y[rows], len(z) * loss.rows(network.out_shape), runs[-1][0])
            value += float(each) * (len(z) / total)
            for s, part in reversed(list(enumerate(parts))):
                p, kept, ctx, batch = saved[s]
                g = part.layout.zeros(network.dtype)
                gy = part.backward(p, part.layout.views(g), gy, kept, ctx, batch)
                sums[s] += g
            b += 1
            for s, r in enumerate(replicas):
                if b % r == 0:
                    update(s, rates[b - r])
        losses.append(value)
        if step in drained:
            for s, r in enumerate(replicas):
                if b % r:
                    update(s, rates[b - b % r])
                mean = sum(buffers[s][1:], buffers[s][0].copy()) / r
                for each in buffers[s]:
                    each[...] = mean
            b = 0
    state = {}
    for s, part in enumerate(parts):
        state |= {f"param/{name}": array for name, array in part.layout.items(w[s])}
        state |= {f"state/{name}": array for name, array in part.buffer_layout.items(buffers[s][0])}
    return losses, state


def rate(step):
    return 0.01 + 0.02 * step


def told(many, drained=(2,), sizes=SIZES):
    """The losses that steps return, each step at its own rate; state() after some, when nothing is in flight."""
    found, state = [], None
    for step, batch in enumerate(batches(many.network, sizes=sizes)):
        many.optimizer.lr = rate(step)
        found.append(many.step(*batch))
        seen = many.state_dict()  # which changes nothing, and shows what `synchronize` does
        if step in drained:
            many.synchronize()
            state = many.state_dict()
            assert all(np.array_equal(array, state[name]) for name, array in seen.items())
    return found, state


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


def late(losses, delay):
    """What steps return that tell the loss of some steps before, and of the first as long as there is none."""
    return [losses[max(0, step - delay)] for step in range(len(losses))]


@pytest.mark.mpi(ranks=[3], more=[1, 2])
def test_it_is_its_equations_exactly(comm):
    found = {}
    for build in mlp, resnet, untied:
        for number, optimizer in enumerate(OPTIMIZERS if build is mlp else OPTIMIZERS[:1]):
            for sync in False, True:
                many = dream(comm, build(), optimizer(), mini_batches=5, vertical_sync=sync)
                cuts, what = many.forward_backward.placement.cuts, (build.__name__, number, sync)
                losses, expected = simulate(build(), optimizer(), cuts, 5, None, sync, drained=(2,))
                said, state = told(many)
                assert said == late(losses, many.forward_backward.delay), what
                for name, array in expected.items() if comm.rank == 0 else ():
                    assert np.array_equal(state[name], array), (*what, name)
                found[build, number, sync] = many.digest()
                many.close()
    if comm.size > 2:  # controls: what is not stale, or stale in another way, or flushed, is another network
        losses, expected = simulate(mlp(), OPTIMIZERS[0](), [6, 12], 5, drained=(2,))
        for other in {"stale": False}, {"drained": (0, 1, 2)}:
            assert simulate(mlp(), OPTIMIZERS[0](), [6, 12], 5, **{"drained": (2,)} | other)[0] != losses
        assert all(found[mlp, i, True] != found[mlp, i, False] for i in range(3))


@pytest.mark.mpi(ranks=[3])
def test_updates_are_counted_as_they_are_made(comm):
    """Adam's correction depends on their number, after batches that are short, and drains with a replica too few."""
    for replicas, sizes, drained in ((), (3, 10, 10), (0, 2)), ((2, 1), (10, 10, 10), (1, 2)):
        many = dream(comm, mlp(), nn.Adam(0.01), mini_batches=5, replicas=replicas)
        cuts, what = many.forward_backward.placement.cuts, (replicas, sizes)
        losses, expected = simulate(mlp(), nn.Adam(0.01), cuts, 5, replicas, drained=drained, sizes=sizes)
        found, state = told(many, drained, sizes)
        assert found[0] == losses[0], what
        for name, array in expected.items() if comm.rank == 0 else ():
            assert np.array_equal(state[name], array), (*what, name)
        other = dream(comm, mlp(), nn.Adam(0.01), mini_batches=5)  # another cut goes on with the counts of its layers
        other.load_state_dict(state)
        counts = [int(array) for name, array in state.items() if name.startswith("exchange/updates/")]
        counts, made = comm.bcast(counts), comm.allgather(int(other.sync.update_count))
        assert set(made) <= set(counts) and max(made) == max(counts) and min(counts) > 0
        assert replicas or set(counts) == {13}
        for each in many, other:
            each.close()


REPLICAS = {1: [(1,)], 2: [(2,)], 3: [(2, 1), (1, 2), (3,)], 4: [(2, 2), (2, 1, 1), (1, 2, 1), (3, 1)]}


@pytest.mark.mpi(ranks=[3], more=[2, 4])
def test_replicated_stages_are_their_equations_exactly(comm, thorough):
    """Two numbers have one sum; of three there may be several, to the last bits. 5, 5, 3 mini-batches end rounds in
    the middle of a step, and the last one with a replica that has none."""
    for i, replicas in enumerate(REPLICAS[comm.size]):
        for number, (build, optimizer, sync) in enumerate(
            ((mlp, OPTIMIZERS[0], False), (mlp, OPTIMIZERS[1], True), (resnet, OPTIMIZERS[0], False))
        ):
            both = (2,), (0, 2)
            for drained in both if thorough else [both[(i + number) % 2]]:
                many = dream(comm, build(), optimizer(), mini_batches=5, vertical_sync=sync, replicas=replicas)
                cuts, what = many.forward_backward.placement.cuts, (replicas, number, drained)
                losses, expected = simulate(build(), optimizer(), cuts, 5, replicas, sync, drained=drained)
                said, state = told(many, drained)
                many.check_replicas()
                exact = max(replicas) < 3 and replicas[-1] < 3
                equal = np.array_equal if exact else lambda a, b: np.allclose(a, b, rtol=1e-12, atol=1e-14)
                several = replicas[-1] > 1  # parts of a step's loss are added up
                np.testing.assert_allclose(
                    said, late(losses, many.forward_backward.delay), rtol=1e-14 * several, err_msg=str(what)
                )
                for name, array in expected.items() if comm.rank == 0 else ():
                    assert equal(state[name], array), (*what, name)
                many.close()
    if comm.size == 3:  # control: replicas that do not sum their gradients
        many = dream(comm, mlp(), OPTIMIZERS[0](), mini_batches=5, replicas=(2, 1))
        many.sync.sum_replicas = lambda bad: bad
        _, state = told(many)
        _, expected = simulate(mlp(), OPTIMIZERS[0](), many.forward_backward.placement.cuts, 5, (2, 1), drained=(2,))
        assert comm.rank or any(not np.allclose(state[name], array) for name, array in expected.items())
        with pytest.raises(ReplicaError, match=r"parameter.*\[1\]"):
            many.check_replicas()
        many.close()


@pytest.mark.mpi(ranks=3, more=[2])
def test_sums_of_replicas_leave_while_earlier_layers_go_backward(comm, thorough):
    """In small buckets, and their equations are the same, to the last bit; the control: none leaves early."""
    replicas = {2: (2,), 3: (2, 1)}[comm.size]
    early = lambda overlap: {"bucket": 1e-4, "first_bucket": 1e-4, "overlap": overlap}
    ways = [("poke", "none"), ("thread",), ("poke",)]
    for i, (build, optimizer) in enumerate([(mlp, OPTIMIZERS[0]), (resnet, OPTIMIZERS[1]), (untied, OPTIMIZERS[0])]):
        for overlap in ("poke", "thread", "none") if thorough else ways[i]:
            many = dream(comm, build(), optimizer(), mini_batches=5, replicas=replicas, bucketing=early(overlap))
            buckets, left = many.sync.buckets, []
            if many.forward_backward.peers:
                (stage,) = many.forward_backward.stages.values()
                backward = stage.network.backward

                def watched(*arguments, backward=backward, buckets=buckets, left=left):
                    gx = backward(*arguments)
                    left.append(buckets.launched)
                    return gx

                stage.network.backward = watched
            cuts, what = many.forward_backward.placement.cuts, (build.__name__, overlap)
            losses, expected = simulate(build(), optimizer(), cuts, 5, replicas, drained=(2,))
            said, state = told(many)
            np.testing.assert_allclose(said, late(losses, many.forward_backward.delay), rtol=1e-14, err_msg=str(what))
            for name, array in expected.items() if comm.rank == 0 else ():
                assert np.array_equal(state[name], array), (*what, name)
            assert bool(buckets) == (comm.rank < 2)
            if buckets:
                assert len(buckets.buckets) > 2 and all((n > 0) == (overlap != "none") for n in left), (*what, left)
                assert f"replicas sum gradients by messages, {len(buckets.buckets)} buckets" in many.sync.describe()
            many.close()


@pytest.mark.mpi(ranks=3)
def test_a_stage_keeps_as_many_versions_as_mini_batches_in_flight(comm):
    for sync, replicas, versions in (
        (False, (), [3, 2, 1]),
        (True, (), [3, 3, 3]),
        (False, (2, 1), [2, 2, 1]),
        (True, (2, 1), [2, 2, 4]),
    ):
        many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=10, vertical_sync=sync, replicas=replicas)
        kept = [1]

        def counted(*given, sync=many.sync, apply=many.sync.apply, kept=kept):
            apply(*given)
            kept.append(1 + len(sync.stash))

        many.sync.apply = counted
        for _ in range(2):
            many.step(*next(batches(mlp())))
        assert max(kept) == versions[comm.rank], (sync, replicas)
        many.close()


@pytest.mark.mpi(ranks=3)
def test_the_pipeline_stays_full_from_step_to_step(comm):
    """What is in flight when a step ends: a rank's warm-up; nothing, where all is looked at. The first stage ends a
    step that the last one has not begun."""
    many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=4)
    in_flight = lambda: many.forward_backward.in_flight
    for batch in batches(mlp()):
        many.step(*batch)
        assert len(in_flight().saved) == 2 - comm.rank
    assert in_flight().given == 4 + 4 + 3
    many.sum_scores(batch[0], batch[1])
    assert len(in_flight().saved) == 2 - comm.rank
    many.synchronize()
    assert in_flight() is None and many.sync.stash == {} and many.forward_backward.in_transit() == 0
    x, y, total = next(batches(mlp()))
    many.step(x, y, total)
    before = x.copy()
    x[...] = np.nan  # whose memory that is
    np.testing.assert_array_equal(np.isfinite(many.synchronize(0.0)), True)
    many.close()
    many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=2)
    many.step(before, y, total)
    if comm.rank == 2:
        comm.recv(source=0)
    many.step(before, y, total)
    if comm.rank == 0:
        comm.send("the second step has ended", 2)
    many.close()


@pytest.mark.mpi(ranks=3)
def test_the_loss_of_an_epoch_is_exact(comm):
    """However late the steps have told theirs, and of batches of different sizes."""
    for replicas in (), (2, 1):
        many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=2, replicas=replicas)
        losses, _ = simulate(mlp(), nn.SGD(0.1), many.forward_backward.placement.cuts, 2, replicas, drained=(0, 2))
        sums = 0.0
        for step, (x, y, total) in enumerate(batches(mlp())):
            many.optimizer.lr = rate(step)
            sums += many.step(x, y, total) * total
            sums = many.synchronize(sums) if step in (0, 2) else sums
        expected = sum(loss * total for loss, (*_, total) in zip(losses, batches(mlp()), strict=True))
        np.testing.assert_allclose(sums, expected, rtol=1e-14)
        many.close()


@pytest.mark.mpi(ranks=[3], more=[2])
def test_it_learns_digits(comm, thorough):
    data = nn.data.load("digits", limit=400, validation=0.0)
    given = ((), (2, 1))[: comm.size - 1]
    for replicas in given if thorough else given[-1:]:
        network = nn.models.build("mlp:64,32,10", data.in_shape, 10)
        many = dream(comm, network, nn.Adam(0.003), mini_batches=8, replicas=replicas)
        train = nn.Loader(data.train, batch=64, shard=many.shard)
        test = nn.Loader(data.test, batch=100, shuffle=False, shard=many.shard)
        training = nn.fit(many, train, 12, test=test)
        assert training.result["accuracy"] > 0.85
        assert training.history[-1]["loss"] < 0.5 < training.history[0]["loss"]
        many.close()


@pytest.mark.mpi(ranks=3)
def test_a_checkpoint_in_the_middle_goes_on(comm):
    """All of it is there, on the rank that writes; and what continues from it makes the same steps."""
    for replicas in (), (2, 1):
        many, again = (dream(comm, resnet(), nn.Adam(0.01), mini_batches=4, replicas=replicas) for _ in range(2))
        given = list(batches(resnet()))
        many.step(*given[0])
        many.step(*given[1])
        many.synchronize()
        state = many.state_dict()
        again.load_state_dict(state)
        assert many.steps == again.steps == 2
        found = []
        for each in many, again:
            each.step(*given[2])
            each.step(*given[0])
            found.append((each.digest(), each.state_dict()))
        assert found[0][0] == found[1][0]
        for name, array in found[0][1].items():
            assert np.array_equal(found[1][1][name], array), name
        one = nn.Trainer(resnet(), nn.CrossEntropyLoss(), nn.Adam(0.01), SEED)
        if comm.rank == 0:
            one.load_state_dict(state)
        x, y, _ = given[1]
        expected = comm.bcast(one.sum_scores(x, y) if comm.rank == 0 else None)
        many.load_state_dict(state)
        np.testing.assert_allclose(many.sum(many.sum_scores(x, y)), expected, rtol=1e-12)
        np.testing.assert_allclose(many.predict(x), comm.bcast(one.predict(x) if comm.rank == 0 else None), rtol=1e-10)
        many.close()
        again.close()


@pytest.mark.mpi(ranks=2)
def test_a_stage_without_parameters_goes_on(comm):
    network = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10)), (8, 8, 1), np.float64)
    many, again = (dream(comm, network, nn.Adam(0.01), mini_batches=4, cuts=[1]) for _ in range(2))
    x, y = np.random.default_rng(0).random((8, 8, 8, 1)), np.arange(8)
    many.step(x, y, 8)
    many.synchronize()
    again.load_state_dict(many.state_dict())
    for each in many, again:
        each.step(x, y, 8)
    assert many.digest() == again.digest()
    many.close()
    again.close()


@pytest.mark.mpi(ranks=[3], more=[2])
def test_a_loss_that_is_not_finite_is_applied_nowhere(comm):
    for replicas in ((), (2, 1))[: comm.size - 1]:
        many = dream(comm, mlp(), nn.SGD(0.1, 0.9), mini_batches=5, replicas=replicas)
        x, y, total = next(batches(mlp()))
        many.step(x, y, total)
        bad = x.copy()
        bad[9] = np.inf
        wrong, quiet = r"input on rank 0.*\[9\]", np.errstate(invalid="ignore", over="ignore")
        with pytest.raises(NonFiniteLoss, match=wrong) as error, quiet:
            many.step(bad, y, total)
            many.step(x, y, total)
            many.synchronize(0.0)
        assert error.value.samples == [], "of which batch they are nobody knows"
        assert all(np.isfinite(array).all() for array in many.snapshot().values())
        many.check_replicas()
        assert np.isfinite(many.step(x, y, total)) and np.isfinite(many.synchronize(0.0))
        many.close()


@pytest.mark.mpi(ranks=2)
def test_what_cannot_be(comm):
    with pytest.raises(ValueError, match=r"0\.W: stages share it, and would update it at different times"):
        dream(comm, transformer(), nn.SGD(0.1))
    with pytest.raises(ValueError, match="the norm of the whole gradient is never known"):
        dream(comm, mlp(), nn.SGD(0.1, clip=clipping.ClipGlobalNorm(1.0)))
    with pytest.raises(ValueError, match="replicas"):
        dream(comm, mlp(), nn.SGD(0.1), replicas=(2, 1))
    with pytest.raises(ValueError, match="replicas"):
        dream(comm, mlp(), nn.SGD(0.1), replicas=(1.0, 1.0))
    with pytest.raises(ValueError, match="mini_batches"):
        dream(comm, mlp(), nn.SGD(0.1), mini_batches=0)
    with pytest.raises(ValueError, match="overlap 'late'"):
        dream(comm, mlp(), nn.SGD(0.1), bucketing={"overlap": "late"})
    with pytest.raises(ValueError, match="statistics over all ranks need all at one step"):
        dream(comm, cnn(synchronized=True), nn.SGD(0.1), replicas=(2,))
    many = dream(comm, mlp(), nn.SGD(0.1), limit=0.5)
    x, y, total = next(batches(mlp()))
    if comm.rank == 1:
        with pytest.raises(TimeoutError, match="rank 0"):
            many.step(x, y, total)
    comm.Barrier()


@pytest.mark.mpi(ranks=[3], more=[2, 4])
def test_all_ranks_refuse_a_batch_of_which_they_were_given_different_sizes(comm, thorough):
    """Whoever is wrong, whoever is late; in the first step, and with mini-batches of others in flight."""
    x, y, total = next(batches(mlp()))
    for i, replicas in enumerate([(), *REPLICAS[comm.size]]):
        for odd in range(comm.size) if thorough else [i % comm.size]:
            for before in (0, 2) if thorough else [2 * (i // 2 % 2)]:
                many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=2, replicas=replicas, limit=20)
                for _ in range(before):
                    many.step(x, y, total)
                many.synchronize()
                digest = many.digest()
                for _ in range(2 * bool(before)):
                    many.step(x, y, total)
                n = 7 if comm.rank == odd else total
                numbers = "; ".join(f"{size} on rank" for size in ((7, 10) if odd == 0 else (10, 7)))
                with pytest.raises(ValueError, match=f"step {2 * before}: .*: {numbers.replace('; ', '.*; ')}"):
                    for _ in range(3):  # the first stages end the step before the last one begins it
                        many.step(x[:n], y[:n], n)
                    many.synchronize()
                if not before:
                    assert many.digest() == digest
                for call in (lambda: many.step(x, y, total)), (lambda: many.predict(x)):  # noqa: B023 called here
                    with pytest.raises(RuntimeError, match="failed"):  # not messages of that step for others
                        call()
                many = dream(comm, mlp(), nn.SGD(0.1), mini_batches=2, replicas=replicas, limit=20)
                wrong = f"step 0: all 10 samples of a batch go through one pipeline, given 9 on rank {odd}"
                with pytest.raises(ValueError, match=wrong):
                    for _ in range(3):
                        n = 9 if comm.rank == odd else total
                        many.step(x[:n], y[:n], total)
                    many.synchronize()


@pytest.mark.mpi(ranks=[3], more=[1, 2, 4])
def test_looking_changes_nothing_and_another_state_leaves_nothing_in_flight(comm, thorough):
    for i, replicas in enumerate([(), *REPLICAS[comm.size]]):
        ways = [(mlp, False), (resnet, True), (untied, False)]
        for build, sync in ways if thorough else [ways[i % 3]]:
            found = []
            for looks in 0, 1:
                many = dream(
                    comm, build(), nn.Adam(0.01), mini_batches=5, replicas=replicas, vertical_sync=sync, limit=20
                )
                losses = []
                for step, (x, y, total) in enumerate([*batches(build())] * 2):
                    many.optimizer.lr = rate(step)
                    losses.append(many.step(x, y, total))
                    for _ in range(looks * (1 + step % 2)):
                        many.sum_scores(x, y)
                        many.check_replicas()
                        many.digest()
                losses.append(many.synchronize(0.0))
                found.append((losses, many.digest(), many.state_dict()))
                x, y, total = next(batches(build()))
                many.step(x, y, total)
                many.load_state_dict(found[-1][2])
                assert many.digest() == found[-1][1]
                many.step(x, y, total)
                many.synchronize()
                found[-1] += many.digest(), many.snapshot()
                many.close()
            (losses, digest, state, later, _), others = found[0], found[1]
            assert losses == others[0] and digest == others[1] and later == others[3] and later != digest
            assert all(np.array_equal(array, others[2][name]) for name, array in state.items())


@pytest.mark.mpi(ranks=2)
def test_a_schedule_may_scale_the_velocity_of_lars(comm):
    """As MomentumCorrection does where the rate falls: all of every stage's velocity is multiplied."""
    many = dream(comm, mlp(), nn.LARS(0.1))
    for x, y, total in batches(mlp(), sizes=(10,)):
        many.step(x, y, total)
    before = many.state_dict()
    many.rescale("velocity", 0.5)
    after = many.state_dict()
    names = [name for name in before if "velocity" in name]
    assert names or comm.rank
    for name in names:
        assert (after[name] == 0.5 * before[name]).all()
    many.close()
