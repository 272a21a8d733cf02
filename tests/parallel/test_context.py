"""Sequences cut over ranks: they compute what one process computes; the ring's schedule; bytes; refusals."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import nn
from collectives.checking.simulator import simulate_lengths
from collectives.steps import Compute, RecvReduce, Send
from nn.core.layer import Sequential
from parallel.strategies.context.attention import ContextGroups
from parallel.strategies.context.cutting import cut
from parallel.strategies.context.positions import ContextDegrees, member_positions, member_rows, positions
from parallel.strategies.context.ring import ring_backward, ring_forward
from parallel.strategies.context.strategy import context_degrees
from parallel.strategies.tensor.moves import Cut
from parallel.strategies.tensor.parts import SplitDropout

SEED, SAMPLES, CLASSES = 5, 7, 11
MODELS = {
    "causal": "transformer:8,4,1",
    "tied, rotary, dropout": "transformer:8,4,1,1,positions=rotary,dropout=0.2",
    "sinusoidal, by blocks": "transformer:8,4,1,positions=sinusoidal,attention=blocks:2",
    "all see all, padding": "encoder:8,4,1",
    "experts": "transformer:8,4,1,experts=4,top=2,auxiliary=0.5,noise=0.1",
    "experts, balanced": "transformer:8,4,1,experts=4,top=1,gate=sigmoid,auxiliary=0.5",
}


def network(model, length):
    return nn.models.build(MODELS[model], (length,), CLASSES, np.float64)


def batches(shard, length, steps=4):
    """(x, y, total) of batches of 4 and 3; id 0, which is padding, stands at the end."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(1, CLASSES, (SAMPLES, length)), rng.integers(0, CLASSES, (SAMPLES, length))
    x[:3, max(1, length - 3) :] = 0
    y[1, : length // 2] = -100  # the parts of a sequence do not count alike
    y[2] = -100
    data = nn.data.Dataset(x, y, classes=CLASSES, ignore_index=-100, dtype=np.float64)
    loader = nn.Loader(data, 4, seed=1, shard=shard, dtype=np.float64)
    return [each for epoch in range(steps) for each in loader.epoch(epoch)][:steps]


def loss():
    return nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100)


def optimizer():
    return nn.Adam(0.01, eps=1e-4, clip=nn.ClipGlobalNorm(0.5))


def train(trainer, length):
    """Make the steps; of a batch that is cut for several groups the weight of all of it is given."""
    whole = [trainer.whole_loss.weight(y) for _, y, _ in batches((0, 1), length)]
    return [
        trainer.step(*each, total_weight=weight)
        for each, weight in zip(batches(trainer.shard, length), whole, strict=True)
    ]


def many_ranks(comm, model, length, attention, **how):
    from collectives import Communicator
    from parallel.strategies.context.strategy import ContextParallel

    communicator = Communicator(comm)
    return ContextParallel(network(model, length), loss(), optimizer(), communicator, SEED, attention=attention, **how)


def assert_same(many, one, losses, length):
    np.testing.assert_allclose(train(many, length), losses, rtol=1e-12, err_msg=many.describe())
    want, got = one.state_dict(), many.state_dict()
    there = many.is_writer or not many.scattered
    for name, array in want.items() if there else ():
        if name.endswith(".load"):
            continue  # the mean over the ranks: in proportion
        scale = np.abs(array).max() or 1.0 if array.size else 1.0
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-12 * scale, err_msg=f"{many.describe()}: {name}")
    many.check_replicas()
    x = batches((0, 1), length)[0][0]
    np.testing.assert_allclose(many.predict(x), one.predict(x), rtol=1e-11, atol=1e-12)


@pytest.mark.mpi(ranks=[2, 3], more=[4])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_compute_what_one_process_computes(comm, ranks, model):
    ways = {2: ["ring", "ulysses"], 3: ["ring"], 4: ["ring", "ulysses", "ring:2,ulysses:2"]}[ranks]
    for attention in ways:
        for length in (9, ranks) if model in ("causal", "experts") else (9,):
            one = nn.Trainer(network(model, length), loss(), optimizer(), SEED)
            losses = train(one, length)
            many = many_ranks(comm, model, length, attention)
            assert_same(many, one, losses, length)
            many.close()


