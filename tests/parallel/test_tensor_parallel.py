"""Tensor parallelism on ranks: it computes what one process computes, and its checkpoints are one process's."""

import numpy as np
import pytest
from equality import BATCH, CLIPS, OPTIMIZERS, SEED, assert_equals_one_process, batches, cnn

import nn
from nn.models.transformer import transformer
from parallel.mesh import ReplicaError


def make(comm, tensor=None, way="pairs"):
    from collectives import Communicator
    from parallel import TensorParallel

    communicator = Communicator(comm)
    return lambda network, loss, optimizer: TensorParallel(
        network, loss, optimizer, communicator, SEED, tensor=tensor, way=way
    )


def language_model(blocks=1, tied=1):
    """Twelve heads, for 1, 2, 3 and 4 ranks; 33 ids, which none of these divides but 3."""
    return transformer((8,), 33, 24, 12, blocks, tied, dropout=0.2, dtype=np.float64)


def ids(shard, steps=5):
    """Batches of ids for a shard."""
    return [(x, y, total) for x, y, total in batches("transformer", shard, steps)]


def steps(trainer, count=5, first=0, parts=1):
    return [trainer.step(*batch, accumulate=parts) for batch in ids(trainer.shard, count)[first:]]


def one_process(optimizer, clip=0, loss=None):
    one = nn.Trainer(language_model(), loss or nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]), SEED)
    return one, steps(one)


def assert_same_state(many, one):
    want, got = one.state_dict(), many.state_dict()
    if many.is_writer:
        assert want.keys() == got.keys()
        for name, array in want.items():
            np.testing.assert_allclose(
                got[name], array, rtol=0, atol=1e-12 * max(1e-3, np.abs(array).max()), err_msg=name
            )


@pytest.mark.mpi(ranks=[1, 2])
def test_computes_what_one_process_computes(comm, ranks):
    assert_equals_one_process(make(comm), optimizers=("momentum", "adam"), clips=(0, 1))
    assert_equals_one_process(make(comm), models=("cnn",), optimizers=("lars", "lamb"), clips=(0, 2))


@pytest.mark.mpi(ranks=[4], more=[3])
def test_a_language_model_on_more_ranks(comm, ranks):
    """Tied embeddings, dropout, an uneven vocabulary, norms of whole tensors; groups that share a batch."""
    for optimizer, clip, way, tensor in (
        ("adam", 1, "pairs", None),
        ("lamb", 2, "sequence", None),
        ("lars", 1, "width", None),
        *((("adam", 1, "pairs", 2), ("lars", 0, "sequence", 2)) if ranks == 4 else ()),
    ):
        one, losses = one_process(optimizer, clip)
        many = make(comm, tensor, way)(language_model(), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]))
        np.testing.assert_allclose(steps(many), losses, rtol=1e-12, err_msg=f"{optimizer} {way} {tensor}")
        assert_same_state(many, one)
        many.check_replicas()
        many.close()


