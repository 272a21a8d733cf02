"""What a step returns on every rank, and what ranks do that were given different sizes of the global batch."""

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED

import nn
from parallel.sync.step_result import AgreementCode, StepMessage, disagreement, late_disagreement

STRATEGIES = {  # options of the command line
    "node memory": {},
    "node memory, clipped": {"clip": "global:1"},
    "messages": {"node_memory": "off"},
    "zero1": {"strategy": "zero1"},
    "zero2, virtual shards": {"strategy": "zero2", "reproducible": 3},
    "fsdp": {"strategy": "fsdp"},
    "servers": {"strategy": "ps", "server_place": "workers"},
    "3 servers": {"strategy": "ps", "server_place": "workers", "servers": 3},
    "compressed": {"compress": "topk:0.1"},
    "compressed servers": {"strategy": "ps", "server_place": "workers", "compress": "topk:0.1"},
    "master": {"strategy": "dp"},
    "virtual shards": {"reproducible": 3},
    "pipeline": {"strategy": "pipeline", "pipeline": "gpipe:cuts=1/2,micro=2"},
    "tensor": {"strategy": "tensor"},
    "gradients a step late": {"consistency": "stale:1"},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_codes_show_every_disagreement(dtype):
    rng = np.random.default_rng(0)
    for addends in 1, 2, 3, 33, 1000:
        code = AgreementCode(addends, dtype)
        for size in 1, 3, 64, 2**31 - 1, 4.5, 1e-3:
            for checksum in 0, 2**32 - 5:
                sums = sum(code.encode(size, checksum).astype(dtype) for _ in range(addends))
                assert sums.dtype == dtype and code.agree(sums)
                others = (size + 1, checksum), (np.nextafter(size, np.inf), checksum), (size - 2**-20, checksum)
                for other in (*others, (size, checksum + 1), (size, 77)) if addends > 1 else ():
                    wrong = (sums - code.encode(size, checksum) + code.encode(*other)).astype(dtype)
                    assert not code.agree(wrong), (addends, size, checksum, other)
    for _ in range(200):  # the mean of the sizes may be one of them
        sizes, code = rng.integers(1, 9, 3), AgreementCode(3, dtype)
        sums = sum(code.encode(size) for size in sizes).astype(dtype)
        assert code.agree(sums) == (len(set(sizes)) == 1)
    assert AgreementCode(3, np.float32).elements == 6


def test_a_message_is_read_as_it_was_written():
    network = nn.Network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (3,), np.float32)
    vectors = np.zeros((2, StepMessage.elements(network, 2)), np.float32)
    buffers = np.arange(network.buffer_layout.size, dtype=np.float32)
    for i, vector in enumerate(vectors):
        message = StepMessage.of(vector, 2)
        message.write(0.25, 12, buffers)
        if i:
            message.set_overflow()
    result = StepMessage.of(vectors.sum(axis=0), 2).result()
    assert result[:3] == (0.5, True, True)
    np.testing.assert_array_equal(result.buffers, buffers)


def test_the_message_names_each_ranks_size():
    assert disagreement(7, [4, 3, 4, 5]) == (
        "step 7: ranks disagree on the size of the global batch: 4 on ranks 0, 2; 3 on rank 1; 5 on rank 3. "
        "Nothing was updated; give step(x, y, total) the same total on every rank"
    )


def test_a_sync_without_the_sum_is_not_called_a_disagreement_of_sizes():
    message = disagreement(7, [4, 4], ["SGD(lr=0.1)"] * 2)
    assert message.startswith("step 7: all ranks were given 4 as the size") and "disagree" not in message


def test_a_rank_that_has_made_fewer_steps_is_no_disagreement():
    assert late_disagreement([(2, [4, 4, 4]), (2, [4]), (2, [])]) == ""
    found = late_disagreement([(2, [4, 4, 4]), (2, [4]), (2, [4, 5])])
    assert found.startswith("step 3: ranks disagree on the size of the global batch: 4 on rank 0; 5 on rank 2. ")


