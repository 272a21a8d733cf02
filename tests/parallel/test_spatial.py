"""Images cut in height, and branches on different ranks: they compute what one process computes."""

import numpy as np
import pytest
from equality import CLIPS, OPTIMIZERS, SEED

import nn
from nn.core.layer import Sequential
from nn.models.googlenet import Auxiliary, AuxiliaryLoss
from nn.models.resnet import Subsample


def convolutions(synchronized=False):
    """Strides, paddings, dilations, groups, windows that stick out, heights that nothing divides."""
    layers = [
        *(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, synchronized=synchronized), nn.ReLU()),
        *(nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), nn.LocalResponseNorm(3)),
        *(nn.Conv2d(4, 6, (5, 3), stride=(1, 2), padding=(4, 0), dilation=(2, 1), groups=2), nn.Tanh()),
        *(nn.AvgPool2d((3, 2), (2, 1), (1, 0), ceil_mode=True, count_include_pad=False), nn.Dropout(0.3)),
        *(nn.Conv2d(6, 4, (4, 1), padding="same"), nn.Flatten(), nn.Linear(16, 5)),
    ]
    return nn.Network(Sequential(*layers), (13, 9, 2), np.float64, "convolutions")


def residual():
    """Two ways of a residual connection, with a shortcut and without; activations computed again; a mean at the end."""
    body = [nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1)]
    layers = [
        *(nn.Conv2d(2, 4, 7, padding=3), nn.ReLU(), nn.Residual(Sequential(*body), Subsample(2, 6)), nn.ReLU()),
        nn.Recompute(nn.Residual(Sequential(nn.Conv2d(6, 6, 5, padding=2), nn.Dropout(0.2), nn.LayerNorm(6)))),
        *(nn.GlobalAvgPool2d(), nn.Linear(6, 5)),
    ]
    return nn.Network(Sequential(*layers), (11, 6, 2), np.float64, "residual")


def inception(normalized=True):
    """Branches, a classifier inside; one of the layers behind is too low to be cut."""
    norm = [nn.BatchNorm2d(3)] if normalized else []
    branches = nn.Branches(
        Sequential(nn.Conv2d(4, 3, 1, bias=False), *norm, nn.ReLU()),
        Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2), nn.ReLU()),
        Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(4, 2, 1)),
    )
    head = Sequential(nn.AdaptiveAvgPool2d((5, 2)), nn.Flatten(), nn.Linear(90, 5))
    rest = Sequential(nn.Conv2d(9, 4, 3, stride=(3, 1)), nn.MaxPool2d(2), nn.GlobalMaxPool2d(), nn.Linear(4, 5))
    return nn.Network(
        Sequential(nn.Linear(2, 4), nn.Tanh(), branches, Auxiliary(rest, head)), (12, 6, 2), np.float64, "inception"
    )


def unnormalized():
    return inception(False)


LOSSES = dict.fromkeys((inception, unnormalized), AuxiliaryLoss(nn.CrossEntropyLoss()))
SAMPLES = 9


def batches(network, shard, batch=4, steps=5):
    """The first steps' (x, y, total) of batches of 4, 4, 1: also fewer samples than ranks."""
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((SAMPLES, *network.in_shape)), rng.integers(0, 5, SAMPLES)
    loader = nn.Loader(nn.data.Dataset(x, y, classes=5, dtype=np.float64), batch, seed=1, shard=shard, dtype=np.float64)
    return [each for epoch in range(steps) for each in loader.epoch(epoch)][:steps]


def train(trainer, network, parts=1, **more):
    return [trainer.step(*each, parts=parts) for each in batches(network, trainer.shard, **more)]


def loss_of(make):
    return LOSSES.get(make, nn.CrossEntropyLoss())


def one_process(make, optimizer="adam", clip=0, **more):
    one = nn.Serial(make(**more), loss_of(make), OPTIMIZERS[optimizer](CLIPS[clip]), SEED)
    return one, train(one, one.network)


def together(comm, make, optimizer="adam", clip=0, kind="SpatialParallel", exchange=None, more=None, **ranks):
    import parallel
    from collectives import Communicator

    communicator = comm if hasattr(comm, "release") else Communicator(comm)
    rule = OPTIMIZERS[optimizer](CLIPS[clip])
    made = getattr(parallel, kind)
    return made(make(**(more or {})), loss_of(make), rule, communicator, SEED, **ranks, **(exchange or {}))


def assert_same(many, one, losses, **options):
    np.testing.assert_allclose(train(many, one.network, **options), losses, rtol=1e-12, err_msg=many.describe())
    want, got = one.state(), many.state()
    assert want.keys() == dict(got).keys()
    for name, array in want.items():
        scale = np.abs(array).max() or 1.0 if array.size else 1.0
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-12 * scale, err_msg=f"{many.describe()}: {name}")
    many.check_replicas()


@pytest.mark.mpi(ranks=[2, 4], more=[3])
def test_rows_of_images(comm, ranks):
    for make, optimizer, clip in ((convolutions, "adam", 1), (residual, "momentum", 0), (inception, "lamb", 2)):
        one, losses = one_process(make, optimizer, clip)
        many = together(comm, make, optimizer, clip)
        assert_same(many, one, losses)
        many.close()


@pytest.mark.mpi(ranks=[2, 4], more=[3])
def test_branches_on_different_ranks(comm, ranks):
    """Three branches on two and three ranks, and on four, of which one has none."""
    one, losses = one_process(inception, "lamb", 2)
    many = together(comm, inception, "lamb", 2, "BranchParallel")
    assert_same(many, one, losses)
    many.close()


@pytest.mark.mpi(ranks=4)
def test_groups_share_a_batch(comm):
    """--mesh data=2,space=2: batches of one sample, too, of which a group has none; statistics of all ranks or not."""
    messages = {"node_memory": "off", "overlap": "thread"}
    for make, kind, ranks, more, exchange in (
        (convolutions, "SpatialParallel", {"space": 2}, {"synchronized": True}, messages),
        (convolutions, "SpatialParallel", {"space": 2}, {"synchronized": True}, {"node_memory": "on"}),
        (unnormalized, "BranchParallel", {"branch": 2}, {}, messages),
    ):
        one, losses = one_process(make, "adam", 1, **more)
        many = together(comm, make, "adam", 1, kind, exchange, more, **ranks)
        assert many.shard == (comm.rank // 2, 2)
        assert_same(many, one, losses)
        many.close()
