"""Experts dealt out to ranks: they compute what one process computes; bytes; checkpoints; refusals."""

from functools import cache

import numpy as np
import pytest
from equality import pairs

import nn
from collectives import Communicator
from parallel.command.options import Options
from parallel.settings import OptionError
from parallel.state.fragments import GatheredFragments
from parallel.state.splits import NetworkPart, cut
from parallel.strategies import axis_rules
from parallel.strategies.expert.dealing import deal
from parallel.strategies.expert.dispatch import Dispatch, ExpertRanks
from parallel.strategies.expert.strategy import ExpertParallel

SEED, SAMPLES, LENGTH, CLASSES = 5, 11, 6, 9
MODELS = {
    "top 1": "transformer:8,4,1,experts=4,top=1,auxiliary=0.5",
    "top 2": "transformer:8,4,1,experts=8,top=2,auxiliary=0.5",
    "capacity, top 1": "transformer:8,4,1,experts=4,top=1,capacity=0.7,auxiliary=0.5",
    "capacity, top 2": "transformer:8,4,1,experts=4,top=2,capacity=0.7,auxiliary=0.5",
    "shared, tied": "transformer:8,4,2,1,experts=4,top=2,shared=1,dropout=0.2,noise=0.1",
    "balanced": "transformer:8,4,1,experts=4,top=2,gate=sigmoid,auxiliary=0.5,noise=0.1",
}

MESHES = (
    {"expert": 2},
    {"expert": 2, "stage": 1},
    {"expert": 2, "stage": 2},
    {"expert": 2, "stage": 3},
    {"expert": 2, "tensor": 2},
    {"expert": 2, "tensor": 2, "way": "sequence"},
)


def network(model):
    return nn.models.build(MODELS[model], (LENGTH,), CLASSES, np.float64)


def batches(shard, steps=4):
    """(x, y, total) of batches of 5, 5 and 1 samples, of which some ranks have none."""
    rng = np.random.default_rng(3)
    x, y = rng.integers(1, CLASSES, (SAMPLES, LENGTH)), rng.integers(0, CLASSES, (SAMPLES, LENGTH))
    y[1, : LENGTH // 2] = -100  # the samples do not count alike
    data = nn.data.Dataset(x, y, classes=CLASSES, ignore_index=-100, dtype=np.float64)
    loader = nn.Loader(data, 5, seed=1, shard=shard, dtype=np.float64)
    return [each for epoch in range(steps) for each in loader.epoch(epoch)][:steps]


def loss():
    return nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100)


def optimizer():
    return nn.Adam(0.01, eps=1e-4, clip=nn.ClipGlobalNorm(0.5))


def train(trainer, **how):
    """Make the steps; of a batch that is cut for several ranks the weight of all of it is given."""
    whole = [loss().weight(y) for _, y, _ in batches((0, 1))]
    given = zip(batches(trainer.shard), whole, strict=True)
    return [trainer.step(*each, total_weight=weight, **how) for each, weight in given]


def many_ranks(comm, model, **how):
    return ExpertParallel(network(model), loss(), optimizer(), Communicator(comm), SEED, **how)


def assert_same_state(got, want, what):
    for name, array in want.items():
        if name.endswith(".load"):
            continue  # the mean over the ranks: in proportion
        scale = np.abs(array).max() or 1.0 if array.size else 1.0
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-12 * scale, err_msg=f"{what}: {name}")


@cache
def one_process(model):
    """(trainer after the steps, its losses), which no test changes any more."""
    one = nn.Trainer(network(model), loss(), optimizer(), SEED)
    return one, train(one)


