"""A trainer as scripts/train.py runs it and reports on it: what it asks of one process and of many ranks alike."""

from __future__ import annotations

from nn.training.trainer import Trainer


class RunTrainer(Trainer):
    """`nn.Trainer`, with what a run asks of every strategy; here the answers of one process.

    Attributes
    ----------
    communicator, forward_backward : None
        On many ranks, what connects them, and what this one computes of a step.
    local_update : bool
        Whether ranks make steps of their own, and synchronize only in `synchronize`.
    scattered : bool
        Whether the state lies on several ranks, so that `state_items` gathers it.
    on_disk : bool
        Whether some of the state lies in files, because memory is too small for it.
    sends, notes : str
        What a report of memory and messages says beside its numbers.
    phases : tuple of (name, method, together)
        What a step is made of, to be measured: a method of the trainer, or one of its part for "part.method"; whether
        all ranks do it together. It is called without keywords.
    """

    communicator = forward_backward = None
    local_update = scattered = on_disk = False
    sends = notes = ""
    phases = (("compute", "compute_gradients", False), ("update", "update", False))

    def check_replicas(self) -> None:
        """Compare what ranks should hold alike: one process has nothing to compare with."""

    def set_epoch_steps(self, steps: int) -> None:
        """Take the number of steps in an epoch: called before the first step."""

    def bytes_sent(self) -> dict[str, float]:
        """Return what compression saves between ranks, counted; empty where nothing counts it."""
        return {}

    def describe(self) -> str:
        """Return how the work is shared, for the log; empty where there is nothing to say."""
        return ""

    def say(self, line: str) -> None:
        """Take a line for the log; a run puts a function here."""

    def alone(self) -> Trainer | None:
        """Return a trainer of one process with this state, to inspect the network; None on all ranks but the first."""
        return self
