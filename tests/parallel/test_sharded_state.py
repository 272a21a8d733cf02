"""The state of sharded strategies: gathered, scattered, kept in files, continued under other strategies."""

import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE
from equality import OPTIMIZERS, SEED, assert_equals_one_process, batches, difference, mlp, one_process
from sharding import FSDP, STAGES, maker, sharded

import nn
from nn.core.layer import Sequential
from parallel import ShardedCheckpoints

ROOT = Path(__file__).parents[2]


@pytest.mark.mpi(ranks=3)
def test_a_checkpoint_goes_on_under_any_other_strategy(comm, shared_tmp_path):
    """Two steps each of ddp, the three stages and one process are ten steps of one process."""
    from collectives import Communicator
    from parallel import DistributedDataParallel

    build = lambda kind, *more: kind(mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), *more)
    whole = build(nn.Trainer, SEED)
    for batch in batches("mlp", (0, 1), 10):
        whole.step(*batch)
    kept = ShardedCheckpoints(shared_tmp_path)
    trainers = [build(DistributedDataParallel, Communicator(comm), 77)]
    trainers += [sharded(comm, stage) for stage in STAGES]
    for i, trainer in enumerate(trainers):
        if i:
            trainer.load_state_dict(kept.load()[0])
        for batch in batches("mlp", trainer.shard, 10)[2 * i : 2 * i + 2]:
            trainer.step(*batch)
        if not i:  # starts from the seed of the others
            trainer.load_state_dict(one_process("mlp", "adam", steps=2)[0].state_dict())
        entries = list(trainer.state_items()) if comm.rank else trainer.state_items()
        if comm.rank == 0:
            kept.save(entries, {})
        comm.Barrier()
    last = build(nn.Trainer, 3)
    last.load_state_dict(kept.load()[0])
    assert last.steps == 8
    for batch in batches("mlp", (0, 1), 10)[8:]:
        last.step(*batch)
    assert difference(last.flat_parameters, whole.flat_parameters) < 1e-12
    assert difference(last.slots["squares"], whole.slots["squares"]) < 1e-12


@pytest.mark.mpi(ranks=3)
def test_states_are_checked_and_come_back(comm):
    one, _ = one_process("mlp", "adam")
    for stage in STAGES:
        many = sharded(comm, stage)
        many.load_state_dict(one.state_dict() if comm.rank == 0 else {})  # what rank 0 has is scattered
        assert many.steps == one.steps
        assert many.digest() == one.digest() == hashlib.sha256(one.flat_parameters).hexdigest()
        many.check_replicas()
        before, kept = many.snapshot(), comm.bcast(many.state_dict())
        ends = []
        for trainer in (many, sharded(comm, stage)):
            if ends:  # the first one goes on as if nothing had been
                trainer.load_state_dict(kept)
            for batch in batches("mlp", trainer.shard)[:3]:
                trainer.step(*batch)
            ends.append(hashlib.sha256(b"".join(array.tobytes() for _, array in trainer.state_items())).digest())
        assert ends[0] == ends[1], "the same bits: parameters and moments"
        assert many.digest() != one.digest()
        many.restore(before)
        assert many.digest() == one.digest() and many.steps == one.steps
        alone = many.alone()
        assert (alone is None) == (comm.rank > 0)
        if alone:
            assert all((array == one.state_dict()[name]).all() for name, array in alone.state_dict().items())
        wrong = {name: array for name, array in one.state_dict().items() if name != "param/3.b"}
        with pytest.raises(ValueError, match=r"param/3\.b"):  # on all ranks
            many.load_state_dict(wrong)
        with pytest.raises(ValueError, match=r"param/3\.b.*float64\(2,\)"):
            many.load_state_dict(wrong | {"param/3.b": np.zeros(2)})


@pytest.mark.mpi(ranks=2)
def test_a_checkpoint_is_written_with_a_unit_in_memory(comm, tmp_path):
    """Not with the whole state, which is forty times as large; and it is read array by array."""
    widths = [500] * 14
    network = nn.Network(Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))), (500,))
    many = sharded(comm, FSDP, network)
    one_unit, kept = 500 * 512 * 4, ShardedCheckpoints(tmp_path)
    many.ctx.network_context.pool.clear()
    tracemalloc.start()
    try:
        entries = many.state_items()
        if comm.rank == 0:
            kept.save(entries, {})
        else:
            list(entries)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        if comm.rank == 0:
            state = kept.load()[0]
            assert len(state) == 3 * 26 + 1
        many.load_state_dict(state if comm.rank == 0 else {})
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 3 * one_unit and read < 4 * one_unit, (written / one_unit, read / one_unit)


