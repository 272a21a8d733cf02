"""Inject faults: a handler is called where this process comes to a place, such as the update of a step.

A place is an audit event of Python (`sys.audit`, PEP 578), which does nothing without a handler. Python's own events,
such as `open` and `os.rename`, come too, and those of any other program (`sys.audit("mine.exchange", step)`).

| event | argument | this rank is about to |
|---|---|---|
| ringprop.resume | trainer | load the last checkpoint, where it continues a run |
| ringprop.compute_gradients | trainer | compute the gradients of a step, or of one of its micro-batches |
| ringprop.read_sums | trainer | read the sums of a step, which all ranks have |
| ringprop.update | trainer | update the parameters |
| ringprop.update_block | step, parameters | update a block of the parameters that the ranks of a node share |
| ringprop.sum_scores | trainer | evaluate a batch |
| ringprop.save | trainer | save a checkpoint |
| ringprop.end_training | trainer | restore the best epoch, after the last checkpoint of a run with --elastic |
| ringprop.leave_network | trainer | write the network |
| ringprop.say_what_next | trainer | print how to use what it has written |
| ringprop.close | trainer | free what the trainer shares with other ranks |
| ringprop.make_communicator | context | make the communicator of an attempt (parallel/elastic/recovery.py) |
| ringprop.agree | members | agree whether all ranks live (parallel/elastic/membership.py) |
| ringprop.recover | members | recover from a death |
| ringprop.replace_ranks | members | start processes in place of lost ranks |
| ringprop.come | | say that it has come, in place of a lost rank |
| ringprop.connect | | connect to all ranks, in place of a lost one |
| ringprop.join | | get the number of the lost rank |
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_handlers: list[Callable[..., object]] = []


def _call_handlers(event: str, arguments: tuple) -> None:
    for handler in tuple(_handlers):  # another thread may be at its end of `inject`
        handler(event, *arguments)


@cache
def _listen() -> None:
    sys.addaudithook(_call_handlers)  # once: Python removes none


@contextmanager
def inject(handler: Callable[..., object]) -> Iterator[None]:
    """Call `handler(event, *arguments)` at each audit event of this process, on any thread, until this block ends.

    What the handler raises is raised at that place. It should return at once from events that are not its own: there
    are many, and what it does itself, such as opening a file, raises more.

    Examples
    --------
    >>> import numpy as np
    >>> import nn, parallel
    >>> from parallel.testing import faults
    >>> network = nn.Network(nn.Linear(3, 2), (3,))
    >>> trainer = parallel.DistributedDataParallel(network, nn.CrossEntropyLoss(), nn.SGD(lr=0.1), None, shards=1)
    >>> def handler(event, *arguments):
    ...     if event == "ringprop.update" and arguments[0].steps == 2:
    ...         raise RuntimeError("a fault before the third update")
    >>> with faults.inject(handler):
    ...     nn.fit(trainer, (np.eye(3), np.array([0, 1, 1])), epochs=5, batch=3)
    Traceback (most recent call last):
    RuntimeError: a fault before the third update
    >>> trainer.steps
    2
    """
    _listen()
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)
