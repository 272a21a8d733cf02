"""One weird trick: convolutions data-parallel, linear layers model-parallel, activations moved in several ways."""

from functools import cache

import numpy as np
import pytest
from equality import CLIPS, OPTIMIZERS, SEED, batches, difference

import nn
from nn.core.layer import Sequential
from parallel.strategies.activation_rounds import Rounds, rounds
from parallel.strategies.tensor.boundary import SCHEMES, boundary, split


def network(synchronized=True):
    """Masks before and behind the boundary, statistics before it; 23 features, which no number of ranks divides."""
    front = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3, synchronized=synchronized), nn.ReLU()
    front += nn.Dropout(0.2), nn.MaxPool2d(2), nn.Flatten()
    back = nn.Linear(48, 23), nn.ReLU(), nn.Dropout(0.3), nn.Linear(23, 11), nn.Tanh(), nn.Linear(11, 10)
    return nn.Network(Sequential(*front, *back), (8, 8, 1), np.float64)


def make(comm, scheme, optimizer, clip=0, build=network):
    from collectives import Communicator
    from parallel import OneWeirdTrick

    rule = OPTIMIZERS[optimizer](CLIPS[clip])
    return OneWeirdTrick(
        build(), nn.CrossEntropyLoss(label_smoothing=0.1), rule, Communicator(comm), SEED, scheme=scheme
    )


@cache
def one_process(optimizer, clip=0):
    one = nn.Trainer(network(), nn.CrossEntropyLoss(label_smoothing=0.1), OPTIMIZERS[optimizer](CLIPS[clip]), SEED)
    return one, [one.step(*batch) for batch in batches("cnn", (0, 1))]


@pytest.mark.mpi(ranks=[2, 3], more=[1], timeout=120)
def test_computes_what_one_process_computes(comm, ranks):
    """By every scheme, over uneven batches, at once and in parts; norms of whole tensors."""
    for scheme in SCHEMES:
        for optimizer, clip, parts in (("adam", 1, 1), ("lamb", 2, 2)) if scheme == "all" else (("lars", 1, 1),):
            one, losses = one_process(optimizer, clip)
            many = make(comm, scheme, optimizer, clip)
            found = [many.step(*batch, accumulate=parts) for batch in batches("cnn", many.shard)]
            if parts == 1:
                np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=scheme)
                want, got = one.state_dict(), many.state_dict()
                for name in want if many.is_writer else ():
                    assert difference(np.asarray(got[name]), want[name]) < 1e-12 or not np.any(want[name]), name
                assert many.is_writer == bool(got)
            many.check_replicas()
            x, y, _ = batches("cnn", many.shard, 3)[2]
            whole_x, whole_y, _ = batches("cnn", (0, 1), 3)[2]
            if parts == 1:
                expected = one.sum_scores(whole_x, whole_y)
                np.testing.assert_allclose(many.sum(many.sum_scores(x, y)), expected, rtol=1e-12)
            many.close()


@pytest.mark.mpi(ranks=2)
def test_gradients_of_activations_are_summed(comm, monkeypatch):
    """A control: with what a rank itself has of them the convolutions learn something else."""
    _, losses = one_process("adam")
    for scheme in "all", "turns":
        many = make(comm, scheme, "adam")

        def own(self, gx, one, ga):
            at, (lo, hi) = sum(one.counts[: self.rank]), one.rows[self.rank]
            ga[lo:hi] = gx[at : at + hi - lo]

        monkeypatch.setattr(Rounds, "return_gradients", own)
        found = [many.step(*batch) for batch in batches("cnn", many.shard)]
        assert abs(found[0] - losses[0]) < 1e-12 and abs(found[-1] - losses[-1]) > 1e-5
        many.close()


@pytest.mark.mpi(ranks=2)
def test_activations_travel_and_dense_parameters_do_not(comm):
    """Bytes counted on the wire: 8 samples of each rank, 48 features, in float64; targets, and what is told of them."""
    from collectives import Communicator
    from parallel import OneWeirdTrick
    from parallel.reports.traffic import Traffic

    activations, counts, targets, convolutions = 8 * 48 * 8, 2 * 8, 8 * 8, (27 + 6) * 8
    sent = {}
    for scheme in SCHEMES:
        traffic = Traffic(Communicator(comm))
        many = OneWeirdTrick(network(False), nn.CrossEntropyLoss(), nn.SGD(0.1), traffic, SEED, scheme=scheme)
        traffic.reset()
        many.step(*batches("cnn", many.shard)[0])
        sent[scheme] = dict(traffic.bytes)
        many.close()
    assert sent["all"]["allgather"] == sent["shares"]["allgather"] == activations + counts + targets
    assert sent["all"]["reduce_scatter_block"] == sent["shares"]["reduce_scatter_block"] == activations
    assert sent["turns"]["bcast"] == 2 * activations // 2 and sent["turns"]["reduce"] == 2 * activations // 2
    assert sent["features"]["alltoall"] == 2 * activations // 2 and "reduce_scatter_block" not in sent["features"]
    # The first dense layer's sums of 16 samples and 23 outputs, in place of nothing.
    assert sent["features"]["allreduce"] > sent["all"]["allreduce"]
    dense = many.network.layout.count * 8 - convolutions
    assert sent["all"]["allreduce"] < dense / 2, "the parameters of linear layers are not among what is summed"


