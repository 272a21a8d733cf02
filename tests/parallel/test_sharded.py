"""Sharded strategies compute what one process computes, and keep and send what the formulas say."""

import ctypes
import gc
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import tracemalloc
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from equality import MODELS, OPTIMIZERS, SEED, assert_equals_one_process, batches, difference, mlp, one_process, train

import nn
from nn.layer import Sequential

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import netlab  # noqa: E402

STAGES = ["ZeRO1", "ZeRO2", "FullyShardedDataParallel"]
FSDP = STAGES[2]


def maker(comm, stage, **options):
    """(network, loss, optimizer) -> trainer; by default with a unit for every layer."""
    import parallel
    from collectives import Communicator

    options = {"unit_bytes": 1} | options
    return lambda network, loss, optimizer: getattr(parallel, stage)(
        network, loss, optimizer, Communicator(comm), SEED, **options
    )


def sharded(comm, stage, model="mlp", optimizer="adam", clip=0, **options):
    from equality import CLIPS

    network = MODELS[model]() if isinstance(model, str) else model
    return maker(comm, stage, **options)(network, nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]))


@pytest.mark.mpi(ranks=[1, 2, 3, 4, 5], timeout=60)
def test_equals_one_process(comm):
    """Every optimizer on every model, with each clip on one of the stages; with 4 and 5 ranks one of each kind."""
    optimizers = ["momentum", "adam", "lars", "lamb"] if comm.size > 3 else list(OPTIMIZERS)
    for shift, stage in enumerate(STAGES):
        for i, (model, optimizer) in enumerate(product(MODELS, optimizers)):
            assert_equals_one_process(maker(comm, stage), (model,), (optimizer,), ((i + shift) % 3,))


@pytest.mark.mpi(ranks=3)
def test_equals_one_process_between_nodes(comm, monkeypatch):
    """Messages that are on their way while others compute, units gathered ahead, units of several layers."""
    from parallel import sharded

    monkeypatch.setattr(sharded, "nodes_of", lambda communicator: list(range(communicator.size)))
    for stage, options in [
        ("ZeRO1", {}),
        ("ZeRO2", {}),
        (FSDP, {}),
        (FSDP, {"prefetch": 0, "unit_bytes": 2000}),
        (FSDP, {"prefetch": 2}),
        (FSDP, {"prefetch": 9}),
    ]:
        assert_equals_one_process(maker(comm, stage, **options), ("mlp", "transformer"), ("lamb",), (1,))


@pytest.mark.mpi(ranks=3)
def test_controls_that_differ(comm):
    """The comparison can fail: without the allgather after an update, or with units of the step before, it does."""
    one, _ = one_process("mlp", "adam")
    want = np.concatenate([array.reshape(-1) for _, array in one.network.layout.items(one.parameters)])
    for stage in STAGES:
        for broken in (False, True):
            many = sharded(comm, stage)
            if broken:
                many.spread = lambda: None
            train(many, "mlp")
            state = many.state()
            if comm.rank == 0:
                got = np.concatenate([state[f"param/{name}"].reshape(-1) for name in one.network.layout.specs])
                assert (difference(got, want) > 1e-6) == broken, stage


@pytest.mark.mpi(ranks=3)
def test_tied_weights(comm):
    """An array that the first and the last layer share is in a unit of its own, which stays while it is needed."""
    network = lambda: nn.models.build("transformer:16,2,2,1", (8,), 32, "float64")
    make = lambda kind, *more: kind(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9), *more)
    one = make(nn.Serial, SEED)
    losses = train(one, "transformer")
    for stage, options in product(STAGES, ({}, {"unit_bytes": 3000})):
        many = maker(comm, stage, **options)(network(), nn.CrossEntropyLoss(), nn.SGD(0.1, 0.9))
        assert [unit.alone for unit in many.cut.units].count(True) == 1
        np.testing.assert_allclose(train(many, "transformer"), losses, rtol=1e-12)
        state = many.state()
        if comm.rank == 0:
            assert all(difference(state[name], array) < 1e-12 for name, array in one.state().items() if array.ndim)


