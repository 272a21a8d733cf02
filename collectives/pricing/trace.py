"""What happened in a simulation: rounds, messages, local work, shares of channels. event_simulation.py fills it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from collectives.steps import Barrier, Compute, Copy, Recv, RecvReduce, Reduce, Round, Send


class Flight(NamedTuple):
    """One message, in seconds from the start: `start` at the sender's port, `end` in the receiver's hands.

    Its sender had it `ready` before, if the port was busy or the receive was not there yet; and it had `arrived` before
    the end if the receiver was busy. It is added in `adding` seconds behind the end.
    """

    source: int
    dest: int
    send: Send
    recv: Recv | RecvReduce
    start: float
    end: float
    sent_in: int  # round of the sender
    received_in: int  # round of the receiver
    ready: float
    arrived: float
    adding: float


class Span(NamedTuple):
    """One round of one rank, in seconds from the start."""

    rank: int
    index: int
    start: float
    end: float
    steps: Round


class Work(NamedTuple):
    """One Copy, Reduce, Barrier or Compute of a rank in its round `index`, in seconds from the start."""

    rank: int
    index: int
    step: Copy | Reduce | Barrier | Compute
    start: float
    end: float


class Share(NamedTuple):
    """The rate of a flow on its channels, in bytes a second, from `start` to `end` in seconds."""

    source: int
    dest: int
    channels: tuple[int, ...]
    start: float
    end: float
    rate: float


@dataclass
class Trace:
    """Every round, message and piece of work of a simulation, and the order in which rounds began and ended.

    Attributes
    ----------
    rounds, flights, works : list of Span, Flight, Work
    lost : list of Flight
        Messages that no rank received; only of a schedule that is wrong.
    log : list of ("begin" or "end", rank, round)
        In causal order: a round ends after those from which it received began.
    itemsize : int
        Bytes of an element.
    shares : list of Share
        On networks where messages share channels.
    """

    rounds: list[Span] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    lost: list[Flight] = field(default_factory=list)
    log: list[tuple[str, int, int]] = field(default_factory=list)
    itemsize: int = 1
    shares: list[Share] = field(default_factory=list)
