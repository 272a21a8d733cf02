"""Mixed precision on many ranks: what one process computes, steps that are skipped included."""

import numpy as np
import pytest
from equality import BATCH, SEED, batches, difference

import nn
from parallel.command.options import Options
from parallel.sync.step_result import StepMessage

CASES = (
    {"strategy": "ddp"},
    {"strategy": "ddp", "accumulate": 2},
    {"strategy": "ddp", "node_memory": "off"},
    {"strategy": "ddp", "compress": "none"},
    {"strategy": "ddp", "compress": "topk:1"},
    {"strategy": "zero1"},
    {"strategy": "zero2", "unit": 1e-6},
    {"strategy": "zero2", "compress": "none", "accumulate": 2},
    {"strategy": "fsdp", "unit": 1e-6},
    {"strategy": "ps"},
    {"strategy": "ps", "servers": 2, "server_place": "workers", "compress": "topk:1"},
    {"strategy": "dp"},
    *({"strategy": strategy, "reproducible": 4} for strategy in ("ddp", "zero1", "fsdp", "ps", "dp")),
)
LARGE = 2  # the step with a sample too large for float16, which one rank has


def network():
    layers = nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)
    return nn.Network(nn.Sequential(*layers), (8, 8, 1), np.float64, mixed=True)


def steps(trainer, parts=1, count=5):
    """Some steps, uneven ones too."""
    losses = []
    for i, (x, y, total) in enumerate(batches("mlp", trainer.shard, count)):
        if i == LARGE and trainer.shard[0] == 0:
            x = np.concatenate([1e7 * x[:1], x[1:]])
        losses.append(trainer.step(x, y, total, parts))
    return losses


def one_process():
    one = nn.Trainer(network(), nn.CrossEntropyLoss(), nn.Adam(0.01, eps=1e-4), SEED)
    return one, steps(one)


def many_ranks(comm, given, count=5):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    options = Options(batch=BATCH, seed=SEED, **given)
    optimizer = nn.Adam(0.01, eps=1e-4)
    many = build_trainer(options, network(), nn.CrossEntropyLoss(), optimizer, Communicator(comm))
    return many, steps(many, options.accumulate, count)


@pytest.mark.mpi(ranks=[2, 3])
def test_every_strategy_is_what_one_process_computes(comm):
    """To 1e-12 in float64; the step that one rank finds too large is made by none."""
    one, losses = one_process()
    assert one.loss_scale.skipped == 1 and one.steps == 5 and one.updates == 4
    for given in CASES:
        many, found = many_ranks(comm, given)
        np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=str(given))
        np.testing.assert_array_equal(many.loss_scale.array, one.loss_scale.array, err_msg=str(given))
        many.check_replicas()
        alone = many.alone()
        assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12, given
        many.load_state_dict(comm.bcast(many.state_dict()))
        assert many.loss_scale.skipped == 1
        many.close()
        many.communicator.release()


@pytest.mark.mpi(ranks=2)
def test_stages_of_a_pipeline_keep_float16_and_skip_together(comm):
    """The activation that is too large is in the second stage's input, which has it first as the first one's output."""
    from collectives import Communicator
    from parallel.strategies.pipeline.strategy import Pipeline

    one, losses = one_process()
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        optimizer = nn.Adam(0.01, eps=1e-4)
        many = Pipeline(
            network(), nn.CrossEntropyLoss(), optimizer, Communicator(comm), SEED, schedule=schedule, micro_batches=3
        )
        np.testing.assert_allclose(steps(many), losses, rtol=1e-12, err_msg=schedule)
        np.testing.assert_array_equal(many.loss_scale.array, one.loss_scale.array)
        state = comm.bcast(many.state_dict())
        many.load_state_dict(state)
        assert many.loss_scale.skipped == 1 and state["loss_scale"][2] == 1
        alone = many.alone()
        assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12, schedule
        many.close()


@pytest.mark.mpi(ranks=2)
def test_ranks_that_compute_layers_together_skip_together(comm):
    """To 1e-12; where float16 rounds what differs by less, to the last bit."""
    from collectives import Communicator
    from parallel.strategies.tensor_parallel import TensorParallel

    one, losses = one_process()
    for way in ("pairs", "width"):
        adam, communicator = nn.Adam(0.01, eps=1e-4), Communicator(comm)
        many = TensorParallel(network(), nn.CrossEntropyLoss(), adam, communicator, SEED, way=way)
        np.testing.assert_allclose(steps(many), losses, rtol=1e-12, err_msg=way)
        np.testing.assert_array_equal(many.loss_scale.array, one.loss_scale.array)
        many.load_state_dict(comm.bcast(many.state_dict()))
        assert many.loss_scale.skipped == 1
        alone = many.alone()
        assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12, way
        many.close()


