"""Transformers of billions of parameters, by the formulas of their authors: operations, bytes, seconds of a step.

l layers of width h with a heads, s places, vocabulary V; B samples a step in micro-batches of b; t ranks share a layer,
p a pipeline of v chunks a rank.

| what | formula | source |
|---|---|---|
| operations of a step, everything computed twice forward | 96 B s l h^2 (1 + s/6h + V/16lh) | Narayanan et al. 2021 |
| days of training with T tokens, P parameters | 8 T P / (ranks x rate) | the same |
| activations of a layer, bytes | s b h (34 + 5as/h), shared by t: (10 + 24/t + 5as/ht) | Korthikanti et al. 2022 |
| with sequence parallelism | (s b h / t) (34 + 5as/h); attention computed twice: 34 s b h / t | the same |

`Machine` gives seconds: products at a share of the peak that grows with their size, what is elementwise at that of the
memory, sums over the t ranks on the fast network, and between stages on the slow one (Isaev et al. 2023).
"""

from __future__ import annotations

from typing import NamedTuple

from collectives.pricing.networks import Link, Network
from parallel.planning.group_costs import Group, message

HALF = 2  # bytes of an element


class Transformer(NamedTuple):
    """Of layers, width, heads; places and vocabulary as in the papers."""

    layers: int
    width: int
    heads: int
    length: int = 2048
    vocabulary: int = 51_200

    @property
    def parameters(self) -> float:
        """12 l h^2 (1 + 13/12h + (V + s)/12lh)."""
        l, h = self.layers, self.width
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (self.vocabulary + self.length) / (12 * l * h))

    def operations(self, samples: float) -> float:
        """Floating-point operations of a step in which every forward pass is computed twice."""
        l, h, s, vocabulary = self.layers, self.width, self.length, self.vocabulary
        return 96 * samples * s * l * h**2 * (1 + s / (6 * h) + vocabulary / (16 * l * h))

    def activations(self, samples: float, parts: int = 1, sequence: bool = False, selective: bool = False) -> float:
        """Bytes that a layer keeps on each of `parts` ranks.

        Parameters
        ----------
        sequence : norms and dropout are shared out too
        selective : attention's scores are computed again
        """
        s, h, t = self.length, self.width, parts
        scores = 0.0 if selective else 5 * self.heads * s / h
        if sequence:
            return s * samples * h / t * (34 + scores)
        return s * samples * h * (10 + 24 / t + scores / t)


def training_days(tokens: float, parameters: float, ranks: int, rate: float) -> float:
    """8 T P / (n X), X operations a second of a rank."""
    return 8 * tokens * parameters / (ranks * rate) / 86_400


class Machine(NamedTuple):
    """What a rank does: a peak, and the share of it that operations of so many units reach.

    Attributes
    ----------
    peak, memory : operations a second of products; bytes a second of its memory
    products, moves : ((size, share), ...) largest first: operations, bytes
    network : inside, the t ranks of a layer; between, stages
    """

    peak: float
    memory: float
    products: tuple[tuple[float, float], ...]
    moves: tuple[tuple[float, float], ...]
    network: Network

    def multiply(self, operations: float, nbytes: float) -> float:
        """A product: what it reads and writes goes before and after it, as the shares were measured."""
        return operations / (self.peak * share(self.products, operations)) + self.move(nbytes)

    def move(self, nbytes: float) -> float:
        return nbytes / (self.memory * share(self.moves, nbytes))


def share(table: tuple[tuple[float, float], ...], size: float) -> float:
    """Of the first row that is not larger."""
    return next((part for least, part in table if size >= least), table[-1][1])


# Published figures of the machine, and shares that Isaev et al. 2023 measured (Calculon's description of it).
A100 = Machine(
    312e12,
    2048e9,
    ((128e9, 0.99), (16e9, 0.9), (1e9, 0.6), (0.0, 0.1)),
    ((100e6, 0.95), (10e6, 0.90), (1e6, 0.7), (0.0, 0.3)),
    Network(Link(10e-6, 1 / (300e9 * 0.65)), Link(20e-6, 1 / (25e9 * 0.9)), 8, source="A100, NVLink 3, 200 Gbit/s"),
)


class StepCost(NamedTuple):
    """Seconds of a step, and what a micro-batch takes of it on the slowest rank."""

    seconds: float
    forward: float
    backward: float
    sums: float
    between: float
    update: float
    bubble: float


def step(
    model: Transformer,
    machine: Machine,
    batch: int,
    micro: int = 1,
    parts: int = 1,
    stages: int = 1,
    chunks: int = 1,
    selective: bool = False,
) -> StepCost:
    """Seconds of a step: every layer's products, elementwise work and sums; stages in (interleaved) 1F1B; Adam.

    Parameters
    ----------
    micro : samples of a micro-batch
    selective : sequence parallelism, and only attention is computed twice; else everything is
    """
    s, h, b, t = model.length, model.width, micro, parts
    rows, x = s * b, HALF * s * b * h  # bytes of an activation
    scores = model.heads * s * s * b / t  # elements
    wide = t if selective else 1  # ranks that share norms and dropout

    def product(inner: float, outer: float) -> float:
        operations = 2 * rows * inner * outer / t
        return machine.multiply(operations, HALF * (rows * inner + inner * outer / t + rows * outer / t))

    attention = 2 * machine.multiply(2 * rows * s * h / t, HALF * (scores + 2 * rows * h / t))
    attention += machine.move(2 * HALF * scores) + machine.move((2 * HALF + 1) * scores)  # softmax, dropout
    products = product(h, 3 * h) + product(h, h) + 2 * product(h, 4 * h)
    elementwise = 2 * machine.move(2 * x / wide) + 2 * machine.move(3.5 * x / wide) + machine.move(8 * x / t)
    forward = products + attention + elementwise
    backward = 2 * (products + attention) + 2 * elementwise + (attention if selective else forward)
    one = ring(t, x, machine.network.inside)
    sums = one * (4 if selective else 6)  # two each way, and two of what is computed again
    logits = 3 * product(h, model.vocabulary)
    own = model.layers / stages
    crossing = 2 * chunks * message(machine.network.between, x / t) if stages > 1 else 0.0
    adding = machine.move(8 * model.parameters / (t * stages))  # gradients in single precision, read and written
    busy = own * (forward + backward + sums) + logits + crossing + adding
    count = batch / micro
    bubble = (stages - 1) / chunks * (own * (forward + backward + sums) + crossing + adding)
    update = machine.move(32 * model.parameters / (t * stages))  # 16 bytes a parameter, read and written
    return StepCost(
        count * busy + bubble + update, own * forward, own * backward + adding, own * sums, crossing, update, bubble
    )


def ring(count: int, nbytes: float, link: Link) -> float:
    """An allreduce, or a reduce-scatter and an allgather, of a library that starts once: alpha + 2 (t-1)/t n beta."""
    return link.alpha + 2 * Group(count).sent(nbytes) * link.beta if count > 1 else 0.0
