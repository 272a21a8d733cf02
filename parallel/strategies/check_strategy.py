"""Is a strategy one that can be trusted? All that is asked of the built-in ones, in one call on each rank.

    parallel.check_strategy(LineParallel, communicator)

The model is scikit-learn's check_estimator: whoever writes a strategy calls it in a test, on two or three ranks.
`check_death` starts ranks of its own, one of which is killed.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

import numpy as np

import nn
from collectives.steps import chunk
from parallel.launch import launcher

BOUND = 1e-12  # relative to the largest entry, in float64
CONTROL = 1e-6  # what training without the other ranks' samples must differ by, at least
SIZES = (7, 1, 12, 5)  # of global batches: uneven, and without samples for some ranks
PADDING = 2048  # bytes that a rank may keep beside the formula: arrays begin at multiples of 64 bytes


def check_strategy(
    make: Callable,
    communicator,
    *,
    network: Callable[[], nn.Network] | None = None,
    optimizer: Callable[[], object] | None = None,
    as_one: bool = True,
    repeatable: bool = True,
) -> None:
    """Check a strategy (collective): equality with one process, state, bad steps, disagreement, memory, looking.

    Parameters
    ----------
    make : callable (network, loss, optimizer, communicator) -> DistributedTrainer
    communicator : collectives.Communicator
        Of two ranks or more.
    network : callable or None
        Builds a network in float64, of features or of sequences of ids; None for two linear layers.
    optimizer : callable or None
        Builds an optimizer; None for SGD with momentum.
    as_one : bool
        Whether it computes what one process computes, to 1e-12. Not so with local updates: then equality, bad steps
        and disagreement are not checked.
    repeatable : bool
        Whether two runs have the same bits: where not, a run that is looked at need not have those of another.

    Raises
    ------
    AssertionError
        On some rank: what is wrong, with the name of the trainer.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> parallel.check_strategy(parallel.ZeRO1, communicator)
    """
    case = _Case(make, communicator, network or _network, optimizer or _optimizer)
    if communicator.size < 2:
        raise ValueError("check_strategy compares ranks: start at least 2")
    if as_one:
        case.check_equality()
        case.check_bad_step()
        case.check_sizes()
    case.check_agreement()
    case.check_seed()
    case.check_state(as_one)
    case.check_memory()
    case.check_looking(repeatable)


def _network() -> nn.Network:
    return nn.Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,), "float64")


def _optimizer():
    return nn.SGD(0.1, momentum=0.9)


class _Case:
    """The parts of a check; `make` gives a trainer of the same network each time."""

    def __init__(self, make, communicator, network, optimizer):
        self.make, self.communicator, self.network, self.optimizer = make, communicator, network, optimizer
        rng = np.random.default_rng(0)
        probe = self.network()
        *rows, classes = probe.out_shape
        self.ids = probe.takes_ids

        def draw(shape):
            return rng.integers(0, classes, shape) if self.ids else rng.normal(size=shape)

        self.batches = [(draw((n, *probe.in_shape)), rng.integers(0, classes, (n, *rows))) for n in SIZES]

    def many(self, optimizer=None):
        trainer = self.make(self.network(), nn.CrossEntropyLoss(), optimizer or self.optimizer(), self.communicator)
        trainer.set_epoch_steps(len(SIZES))
        self.name = trainer.name
        return trainer

    def one(self) -> nn.Trainer:
        return nn.Trainer(self.network(), nn.CrossEntropyLoss(), self.optimizer())

    def share(self, trainer, x, y):
        """Return this rank's samples of a global batch, and their number."""
        index, count = trainer.shard[:2]
        lo, hi = (0, 0) if index is None else chunk(len(x), count, index)
        return x[lo:hi], y[lo:hi], len(x)

    def train(self, trainer) -> list[float]:
        return [trainer.step(*self.share(trainer, x, y)) for x, y in self.batches]

    def require(self, holds: bool, sentence: str) -> None:
        if not holds:
            raise AssertionError(f"{self.name}, rank {self.communicator.rank}: {sentence}")

    def state(self, trainer) -> dict[str, np.ndarray]:
        """Return the whole state on all ranks (collective)."""
        state = {name: np.array(array) for name, array in trainer.state_dict().items()}
        return self.communicator.bcast(state if trainer.is_writer else None)

    def compare(self, found: dict, wanted: dict, what: str) -> float:
        """Require equal names, and return by how much arrays differ, relative to the largest entry."""
        missing = sorted(wanted.keys() - found.keys())
        self.require(not missing, f"{what}: the state lacks {', '.join(missing)}")
        worst = 0.0
        for name, array in wanted.items():
            if array.ndim and array.size and array.dtype.kind == "f":
                worst = max(worst, float(np.abs(found[name] - array).max() / (np.abs(array).max() or 1.0)))
        return worst

    def check_equality(self) -> None:
        """Parameters, moments and losses are one process's, to 1e-12; what one rank's samples give differs."""
        one, many, alone = self.one(), self.many(), self.one()
        losses = [one.step(x, y, len(x)) for x, y in self.batches]
        found = self.train(many)
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
        self.require(worst < BOUND, f"losses differ from one process's by {worst:.1e}: {found}, expected {losses}")
        state = self.state(many)
        worst = self.compare(state, one.state_dict(), "after training")
        self.require(
            worst < BOUND, f"the state differs from one process's by {worst:.1e}: is every gradient summed once?"
        )
        for x, y in self.batches:  # the control
            lo, hi = chunk(len(x), self.communicator.size, 0)
            if hi > lo:
                alone.step(x[lo:hi], y[lo:hi], hi - lo)
        worst = self.compare(state, alone.state_dict(), "beside the control")
        self.require(
            worst > CONTROL, "training with the samples of rank 0 alone gives the same: the test shows nothing"
        )
        many.check_replicas()
        many.close()

    def check_state(self, as_one: bool) -> None:
        """What one process continues is what these ranks continue, and the other way around."""
        many, one, again = self.many(), self.one(), self.many()
        self.train(many)
        state = self.state(many)
        one.load_state_dict(state)
        again.load_state_dict(state)
        after = self.state(again)
        worst = self.compare(after, state, "loaded on the same ranks")
        self.require(worst == 0, f"a state that is loaded and asked for again differs by {worst:.1e}")
        if as_one:
            losses, found = [one.step(x, y, len(x)) for x, y in self.batches], self.train(again)
            worst = max(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True))
            self.require(worst < BOUND, f"a state that one process continues is continued differently: {worst:.1e}")
            again.load_state_dict(one.state_dict())
            worst = self.compare(self.state(again), one.state_dict(), "of one process")
            self.require(worst < BOUND, f"the state of one process is taken over with a difference of {worst:.1e}")
        again.close()
        many.close()

    def check_bad_step(self) -> None:
        """A batch with a NaN is refused on all ranks, and changes nothing; of ids, which have none, a parameter is."""
        many = self.many()
        self.train(many)
        good = self.state(many)
        before, (x, y) = {name: array.copy() for name, array in good.items()}, self.batches[2]
        if self.ids:
            before[next(name for name in before if name.startswith("param/"))].flat[0] = np.nan
            many.load_state_dict(before)
        else:
            x = x.copy()
            x[0, 0] = np.nan
        refused = False
        try:
            many.step(*self.share(many, x, y))
        except nn.NonFiniteLoss:
            refused = True
        everyone = self.communicator.allgather(refused)
        self.require(all(everyone), f"a loss that is not finite is refused on ranks {_where(everyone)} only")
        worst = self.compare(self.state(many), before, "after a loss that is not finite")
        self.require(not worst > 0, f"a step that was refused has changed the state by {worst:.1e}")
        many.load_state_dict(good)
        self.train(many)
        many.close()

    def check_sizes(self) -> None:
        """Ranks that are given different sizes of a batch refuse it, all of them, and nothing is updated."""
        many = self.many()
        before = self.state(many)
        x, y, total = self.share(many, *self.batches[2])
        refused = False
        try:
            many.step(x, y, total + (self.communicator.rank == self.communicator.size - 1))
        except ValueError:
            refused = True
        everyone = self.communicator.allgather(refused)
        self.require(all(everyone), f"a batch whose size ranks disagree on is refused on ranks {_where(everyone)} only")
        worst = self.compare(self.state(many), before, "after sizes that differ")
        self.require(worst == 0, f"a batch whose size ranks disagree on has changed the state by {worst:.1e}")
        many.close()

    def check_agreement(self) -> None:
        """Ranks that are given different networks refuse to train, all of them."""
        wide = nn.Network(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), (6,), "float64")
        network = wide if self.communicator.rank else self.network()
        refused, self.name = False, getattr(self.make, "__name__", "the strategy")
        try:
            self.make(network, nn.CrossEntropyLoss(), self.optimizer(), self.communicator)
        except (RuntimeError, ValueError):  # a ReplicaError
            refused = True
        everyone = self.communicator.allgather(refused)
        self.require(all(everyone), f"ranks with different networks are refused on ranks {_where(everyone)} only")

    def check_seed(self) -> None:
        """Where `make` takes a seed, first values are those of one process with that seed."""
        if "seed" not in inspect.signature(self.make).parameters:
            return
        parts = self.network(), nn.CrossEntropyLoss(), self.optimizer()
        many, one = self.make(*parts, self.communicator, seed=3), nn.Trainer(*parts, seed=3)
        self.name = many.name
        worst = self.compare(self.state(many), one.state_dict(), "with seed=3")
        self.require(
            worst < BOUND, f"with seed=3 the first values differ from one process's by {worst:.1e}: pass the seed on"
        )
        many.close()

    def check_memory(self) -> None:
        """What a rank keeps is what the formula says."""
        many = self.many()
        self.train(many)
        measured, formula = many.memory(), many.formula()
        for kind, expected in formula.items():
            off = abs(measured[kind] - expected)
            self.require(
                off <= PADDING,
                f"{kind} take {measured[kind]:,} bytes, and the formula says {expected:,.0f}: declare both",
            )
        many.close()

    def check_looking(self, repeatable: bool) -> None:
        """Evaluation, predictions, checkpoints and comparisons, before the first step and after each, change no bit."""
        plain, watched = (self.many(overwriting(self.optimizer())) for _ in range(2))
        look(watched, *self.share(watched, *self.batches[0]))
        for x, y in self.batches:
            mine = self.share(plain, x, y)
            plain.step(*mine)
            watched.step(*mine)
            look(watched, *mine)
        same = not repeatable or plain.digest() == watched.digest()
        self.require(same, "evaluation, predictions, state_dict or check_replicas between steps change what is trained")
        watched.close()
        plain.close()


