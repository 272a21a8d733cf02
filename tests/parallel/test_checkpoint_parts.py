"""Checkpoints of ranks that hold parts of the state: each writes its own, and whoever continues finds the whole."""

import os
import signal
import warnings

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED, dataset

import nn
from nn.training.checkpoint_callback import KeepCheckpoints, Terminated, Termination
from parallel import ShardedCheckpoints
from parallel.sync.coordinator.quasi_newton import QuasiNewton

FOREVER = 10**6
ON_THREE = {
    "zero1": {"strategy": "zero1", "unit": 1e-3},
    "zero2": {"strategy": "zero2", "unit": 1e-3},
    "fsdp": {"strategy": "fsdp", "unit": 1e-3},
    "fsdp, reproducible": {"strategy": "fsdp", "reproducible": 4},
    "ps": {"strategy": "ps"},
    "ps, on workers": {"strategy": "ps", "servers": 3, "server_place": "workers"},
    "ps, compressed": {"strategy": "ps", "compress": "topk:0.2"},
    "ps, asynchronous": {"strategy": "ps", "consistency": "async", "delay_compensation": True},
    "downpour": {"strategy": "downpour", "servers": 2, "server_place": "workers"},
    "pipeline": {"strategy": "pipeline", "mesh": "pipeline=3"},
    "tensor": {"strategy": "tensor", "mesh": "tensor=3"},
    "owt": {"strategy": "owt"},
    "sandblaster": {"strategy": "sandblaster", "servers": 2, "server_place": "workers"},
}
ON_FOUR = {
    "data x pipeline": {"mesh": "data=2,pipeline=2"},
    "zero1 x pipeline": {"strategy": "zero1", "mesh": "data=2,pipeline=2"},
    "data x tensor": {"mesh": "data=2,tensor=2"},
}
ONCE = ("ps, asynchronous", "downpour")  # no two runs are alike
OWN = ("exchange/", "compress/")  # of one strategy, or one method of compression, alone


def network(strategy):
    if strategy == "owt":
        layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 10)
    else:
        layers = nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 10)
    return nn.Network(nn.Sequential(*layers), (8, 8, 1), np.float64)


def trainer(comm, given):
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    given = {"strategy": "ddp", **given}
    options = Options(seed=SEED, batch=16, **given)
    rule = QuasiNewton(history=3) if given["strategy"] == "sandblaster" else OPTIMIZERS["adam"]()
    return build_trainer(options, network(given["strategy"]), nn.CrossEntropyLoss(), rule, Communicator(comm))


def loader(many):
    return nn.Loader(dataset("mlp"), 16, seed=1, shard=many.shard, dtype=np.float64)


def close(many):
    many.close()
    many.communicator.release()


def run(comm, given, epochs, kept=None, state=None, progress=None, background=True):
    """(trainer, digest) after so many epochs."""
    many = trainer(comm, given)
    if state is not None:
        many.load_state_dict(state)
    hooks = [KeepCheckpoints(kept, 2, None, background)] if kept else []
    nn.fit(many, loader(many), epochs, hooks, progress=progress)
    return many, many.digest()


def try_parts(comm, directory, given, name):
    """Written by each, whole when read, continued with the same bits."""
    kept = ShardedCheckpoints(directory)
    many, digest = run(comm, given, 1, kept)
    state = many.state_dict()  # as it is gathered
    comm.Barrier()  # rank 0 lists a checkpoint before others are told that it is there
    last = kept.entries()[-1]
    assert len(kept.entries()) == 2 and len(last["parts"]) > 1, name
    stored, progress, _ = kept.load()
    if comm.rank == 0:
        assert stored.keys() == state.keys(), name
        for key, array in state.items():
            assert np.array_equal(stored[key], array) and stored[key].dtype == array.dtype, (name, key)
        elements = sum(array.size for array in state.values())
        for part in last["parts"]:
            with np.load(directory / part["file"]) as found:
                held = sum(found[key].size for key in found if key not in ("progress", "fragments"))
            assert 0 < held < elements, f"{name}: a rank has written all"
    close(many)
    if name in ONCE:
        return stored, digest
    whole, wanted = run(comm, given, 2)
    again, found = run(comm, given, 2, state=stored, progress=progress)
    assert found == wanted != digest, name
    close(whole)
    close(again)
    return stored, digest


def go_on(comm, stored, digest, given, name):
    """Another strategy begins with the parameters that the checkpoint has."""
    state = {key: stored[key] for key in stored if not key.startswith(OWN)}
    other = trainer(comm, given)
    other.load_state_dict(state)
    assert other.digest() == digest, name
    close(other)


@pytest.mark.mpi(ranks=3, timeout=120)
def test_each_rank_writes_its_own_and_any_strategy_goes_on(comm, shared_tmp_path):
    before = None
    for i, (name, given) in enumerate(ON_THREE.items()):
        own = given["strategy"] in ("owt", "sandblaster")  # with a network, or an optimizer, of their own
        if before and not own:
            go_on(comm, *before, given, f"{name} after another")
        found = try_parts(comm, shared_tmp_path / str(i), given, name)
        before = before if own else found
    stored, digest = before
    one = nn.Trainer(network(""), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), 77)
    one.load_state_dict({key: stored[key] for key in stored if not key.startswith(OWN)})
    assert one.digest() == digest