@pytest.mark.mpi(ranks=3)
def test_micro_batches_and_ranks_without_samples(comm):
    """Sums of shards equal one large batch; a rank with nothing to do takes part in everything."""
    x, y, _ = batches("mlp", (0, 1))[0]
    for stage in STAGES:
        for model in ("mlp", "cnn"):
            one, many = one_process(model, "momentum", steps=0)[0], sharded(comm, stage, model, "momentum")
            one = nn.Serial(MODELS[model](), nn.CrossEntropyLoss(), OPTIMIZERS["momentum"](), SEED)
            x, y, _ = batches(model, (0, 1))[0]
            mine = slice(2 * comm.rank, 2 * comm.rank + 2)
            whole = one.step(x[:6], y[:6], 6)
            if model == "mlp":  # normalisation sees other batches
                many.accumulate(x[mine][:1], y[mine][:1], 6)
                assert abs(many.step(x[mine][1:], y[mine][1:], 6) - whole) < 1e-12
            else:
                assert abs(many.step(x[mine], y[mine], 6) - whole) < 1e-12
            mine = slice(min(comm.rank, 2), min(comm.rank + 1, 2))  # two samples on three ranks
            assert abs(many.step(x[mine], y[mine], 2) - one.step(x[:2], y[:2], 2)) < 1e-12
            np.testing.assert_allclose(many.sum(many.evaluate(x[mine], y[mine])), one.evaluate(x[:2], y[:2]), 1e-12)
            state = many.state()
            if comm.rank == 0:
                for name, array in one.state().items():
                    np.testing.assert_allclose(state[name], array, rtol=1e-9, atol=1e-12, err_msg=f"{stage} {name}")


@pytest.mark.mpi(ranks=3)
def test_a_checkpoint_goes_on_under_any_other_strategy(comm, shared_tmp_path):
    """Two steps each of ddp, the three stages and one process are ten steps of one process."""
    from collectives import Communicator
    from parallel import DistributedDataParallel

    build = lambda kind, *more: kind(mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), *more)
    whole = build(nn.Serial, SEED)
    for batch in batches("mlp", (0, 1), 10):
        whole.step(*batch)
    kept = nn.Checkpoints(shared_tmp_path)
    trainers = [build(DistributedDataParallel, Communicator(comm), 77)]
    trainers += [sharded(comm, stage) for stage in STAGES]
    for i, trainer in enumerate(trainers):
        if i:
            trainer.load_state(kept.load()[0])
        for batch in batches("mlp", trainer.shard, 10)[2 * i : 2 * i + 2]:
            trainer.step(*batch)
        if not i:  # starts from the seed of the others
            trainer.load_state(one_process("mlp", "adam", steps=2)[0].state())
        entries = list(trainer.entries()) if comm.rank else trainer.entries()
        if comm.rank == 0:
            kept.save(entries, {})
        comm.Barrier()
    last = build(nn.Serial, 3)
    last.load_state(kept.load()[0])
    assert last.steps == 8
    for batch in batches("mlp", (0, 1), 10)[8:]:
        last.step(*batch)
    assert difference(last.parameters, whole.parameters) < 1e-12
    assert difference(last.slots["squares"], whole.slots["squares"]) < 1e-12


@pytest.mark.mpi(ranks=3)
def test_states_are_checked_and_come_back(comm):
    one, _ = one_process("mlp", "adam")
    for stage in STAGES:
        many = sharded(comm, stage)
        many.load_state(one.state() if comm.rank == 0 else {})  # what rank 0 has is scattered
        assert many.steps == one.steps
        assert many.digest() == one.digest() == hashlib.sha256(one.parameters).hexdigest()
        many.check_replicas()
        before = many.snapshot()
        many.step(*batches("mlp", many.shard)[0])
        assert many.digest() != one.digest()
        many.restore(before)
        assert many.digest() == one.digest() and many.steps == one.steps
        alone = many.alone()
        assert (alone is None) == (comm.rank > 0)
        if alone:
            assert all((array == one.state()[name]).all() for name, array in alone.state().items())
        wrong = {name: array for name, array in one.state().items() if name != "param/3.b"}
        with pytest.raises(ValueError, match=r"lacks param/3\.b"):  # on all ranks
            many.load_state(wrong)
        with pytest.raises(ValueError, match=r"entry param/3\.b: expected float64\(10,\), given float64\(2,\)"):
            many.load_state(wrong | {"param/3.b": np.zeros(2)})


