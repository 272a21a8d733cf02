"""What ranks move in mixed precision is float16, half the bytes, and they compute what one process computes."""

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED
from pipelines import difference, mlp, train, transformer

import nn
import nn.core.mixed_precision
from nn.core.layer import Sequential

MICRO = 3


def convolutions():
    """Windows that reach over rows, branches, and linear layers behind; every part has a remainder."""
    layers = [nn.Conv2d(1, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Parallel(nn.Conv2d(6, 4, 1), Sequential(nn.Conv2d(6, 5, 3, padding=1), nn.ReLU())), nn.Dropout(0.2)]
    layers += [nn.Flatten(), nn.Linear(81, 11), nn.Sigmoid(), nn.Linear(11, 4)]
    return nn.Network(Sequential(*layers), (6, 7, 1), np.float64)


def heads():
    """Two blocks, of which ranks compute some heads and some columns."""
    layers = [nn.Embedding(9, 8), *(nn.TransformerBlock(8, 2, causal=True, dropout=0.1) for _ in range(2))]
    return nn.Network(Sequential(*layers, nn.LayerNorm(8), nn.Linear(8, 9)), (6,), np.float64)


def residual():
    """The root, so that nobody rounds what the ranks add up."""
    return nn.Network(nn.Residual(Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))), (4,), np.float64)


def halved(network):
    network.mixed = True
    return network


def one_process(build, parts=1):
    one = nn.Trainer(halved(build()), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
    return one, train(one, parts)


def make(name, network, communicator, **options):
    import parallel

    trained = network, nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), communicator, SEED
    return getattr(parallel, name)(*trained, **options)


def assert_same(many, one, losses):
    np.testing.assert_allclose(train(many), losses, rtol=1e-12, err_msg=many.describe())
    np.testing.assert_array_equal(many.loss_scale.array, one.loss_scale.array)
    many.check_replicas()
    state = many.state_dict()
    assert not many.is_writer or difference(state, one.state_dict()) < 1e-12, many.describe()
    many.close()


@pytest.mark.mpi(ranks=2)
def test_a_pipeline_computes_what_one_process_computes_wherever_it_is_cut(comm):
    """Before layers with parameters and without, in the middle of what is residual; forward computed again or not."""
    from collectives import Communicator

    world = Communicator(comm)
    for build, cuts in (mlp, (2, 4, 6, 14)), (transformer, (3, 4, 6)), (convolutions, (1, 4, 6, 9)):
        one, losses = one_process(build, MICRO)
        for number, cut in enumerate(cuts):
            schedule, recompute = ("gpipe", "1f1b", "zb-h1")[number % 3], number % 2 > 0
            given = {"cuts": [cut], "schedule": schedule, "recompute": recompute, "micro_batches": MICRO}
            assert_same(make("Pipeline", halved(build()), world, **given), one, losses)


TOGETHER = (
    ("TensorParallel", heads, {"way": "pairs"}),
    ("TensorParallel", heads, {"way": "sequence"}),
    ("TensorParallel", convolutions, {"way": "width"}),
    ("SpatialParallel", convolutions, {}),
    ("BranchParallel", convolutions, {}),
)
# Here some parts are outputs, or added up: no layer would take them as float16, and they travel as they are.
ADDED = ("TensorParallel", heads, {"way": "width"}), ("TensorParallel", residual, {"way": "width"})


@pytest.mark.mpi(ranks=[2, 3])
def test_ranks_that_compute_layers_together_compute_what_one_process_computes(comm, ranks):
    """Parts that are not alike, too: what lies in the gap behind one is no number that is too large."""
    from collectives import Communicator

    world = Communicator(comm)
    tricks = tuple(("OneWeirdTrick", convolutions, {"scheme": way}) for way in ("all", "turns", "shares", "features"))
    for name, build, options in (*TOGETHER, *ADDED, *tricks):
        if build is not heads or ranks == 2:
            assert_same(make(name, halved(build()), world, **options), *one_process(build))