@pytest.mark.exhaustive
@pytest.mark.mpi(ranks=4, timeout=120)
def test_of_a_mesh_too(comm, shared_tmp_path):
    for i, (name, given) in enumerate(ON_FOUR.items()):
        stored, digest = try_parts(comm, shared_tmp_path / str(i), given, name)
        go_on(comm, stored, digest, {"strategy": "fsdp"}, name)
        parts = ShardedCheckpoints(shared_tmp_path / str(i)).entries()[-1]["parts"]
        assert len(parts) == (4 if given.get("strategy") == "zero1" else 2), "one replica writes what all have"


@pytest.mark.mpi(ranks=2)
def test_written_at_once_or_by_a_thread_they_hold_the_same(comm, shared_tmp_path):
    stored = []
    for background in (False, True):
        kept = ShardedCheckpoints(shared_tmp_path / str(background))
        many, _ = run(comm, ON_THREE["zero1"], 1, kept, background=background)
        comm.Barrier()
        stored.append(kept.load()[0])
        close(many)
    assert stored[0].keys() == stored[1].keys()
    assert all(np.array_equal(stored[0][key], stored[1][key]) for key in stored[0])


@pytest.mark.mpi(ranks=2)
def test_ranks_without_a_common_directory_gather(comm, tmp_path):
    """As where hosts have disks of their own: then the first rank has all, and says why."""
    kept, said = ShardedCheckpoints(tmp_path / str(comm.rank)), []
    many = trainer(comm, ON_THREE["fsdp"])
    many.say = said.append
    nn.fit(many, loader(many), 1, [KeepCheckpoints(kept, 2, background=True)])
    state = many.state_dict()
    if comm.rank == 0:
        stored = kept.load()[0]
        assert all(np.array_equal(stored[key], array) for key, array in state.items())
        assert [entry.keys() for entry in kept.entries()] == [{"file", "sha256", "named"}] * 2
        assert len(said) == 1 and "not all ranks see" in said[0]
    else:
        assert not kept.directory.exists()
    close(many)


@pytest.mark.mpi(ranks=2)
def test_a_directory_in_place_of_the_token_stops_no_rank_alone(comm, shared_tmp_path):
    """The first rank can neither write the file that shows the directory to all, nor remove what is in its place."""
    kept = ShardedCheckpoints(shared_tmp_path / "kept")
    if comm.rank == 0:
        (kept.directory / ".shared.tmp").mkdir(parents=True)
    comm.Barrier()
    many = trainer(comm, ON_THREE["zero1"])
    many.say = lambda line: None
    nn.fit(many, loader(many), 1, [KeepCheckpoints(kept)])
    comm.Barrier()
    assert kept.load()[1]["epoch"] == 1
    close(many)


@pytest.mark.mpi(ranks=3)
def test_a_rank_that_cannot_write_is_named_on_all_and_the_last_whole_one_stays(comm, shared_tmp_path):
    class Full(ShardedCheckpoints):
        def write_part(self, steps, number, place, *arguments):
            if comm.rank == 2 and steps > 3:
                raise OSError(28, "No space left on device")
            return super().write_part(steps, number, place, *arguments)

    def out_of_memory(*arguments):
        raise MemoryError

    for background in (False, True):
        kept, many = Full(shared_tmp_path / str(background)), trainer(comm, ON_THREE["zero2"])
        said = "No space left" if comm.rank == 2 else "rank 2 could not write a checkpoint: .*No space left"
        with pytest.raises(OSError, match=said):
            nn.fit(many, loader(many), FOREVER, [KeepCheckpoints(kept, None, None, background)])
        many.digest()  # all could go on
        comm.Barrier()
        if comm.rank == 2:  # an error without words
            kept.write_part = out_of_memory
        with pytest.raises(
            MemoryError if comm.rank == 2 else OSError, match="" if comm.rank == 2 else "rank 2 .*: MemoryError"
        ):
            nn.fit(many, loader(many), FOREVER, [KeepCheckpoints(kept, None, None, background)])
        comm.Barrier()
        assert [entry["file"] for entry in kept.entries()] == ["step-00000003.npz"] and kept.load()[1]["epoch"] == 1
        close(many)


@pytest.mark.mpi(ranks=3)
def test_one_rank_that_is_asked_to_end_ends_all_with_one_checkpoint(comm, shared_tmp_path):
    """SIGTERM to the last one alone, in a run without an end; then the same bits as never asked."""

    class Terminate(nn.Callback):
        def on_step(self, training, loss):
            if training.trainer.steps == 4 and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    for name in ("fsdp", "ps", "pipeline", "downpour"):
        kept, many = ShardedCheckpoints(shared_tmp_path / name), trainer(comm, ON_THREE[name])
        before = signal.getsignal(signal.SIGTERM)
        with Termination() as termination, pytest.raises(Terminated) as ended:
            hooks = [Terminate(), KeepCheckpoints(kept, None, None, True, termination)]
            nn.fit(many, loader(many), FOREVER, hooks)
        assert signal.getsignal(signal.SIGTERM) is before
        comm.Barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            stored, progress, _ = kept.load()
        assert len(set(comm.allgather(str(ended.value)))) == 1 and f"step {int(stored['steps'])}," in str(ended.value)
        close(many)
        if name == "downpour":
            continue
        epochs = progress["epoch"] + 1
        whole, wanted = run(comm, ON_THREE[name], epochs)
        again, found = run(comm, ON_THREE[name], epochs, state=stored, progress=progress)
        assert found == wanted, name
        close(whole)
        close(again)