@pytest.mark.mpi(ranks=2)
def test_offload_to_files_that_no_end_leaves_behind(comm, shared_tmp_path):
    directory = shared_tmp_path / "deep" / "offload"
    for stage in STAGES:
        assert_equals_one_process(maker(comm, stage, offload=directory), ("mlp",), ("adam",), (1,))
        many = sharded(comm, stage, offload=directory)
        assert os.listdir(directory) == []
        maps = Path("/proc/self/maps").read_text()
        assert f"{directory}/shard-{os.getpid()}-rank-{comm.rank} (deleted)" in maps
        many.communicator.release()
    assert_equals_one_process(maker(comm, "ZeRO1", offload=directory), ("mlp",), ("sgd",), (0,))  # nothing to offload
    file = shared_tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match=r"offload: ranks 0, 1: .*file is no directory"):
        sharded(comm, "ZeRO1", offload=file)


@pytest.mark.mpi(ranks=2)
def test_a_full_directory_is_refused_by_name(comm, shared_tmp_path, monkeypatch):
    """On all ranks, before the first step; nothing is left in it."""
    if os.getuid() == 0:
        if comm.rank == 0:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", shared_tmp_path], check=True)
        comm.Barrier()
    elif comm.rank == 1:
        import errno

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    big = nn.Network(Sequential(nn.Linear(100, 300), nn.Linear(300, 10)), (100,))
    try:
        with pytest.raises(
            OSError,
            match=r"no room for ranks? [\d, ]+: each of 2 ranks needs [\d,]+ bytes in .*, where [\d,]+ are free \(No",
        ):
            sharded(comm, FSDP, big, offload=shared_tmp_path)
        assert os.listdir(shared_tmp_path) == []
    finally:
        comm.Barrier()
        if os.getuid() == 0 and comm.rank == 0:
            subprocess.run(["umount", shared_tmp_path], check=True)


@pytest.mark.mpi(ranks=2)
def test_a_directory_that_one_rank_may_not_look_into_is_refused_on_all(comm, shared_tmp_path, monkeypatch):
    """Without the number of free bytes, which that rank cannot tell: the other one waited for it."""
    import errno

    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if comm.rank == 1:
        monkeypatch.setattr(os, "statvfs", refused)
    for error, words in (full, r"no room for rank 1: .* in \S+ \(No space"), (refused, "rank 1: Permission denied"):
        if comm.rank == 1:
            monkeypatch.setattr(os, "posix_fallocate", error)
        with pytest.raises(OSError, match=words):
            sharded(comm, FSDP, mlp(), offload=shared_tmp_path)
        assert os.listdir(shared_tmp_path) == []
        comm.Barrier()  # before the next one makes its files


def run(*arguments):
    command = [sys.executable, ROOT / "scripts/train.py", "--no-pictures", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_from_the_command_line_to_another_strategy_and_rank_count(tmp_path):
    out = tmp_path / "run"
    common = ["--data", "digits", "--model", "mlp:64,40,10", "--optimizer", "adam", "--lr", "0.01", "--limit", "600"]
    done = run(*common, "--strategy", "fsdp", "--ranks", 3, "--epochs", 2, "--memory", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "3 ranks, FullyShardedDataParallel" in done.stdout and "formula" in done.stdout
    before = json.loads((out / "result.json").read_text())
    stored = ShardedCheckpoints(out / "checkpoints").load()[0]
    network = nn.Network(Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)), (64,))
    flat = network.layout.zeros(np.float32)
    names = [name for name in stored if name.startswith("param/")]
    for (_, array), name in zip(network.layout.items(flat), names, strict=True):
        array[...] = stored[name]
    assert before["parameters_sha256"] == hashlib.sha256(flat).hexdigest()
    more = run("--resume", out, "--ranks", 2, "--strategy", "zero1", "--epochs", 3)
    assert more.returncode == 0, more.stderr
    assert "continuing" in more.stdout and json.loads((out / "result.json").read_text())["epochs"] == 3