@pytest.mark.mpi(ranks=3)
def test_nan_is_told_by_all_before_the_update(comm):
    for stage in STAGES:
        many = sharded(comm, stage)
        before = many.digest()
        x, y = np.zeros((4, 8, 8, 1)), np.zeros(4, int)
        if comm.rank == 1:
            x[2] = np.nan
        with pytest.raises(nn.NonFiniteLoss, match=r"step 0.*the input.*on rank 1"):
            many.step(x, y, 12)
        assert many.digest() == before and many.steps == 0
        x[:] = 0
        assert np.isfinite(many.step(x, y, 12)), "training goes on"
        many.own(many.cut.units[-1])[0] = np.nan if comm.rank == 2 else 0
        many.spread()
        with pytest.raises(nn.NonFiniteLoss, match=r"parameter 1\.W \(it was updated in step 0\)"):
            many.step(x + 1, y, 12)


@pytest.mark.mpi(ranks=3)
def test_bytes_on_the_wire(comm):
    """2 Psi for stages 1 and 2, 3 Psi for stage 3 less the unit that backward begins with; and an allreduce's 2 Psi."""
    from collectives import Communicator
    from parallel import DistributedDataParallel
    from parallel.traffic import Traffic

    shapes = [64, 960, 960, 960, 960, 960, 96]  # no padding: all are multiples of 16 ranks
    network = nn.Network(Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(shapes))), (64,))
    psi = network.layout.count * 4 * 2 // 3  # bytes that a rank sends of Psi elements
    small = lambda traffic: traffic.bytes["allreduce"]  # loss and statistics
    x, y = np.zeros((2, 64), np.float32), np.zeros(2, int)
    import parallel

    for stage, wire in zip(STAGES, (2, 2, 3), strict=True):
        traffic = Traffic(Communicator(comm))
        many = getattr(parallel, stage)(network, nn.CrossEntropyLoss(), nn.Adam(0.01), traffic, SEED)
        again = many.cut.units[0].stop * 4 * 2 // 3 if stage == FSDP else 0
        for _ in range(2):
            traffic.reset()
            many.step(x, y, 6)
            assert small(traffic) < 16 and traffic.total - small(traffic) == wire * psi - again, stage
            assert traffic.calls["reduce_scatter_block"] == len(many.cut.units)
        many.communicator.communicator.release()
    traffic = Traffic(Communicator(comm, allreduce="ring"))
    ddp = DistributedDataParallel(
        network, nn.CrossEntropyLoss(), nn.Adam(0.01), traffic, SEED, node_memory="off", overlap="none"
    )
    traffic.reset()
    ddp.step(x, y, 6)
    assert 2 * psi <= traffic.total < 2 * psi + 1000
    ddp.close()