@pytest.mark.mpi(ranks=3)
def test_no_rank_updates_where_sizes_differ_though_their_mean_is_one_of_them(comm):
    """Rank 0 of sizes 4, 3, 5 was given the mean, and once made the step while the others refused it."""
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    for case, options in STRATEGIES.items():
        options = Options(seed=SEED, **options)
        network = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 9)), (8, 8, 1))
        parts = network, nn.CrossEntropyLoss(), OPTIMIZERS["momentum"]()
        many = build_trainer(options, *parts, Communicator(comm))
        index, count = many.shard[:2]
        n = 0 if index is None else 3 if count == 1 else 1
        x, y = np.ones((n, 8, 8, 1), np.float32), np.zeros(n, int)
        before = many.flat_parameters.copy()
        with pytest.raises(ValueError, match=r"step 0: .* 4 on rank 0; 3 on rank 1; 5 on rank 2") as refused:
            many.step(x, y, [4, 3, 5][comm.rank])
            if options.consistency != "sync":  # found when the sum arrives
                many.step(x, y, 3)
        assert len(set(comm.allgather(str(refused.value)))) == 1, case
        assert (many.flat_parameters == before).all(), case
        assert np.isfinite(many.step(x, y, 4)), f"{case}: ranks go on together"
        many.synchronize()
        before, rate = many.digest(), many.optimizer.lr  # a worker's parameters are a step older
        for name, value, back in ("lr", 0.25, rate), ("momentum", 0.5, 0.9), ("frozen", ("1.W",), ()):
            steps = many.steps
            setattr(many.optimizer, name, value if comm.rank == 1 else back)  # as by a callback of that rank alone
            wrong = rf"step {steps}: .* optimizer: .*{rate}.* on ranks 0, 2; .*{name}=.* on rank 1. Nothing was updated"
            with pytest.raises(ValueError, match=wrong):
                many.step(x, y, 4)
                many.step(x, y, 4)
            assert many.digest() == before, (case, name)
            setattr(many.optimizer, name, back)
        assert np.isfinite(many.step(x, y, 4)), f"{case}: ranks go on together"
        many.close()


LOCAL_UPDATE = {
    "local-sgd": {"strategy": "local-sgd:2"},
    "diloco": {"strategy": "diloco:2"},
    "easgd": {"strategy": "easgd:2"},
    "a replica of three ranks": {"strategy": "local-sgd:2", "mesh": "tensor=3"},
    "asynchronous": {"strategy": "ps", "consistency": "async", "server_place": "workers"},
    "downpour": {"strategy": "downpour:push=2,fetch=2", "server_place": "workers"},
}


@pytest.mark.mpi(ranks=3)
def test_ranks_that_train_apart_compare_sizes_where_they_meet(comm):
    """The mean of 4, 3, 5 is rank 0's; they are found on all ranks, with the step, and training can go on."""
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    for case, options in LOCAL_UPDATE.items():
        options = Options(seed=SEED, **options)
        network = nn.Network(nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 9)), (8, 8, 1))
        parts = network, nn.CrossEntropyLoss(), OPTIMIZERS["momentum"]()
        many = build_trainer(options, *parts, Communicator(comm))
        n = 1 if many.shard[1] > 1 else 3
        x, y = np.ones((n, 8, 8, 1), np.float32), np.zeros(n, int)
        state = many.state_dict()
        state = comm.bcast(state)
        many.step(x, y, 3)
        with pytest.raises(
            ValueError, match=r"step 1: .* 4 on rank 0; 3 on rank 1; 5 on rank 2.* when they synchronize"
        ) as found:
            many.step(x, y, [4, 3, 5][comm.rank])
            many.synchronize()
        assert len(set(comm.allgather(str(found.value)))) == 1, case
        many.load_state_dict(state)
        for _ in range(2):
            assert np.isfinite(many.step(x, y, 3)), case
        many.synchronize()
        many.check_replicas()
        many.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 2}, "node_memory='on'"),
        ({"shards": 8}, "node_memory='on'"),
        ({"compressor": "fp16"}, "node_memory='on'"),
    ],
)
def test_what_is_not_summed_in_node_memory_is_refused_with_it(options, words):
    from parallel.mesh import Mesh
    from parallel.strategies.gradient_sync import gradient_sync
    from parallel.sync import compression

    if "compressor" in options:
        options = {"compressor": compression.parse(options["compressor"])}
    with pytest.raises(ValueError, match=words):
        gradient_sync(Mesh(None), node_memory="on", **options)


@pytest.mark.mpi(ranks=2)
def test_virtual_shards_beside_ranks_that_share_samples_are_refused(comm):
    from collectives import Communicator
    from parallel.mesh import Mesh
    from parallel.strategies.gradient_sync import gradient_sync

    with pytest.raises(ValueError, match="virtual shards need a mesh whose only axis is data"):
        gradient_sync(Mesh(Communicator(comm), space=2), shards=8)
