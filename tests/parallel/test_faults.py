"""What goes wrong on one rank, where, under which strategy: the run ends in time and says who, and nothing is lost.

Each cell is a run of which a rank fails (faulty.py). It must end by itself, name the rank or the file, and leave no
process; and from what is saved training goes on to the parameters of a run that nothing has disturbed. Which cells are
tried is decided by a seed: seven, 50 more in the exhaustive tests, and RINGPROP_FUZZ=5 tries them all.
"""

import os
import random
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import PATIENCE, longer

import nn
from parallel import ShardedCheckpoints
from parallel.command import factory
from parallel.command.options import Options
from parallel.command.parsing import parse

ROOT = Path(__file__).parents[2]
# Three epochs of four steps; saved after steps 3, 4, 6, 8, 9, 12. A fault of a phase comes in the second epoch.
RUN = ["--model", "mlp:64,12,10", "--limit", "80", "--batch", "20", "--epochs", "3", "--dtype", "float64"]
RUN += ["--momentum", "0.9", "--checkpoint-steps", "3", "--no-pictures", "--threads", "1"]
STRATEGIES = {
    "ddp": [],
    "fsdp": ["--strategy", "fsdp"],
    "ps": ["--strategy", "ps", "--server-place", "workers", "--servers", "2"],
    "pipeline": ["--strategy", "pipeline"],
}
# Of which single cells are tried: the second rank is the second stage of a replica.
LOCAL_UPDATE = {
    "downpour": ["--ranks", "3", "--strategy", "downpour", "--mesh", "pipeline=2"],
    "local-sgd": ["--ranks", "4", "--strategy", "local-sgd:2", "--mesh", "data=2,pipeline=2"],
}
PHASES = ("start", "step", "evaluation", "checkpoint", "end")
# Kind -> how the run says who, or what. Of a rank that others wait for, --watch does.
SAID = {
    "raise": "boom",
    "SystemExit": "boom|rank RANK",
    "exit 3": "rank RANK",
    "exit 0": "rank RANK",
    "SIGKILL": "rank RANK was killed",
    "SIGSTOP": "rank RANK",
    "SIGTERM": "to continue: ",
    "NaN": "parameter .* (was updated|on ranks)|not finite",  # of all ranks that it has reached since
    "wrong shape": "shape|features",
    "wrong dtype": "dtype|could not convert|not supported|ufunc",
    "missing call": "ranks? RANK|MPI_ERR",  # what MPI itself says where calls do not fit
    "disk full": r"cannot write .*(step-|best|manifest|network|metrics|config)",
    "corrupted part": "rank RANK was killed",
    "truncated manifest": "rank RANK was killed",
}
WAITED_FOR = ("SIGSTOP", "exit 0", "missing call")
# Where there is nothing to strike: a phase without the call, a fault without an effect.
NOT = {
    "NaN": ("end",),
    "wrong shape": ("start", "checkpoint", "end"),
    "wrong dtype": ("start", "checkpoint", "end"),
    "corrupted part": ("start",),
    "truncated manifest": ("start",),
    "missing call, ddp": ("checkpoint",),  # the first rank writes, and the others have nothing to do
}
CELLS = [
    (kind, phase, strategy)
    for kind in SAID
    for phase in PHASES
    for strategy in STRATEGIES
    if phase not in (*NOT.get(kind, ()), *NOT.get(f"{kind}, {strategy}", ()))
]
DRAWN = 7
MORE = min(len(CELLS), 50 * int(os.environ.get("RINGPROP_FUZZ", 1)))  # in the exhaustive ones
SAMPLE = set(random.Random(15).sample(CELLS, DRAWN))
TRIED = SAMPLE | set(random.Random(16).sample(CELLS, MORE))


@cache
def undisturbed() -> np.ndarray:
    """The parameters that one process has in the end."""
    return finish(Options(**vars(parse(RUN))), None)


