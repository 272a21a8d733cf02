"""The roles of Sandblaster: coordinator, shards and replicas run L-BFGS, and none of them holds all of it.

    coordinator   runs the algorithm: commands the shards, deals the batch to idle replicas; holds scalars only
    shard         a slice of every vector (parameters, gradient, direction, pairs), and the sums of its slice
    replica       pulls the parameters, computes the gradient of a chunk of the batch, pushes its slices to the shards

An **evaluation** is one loss and one gradient of the whole batch. The coordinator cuts the batch into chunks of a few
samples, and gives a replica the next one whenever it is done with one: so a fast replica does more of them, and nobody
waits for the slowest. At the tail, when all are dealt, an idle replica gets one that another has not finished yet (a
backup task); whoever comes second is not counted.

A shard adds chunks in one fixed tree, whatever the order in which they come, and drops what came before: so the sum has
the same bits for any number of replicas, any order of arrival and any chunk computed twice. Only dot products depend
on the number of shards, by rounding.

Source: Dean et al. 2012, section 4.2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from nn.optim.lbfgs import Vectors
from parallel.sync.fixed_tree import Node, siblings
from parallel.sync.mailbox import Actor, Message

COORDINATOR = ("coordinator", 0)
KINDS = (
    "dot", "copy", "scale", "axpy", "begin",  # coordinator to shards
    "product", "summed",  # and back
    "start", "chunk", "stop",  # coordinator to replicas (stop: to all)
    "idle", "computed",  # and back
    "pull", "push",  # replica to shards
    "slice",  # and back
    "bye",  # from a replica, and back from the shards: nothing more comes in this search
)  # fmt: skip


class ParameterShard(Actor):
    """A slice of every vector, and what the coordinator lets it do with them.

    Parameters
    ----------
    number : int
    vectors : Vectors
        Of this slice: "w" and "g" at least.
    names : list of str
        Of all vectors, as messages number them.
    replicas : int
    mailbox : where messages are sent
    """

    def __init__(self, number: int, vectors: Vectors, names: list[str], replicas: int, mailbox):
        super().__init__(mailbox, ("shard", number))
        self.vectors, self.names = vectors, names
        self.open = self.evaluation = 0  # whether chunks are missing, and of which evaluation
        self.replicas, self.late = replicas, []  # pulls that have come before what they ask for
        self.done = False

    def start_search(self) -> None:
        """Expect the messages of a search, and their end."""
        self.left, self.done = 1 + self.replicas, False

    def handle(self, message: Message) -> None:
        """Obey a command of the coordinator, or serve a replica."""
        kind, header = message.kind, message.header
        match kind:
            case "dot":
                a, b = self._vectors(header)
                self.send(COORDINATOR, "product", (self.vectors.dot(a, b),))
            case "copy":
                self.vectors.copy(*self._vectors(header))
            case "scale":
                self.vectors.scale(*self._vectors(header[:1]), header[1])
            case "axpy":
                to, x = self._vectors(header[:2])
                self.vectors.axpy(to, header[2], x)
            case "begin":
                self._begin(*map(int, header))
            case "pull":
                self._pull(message)
            case "push":
                self._push(*map(int, header), message.array)
            case "stop" | "bye":
                if kind == "bye":  # a replica asks for nothing more: so it gets nothing more
                    self.send(message.sender, "bye")
                self.left -= 1
                self.done = not self.left

    def _vectors(self, numbers) -> list[str]:
        return [self.names[int(i)] for i in numbers]

    def _begin(self, evaluation: int, chunks: int) -> None:
        self.evaluation, self.open = evaluation, True
        self.right_of = {left: right for right, left in siblings(chunks).items()}
        self.left_of = siblings(chunks)
        self.whole: Node = (0, chunks)
        self.sums: dict[Node, np.ndarray] = {}
        self.seen: set[int] = set()
        late, self.late = self.late, []
        for message in late:
            self._pull(message)

    def _pull(self, message: Message) -> None:
        """Answer with the parameters, if they are those that the replica means."""
        asked = int(message.header[0])
        if asked > self.evaluation:  # by who has heard of an evaluation before this shard has
            self.late.append(message)
        elif self.open and asked == self.evaluation:  # else all has been computed without that replica
            self.send(message.sender, "slice", message.header, self.vectors.arrays["w"])

    def _push(self, evaluation: int, chunk: int, gradient: np.ndarray) -> None:
        """Add a chunk's gradient, unless it has been added; with its neighbour, once that is here too."""
        if not self.open or evaluation != self.evaluation or chunk in self.seen:
            return
        self.seen.add(chunk)
        g = self.vectors.arrays["g"]
        node, total = (chunk, chunk + 1), gradient.view(g.dtype)
        while node != self.whole:
            right, left = self.right_of.get(node), self.left_of.get(node)
            if right in self.sums:
                total, node = np.add(total, self.sums.pop(right), out=total), (node[0], right[1])
            elif left in self.sums:
                total, node = np.add(self.sums.pop(left), total, out=total), (left[0], node[1])
            else:
                self.sums[node] = total
                return
        g[:] = total
        self.open = False
        self.send(COORDINATOR, "summed", (evaluation,))