@pytest.mark.mpi(ranks=2)
def test_a_skipped_step_that_fails_is_not_counted(comm, monkeypatch):
    """A rank that survives the death of another in that step begins it again, with its batch."""
    many, _ = many_ranks(comm, {"strategy": "ddp"}, LARGE)
    state = many.state_dict()

    def barrier(what):
        raise RuntimeError(f"a rank died before {what}")

    monkeypatch.setattr(many.sync, "barrier", barrier)
    (x, y, total), *_ = batches("mlp", many.shard, 1)
    with pytest.raises(RuntimeError, match="died before the step that is skipped"):
        many.step(1e7 * x, y, total)
    after = many.state_dict()
    assert many.steps == LARGE and all(np.array_equal(array, after[name]) for name, array in state.items())
    monkeypatch.undo()
    many.close()


@pytest.mark.mpi(ranks=4)
def test_stages_that_ranks_compute_together_skip_together(comm):
    from collectives import Communicator
    from parallel.strategies.pipeline.strategy import Pipeline

    one, losses = one_process()
    given = network(), nn.CrossEntropyLoss(), nn.Adam(0.01, eps=1e-4), Communicator(comm), SEED
    many = Pipeline(*given, schedule="zb-h1", micro_batches=3, tensor=2)
    np.testing.assert_allclose(steps(many), losses, rtol=1e-12)
    np.testing.assert_array_equal(many.loss_scale.array, one.loss_scale.array)
    assert many.loss_scale.skipped == 1
    alone = many.alone()
    assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12
    many.close()


@pytest.mark.mpi(ranks=2)
def test_control_a_rank_that_keeps_it_to_itself_is_found(comm, monkeypatch):
    monkeypatch.setattr(StepMessage, "set_overflow", lambda message: None)
    many, _ = many_ranks(comm, {"strategy": "ddp"}, LARGE + 1)
    assert many.loss_scale.skipped == 0
    many.close()


@pytest.mark.mpi(ranks=[1, 2, 3])
def test_reproducible_runs_have_the_same_bits(comm):
    """In float32, as it is used."""
    from collectives import Communicator
    from parallel import DistributedDataParallel

    digests = []
    for make in (
        lambda *given: DistributedDataParallel(*given, None, SEED, shards=4),
        lambda *given: DistributedDataParallel(*given, Communicator(comm), SEED, shards=4),
    ):
        layers = nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)
        net = nn.Network(nn.Sequential(*layers), (8, 8, 1), mixed=True)
        trainer = make(net, nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9))
        data = nn.data.Dataset(np.random.default_rng(1).random((35, 8, 8, 1)), np.arange(35) % 10, classes=10)
        for x, y, total in nn.Loader(data, 16, seed=1, shard=trainer.shard).epoch(0):
            trainer.step(x, y, total)
        digests.append(trainer.digest())
    assert digests[0] == digests[1]


@pytest.mark.mpi(ranks=4)
def test_parts_of_which_one_overflows_are_compressed_together_or_not_at_all(comm):
    """Only the ranks with the last columns of the first layer see the overflow."""
    from collectives import Communicator
    from parallel.strategies import build_trainer

    layers = nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)
    made = nn.Network(nn.Sequential(nn.Flatten(), *layers), (8, 8, 1), np.float64, mixed=True)
    options, communicator = Options(seed=SEED, mesh="data=2,tensor=2", compress="fp16"), Communicator(comm, watch=10)
    many = build_trainer(options, made, nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)
    one = nn.Trainer(made, nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    for scale in 1e7, 1.0:
        state = {name: array.copy() for name, array in one.state_dict().items()}
        state["param/1.W"][:, -1] *= scale
        many.load_state_dict(state)
        one.load_state_dict(state)
        one.step(*batches("mlp", (0, 1), 1)[0])
        many.step(*batches("mlp", many.shard, 1)[0])
        assert many.loss_scale.skipped == one.loss_scale.skipped == 1
        one.load_state_dict(one.state_dict() | {"param/1.W": one.state_dict()["param/1.W"] / scale})
    alone = many.alone()
    assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-2
    many.close()
    communicator.release()


def test_what_does_not_skip_together_takes_no_mixed_network():
    from parallel import QuasiNewton, Sandblaster

    with pytest.raises(ValueError, match="keeps float16, and a line search needs gradients as exact as the loss"):
        Sandblaster(network(), nn.CrossEntropyLoss(), QuasiNewton())


@pytest.mark.mpi(ranks=2)
def test_ranks_that_train_apart_take_none(comm):
    from collectives import Communicator
    from parallel.strategies.local_sgd import LocalSGD

    with pytest.raises(ValueError, match="ranks that make local updates do not skip a step together"):
        LocalSGD(network(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm), SEED)