@pytest.mark.mpi(ranks=[2], more=[3])
def test_checkpoints_hold_whole_tensors(comm, ranks):
    """What is begun on one process is continued here, and the other way round; samples may come in parts."""
    for way in "pairs", "sequence":
        one, losses = one_process("adam")
        half = nn.Trainer(language_model(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
        steps(half, 2)
        many = make(comm, way=way)(language_model(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"]())
        many.load_state_dict(half.state_dict() if many.is_writer else {})
        np.testing.assert_allclose(steps(many, 4, 2, parts=2), losses[2:4], rtol=1e-12)
        state = many.state_dict()
        again = nn.Trainer(language_model(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
        assert bool(state) == many.is_writer
        if many.is_writer:
            again.load_state_dict(state)
            assert steps(again, 5, 4) == pytest.approx(losses[4:], rel=1e-12)
        snapshot = many.snapshot()
        assert steps(many, 5, 4) == pytest.approx(losses[4:], rel=1e-12)
        assert_same_state(many, one)
        digest, alone = many.digest(), many.alone()
        assert alone is None or alone.digest() == digest
        many.restore(snapshot)
        assert steps(many, 5, 4) == pytest.approx(losses[4:], rel=1e-12)
        with pytest.raises(ValueError, match=r"entry param/0\.W: expected float64\(33, 24\), given float64\(17, 24\)"):
            many.load_state_dict(state | {"param/0.W": np.zeros((17, 24))} if many.is_writer else {})
        many.close()


@pytest.mark.mpi(ranks=2)
def test_ranks_know_all_that_is_asked(comm):
    one, _ = one_process("adam")
    many = make(comm)(language_model(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"]())
    steps(many)
    x, y, _ = ids((0, 1))[0]
    np.testing.assert_allclose(many.predict(x), one.predict(x), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(many.sum(many.sum_scores(x, y)), one.sum_scores(x, y), rtol=1e-12)
    assert many.shard == (0, 1) and "every layer computed by 2 ranks together" in many.describe()
    formula = many.formula()
    assert (
        formula["parameters"] < 0.6 * one.formula()["parameters"]
        and many.memory()["moments"] < 0.6 * one.memory()["moments"]
    )
    if comm.rank:  # its own copy of a tensor that is whole on both
        dict(many.local_network.layout.items(many.flat_parameters))["4.gamma"][0] += 1
    with pytest.raises(ReplicaError, match=r"parameter 4\.gamma on ranks \[1\] differs from rank 0's"):
        many.check_replicas()
    many.close()


@pytest.mark.mpi(ranks=2)
def test_a_bad_step_changes_nothing_and_is_traced(comm):
    network = cnn(False)
    one = nn.Trainer(cnn(False), nn.CrossEntropyLoss(), nn.Adam(0.01), SEED)
    many = make(comm)(network, nn.CrossEntropyLoss(), nn.Adam(0.01))
    good, (x, y, total) = batches("cnn", (0, 1), 2)
    x = x.copy()
    x[3, 2, 2] = np.nan
    for trainer in one, many:
        trainer.step(*good)
        before = {name: np.array(array) for name, array in trainer.state_items()}
        with pytest.raises(nn.NonFiniteLoss, match=r"input.*\[3\]"):
            trainer.step(x, y, total)
        after = dict(trainer.state_items())
        assert all(np.array_equal(before[name], after[name]) for name in before)
    broken = dict(many.local_network.layout.items(many.flat_parameters))
    if comm.rank:
        broken["0.W"][0, 0, 0, 0] = np.inf
    with pytest.raises(nn.NonFiniteLoss, match=r"parameter 0\.W"):
        many.step(*good)
    many.close()


@pytest.mark.mpi(ranks=2)
def test_four_allreduces_a_block_on_the_wire(comm):
    """Two forward and two backward, each of N x T x D numbers; cut along places, the same bytes in halves."""
    from collectives import Communicator
    from parallel import TensorParallel
    from parallel.reports.traffic import Traffic

    found = {}
    for way in "pairs", "sequence":
        for blocks in 1, 3:
            traffic = Traffic(Communicator(comm))
            many = TensorParallel(language_model(blocks), nn.CrossEntropyLoss(), nn.SGD(0.1), traffic, SEED, way=way)
            traffic.reset()
            many.step(*ids((0, 1))[0])
            found[way, blocks] = dict(traffic.calls), dict(traffic.bytes)
            many.close()
    activation = BATCH * 8 * 24 * 8  # bytes
    (calls, sent), (more, further) = found["pairs", 1], found["pairs", 3]
    assert more["allreduce"] - calls["allreduce"] == 2 * 4
    assert further["allreduce"] - sent["allreduce"] == 2 * 4 * activation
    assert {name: n for name, n in more.items() if name != "allreduce"} == {
        name: n for name, n in calls.items() if name != "allreduce"
    }
    (calls, sent), (more, further) = found["sequence", 1], found["sequence", 3]
    assert more["allreduce"] == calls["allreduce"], "norms' gradients are one message"
    for name in "allgather", "reduce_scatter_block":
        assert more[name] - calls[name] == 2 * 4 and further[name] - sent[name] == 4 * activation


@pytest.mark.mpi(ranks=2)
def test_ranks_that_disagree_are_told(comm):
    from collectives import Communicator
    from parallel import SpatialParallel, TensorParallel

    with pytest.raises(ValueError, match="tensor 3"):
        make(comm, 3)(language_model(), nn.CrossEntropyLoss(), nn.SGD(0.1))
    for build, network in (TensorParallel, language_model), (SpatialParallel, cnn):
        with pytest.raises(ValueError, match="ZeRO has the stages 1, 2 and 3, or 0 for nothing in shards; given 4"):
            build(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm), stage=4)
    with pytest.raises(ReplicaError, match="optimizer"):
        make(comm)(language_model(), nn.CrossEntropyLoss(), nn.SGD(0.1 + comm.rank))
    many = make(comm)(language_model(), nn.CrossEntropyLoss(), nn.SGD(0.1))
    x, y, total = ids((0, 1))[0]
    with pytest.raises(ValueError, match="global batch"):
        many.step(x, y, total + comm.rank)
    many.close()
