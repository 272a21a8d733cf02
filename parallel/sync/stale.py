"""Gradients summed while the next steps compute, and applied S steps late, without a server.

    step        | k          | k+1        | k+2
    compute     | g(k)       | g(k+1)     | g(k+2)
    messages         | sum of g(k)  | sum of g(k+1) ...
    update      | of k-S     | of k+1-S   | of k+2-S

All ranks apply the same sums in the same order, so they hold the same parameters; in the first S steps nothing is
applied. At the end of an epoch, and for a checkpoint (`synchronize`), ranks wait for the sums in flight and apply them,
so nothing is lost, and the next S steps apply nothing again. Looking in between shows the same, and changes nothing.

The loss travels behind the gradients, and so comes S steps late as well: a step returns the loss of its own part of the
batch times the ranks, and all ranks learn S steps later of a loss that is not finite. Its gradients, and those after
it, are applied nowhere. Running statistics are each rank's own until ranks synchronize, and become their mean.

Cost: S + 1 more buffers; of a step max(compute, 2 n (p-1)/p beta), whatever S >= 1, where messages move by themselves.
Sources: Agarwal and Duchi 2011 (delayed gradients); Li et al. 2018 (Pipe-SGD).
"""

from __future__ import annotations

import math

import numpy as np
from mpi4py import MPI

from parallel.state.placed import in_transit
from parallel.sync.local_update import LocalUpdate, temporarily
from parallel.sync.step_result import StepMessage, StepResult, disagreement


class Stale(LocalUpdate):
    """Every rank has all parameters, and applies the sums of gradients some steps late.

    Parameters
    ----------
    delay : int
        S, at least 1.
    """

    sends = "2"
    phases = (
        ("compute", "compute_gradients", False),
        ("communicate", "sync.wait", False),
        ("update", "sync.apply", False),
    )

    def __init__(self, delay: int):
        self.delay = delay

    def allocate(self):
        super().allocate()
        threads = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        self.communicator = self.mesh.communicator.Dup(progress=threads)
        self.idle = [
            InFlight(self.communicator, np.zeros_like(self.flat_buffer), self.layout.size, self.addends)
            for _ in range(self.delay + 1)
        ]
        self.in_flight: list[InFlight] = []  # the oldest first

    def begin_pass(self, micro):
        return self.poke

    def poke(self, end: int = 0) -> None:
        """Advance the sums in flight, between layers."""
        for reduction in self.in_flight:
            reduction.request.Test()

    def finish_step(self):
        own = float(self.message.loss)
        self.bad |= not math.isfinite(own)
        reduction = self.idle.pop()
        reduction.flat_buffer[:] = self.flat_buffer
        reduction.step, reduction.total, reduction.rate = self.step, self.total, float(self.optimizer.lr)
        reduction.request.Start()
        self.in_flight.append(reduction)
        loss = own * self.mesh.count if math.isfinite(own) else 0.0
        if len(self.in_flight) > self.delay and self.complete_oldest():
            loss = math.nan
        return StepResult(loss, True)

    def update(self):
        """Do nothing: `complete_oldest` has applied what was due."""

    def complete_oldest(self) -> bool:
        """Wait for the oldest sum, and apply it; return whether its loss is not finite.

        Raises
        ------
        ValueError
            On all ranks: they were given different sizes of that batch.
        """
        reduction = self.in_flight.pop(0)
        self.wait(reduction)
        self.idle.append(reduction)
        result = reduction.message.result()
        if not result.agreed:
            self.drop()
            settings = self.mesh.allgather((reduction.total, f"lr={reduction.rate}, now {self.optimizer!r}"))
            raise ValueError(disagreement(reduction.step, *zip(*settings, strict=True)))
        if not math.isfinite(result.loss):
            self.drop()
            return True
        try:
            self.apply(reduction)
        except FloatingPointError:  # on all ranks
            self.drop()
            raise
        return False

    def wait(self, reduction: InFlight) -> None:
        """Wait until that sum is complete."""
        reduction.request.Wait()

    def apply(self, reduction: InFlight) -> None:
        """Update with a sum, at the rate of its own step."""
        with temporarily(self.optimizer, lr=reduction.rate):
            self.optimizer.update(self.parameters, reduction.gradients, self.slots, reduction.step, self.region)

    def drop(self) -> None:
        """Complete the sums in flight, without applying them: training ends."""
        while self.in_flight:
            reduction = self.in_flight.pop(0)
            self.wait(reduction)
            self.idle.append(reduction)
        self.bad, self.synchronized = False, True

    def reset(self):
        super().reset()
        self.drop()

    def trained(self):
        yield from super().trained()
        for reduction in self.in_flight:
            self.wait(reduction)  # its sum arrives in the array
            yield reduction.flat_buffer  # whose gradients an optimizer may overwrite

    def write_synchronized(self):
        for reduction in self.in_flight:
            self.wait(reduction)
            result = reduction.message.result()
            if not result.agreed or not math.isfinite(result.loss):  # training will end here
                break
            try:
                self.apply(reduction)
            except FloatingPointError:
                break
        if self.buffers.size:
            self.mean(self.buffers)

    def synchronize(self):
        self.resume()
        if self.synchronized:
            return False
        while self.in_flight:
            if self.complete_oldest():
                return True
        if self.buffers.size:
            self.mean(self.buffers)
        self.synchronized = True
        return False

    def placed(self):
        yield from super().placed()
        yield from in_transit(*(reduction.flat_buffer for reduction in (*self.idle, *self.in_flight)))

    def describe(self):
        steps = "1 step" if self.delay == 1 else f"{self.delay} steps"
        return f"gradients summed by messages while the next steps compute, applied {steps} late"

    def close(self):
        self.drop()
        self.communicator.Free()


class InFlight:
    """The sum in flight of one step: gradients, and the message behind them.

    Parameters
    ----------
    communicator : collectives.Communicator
        Of all ranks that sum it (collective).
    flat_buffer : flat array
    size : int
        Of the gradients.
    addends : int
        As for StepMessage.
    """

    def __init__(self, communicator, flat_buffer: np.ndarray, size: int, addends: int):
        self.flat_buffer, self.gradients = flat_buffer, flat_buffer[:size]
        self.message = StepMessage.of(flat_buffer[size:], addends)
        self.request = communicator.Allreduce_init(MPI.IN_PLACE, flat_buffer)
        self.step = self.total = 0
        self.rate = 0.0