@pytest.mark.mpi(ranks=[4])
def test_groups_share_every_batch(comm, ranks):
    for how in ({}, {"stage": 1}, {"stage": 3}):
        one = nn.Trainer(network("causal", 9), loss(), optimizer(), SEED)
        losses = train(one, 9)
        many = many_ranks(comm, "causal", 9, "ring", context=2, **how)
        assert many.shard[1] == 2
        assert_same(many, one, losses, 9)
        many.close()


@pytest.mark.mpi(ranks=[2])
def test_keys_that_were_not_passed_on_in_backward_would_give_other_gradients(comm, ranks, monkeypatch):
    """The control: forward stays right, and nothing crashes."""
    from parallel.strategies.context.ring import Ring

    one = nn.Trainer(network("causal", 9), loss(), optimizer(), SEED)
    losses = train(one, 9)
    right, own = Ring.compute_step, {}

    def call(self, step, lengths, shape, *arrays):
        if step == 0:
            own[self] = arrays[0].copy()
        if len(arrays) == 2:  # backward: always this rank's keys and values
            arrays = own[self], arrays[1]
        right(self, step, lengths, shape, *arrays)

    monkeypatch.setattr(Ring, "compute_step", call)
    many = many_ranks(comm, "causal", 10, "ring")  # parts of one length
    one = nn.Trainer(network("causal", 10), loss(), optimizer(), SEED)
    losses, found = train(one, 10), train(many, 10)
    assert found[0] == pytest.approx(losses[0], rel=1e-12) and found[-1] != pytest.approx(losses[-1], rel=1e-6)
    many.close()


@pytest.mark.mpi(ranks=[2])
def test_values_that_are_not_finite_are_refused_on_all_ranks(comm, ranks):
    many = many_ranks(comm, "causal", 9, "ring", node_memory="off")
    many.flat_parameters[3] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match="parameter"):
        many.step(*batches(many.shard, 9)[0])
    many.close()


