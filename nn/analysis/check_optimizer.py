"""Is an optimizer one that trainers can rely on, of a whole buffer and of slices of it? See check_layer.py.

nn.check_optimizer(MyOptimizer(lr=0.1))
"""

from __future__ import annotations

import copy
import pickle
import threading
from itertools import pairwise

import numpy as np

from nn.analysis.check_layer import importable
from nn.core.layer import Spec
from nn.core.layout import ALIGN, Layout, Region
from nn.initializers import normal
from nn.optim.optimizers import Optimizer

STEPS, NEAR = 5, 1e-10
PATIENCE = 30  # seconds: slices that ask for other sums than the others wait no longer
SPECS = {
    "0": {"W": Spec((5, 7), normal(1.0)), "b": Spec((7,), normal(1.0), decay=False)},
    "1": {"W": Spec((7, 3), normal(1.0))},
}


def check_optimizer(optimizer: Optimizer, seed: int = 0) -> None:
    """Check an optimizer: it minimises, keeps nothing, leaves padding zero, and works on slices of a buffer.

    Parameters
    ----------
    optimizer : Optimizer
        An instance.
    seed : int
        Seed of parameters and gradients.

    Raises
    ------
    AssertionError, TypeError
        What is wrong, in one sentence with the optimizer's name.

    Examples
    --------
    >>> import nn
    >>> nn.check_optimizer(nn.Adam(0.01))
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"check_optimizer takes an optimizer, given {optimizer!r:.80}: an instance, not the class, of a "
            "subclass of nn.Optimizer"
        )
    if optimizer.searches:
        raise TypeError(f"{optimizer!r}: it evaluates the batch itself, so a step of it cannot be looked at alone")
    if missing := [name for name in ("lr", "weight_decay", "clip", "rates", "frozen") if name not in vars(optimizer)]:
        raise TypeError(
            f"{type(optimizer).__name__}: it has no {', '.join(missing)}: its __init__ must call super().__init__(lr)"
        )
    case = _Case(optimizer, seed)
    for check in (
        case.check_result,
        case.check_nothing_is_kept,
        case.check_slots,
        case.check_padding_and_dtypes,
        case.check_minimises,
        case.check_decay,
        case.check_slices,
        case.check_copies,
    ):
        check()


class _Case:
    """An optimizer, with parameters and gradients of some steps."""

    def __init__(self, optimizer: Optimizer, seed: int):
        self.optimizer, self.layout = optimizer, Layout(SPECS)
        self.region, rng = self.layout.region(), np.random.default_rng(seed)
        self.start = self.layout.zeros(np.float64)
        self.layout.initialize(self.start, seed)
        self.inside = np.zeros(self.layout.size, bool)
        for array in self.layout.slices.values():
            self.inside[array] = True
        self.gradients = [np.where(self.inside, rng.standard_normal(self.layout.size), 0) for _ in range(STEPS)]

    def fail(self, sentence: str) -> None:
        raise AssertionError(f"{self.optimizer!r}: {sentence}")

    def slots(self, size: int, dtype) -> dict[str, np.ndarray]:
        return {name: np.zeros(size, dtype) for name in self.optimizer.slots}

    def train(self, optimizer: Optimizer, dtype=np.float64) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Parameters and slots after some steps."""
        w, slots = self.start.astype(dtype), self.slots(self.layout.size, dtype)
        for step, g in enumerate(self.gradients):
            optimizer.update(w, g.astype(dtype), slots, step, self.region)
        return w, slots

    def check_result(self) -> None:
        names = self.optimizer.slots
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            self.fail(f"slots must be a tuple of names, given {names!r:.80}")
        w = self.start.copy()
        slots = self.slots(self.layout.size, np.float64)
        before = dict(slots)
        try:
            self.optimizer.update(w, self.gradients[0].copy(), slots, 0, self.region)
        except KeyError as error:
            if error.args and error.args[0] not in before:
                self.fail(f"apply() asks for slot {error}, which the class does not declare: slots = ({error},)")
            raise
        for name, slot in before.items():
            if slots.get(name) is not slot:
                self.fail(
                    f"slot {name!r} is replaced: write into it, as slots[{name!r}] *= 0.9, or slots[{name!r}][:] = ..."
                )
        if np.array_equal(w, self.start):
            self.fail("an update leaves the parameters as they were: write into w, as w -= ..., not w = w - ...")
        if not np.isfinite(w).all():
            self.fail("after one update some parameters are not finite: is something divided by a moment that is 0?")

    def check_nothing_is_kept(self) -> None:
        """All that lasts from step to step is in the slots and in `step`."""
        expected, _ = self.train(copy.deepcopy(self.optimizer))
        shared = copy.deepcopy(self.optimizer)
        self.train(shared)
        if not np.array_equal(self.train(shared)[0], expected):
            self.fail(
                "used for a second network it makes other updates: what lasts from step to step must be in `slots`, "
                "which checkpoints keep, or follow from `step`"
            )

    def check_slots(self) -> None:
        """Slots that are declared are written to."""
        for name, slot in self.train(self.optimizer)[1].items():
            if not slot.any():
                self.fail(
                    f"slot {name!r} is declared, and still zero after {STEPS} updates: write into it, as v *= 0.9; "
                    "v += g, not v = 0.9 * v + g"
                )

    def check_padding_and_dtypes(self) -> None:
        for dtype in (np.float32, np.float64):
            w, slots = self.train(self.optimizer, dtype)
            for name, buffer in {"the parameters": w, **slots}.items():
                if buffer[~self.inside].any():
                    self.fail(
                        f"padding of {name} is no longer zero: elements with gradient and parameter 0 must stay 0"
                    )
        single, double = self.train(self.optimizer, np.float32)[0], self.train(self.optimizer)[0]
        if not np.allclose(single, double, 1e-3, 1e-4):
            self.fail("in float32 it computes something else than in float64")

    def check_minimises(self) -> None:
        """Half the squared distance to a point falls, with the rate that was given and some smaller ones."""
        goal = np.where(self.inside, 0.5, 0.0)
        for shrink in (1, 0.1, 0.01):
            optimizer = copy.deepcopy(self.optimizer)
            optimizer.lr = optimizer.lr * shrink
            w, slots = self.start.copy(), self.slots(self.layout.size, np.float64)
            for step in range(100):
                optimizer.update(w, w - goal, slots, step, self.region)
            if np.square(w - goal).sum() < np.square(self.start - goal).sum():
                return
        self.fail("100 steps down a quadratic bowl end higher than they began: do parameters move along the gradient?")

    def check_decay(self) -> None:
        """Weight decay leaves out what Spec.decay leaves out: biases."""
        optimizer = copy.deepcopy(self.optimizer)
        optimizer.weight_decay = 0.1
        w = self.start.copy()
        optimizer.update(w, np.zeros_like(w), self.slots(len(w), np.float64), 0, self.region)
        if not np.isfinite(w).all():
            self.fail("where gradients are 0 parameters become NaN: is something divided by a norm that may be 0?")
        before, after = dict(self.layout.items(self.start)), dict(self.layout.items(w))
        if not np.array_equal(before["0.b"], after["0.b"]):
            self.fail("weight decay changes a bias: apply it to the slices in region.decayed only")
        if np.array_equal(before["0.W"], after["0.W"]):
            self.fail(
                "weight_decay does nothing: without a gradient, a decayed parameter should shrink. apply() adds it: "
                "for part in region.decayed: g[part] += self.weight_decay * w[part]"
            )

    def check_slices(self) -> None:
        """Updates of slices, each by a thread with sums over all of them, are those of the whole."""
        expected, expected_slots = self.train(self.optimizer)
        cuts = [0, ALIGN, self.layout.size // 2 // ALIGN * ALIGN, self.layout.size]
        regions = [self.layout.region(lo, hi) for lo, hi in pairwise(cuts)]
        w, slots = self.start.copy(), self.slots(self.layout.size, np.float64)
        for step, g in enumerate(self.gradients):
            self.update_slices(regions, w, g.copy(), slots, step)
        if not np.allclose(w, expected, NEAR, NEAR) or any(
            not np.allclose(slots[name], slot, NEAR, NEAR) for name, slot in expected_slots.items()
        ):
            self.fail(
                "updates of slices, as ZeRO makes them, are not those of the whole: an update must not depend on the "
                "index of an element in w, and norms are summed by sum_over_slices"
            )

    def update_slices(self, regions: list[Region], w, g, slots, step: int) -> None:
        """Make one step, with a thread for each slice."""
        barrier, sums, errors = threading.Barrier(len(regions)), {}, []

        def work(index: int, region: Region) -> None:
            def sum_over_slices(array: np.ndarray) -> None:
                sums[index] = array.copy()
                barrier.wait(PATIENCE)
                total = sum(sums[r] for r in range(len(regions)))
                barrier.wait(PATIENCE)
                array[...] = total

            here = slice(region.lo, region.hi)
            try:
                part = {name: slot[here] for name, slot in slots.items()}
                self.optimizer.update(w[here], g[here], part, step, region, sum_over_slices)
            except BaseException as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=work, args=pair) for pair in enumerate(regions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            error = next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
            self.fail(f"an update of a slice raises {type(error).__name__} ({error})")

    def check_copies(self) -> None:
        expected = self.train(self.optimizer)[0]
        copies = [copy.deepcopy(self.optimizer)]
        if importable(type(self.optimizer)):
            copies.append(pickle.loads(pickle.dumps(self.optimizer)))
        if any(not np.array_equal(self.train(other)[0], expected) for other in copies):
            self.fail("a copy makes other updates")
