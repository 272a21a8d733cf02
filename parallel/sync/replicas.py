"""Local SGD, DiLoCo and EASGD: replicas make steps of their own, and average now and then, without a server.

A step moves a replica along the gradient of its own part of the batch, times the number of replicas, so that the mean
of all replicas' steps from one point is the step of data parallelism, uneven parts included. Then, every so many steps:

Averaged   all take the mean of all                                       local SGD
Outer      an outer step: an optimizer of its own moves the last common  DiLoCo
           parameters along the mean of the differences
Elastic    each moves towards a centre that all know, and the centre      EASGD
           towards all

At the end of an epoch, and for a checkpoint (`synchronize`), they average too, with their moments; after `Elastic` the
centre is evaluated and saved, and the replicas continue where they were. Looking in between (an evaluation, the state,
a digest) shows what averaging would give, and changes nothing.

A loss that is not finite moves nothing; all ranks learn of it at the next average, and end. Sizes of global batches are
compared there, too.

A replica may itself be several ranks that have stages or parts of one network: each averages with the ranks that have
the same part.

Cost: an allreduce of 2 n (p-1)/p beta every so many steps in place of each; with a drift one number a step.
Sources: McDonald et al. 2010, Stich 2019 (local SGD); Kamp et al. 2018 (averages when replicas have drifted);
Douillard et al. 2023 (DiLoCo); Zhang, Choromanska, LeCun 2015 (EASGD).
"""

from __future__ import annotations

import math

import numpy as np
from mpi4py.MPI import IN_PLACE, MAX

from nn.optim.optimizers import SGD
from parallel.state.placed import OWN, PlacedArray, Shard, in_transit
from parallel.sync.local_update import LocalUpdate
from parallel.sync.step_result import AgreementCode, SizeLog, StepResult, late_disagreement


class Replicas(LocalUpdate):
    """The base of these strategies: local steps, and when to average.

    Parameters
    ----------
    every : int
        Steps between averages.

    Attributes
    ----------
    since : int
        Steps since the last average.
    averages : int
        Averages in this epoch.
    averaged : bool
        Whether no replica has moved since the last average.
    """

    phases = (
        ("compute", "compute_gradients", False),
        ("communicate", "sync.average_replicas", True),
        ("update", "sync.move", False),
    )

    def __init__(self, every: int):
        self.every = every

    def allocate(self):
        super().allocate()
        self.since = self.averages = 0
        self.averaged, self.error, self.sizes = True, "", SizeLog()
        ranks = np.ones(1)
        if self.sum_model:
            self.sum_model(ranks)
        self.code = AgreementCode(int(ranks[0]), np.float64)  # by which ranks of one replica compare

    def begin_step(self, step, samples, total, parts):
        self.averaged = False
        self.sizes.add(step, total)
        return super().begin_step(step, samples, total, parts)

    def reset(self):
        super().reset()
        self.sizes.clear()
        self.since, self.averaged, self.error = 0, True, ""

    def finish_step(self):
        """Move, and average where it is time; return this replica's estimate of the loss: its part times replicas."""
        own = float(self.message.loss)
        self.bad |= not math.isfinite(own)
        if not self.bad and not self.error:
            self.move()
        self.since += 1
        loss = own * self.mesh.count if math.isfinite(own) else 0.0
        if (self.since >= self.every or self.drifted()) and self.average_replicas():
            loss = math.nan
        return StepResult(loss, True)

    def move(self) -> None:
        """Make a step of this replica; without samples, too, as a step of data parallelism updates all moments."""
        self.gradients *= self.mesh.count
        try:
            super().update()
        except FloatingPointError as error:  # raised where the ranks synchronize
            self.error = str(error)

    def update(self):
        """Do nothing: `finish_step` has moved this replica."""

    def drifted(self) -> bool:
        """Return, alike on all ranks, whether replicas must average before it is time."""
        return False

    def average_replicas(self) -> bool:
        """Average, or move replicas closer; return whether a loss was not finite on any rank (collective).

        Raises
        ------
        FloatingPointError
            On all ranks, where one could not update: a norm that is not finite.
        ValueError
            On all ranks: they were given different sizes of a global batch.
        """
        sizes = float(self.sizes.checksum())
        flags = np.array([self.bad, bool(self.error), sizes, -sizes], np.float64)
        self.mesh.data.Allreduce(IN_PLACE, flags, MAX)
        differ = self._differ(sizes, flags[2] != -flags[3])
        if differ and (problem := late_disagreement(self.allgather(self.sizes.drain()))):
            self.since, self.bad, self.error = 0, False, ""
            raise ValueError(problem)
        self.sizes.clear()
        if flags[:2].any():
            self.since, self.bad = 0, False
            error, self.error = self.error, ""
            if flags[1]:
                raise FloatingPointError(error or "the update of another rank: a norm that is not finite")
            return True
        self.average()
        self.since, self.averages, self.averaged = 0, self.averages + 1, True
        return False

    def _differ(self, sizes: float, differ: bool) -> bool:
        """Return, alike on all ranks, whether any had other sizes, in this replica or between replicas."""
        if not self.sum_model:
            return differ
        sums = np.array([differ, *self.code.encode(sizes)])
        self.sum_model(sums)
        return sums[0] > 0 or not self.code.agree(sums[1:])

    def average(self) -> None:
        """Average the replicas, or bring them closer."""
        raise TypeError(f"{type(self).__name__} does not say how")

    def write_synchronized(self):
        if not self.averaged:
            self.average()
        for buffer in (*self.slots.values(), self.buffers):
            if buffer.size:
                self.mean(buffer)

    def synchronize(self):
        self.resume()
        if self.synchronized:
            return False
        if not self.averaged and self.average_replicas():
            return True
        self.write_synchronized()
        self.synchronized = True
        return False

    def epoch_record(self):
        found, self.averages = self.averages, 0
        return {"averages": found}