@pytest.mark.mpi(ranks=[2])
def test_bytes_that_ulysses_sends(comm, ranks):
    """4 (p - 1) / p times a rank's keys each way."""
    from collectives import Communicator
    from parallel.mesh import Ranks

    N, T, H, d = 2, 16, 4, 3
    communicator, groups = Communicator(comm), ContextGroups(ContextDegrees(1, 2), comm.rank)
    groups.connect(communicator, Ranks)
    all_to_all, sent = groups.heads.all_to_all, []
    groups.heads.all_to_all = lambda array: sent.append(array.nbytes // 2) or all_to_all(array)
    inner = cut(nn.Network(nn.MultiHeadAttention(H * d, H), (T, H * d), np.float64), groups)
    ctx = inner.context()
    ctx.network_context.input_gradient = True
    ctx.network_context.groups["context"] = Ranks(communicator)
    buffer = inner.layout.zeros(np.float64)
    inner.layout.initialize(buffer, 0)
    p, g = inner.layout.views(buffer), inner.layout.views(np.zeros_like(buffer))
    y, saved = inner.forward(p, np.ones((N, T, H * d)), ctx)
    inner.backward(p, g, np.ones_like(y), saved, ctx)
    assert sum(sent) == 6144 and len(sent) == 8
    groups.close()


@pytest.mark.mpi(ranks=[2], more=[4])
def test_bytes_on_the_wire_are_those_of_the_formula(comm, ranks):
    """Of a rank's keys of each layer a ring sends 6 (p - 1) times as much in a step, and Ulysses 8 (p - 1) / p times.

    Counted by the communicator, which is what --memory tells.
    """
    from collectives import Communicator
    from parallel.reports.traffic import Traffic
    from parallel.strategies.context.strategy import ContextParallel

    length, communicator = 4 * ranks, Communicator(comm)
    for attention, operation, times, calls in (("ring", "run", 6 * (ranks - 1), 2), ("ulysses", "alltoall", 8, 8)):
        traffic = Traffic(communicator)
        how = {"attention": attention, "node_memory": "off"}
        many = ContextParallel(network("causal", length), loss(), optimizer(), traffic, SEED, **how)
        samples = batches(many.shard, length)[0]
        many.step(*samples, total_weight=many.whole_loss.weight(samples[1]))
        keys = len(samples[0]) * 4 * 8 * 8  # of four positions, eight features each
        sent = times * keys if attention == "ring" else times * keys * (ranks - 1) // ranks
        assert (traffic.bytes[operation], traffic.calls[operation]) == (sent, calls)
        many.close()


# ------------------------------------------------------------------------------------------- without ranks


@pytest.mark.parametrize("size", range(1, 34))
@pytest.mark.parametrize("schedule", [ring_forward, ring_backward])
def test_the_rings_schedule(size, schedule):
    """All messages match, nothing races, all ranks end; every rank sees every part, and all gradients come home."""
    lengths = [3 + (r % 3) for r in range(size)]
    rounds = [list(schedule(rank, size, lengths, 2)) for rank in range(size)]
    names = ("x", "first", "second", "y", "a", "b", "c")
    simulate_lengths(rounds, [dict.fromkeys(names, 2 * max(lengths)) for _ in range(size)])
    for rank in range(size):
        computed = [s for steps in rounds[rank] for s in steps if isinstance(s, Compute)]
        assert [s.reads[0].hi for s in computed] == [2 * lengths[(rank - step) % size] for step in range(size)]
        sent = sum(s.hi - s.lo for steps in rounds[rank] for s in steps if isinstance(s, Send))
        assert sent <= (2 if schedule is ring_backward else 1) * (size - 1) * 2 * max(lengths)
        if schedule is ring_backward and size > 1:
            assert any(isinstance(s, RecvReduce) and s.buf == "y" for s in rounds[rank][-1])


@pytest.mark.parametrize("size, forward, backward", [(1, 0, 0), (2, 3072, 6144), (4, 4608, 9216)])
def test_bytes_that_a_ring_sends(size, forward, backward):
    """2 (p - 1) and 4 (p - 1) times a rank's keys: 2 samples, 16 positions, 4 heads of 3 features, 8 bytes."""
    found = [
        sum(8 * (s.hi - s.lo) for steps in schedule(0, size, [16 // size] * size, 48) for s in steps if type(s) is Send)
        for schedule in (ring_forward, ring_backward)
    ]
    assert found == [forward, backward]


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (4, 1), (1, 3), (2, 2), (3, 4), (33, 1)])
@pytest.mark.parametrize("length", [1, 2, 8, 10, 23, 64])
def test_every_position_is_somebodys(degrees, length):
    degrees = ContextDegrees(*degrees)
    parts = [positions(length, rank, degrees) for rank in range(degrees.size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(length))
    assert all((np.diff(part) > 0).all() for part in parts)
    for member in range(degrees.ring):
        whole, mine = member_positions(length, member, degrees), member_rows(length, member, degrees)
        for piece, rows in enumerate(mine):
            assert whole[rows].tolist() == parts[member * degrees.heads + piece].tolist()


def test_golden_positions():
    assert [positions(8, r, ContextDegrees(2, 1)).tolist() for r in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(10, r, ContextDegrees(2, 1)).tolist() for r in range(2)] == [[0, 1, 7, 8, 9], [2, 3, 4, 5, 6]]


@pytest.mark.parametrize("ranks, pairs", [(2, [68, 68]), (4, [34, 34, 34, 34])])
def test_zigzag_balances_causal_work(ranks, pairs):
    """Key-query pairs of a rank, T = 16; in contiguous parts they are 36 and 100 on two ranks."""
    at = [positions(16, rank, ContextDegrees(ranks, 1)) for rank in range(ranks)]
    assert [int(sum(q + 1 for q in mine)) for mine in at] == pairs
    contiguous = [int(sum(q + 1 for q in range(16 * r // 2, 16 * (r + 1) // 2))) for r in range(2)]
    assert contiguous == [36, 100]


@pytest.mark.parametrize(
    "attention, ranks, expected",
    [
        ("ring", 4, (4, 1)),
        ("ulysses", 4, (1, 4)),
        ("ring:2,ulysses:2", 4, (2, 2)),
        ("ulysses:2,ring", 6, (3, 2)),
        ("ring,ulysses:3", 6, (2, 3)),
    ],
)
def test_degrees(attention, ranks, expected):
    assert context_degrees(attention, ranks) == expected


@pytest.mark.parametrize(
    "attention, message",
    [
        ("rings", 'is "ring"'),
        ("ring:3", "use ring:1,ulysses:4, ring:2,ulysses:2"),
        ("ring:2,ring:2", "both as"),
        ("ring:-1", 'is "ring"'),
        ("ring:0", "is for 0 ranks"),
    ],
)
def test_other_degrees_are_refused(attention, message):
    with pytest.raises(ValueError, match=message):
        context_degrees(attention, 4)


def refused(layers, in_shape, ranks=2, attention="ring"):
    made = nn.Network(Sequential(*layers), in_shape)
    return partial(cut, made, ContextGroups(context_degrees(attention, ranks), 0))


@pytest.mark.parametrize(
    "make, message",
    [
        (refused([nn.Embedding(5, 4), nn.LSTM(4, 4)], (6,)), r"layer 1 \(LSTM.*only attention may look"),
        (refused([nn.Linear(4, 3)], (4,)), "that have an output at every position"),
        (refused([nn.Embedding(5, 4)], (3,), 4), "use at most 3 ranks on the axis context"),
        (
            refused([nn.Embedding(5, 6), nn.MultiHeadAttention(6, 3)], (8,), 2, "ulysses"),
            "3 heads cannot be dealt out to 2 ranks evenly: use --context ring, or a multiple of 2 heads",
        ),
        (refused([nn.Embedding(5, 4), nn.MixtureOfExperts(4, 2, capacity=1.0)], (8,)), "use capacity=0"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_would_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("cut", [None, Cut(1, 0), Cut(-1, 6), Cut(-1, 6, 2)])
@pytest.mark.parametrize("degrees", [ContextDegrees(2, 1), ContextDegrees(2, 2), ContextDegrees(1, 3)])
def test_each_rank_has_its_part_of_one_processs_mask(degrees, cut):
    """Positions of the axis "context", and of these what the axis "tensor" cuts: positions, or features in blocks."""
    from types import SimpleNamespace

    layer, length = nn.Dropout(0.4), 11
    whole = nn.Network(layer, (length, 6), np.float64).context(seed=SEED)
    mask = layer.forward(None, np.ones((3, length, 6)), whole)[1].copy()
    for rank in range(degrees.size):
        mine = positions(length, rank, degrees)
        axis = cut and replace(cut, size=len(mine)) if cut and cut.axis == 1 else cut
        for part in range(2 if cut else 1):
            split = SplitDropout(layer, axis, positions=mine, length=length)
            ctx = nn.Network(split, (length, 6), np.float64).context(seed=SEED)
            group = SimpleNamespace(rank=part, size=2)
            ctx.network_context.groups["tensor"] = group
            wanted = mask[:, mine] if axis is None else axis.scatter(mask[:, mine], group, ctx)
            np.testing.assert_array_equal(split.forward(None, np.ones(wanted.shape), ctx)[1], wanted)


@pytest.mark.mpi(ranks=[2], more=[4])
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_the_strategy_is_one_that_can_be_trusted(comm, ranks, attention):
    """All that is asked of strategies: equality, state, bad steps, disagreement, memory, looking."""
    from collectives import Communicator
    from parallel import ContextParallel, check_strategy

    def make(network, loss, optimizer, communicator):
        return ContextParallel(network, loss, optimizer, communicator, attention=attention)

    check_strategy(make, Communicator(comm), network=lambda: network("causal", 9))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_id_that_does_not_exist_is_refused_on_all_ranks(rank):
    """Also on those that have other positions; with the position in the whole sequence."""
    mine = cut(network("causal", 9), ContextGroups(ContextDegrees(2, 1), rank))
    x = np.ones((3, 9), np.int64)
    x[1, 8] = CLASSES
    p = mine.layout.views(mine.layout.zeros(np.float64))
    with pytest.raises(ValueError, match="id 11 of sample 1"):
        mine.forward(p, x, mine.context())
