"""The examples in the docstrings of public names run, and print what is shown; every public name has one."""

import doctest
import inspect
import sys
from pathlib import Path

import pytest

import parallel
from nn import registry
from parallel.testing import faults

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import conf

sys.path.pop(0)
# Without an example: made by the engine and by strategies, not by users; an error of ranks; a check that starts ranks.
WITHOUT = {
    "nn.LayerContext", "nn.NetworkContext", "parallel.DistributedTrainer", "parallel.ReplicaError",
    "parallel.check_death",
}  # fmt: skip
NAMES = {f"{place}.{name}": value for package in conf.PACKAGES for place, name, value in conf.public_names(package)}
AS_IN = "in the example of `DistributedDataParallel`"  # where the names of an example come from


def examples(value) -> str:
    """The Examples section of a docstring; "" where there is none of its own."""
    text = inspect.cleandoc(vars(value).get("__doc__") or "" if isinstance(value, type) else value.__doc__ or "")
    return text.partition("\nExamples\n--------\n")[2]


NEEDS_RANKS = ("MPI.COMM_WORLD", AS_IN, "check_world()", "install_excepthooks()")
ON_RANKS = {name for name, value in NAMES.items() if any(word in examples(value) for word in NEEDS_RANKS)}


def run(text: str, name: str, names: dict) -> None:
    """Run examples in a namespace; an output that differs is an error."""
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    example.globs = names  # not a copy: the next example goes on with them
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(example, out=said.append, clear_globs=False)
    assert not runner.failures and runner.tries, "".join(said)


def test_every_public_name_has_an_example():
    without = {name for name, value in NAMES.items() if ">>>" not in examples(value)}
    assert without == WITHOUT


@pytest.mark.parametrize("name", sorted(NAMES.keys() - WITHOUT - ON_RANKS))
def test_an_example_prints_what_is_shown(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", {kind: dict(of) for kind, of in registry._REGISTERED.items()})
    run(examples(NAMES[name]), name, {"__name__": "example"})


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("name", sorted(ON_RANKS))
def test_an_example_on_ranks_prints_what_is_shown(comm, ranks, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    if AS_IN in examples(NAMES[name]):
        run(examples(parallel.DistributedDataParallel), "DistributedDataParallel", names)
    run(examples(NAMES[name]), name, names)


def test_the_example_of_a_fault_raises_it():
    run(examples(faults.inject), "inject", {"__name__": "example"})


def test_a_wrong_example_is_seen():
    """The control."""
    with pytest.raises(AssertionError, match="Expected:"):
        run(">>> 1 + 1\n3\n", "wrong", {})
    assert inspect.signature(NAMES["collectives.Communicator"]).parameters.keys() >= {"watch", "debug", "memory"}