@pytest.mark.mpi(ranks=2)
def test_control_on_a_process_that_rounds_nothing_in_between(comm, monkeypatch):
    """Sent as float16 all the same: that would make a difference, and is found."""
    from collectives import Communicator

    monkeypatch.setattr(nn.core.mixed_precision, "_rounds", lambda p, ctx: False)
    one, losses = one_process(mlp, MICRO)
    many = make("Pipeline", halved(mlp()), Communicator(comm), micro_batches=MICRO)
    with pytest.raises(AssertionError):
        assert_same(many, one, losses)
    many.close()


@pytest.mark.mpi(ranks=2)
def test_bytes_on_the_wire(comm):
    """A quarter of those of float64 where something is moved; as many where it is summed."""
    from collectives import Communicator

    world = Communicator(comm)
    pipeline = ("Pipeline", heads, {"micro_batches": MICRO})
    tricks = (("OneWeirdTrick", convolutions, {"scheme": way}) for way in ("all", "turns", "features"))
    for name, build, options in (pipeline, *TOGETHER, *tricks):
        full, half = (sent_in_a_step(world, name, build, mixed, options) for mixed in (False, True))
        assert full.keys() == half.keys()
        for operation, count in full.items():
            case = f"{name}, {options}: {operation}, {count} and {half[operation]} bytes"
            if operation in ("send", "allgather", "alltoall", "bcast"):
                told = whole_numbers(name, operation)  # targets and places of samples, in owt's rounds
                assert half[operation] - told == (count - told) / 4, case
            elif operation == "run":  # halos: forward they are moved, backward summed
                assert half[operation] == 0.625 * count, case
            else:
                assert abs(half[operation] - count) <= SUMMED, case
        assert sum(half.values()) < sum(full.values()) or options == {"way": "pairs"}, "which only sums"


SUMMED = 32  # bytes: of a number more that is summed, how many ranks have found one too large


def whole_numbers(name, operation):
    """Bytes that both ranks tell each other in a step of OneWeirdTrick: 10 targets, and where 5 samples of each are."""
    return 10 * 8 + 4 * 8 if (name, operation) == ("OneWeirdTrick", "allgather") else 0


def sent_in_a_step(world, name, build, mixed, options):
    """Bytes of both ranks, by operation."""
    from parallel.reports.traffic import Traffic

    network, traffic = build(), Traffic(world)
    network.mixed = mixed
    many = make(name, network, traffic, **options)
    traffic.reset()
    train(many, sizes=(10,))
    sent = {operation: world.allreduce(count) for operation, count in sorted(traffic.bytes.items())}
    many.close()
    return {operation: count for operation, count in sent.items() if count}


@pytest.mark.mpi(ranks=2)
def test_evaluation_moves_what_it_computes(comm):
    """Nothing is rounded there, on one process or on many."""
    from collectives import Communicator

    one = nn.Trainer(halved(heads()), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
    x = np.random.default_rng(1).integers(0, 9, (5, 6))
    expected = one.predict(x)
    for name, options in ("Pipeline", {"micro_batches": MICRO}), ("TensorParallel", {"way": "sequence"}):
        many = make(name, halved(heads()), Communicator(comm), **options)
        np.testing.assert_allclose(many.predict(x), expected, rtol=1e-12, atol=1e-12)
        many.close()


@pytest.mark.mpi(ranks=2)
def test_a_gradient_too_large_for_the_wire_lets_all_ranks_skip_the_step(comm, monkeypatch):
    """It is the second stage that sends it, and notes it; the first one never does."""
    from collectives import Communicator
    from parallel.strategies.pipeline import step

    many = make("Pipeline", halved(mlp()), Communicator(comm), micro_batches=MICRO)
    before, packed = {name: np.array(array) for name, array in many.state_dict().items()}, step.pack

    def once_too_large(context, array, gradient=False):
        return packed(context, 1e12 * array if gradient and many.steps == 0 else array, gradient)

    monkeypatch.setattr(step, "pack", once_too_large)
    train(many, sizes=(10,))
    assert many.loss_scale.skipped == 1 and many.loss_scale.scale == 2.0**15 and many.updates == 0
    for name, array in many.state_dict().items():
        if name.startswith(("param", "optimizer")):
            np.testing.assert_array_equal(array, before[name], err_msg=name)
    train(many, sizes=(10,))
    assert many.loss_scale.skipped == 1 and many.updates == 1
    many.close()