class Replica(Actor):
    """Compute gradients of chunks.

    Parameters
    ----------
    number : int
    slices : list of slice
        Of the parameters, those of each shard.
    parameters, gradients : flat arrays
        Of all parameters; what `compute` reads and writes.
    compute : callable (chunk) -> float
        The loss of a chunk of the batch; its gradient goes into `gradients`.
    mailbox : where messages are sent

    """

    def __init__(
        self, number: int, slices: list[slice], parameters, gradients, compute: Callable[[int], float], mailbox
    ):
        super().__init__(mailbox, ("replica", number))
        self.slices = slices
        self.parameters, self.gradients, self.compute = parameters, gradients, compute
        self.wanted = -1  # the evaluation whose parameters are asked for
        self.done = False

    def start_search(self) -> None:
        """Expect the messages of a search."""
        self.left, self.done = len(self.slices), False

    def handle(self, message: Message) -> None:
        """Obey a command of the coordinator, or take a slice from a shard."""
        match message.kind:
            case "start":  # the parameters of an evaluation are to be pulled
                self.wanted, self.missing = int(message.header[0]), len(self.slices)
                for i in range(len(self.slices)):
                    self.send(("shard", i), "pull", message.header)
            case "slice" if message.header[0] == self.wanted:
                self.parameters[self.slices[message.sender[1]]] = message.array.view(self.parameters.dtype)
                self.missing -= 1
                if not self.missing:
                    self.send(COORDINATOR, "idle", message.header)
            case "chunk":
                evaluation, chunk = message.header
                loss = self.compute(int(chunk))
                for i, share in enumerate(self.slices):
                    self.send(("shard", i), "push", (evaluation, chunk), self.gradients[share])
                self.send(COORDINATOR, "computed", (evaluation, chunk, loss))
            case "stop":
                for i in range(len(self.slices)):
                    self.send(("shard", i), "bye")
                self.send(COORDINATOR, "bye")
            case "bye":
                self.left -= 1
                self.done = not self.left


class Coordinator(Actor):
    """Runs an algorithm on vectors that it does not hold: what `LBFGS` asks of `Vectors`, and its evaluations.

    Parameters
    ----------
    names : list of str
        Of all vectors.
    shards, replicas : int
    mailbox : where messages are sent

    Attributes
    ----------
    evaluations : int
        Made so far: the number of the last one.
    current : bool
        Whether "w" is what all replicas have.
    """

    def __init__(self, names: list[str], shards: int, replicas: int, mailbox):
        self.numbers = {name: float(i) for i, name in enumerate(names)}
        super().__init__(mailbox, COORDINATOR)
        self.shards, self.replicas = shards, replicas
        self.evaluations = 0
        self.chunks = 0  # of a batch
        self.current = False

    def start_search(self) -> None:
        """Expect the messages of a search."""
        self.left = self.replicas

    done = property(lambda self: not self.left)

    # ------------------------------------------------------------------------------------------------ vectors

    def dot(self, a: str, b: str) -> float:
        """a . b: the sum of what the shards have."""
        self.products: list[float] = []
        self._send_shards("dot", (self.numbers[a], self.numbers[b]))
        self.mailbox.wait(lambda: len(self.products) == self.shards)
        return math.fsum(self.products)

    def copy(self, to: str, source: str) -> None:
        """to = source."""
        self.current &= to != "w"
        self._send_shards("copy", (self.numbers[to], self.numbers[source]))

    def scale(self, a: str, factor: float) -> None:
        """a *= factor."""
        self._send_shards("scale", (self.numbers[a], factor))

    def axpy(self, to: str, factor: float, x: str) -> None:
        """to += factor x."""
        self.current &= to != "w"
        self._send_shards("axpy", (self.numbers[to], self.numbers[x], factor))

    # ------------------------------------------------------------------------------------------------ evaluations

    def evaluate(self) -> float:
        """The loss of the batch at "w", its gradient into "g"."""
        self._begin(range(self.chunks))
        self.mailbox.wait(lambda: len(self.losses) == self.chunks and self.summed == self.shards)
        self.current = len(self.pulled) == self.replicas
        return math.fsum(self.losses.values())

    def refresh(self) -> None:
        """Let all replicas have the parameters as they are now: an evaluation of which nothing is dealt."""
        self._begin(())
        self.mailbox.wait(lambda: len(self.pulled) == self.replicas)
        self.current = True

    def _begin(self, chunks) -> None:
        self.evaluations += 1
        self.waiting, self.out, self.losses = deque(chunks), {}, {}  # out: to which replicas a chunk was given
        self.pulled, self.summed = set(), 0
        self._send_shards("begin", (self.evaluations, self.chunks))
        self._send_replicas("start", (self.evaluations,))

    def handle(self, message: Message) -> None:
        """Note the answers of shards and replicas."""
        header, replica = message.header, message.sender[1]
        match message.kind:
            case "product":
                self.products.append(header[0])
            case "summed":
                self.summed += 1
            case "idle" if header[0] == self.evaluations:
                self.pulled.add(replica)
                self._deal(replica)
            case "computed" if header[0] == self.evaluations:
                self.losses.setdefault(int(header[1]), header[2])
                self.out.pop(int(header[1]), None)
                self._deal(replica)
            case "bye":
                self.left -= 1

    def _deal(self, replica: int) -> None:
        """Give an idle replica the next chunk; at the tail, the one that has been out for longest, but once only."""
        if self.waiting:
            chunk = self.waiting.popleft()
            self.out[chunk] = [replica]
        else:
            chunk = next((c for c, given in self.out.items() if len(given) == 1 and replica not in given), None)
            if chunk is None:
                return
            self.out[chunk].append(replica)
        self.send(("replica", replica), "chunk", (self.evaluations, chunk))

    def stop(self) -> None:
        """End a search: return when all messages of the replicas are here."""
        self._send_replicas("stop")
        self._send_shards("stop")
        self.mailbox.wait(lambda: self.done)

    def _send_shards(self, kind: str, header=()) -> None:
        for i in range(self.shards):
            self.send(("shard", i), kind, header)

    def _send_replicas(self, kind: str, header=()) -> None:
        for i in range(self.replicas):
            self.send(("replica", i), kind, header)