def look(trainer, x, y, *_) -> None:
    """Do what changes nothing (collective)."""
    trainer.sum_scores(x, y)
    trainer.predict(x)
    trainer.state_dict()
    trainer.check_replicas()
    trainer.snapshot()
    trainer.sync.bytes_sent()


def overwriting(optimizer):
    """Return an optimizer that overwrites gradients after an update, as any optimizer may."""
    kind = type(optimizer)

    def apply(self, w, g, slots, step, region, *more):
        kind.apply(self, w, g, slots, step, region, *more)
        for _, part, _ in region.tensors:
            g[part] = np.nan

    optimizer.__class__ = type(kind.__name__, (kind,), {"apply": apply})
    return optimizer


def _where(flags: list[bool]) -> str:
    return ", ".join(str(rank) for rank, flag in enumerate(flags) if flag) or "none"


DYING = """
import os, signal, sys
import numpy as np
from importlib import import_module
import nn
from collectives import Communicator
from mpi4py import MPI
module, name = sys.argv[1:3]
communicator = Communicator(MPI.COMM_WORLD, watch=20.0)
network = nn.Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), (6,), "float64")
trainer = getattr(import_module(module), name)(network, nn.CrossEntropyLoss(), nn.SGD(0.1), communicator)
for step in range(10**9):
    index, count = trainer.shard[:2]
    n = 0 if index is None else 12 // count
    trainer.step(np.ones((n, 6)), np.zeros(n, int), 12 if index is None else n * count)
    if step == 3 and communicator.rank == communicator.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def check_death(module: str, name: str, ranks: int = 3, limit: float = 120.0) -> None:
    """Kill one of some ranks that train, and check that no other waits for it for ever.

    Parameters
    ----------
    module, name : str
        Where the strategy is: imported by each rank.
    ranks : int
    limit : float
        Seconds in which all must have ended.

    Raises
    ------
    AssertionError
        Ranks still wait after `limit` seconds, or say that all is well.
    """
    start, said = time.monotonic(), []
    status = launcher.run(["-c", DYING, module, name], ranks, timeout=limit, stdout=said.append)
    if time.monotonic() - start >= limit:
        raise AssertionError(f"{name}: {ranks - 1} ranks still wait {limit:g} s after one was killed")
    if status == 0:
        raise AssertionError(
            f"{name}: a rank was killed, and the others end as if all were well: {''.join(said)[-300:]}"
        )