def finish(options: Options, kept: ShardedCheckpoints | None) -> np.ndarray:
    """Train to the end, on one process, from the last checkpoint where there is one."""
    data, network, loss, optimizer = factory.prepare(options)
    one, progress = nn.Trainer(network, loss, optimizer, options.seed), None
    if kept:
        state, progress, _ = kept.load()
        one.load_state_dict({name: array for name, array in state.items() if not name.startswith("exchange/")})
    nn.fit(one, factory.loaders(options, data, one.shard).train, options.epochs, progress=progress)
    return one.flat_parameters


def strike(out: Path, kind: str, phase: str, strategy: str) -> tuple[Path, int, str, int]:
    """(its directory, exit status, what it said) of a run with that fault, and the rank that had it.

    Where ranks wait for it, once with enough time to come so far.
    """
    rank = 0 if kind in ("disk full", "corrupted part", "truncated manifest") or phase == "checkpoint" else 1
    rank = 1 if kind == "missing call" else rank
    rank = 0 if kind.startswith("wrong") and strategy == "pipeline" else rank  # the first stage gets the samples
    for i, seconds in enumerate(longer(2) if kind in WAITED_FOR else (300,)):
        directory, struck = out / str(i), out / f"struck {i}"
        told = {"FAULT": f"{kind}/{phase}/{rank}", "STRUCK": str(struck), "CHECKPOINTS": str(directory / "checkpoints")}
        command = [sys.executable, ROOT / "tests/parallel/faulty.py", *RUN, "--ranks", "2"]
        command += (STRATEGIES | LOCAL_UPDATE)[strategy]
        done = subprocess.run(
            [*map(str, command), "--watch", str(seconds), "--out", str(directory)],
            cwd=ROOT, env=os.environ | told | {"PYTHONPATH": str(ROOT)}, text=True, timeout=PATIENCE,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if struck.exists():
            return directory, done.returncode, done.stdout, rank
    raise AssertionError(f"it did not come as far:\n{done.stdout}")


def cell(kind, phase, strategy):
    return pytest.param(
        kind, phase, strategy, id=f"{kind}, {phase}, {strategy}",
        marks=() if (kind, phase, strategy) in SAMPLE else pytest.mark.exhaustive,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "phase", "strategy"), [cell(*each) for each in CELLS if each in TRIED])
def test_it_ends_says_who_and_loses_nothing(tmp_path, kind, phase, strategy):
    directory, status, said, rank = strike(tmp_path, kind, phase, strategy)
    if (kind, phase) != ("disk full", "end"):  # then all is saved, but for the network's own file
        assert status != 0, said
    assert re.search(SAID[kind].replace("RANK", str(rank)), said), said
    kept, options = ShardedCheckpoints(directory / "checkpoints"), Options(**vars(parse(RUN)))
    if phase == "start":
        assert not kept.entries()
        return
    if kind == "truncated manifest":
        with pytest.raises(nn.CheckpointError, match=r"manifest\.json"):
            kept.load()
        return
    with warnings.catch_warnings(record=True) as damaged:
        warnings.simplefilter("always")
        found = finish(options, kept)
        state, _, _ = kept.load()
    named = [str(each.message) for each in damaged if "DAMAGED" in str(each.message)]
    assert bool(named) == (kind == "corrupted part") and all(".npz" in each for each in named)
    promised = 12 if phase == "end" else 4  # what was begun at 6 may have been cut short
    assert state["steps"] >= promised or named
    np.testing.assert_allclose(found, undisturbed(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("SIGKILL", "downpour"),
        pytest.param("SIGSTOP", "downpour", marks=pytest.mark.exhaustive),
        pytest.param("SIGKILL", "local-sgd", marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_of_a_replica_that_is_a_pipeline_is_named(tmp_path, kind, strategy):
    _, status, said, rank = strike(tmp_path, kind, "step", strategy)
    assert rank == 1 and status != 0, said
    assert re.search(SAID[kind].replace("RANK", "1"), said), said
