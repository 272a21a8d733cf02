"""Every declared strategy passes the check that strangers call; a new strategy is one file and one entry."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

import nn
from parallel.launch import launcher
from parallel.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
KEYS = {"local-sgd": "local-sgd:2", "diloco": "diloco:2", "easgd": "easgd:2"}  # two rounds in a check
UNREPEATABLE = ("downpour",)  # what comes first decides


def convolutional():
    """For one weird trick: 6 features as an image of 6 x 1, then a linear layer."""
    layers = nn.Reshape(6, 1, 1), nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)
    return nn.Network(nn.Sequential(*layers), (6,), "float64")


@pytest.mark.mpi(ranks=2, more=[3])
@pytest.mark.parametrize("name", [name for name, strategy in STRATEGIES.items() if not strategy.searches])
def test_every_strategy_passes_the_check(comm, name):
    import parallel
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    options = Options(strategy=KEYS.get(name, name), batch=12, server_place="workers", pipeline=None)
    parallel.check_strategy(
        lambda *parts, seed=0: build_trainer(dataclasses.replace(options, seed=seed), *parts),
        Communicator(comm),
        network=convolutional if name == "owt" else None,
        as_one=not STRATEGIES[name].supports.local_update,
        repeatable=name not in UNREPEATABLE,
    )


@pytest.mark.mpi(ranks=2, more=[3])
def test_ranks_that_have_experts_pass_the_check(comm):
    import parallel
    from collectives import Communicator

    def network():
        experts = nn.Residual(nn.MixtureOfExperts(6, comm.size, 2, 5), nn.Linear(6, 6))
        return nn.Network(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), experts, nn.Linear(6, 3)), (6,), "float64")

    parallel.check_strategy(parallel.ExpertParallel, Communicator(comm), network=network)


@pytest.mark.mpi(ranks=2)
def test_late_gradients_pass_the_check(comm):
    import parallel
    from collectives import Communicator

    parallel.check_strategy(parallel.StaleDataParallel, Communicator(comm), as_one=False)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("counts some gradients twice", "differ from one process's|differs from one process's"),
        ("forgets its formula", "bytes, and the formula says"),
        ("updates when looked at", "change what is trained"),
        ("ignores its seed", "with seed=3 the first values differ from one process's"),
    ],
)
def test_the_check_sees_what_is_wrong(comm, wrong, words, monkeypatch):
    import parallel
    from collectives import Communicator
    from parallel.sync.messages import Messages
    from parallel.trainer import DistributedTrainer

    if wrong == "counts some gradients twice":
        own_sum = Messages.finish_step

        def twice(self):
            result = own_sum(self)
            self.flat_buffer[:5] *= 2
            return result

        monkeypatch.setattr(Messages, "finish_step", twice)
    elif wrong == "forgets its formula":
        monkeypatch.setattr(DistributedTrainer, "formula", lambda self: {"moments": 0, "gradients": 10**6})
    elif wrong == "updates when looked at":
        own = DistributedTrainer.sum_scores

        def sum_scores(self, x, y):
            self.flat_parameters[:] *= 1.0 + 1e-9
            return own(self, x, y)

        monkeypatch.setattr(DistributedTrainer, "sum_scores", sum_scores)

    def make(*parts, seed=0):
        if wrong == "ignores its seed":
            seed = 0
        return parallel.DistributedDataParallel(*parts, seed, node_memory="off")

    with pytest.raises((AssertionError, parallel.ReplicaError), match=words):
        parallel.check_strategy(make, Communicator(comm))


def test_no_rank_waits_for_one_that_was_killed():
    import parallel

    parallel.check_death("parallel", "DistributedDataParallel", 3, PATIENCE)


def test_a_new_strategy_is_one_file_and_one_entry(tmp_path, monkeypatch):
    """The file of docs/howto/strategy.md in a copy of the tree: it is in --help, the estimate and the docs' tables."""
    for name in ("nn", "collectives", "parallel", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)  # and what is compiled
    page = (ROOT / "docs" / "howto" / "strategy.md").read_text()
    text = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "parallel" / "strategies" / "line.py").write_text(text)
    entry = tmp_path / "parallel" / "strategies" / "__init__.py"
    before = entry.read_text()
    after = before.replace("    downpour,\n", "    downpour,\n    line,\n", 1).replace(
        "    data_parallel.STRATEGY,\n", "    data_parallel.STRATEGY,\n    line.STRATEGY,\n"
    )
    assert after.count("line") > before.count("line") + 1
    entry.write_text(after)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # before what is installed

    def said(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        return done.stdout + done.stderr

    assert "line: Data parallelism along a line" in said("scripts/train.py", "--help", "strategies")
    assert "ddp, line, zero1" in " ".join(said("scripts/train.py", "--help").split())
    refused = said("scripts/train.py", "--strategy", "line", "--ranks", "2", "--compress", "fp16", "--limit", "60")
    assert "--compress fp16 cannot be combined with --strategy line: the line sums" in refused
    tables = said("-c", "from parallel.strategies import table; print(table.summaries(), table.matrix())")
    assert "| `line` | as `ddp`, summed along a line of ranks |" in tables and "| `line` | data |" in tables
    assert "LineParallel" in said("-c", "import parallel; print(parallel.LineParallel, dir(parallel))")
    estimate = said("scripts/estimate.py", "mlp:784,30,10", "--ranks", "4", "--network", "gigabit")
    assert re.search(r"^ +4  line ", estimate, re.MULTILINE), estimate
    words = ["scripts/train.py", "--strategy", "line", "--model", "mlp:64,9,10", "--limit", "60", "--epochs", "1"]
    words += ["--no-pictures", "--out", str(tmp_path / "run")]
    with open(tmp_path / "log", "w") as log:
        status = launcher.run(words, 2, timeout=PATIENCE, cwd=tmp_path, stdout=log)
    assert status == 0, (tmp_path / "log").read_text()