@pytest.mark.mpi(ranks=2, timeout=60)
def test_memory_is_what_the_formulas_say(comm):
    """Of 8.9 million parameters: allocated exactly, and in the process's own pages, within a few percent."""
    import parallel
    from collectives import Communicator
    from parallel.memory import expected

    def pss() -> int:
        """Bytes of this process in memory; of pages that n processes share, 1/n; without what malloc keeps."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        comm.Barrier()
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        found = next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
        comm.Barrier()
        return found

    def measured(kind, widths, **options):
        network = nn.Network(Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))), (16,))
        communicator = Communicator(comm)
        communicator.Allreduce(np.zeros(10000), np.zeros(10000))
        before = pss()
        many = kind(network, nn.CrossEntropyLoss(), nn.Adam(0.01), communicator, SEED, **options)
        many.step(np.zeros((1, 16), np.float32), np.zeros(1, int), comm.size)
        many.run.common.memory.clear()
        grown, found, formula = pss() - before, many.memory(), expected(many)
        many.close()
        communicator.release()
        return grown, found, formula

    widths = [16, *[1056] * 9, 16]
    measured(parallel.ZeRO1, [16, 64, 16])  # what grows once is there
    psi = 4 * sum(a * b + b for a, b in pairwise(widths))
    shares = {"ZeRO1": 2 + 2 / 2, "ZeRO2": 1 + 3 / 2, FSDP: 4 / 2}
    seen = {}
    for stage in STAGES:
        grown, found, formula = measured(getattr(parallel, stage), widths)
        kept = sum(found[kind] for kind in formula)
        assert sum(formula.values()) == psi * shares[stage]
        assert kept == pytest.approx(psi * shares[stage], rel=1e-3)
        seen[stage] = grown / (kept + found["in transit"])
    assert all(0.95 < ratio < 1.08 for ratio in seen.values()), seen


@pytest.mark.mpi(ranks=2)
def test_offload_to_files_that_no_end_leaves_behind(comm, shared_tmp_path):
    from collectives import Communicator

    directory = shared_tmp_path / "deep" / "offload"
    for stage in STAGES:
        assert_equals_one_process(maker(comm, stage, offload=directory), ("mlp",), ("adam",), (1,))
        many = sharded(comm, stage, offload=directory)
        assert os.listdir(directory) == []
        maps = Path("/proc/self/maps").read_text()
        assert f"{directory}/shard-{os.getpid()}-rank-{comm.rank} (deleted)" in maps
        many.communicator.release()
    assert_equals_one_process(maker(comm, "ZeRO1", offload=directory), ("mlp",), ("sgd",), (0,))  # nothing to offload
    assert isinstance(Communicator(comm).size, int)


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
            match=r"offload: rank \d: .*shard-\d+-rank-\d needs [\d,]+ bytes, .* has [\d,]+ free \(No space left",
        ):
            sharded(comm, FSDP, big, offload=shared_tmp_path)
        assert os.listdir(shared_tmp_path) == []
    finally:
        comm.Barrier()
        if os.getuid() == 0 and comm.rank == 0:
            subprocess.run(["umount", shared_tmp_path], check=True)


@pytest.mark.mpi(ranks=2)
def test_a_checkpoint_is_written_with_a_unit_in_memory(comm, tmp_path):
    """Not with the whole state, which is forty times as large; and it is read array by array."""
    widths = [500] * 14
    network = nn.Network(Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))), (500,))
    many = sharded(comm, FSDP, network)
    one_unit, kept = 500 * 512 * 4, nn.Checkpoints(tmp_path)
    many.run.common.memory.clear()
    tracemalloc.start()
    try:
        entries = many.entries()
        if comm.rank == 0:
            kept.save(entries, {})
        else:
            list(entries)
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        if comm.rank == 0:
            state = kept.load()[0]
            assert len(state) == 3 * 26 + 1
        many.load_state(state if comm.rank == 0 else {})
        read = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert written < 3 * one_unit and read < 4 * one_unit, (written / one_unit, read / one_unit)


def test_units_cover_the_layout_and_shards_the_units():
    """Whatever the sizes: every parameter is in exactly one block of one rank; a tensor is in one unit."""
    from parallel.units import Cut, Joined

    for model, ranks, least in product(("cnn", "transformer"), (1, 2, 3, 7), (1, 700, 10**9)):
        network = MODELS[model]()
        cut = Cut(network, ranks, least)
        assert sorted(name for unit in cut.units for name in unit.names) == sorted(network.layout.specs)
        assert [unit.start for unit in cut.units] == [0, *(unit.stop for unit in cut.units)][:-1]
        assert cut.units[-1].stop == network.layout.size and (least < 10**9 or len(cut.units) == 1)
        counts = dict.fromkeys(network.layout.specs, 0)
        for rank in range(ranks):
            joined = Joined(cut, rank)
            for name, place, _ in joined.tensors:
                counts[name] += place.stop - place.start
                assert 0 <= place.start < place.stop <= cut.size
        assert counts == {name: int(np.prod(spec.shape)) for name, spec in network.layout.specs.items()}


def run(*arguments):
    command = [sys.executable, ROOT / "scripts/train.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_from_the_command_line_to_another_strategy_and_rank_count(tmp_path):
    out = tmp_path / "run"
    common = ["--data", "digits", "--model", "mlp:64,40,10", "--optimizer", "adam", "--lr", "0.01", "--limit", "600"]
    done = run(*common, "--strategy", "fsdp", "--ranks", 3, "--epochs", 2, "--memory", "--out", out, "--inspect")
    assert done.returncode == 0, done.stderr
    assert "3 ranks, FullyShardedDataParallel" in done.stdout and "formula" in done.stdout
    assert (out / "inspection" / "distributions.txt").exists()
    before = json.loads((out / "result.json").read_text())
    stored = nn.Checkpoints(out / "checkpoints").load()[0]
    network = nn.Network(Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)), (64,))
    flat = network.layout.zeros(np.float32)
    names = [name for name in stored if name.startswith("param/")]
    for (_, array), name in zip(network.layout.items(flat), names, strict=True):
        array[...] = stored[name]
    assert before["parameters_sha256"] == hashlib.sha256(flat).hexdigest()
    more = run("--resume", out, "--ranks", 2, "--strategy", "zero1", "--epochs", 3)
    assert more.returncode == 0, more.stderr
    assert "continuing" in more.stdout and json.loads((out / "result.json").read_text())["epochs"] == 3


ACROSS_HOSTS = """
    import sys
    from pathlib import Path
    import numpy as np
    from mpi4py import MPI
    import nn, parallel
    from collectives import Communicator
    from parallel.traffic import Traffic
    sys.path.insert(0, sys.argv[1])
    from equality import SEED, assert_equals_one_process

    comm = MPI.COMM_WORLD
    for kind in (parallel.ZeRO2, parallel.FullyShardedDataParallel):
        make = lambda network, loss, optimizer: kind(network, loss, optimizer, Communicator(comm), SEED, 1)
        assert_equals_one_process(make, ("mlp", "transformer"), ("lamb",), (1,))

    def sent():  # bytes that left this host
        lines = Path("/proc/net/dev").read_text().splitlines()[2:]
        return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.split(":")[0].strip() == "lo")

    layers = [nn.Linear(512, 512, bias=False) for _ in range(6)]
    network = nn.Network(nn.layer.Sequential(*layers), (512,))
    traffic = Traffic(Communicator(comm))
    many = parallel.FullyShardedDataParallel(network, nn.CrossEntropyLoss(), nn.Adam(1e-3), traffic, SEED)
    batch = np.ones((2, 512), np.float32), np.zeros(2, int), 6
    many.step(*batch)
    comm.Barrier()
    traffic.reset()
    before = sent()
    for _ in range(3):
        many.step(*batch)
    comm.Barrier()
    told = comm.gather((sent() - before) / traffic.total)
    units = comm.gather(traffic.total * 3 / 2 / 3 / (4 * network.layout.count))
    if comm.rank == 0:
        print("ratios", *told, "psi", *units)
"""


@pytest.mark.skipif(bool(netlab.why_not()), reason=str(netlab.why_not()))
def test_across_hosts_what_is_counted_is_what_network_cards_count(tmp_path):
    """Three hosts: equal to one process; counted 3 Psi less two units of six, as sent but for 2 to 8% of headers."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(ACROSS_HOSTS))
    mpiexec = Path(sys.executable).with_name("mpiexec")
    ranks = [mpiexec, "-n", 3, "--map-by", "node", sys.executable, "-m", "mpi4py", program, Path(__file__).parent]
    command = [sys.executable, netlab.__file__, "run", "--hosts", 3, "--slots", 1, "--", *ranks]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    ratios, psi = [float(word) for word in words[1:4]], [float(word) for word in words[5:8]]
    assert all(1 < ratio < 1.1 for ratio in ratios), ratios
    assert psi == pytest.approx([3 - 2 / 6] * 3, rel=1e-3)