@pytest.mark.mpi(ranks=2)
def test_statistics_are_those_of_data_parallelism(comm):
    """Where each rank normalises by itself."""
    from collectives import Communicator
    from parallel import DistributedDataParallel, OneWeirdTrick

    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10)
    one = nn.Network(Sequential(*layers), (8, 8, 1), np.float64)
    other = DistributedDataParallel(one, nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm), SEED)
    many = OneWeirdTrick(one, nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm), SEED, scheme="turns")
    for batch in batches("cnn", many.shard, 3):
        assert many.step(*batch) == pytest.approx(other.step(*batch), rel=1e-12)
    want, got = other.state_dict(), many.state_dict()
    for name in want if many.is_writer else ():
        np.testing.assert_allclose(got[name], want[name], rtol=1e-10, atol=1e-12, err_msg=name)
    many.close()
    other.close()


@pytest.mark.mpi(ranks=2)
def test_a_sample_that_is_alone_on_its_rank_is_refused_before_training(comm):
    """Where one value a channel is normalised: a batch of two has one sample for each rank."""
    layers = nn.Conv2d(1, 3, 3), nn.GlobalAvgPool2d(), nn.BatchNorm1d(3), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 10)
    many = make(comm, "all", "sgd", build=lambda: nn.Network(Sequential(*layers), (8, 8, 1), np.float64))
    with pytest.raises(ValueError, match="leaves one sample to a shard"):
        nn.fit(many, (np.zeros((4, 8, 8, 1)), np.arange(4)), 1, batch=2)
    many.close()


@pytest.mark.mpi(ranks=2)
def test_a_bad_step_changes_nothing_and_is_traced(comm):
    """Also where one rank alone sees it; an infinite parameter shows behind the boundary on both."""
    many = make(comm, "shares", "adam")
    good, (x, y, total) = batches("cnn", many.shard, 2)
    many.step(*good)
    before = {name: np.array(array) for name, array in many.state_items()}
    bad = x.copy()
    if comm.rank:
        bad[3, 2, 2] = np.nan
    with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 1.*\[11\]"):
        many.step(bad, y, total)
    n = 1 - comm.rank  # the other rank has no samples
    with pytest.raises(nn.NonFiniteLoss, match=r"input.*rank 0"):
        many.step(np.full_like(x[:n], np.nan), y[:n], 1)
    assert all(np.array_equal(before[name], array) for name, array in many.state_items())
    huge = dict(many.local_network.layout.items(many.flat_parameters))["6.W"]
    huge *= 1e200
    dict(many.local_network.layout.items(many.flat_parameters))["9.W"][...] *= 1e200
    with pytest.raises(nn.NonFiniteLoss, match=r"output.*layer \d"):
        many.step(x, y, total)
    many.close()


@pytest.mark.mpi(ranks=2)
def test_normalisation_behind_the_boundary_sees_all_samples(comm):
    """Of the channels that are a rank's own; its statistics are whole in a checkpoint."""

    def build():
        layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, synchronized=True), nn.ReLU(), nn.Flatten(), nn.Linear(72, 7)
        layers += nn.BatchNorm1d(7, synchronized=True), nn.Tanh(), nn.Linear(7, 10)
        return nn.Network(Sequential(*layers), (8, 8, 1), np.float64)

    for scheme in "all", "features":
        one = nn.Trainer(build(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.SGD(0.1), SEED)
        many = make(comm, scheme, "sgd", build=build)
        many.optimizer.weight_decay = 0.0
        for mine, whole in zip(batches("cnn", many.shard, 3), batches("cnn", (0, 1), 3), strict=True):
            assert many.step(*mine) == pytest.approx(one.step(*whole), rel=1e-12)
        want, got = one.state_dict(), many.state_dict()
        for name in want if many.is_writer else ():
            np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-12, err_msg=f"{scheme} {name}")
        many.close()
    for scheme in "turns", "shares":
        with pytest.raises(ValueError, match="needs all samples at once: use all or features"):
            split(build(), nn.CrossEntropyLoss(), 2, scheme)


def test_every_sample_is_in_one_round():
    for scheme in SCHEMES:
        for samples in ([4, 3, 0], [1, 0, 0], [5, 5, 5]):
            found = rounds(scheme, samples)
            for rank, n in enumerate(samples):
                rows = [range(*one.rows[rank]) for one in found]
                assert sorted(row for each in rows for row in each) == list(range(n))
            assert all(sum(one.counts) for one in found)
    assert rounds("all", [0, 0]) == []
    assert max(sum(one.counts) for one in rounds("shares", [6, 6, 6])) == 6


def test_networks_of_other_kinds_are_refused():
    """And where the boundary lies in those of this kind."""
    assert boundary(network()) == 6
    assert boundary(nn.models.build("cnn", (8, 8, 1), 10)) == 7
    assert boundary(nn.models.build("resnet20", (8, 8, 3), 10)) == 22
    for model, shape in (("mlp:64,10", (64,)), ("transformer:8,2,1", (6,))):
        with pytest.raises(
            ValueError, match=r"no Sequential of convolutions and then linear layers.*--strategy tensor"
        ):
            boundary(nn.models.build(model, shape, 10))
    with pytest.raises(ValueError, match="by 'some': expected one of all, turns, shares, features"):
        split(network(), nn.CrossEntropyLoss(), 2, "some")
    with pytest.raises(ValueError, match="40 ranks"):
        split(network(), nn.CrossEntropyLoss(), 40, "all")
    layers = nn.Conv2d(1, 2, 3), nn.Residual(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"before a linear layer.*child 1 is Residual.*use all, turns or shares"):
        split(nn.Network(Sequential(*layers), (8, 8, 1)), nn.CrossEntropyLoss(), 2, "features")