def assert_same(many, model, **how):
    one, losses = one_process(model)
    np.testing.assert_allclose(train(many, **how), losses, rtol=1e-12, err_msg=many.describe())
    got = many.state_dict()
    if many.is_writer:
        assert_same_state(got, one.state_dict(), many.describe())
    many.check_replicas()
    x, y, _ = batches((0, 1))[0]
    np.testing.assert_allclose(many.predict(x), one.predict(x), rtol=1e-11, atol=1e-12)
    mine = x[many.shard[0] :: many.shard[1]], y[many.shard[0] :: many.shard[1]]
    np.testing.assert_allclose(many.sum(many.sum_scores(*mine)), one.sum_scores(x, y), rtol=1e-11)
    many.close()


@pytest.mark.mpi(ranks=[4], more=[1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_compute_what_one_process_computes(comm, ranks, model):
    assert_same(many_ranks(comm, model), model)
    assert_same(many_ranks(comm, model), model, accumulate=2)


@pytest.mark.mpi(ranks=[4])
@pytest.mark.parametrize(("model", "how"), pairs(MODELS, MESHES, 2))
def test_meshes_compute_what_one_process_computes(comm, ranks, model, how):
    assert_same(many_ranks(comm, model, **how), model)


@pytest.mark.mpi(ranks=[2], more=[4])
@pytest.mark.parametrize("how", [{}, {"shards": 4}], ids=str)
def test_the_bias_moves_once_a_step_where_a_rank_has_no_samples(comm, ranks, how):
    """In data parallelism, too: in the third batch, of one sample, the others' loads and biases would be old."""
    from parallel import DistributedDataParallel

    one, losses = one_process("balanced")
    many = DistributedDataParallel(network("balanced"), loss(), optimizer(), Communicator(comm), SEED, **how)
    np.testing.assert_allclose(train(many), losses, rtol=1e-12)
    assert_same_state(many.state_dict(), one.state_dict(), how)
    many.close()


@pytest.mark.mpi(ranks=[4])
def test_a_checkpoint_continues_on_every_mesh(comm, ranks, thorough):
    """Half of the steps on one mesh, the others on another: as one process makes them all."""
    meshes = {
        "one process": None,
        "expert": {},
        "data, expert": {"expert": 2},
        "data, expert, sharded": {"expert": 2, "stage": 3},
        "expert, tensor": {"expert": 2, "tensor": 2},
    }
    model, given = (
        "balanced",
        list(zip(batches((0, 1)), [loss().weight(y) for _, y, _ in batches((0, 1))], strict=True)),
    )

    def build(how):
        return nn.Trainer(network(model), loss(), optimizer(), SEED) if how is None else many_ranks(comm, model, **how)

    def steps(trainer, which):
        mine = list(zip(batches(trainer.shard), [weight for _, weight in given], strict=True))[which]
        return [trainer.step(*each, total_weight=weight) for each, weight in mine]

    one = build(None)
    losses, want = steps(one, slice(4)), one.state_dict()
    for i, (first, how) in enumerate(meshes.items()):
        before = build(how)
        steps(before, slice(2))
        state = before.state_dict()
        if how is not None:
            fragments = GatheredFragments(comm.allgather(list(before.fragments())))
            if before.is_writer:
                assert {name: array.tobytes() for name, array in state.items()} == {
                    name: fragments[name].tobytes() for name in state
                }
            before.close()
        state = comm.bcast(state)
        goes_on = list(meshes.items())
        for second, then in goes_on if thorough else [goes_on[(i + k) % len(meshes)] for k in (1, 2)]:
            after = build(then)
            after.load_state_dict(state)
            np.testing.assert_allclose(steps(after, slice(2, 4)), losses[2:], rtol=1e-12, err_msg=f"{first}, {second}")
            got = after.state_dict()
            if after.is_writer:
                assert_same_state(got, want, f"{first}, {second}")
            if then is not None:
                after.close()


@pytest.mark.mpi(ranks=[2, 4])
def test_bytes_that_travel(comm, ranks):
    """Positions whose expert is elsewhere, four times; golden numbers of 8 positions and 4 experts."""
    shapes = {"router": (3, 4), "A": (4, 3, 4), "B": (4, 4, 3)}
    whole = {name: np.arange(np.prod(shape), dtype=float).reshape(shape) for name, shape in shapes.items()}
    whole = {"router": np.cos(whole["router"]), "A": np.sin(0.5 * whole["A"]), "B": np.cos(0.7 * whole["B"])}
    layer = nn.MixtureOfExperts(3, 4, 2, 4, activation="relu", auxiliary=0)
    mine = NetworkPart(deal(nn.Network(layer, (3,), np.float64), ranks), comm.rank, ranks)
    parameters, gradients = mine.layout.zeros(np.float64), mine.layout.zeros(np.float64)
    for name, array in mine.layout.items(parameters):
        array[...] = cut(mine.whole_specs, whole, comm.rank, ranks)[name]
    ctx = mine.context()
    ctx.network_context.input_gradient = True
    group = ctx.network_context.groups["expert"] = ExpertRanks(Communicator(comm))
    rows = slice(8 * comm.rank // ranks, 8 * (comm.rank + 1) // ranks)
    x, gy = (f(np.arange(24.0)).reshape(8, 3)[rows] for f in (np.sin, lambda i: np.cos(1.3 * i)))
    y, saved = mine.forward(mine.layout.views(parameters), x, ctx)
    gx = mine.backward(mine.layout.views(parameters), mine.layout.views(gradients), gy, saved, ctx)
    arrays = {"y": y} | dict(mine.layout.items(gradients))
    squares = comm.allreduce(np.array([(array**2).sum() for array in arrays.values()]))
    found = dict(zip(arrays, squares, strict=True))
    assert found["y"] == pytest.approx(1.638003282034, rel=1e-11)
    assert found["A"] == pytest.approx(5.874834417639, rel=1e-11) and gx.shape == x.shape
    assert found["B"] == pytest.approx(1.351441435114, rel=1e-11)
    sent = comm.allgather(group.bytes_sent)
    assert sum(sent) == ranks * {2: 384, 4: 288}[ranks]


@pytest.mark.mpi(ranks=[2])
def test_experts_gradients_summed_over_their_axis_would_be_wrong(comm, ranks):
    """The control: experts of other ranks are other experts."""
    losses = one_process("top 2")[1]
    many = many_ranks(comm, "top 2")
    name = next(name for name in many.local_network.layout.specs if name.endswith(".A"))
    many.forward_backward.add_partial_gradients(many, [name], many.forward_backward.everyone)
    found = train(many)
    assert found[0] == pytest.approx(losses[0], rel=1e-12) and found[-1] != pytest.approx(losses[-1], rel=1e-9)
    many.close()


@pytest.mark.mpi(ranks=[2])
def test_a_shared_expert_is_computed_while_positions_travel(comm, ranks, monkeypatch):
    """By the order of events: sent, computed, received; in forward and in backward of both layers."""
    many, events = many_ranks(comm, "shared, tied"), []
    group, start = many.ctx.group("expert"), ExpertRanks.start

    def started(self, *arguments):
        wait = start(self, *arguments)
        events.append("sent")

        def waited():
            events.append("received")
            return wait()

        return waited

    monkeypatch.setattr(ExpertRanks, "start", started)
    for name in ("forward", "backward"):
        compute = getattr(nn.GELU, name)

        def computed(self, *arguments, compute=compute, name=name):
            events.append(name)
            return compute(self, *arguments)

        monkeypatch.setattr(nn.GELU, name, computed)
    train(many)
    assert group.bytes_sent
    there = ["sent", "forward", "received", "forward", "forward", "sent", "received"]  # the shared one; two of mine
    back = ["sent", "backward", "received", "backward", "backward", "sent", "received"]
    assert events == 4 * (2 * there + 2 * back)
    many.close()


@pytest.mark.mpi(ranks=[2])
def test_values_that_are_not_finite_are_refused_on_all_ranks(comm, ranks):
    bad = nn.Network(nn.Sequential(nn.MixtureOfExperts(4, 4)), (4,), np.float64)
    many = ExpertParallel(bad, nn.MSELoss(), optimizer(), Communicator(comm), SEED)
    x, y = np.ones((1, 4)), np.ones((1, 4))
    if comm.rank:
        x[0, 2] = np.inf
    with pytest.raises(nn.NonFiniteLoss, match="input"):
        many.step(x, y, 2)
    many.close()


@pytest.mark.mpi(ranks=[2])
def test_mixed_precision(comm, ranks):
    """As one process, to float16's precision, and every rank skips the same steps."""

    def mixed():
        found = nn.models.build(MODELS["top 2"], (LENGTH,), CLASSES, np.float32)
        found.mixed = True
        return found

    one = nn.Trainer(mixed(), loss(), optimizer(), SEED)
    many = ExpertParallel(mixed(), loss(), optimizer(), Communicator(comm), SEED)
    np.testing.assert_allclose(train(many), train(one), rtol=2e-3)
    many.check_replicas()
    many.close()


@pytest.mark.mpi(ranks=[4])
def test_the_load_is_recorded_as_in_one_process(comm, ranks):
    def record(trainer):
        rng = np.random.default_rng(3)
        x = rng.integers(1, CLASSES, (SAMPLES, LENGTH))
        loader = nn.Loader(nn.data.Dataset(x, x, classes=CLASSES, dtype=np.float64), 5, seed=1, shard=trainer.shard)
        return nn.fit(trainer, loader, 1, [nn.callbacks.ExpertLoad()]).history[0]["experts"]

    model = "capacity, top 2"
    want = record(nn.Trainer(network(model), nn.CrossEntropyLoss(), optimizer(), SEED))
    for how in ({}, {"expert": 2, "tensor": 2}):
        many = ExpertParallel(
            network(model), nn.CrossEntropyLoss(), optimizer(), Communicator(comm), SEED, **{"expert": 4} | how
        )
        assert record(many) == want and sum(want["2.1.body.1"]["dropped"]) > 0, how
        many.close()


# ------------------------------------------------------------------------------------------- without ranks


@pytest.mark.parametrize(
    "model, experts, tensors, why",
    [
        ("transformer:8,4,1", 2, 1, "no experts that 2 ranks could have: .* use data parallelism"),
        ("transformer:8,4,1,experts=6", 4, 1, "its 6 experts .* to 4 ranks .* use 1, 2, 3, 6 for .* that 4 divides"),
        ("transformer:8,4,1,experts=8", 4, 4, "to 4 ranks on the axis expert and 4 on .* tensor: use 1, 2 for"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused(model, experts, tensors, why):
    with pytest.raises(ValueError, match=why):
        deal(nn.models.build(model, (LENGTH,), CLASSES, np.float64), experts, tensors)


@pytest.mark.parametrize("ranks", range(1, 34))
def test_rows_are_brought_together_by_expert(ranks):
    rng = np.random.default_rng(ranks)
    received = rng.integers(0, 3, (ranks, 3))
    plan = Dispatch(received, received)
    labels = [(e, r) for r in range(ranks) for e in range(3) for _ in range(received[r, e])]
    assert [labels[i] for i in plan.by_expert] == sorted(labels) and plan.counts.tolist() == received.sum(0).tolist()


def test_options_that_do_not_go_with_the_axis_are_refused():
    model = "transformer:8,4,1,experts=4"
    for more, why in (
        ({"mesh": "expert=2,space=2"}, "axes space and expert cannot be combined: .* cut images; use data, pipeline"),
        (
            {"mesh": "expert=2", "reproducible": 4},
            "--reproducible cannot be combined with .*expert.*depends on how many",
        ),
        ({"mesh": "expert=2", "strategy": "diloco"}, "--strategy diloco has no axis expert: .* use ddp, zero1, zero2"),
        ({"mesh": "expert=2", "node_memory": "on"}, "summed by messages"),
    ):
        with pytest.raises(OptionError, match=why):
            axis_rules.check_options(Options(model=model, **more))