class Averaged(Replicas):
    """Local SGD: all take the mean.

    Parameters
    ----------
    every : int
    drift : float
        All average before it is time when one is farther from the last average than `drift` times its norm (one number
        is compared in every step); 0 for never.
    """

    def __init__(self, every: int, drift: float = 0.0):
        super().__init__(every)
        self.drift = drift

    def allocate(self):
        super().allocate()
        self.last = self.parameters.copy() if self.drift else None
        self.farthest = 0.0

    def average(self):
        self.mean(self.parameters)
        if self.drift:
            self.last[:] = self.parameters

    def drifted(self):
        if not self.drift:
            return False
        both = self.parameters - self.last, self.last
        squares = np.array([sum(float(np.linalg.norm(v[part])) ** 2 for part in self.region.owned) for v in both])
        if self.sum_model:
            self.sum_model(squares)
        distance, norm = np.sqrt(squares)
        drift = np.array([distance / max(norm, 1e-30) if math.isfinite(distance) else math.inf])
        self.mesh.data.Allreduce(IN_PLACE, drift, MAX)
        self.farthest = max(self.farthest, float(drift[0]))
        return bool(drift[0] > self.drift)

    def trained(self):
        yield from super().trained()
        if self.drift:
            yield self.last

    def loaded(self, steps, anew=()):
        if self.drift:
            self.last[:] = self.parameters

    def epoch_record(self):
        found = super().epoch_record()
        if self.drift:
            found["drift"], self.farthest = round(self.farthest, 6), 0.0
        return found

    def placed(self):
        yield from super().placed()
        yield from in_transit(*([self.last] if self.drift else []))

    def describe(self):
        when = f", or when one has drifted by {self.drift:g}" if self.drift else ""
        return f"replicas averaged every {self.every} steps{when}"


class Outer(Replicas):
    """DiLoCo: an outer optimizer makes a step along the mean of the replicas' differences.

    Parameters
    ----------
    every : int
    outer : SGD
        With a momentum, perhaps.
    """

    def __init__(self, every: int, outer: SGD):
        super().__init__(every)
        self.outer = outer

    def allocate(self):
        super().allocate()
        self.last = self.parameters.copy()  # the last common parameters
        self.outer_slots = {name: self.layout.zeros(self.dtype) for name in self.outer.slots}

    def average(self):
        self.mean(self.parameters)
        np.subtract(self.last, self.parameters, out=self.gradients)
        self.outer.update(self.last, self.gradients, self.outer_slots, 0, self.region)
        self.parameters[:] = self.last

    def trained(self):
        yield from super().trained()
        yield self.last
        yield from self.outer_slots.values()

    def placed(self):
        yield from super().placed()
        for name, slot in self.outer_slots.items():
            yield PlacedArray(f"{OWN}outer/{name}", "moments", slot, self.layout)
        yield from in_transit(self.last)

    def loaded(self, steps, anew=()):
        self.last[:] = self.parameters

    def describe(self):
        return f"rounds of {self.every} inner steps, then {self.outer!r} on the mean difference"


class Elastic(Replicas):
    """EASGD: each replica moves towards a centre, and the centre towards all.

    While ranks are synchronized `parameters` are the centre's; the replica's come back with the next step.

    Parameters
    ----------
    every : int
    alpha : float
        x -= alpha (x - c) of each replica, c += alpha (x - c) of the centre, for all; 0: 0.9 / replicas.
    """

    def __init__(self, every: int, alpha: float = 0.0):
        super().__init__(every)
        self.alpha = alpha

    def allocate(self):
        super().allocate()
        self.alpha = self.alpha or 0.9 / self.mesh.count
        if self.alpha * (1 + self.mesh.count) > 2:
            raise ValueError(
                f"EASGD: with alpha {self.alpha:g} replicas and centre would overshoot each other, further every time: "
                f"use at most 2 / (replicas + 1), here {2 / (1 + self.mesh.count):.3g}"
            )
        self.other = self.parameters.copy()  # the centre while replicas train, this replica where all are looked at

    def begin_step(self, step, samples, total, parts):
        if self.synchronized:
            self._swap()
        return super().begin_step(step, samples, total, parts)

    def _swap(self) -> None:
        self.parameters[:], self.other[:] = self.other.copy(), self.parameters.copy()

    def average(self):
        x, c, d = self.parameters, self.other, self.gradients
        np.subtract(x, c, out=d)
        d *= self.alpha
        x -= d
        self.mesh.sum(d)
        c += d

    def trained(self):
        yield from super().trained()
        yield self.other

    def write_synchronized(self):
        super().write_synchronized()
        self._swap()

    def placed(self):
        yield from super().placed()
        yield PlacedArray(f"{OWN}{self.kind}", "parameters", self.other, self.layout, Shard(1))

    @property
    def kind(self) -> str:
        """Return the name of this replica in a state; it contains the number of replicas."""
        return f"replica-{self.mesh.index}-of-{self.mesh.count}"

    def loaded(self, steps, anew=()):
        """Continue each replica if there are as many; else, and after another strategy, all from the centre."""
        if self.kind in anew:
            self.other[:] = self.parameters

    def describe(self):
        return f"replicas and a centre, which move {self.alpha:.3g} of the way every {self.every} steps"
