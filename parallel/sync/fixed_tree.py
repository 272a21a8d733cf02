"""One sum, the same bits on any number of ranks: V leaves are added in one fixed binary tree, whoever holds them.

Floating-point addition is not associative, so a sum depends on how it is parenthesised; here the tree over the leaves
0 .. V - 1 says how, and the number of ranks does not. A rank holds consecutive leaves, and keeps of them only the sums
of complete subtrees (at most 2 log2 V arrays). Then every rank receives, for its slice of the elements, all ranks'
subtree sums, and adds them as the tree says; that is what `reduce_scatter` writes down as a schedule. Where a rank's
leaves are one subtree (V and the ranks are powers of two), as many bytes travel as in a ring: (p-1)/p n a rank.

After the reproducible reductions of Demmel and Nguyen (2015) in aim, though not in means: they make the sum independent
of the order of addition, a tree that never changes is enough here, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.algorithms.allgather import ring as ring_allgather
from collectives.steps import Blocks, Copy, Recv, Reduce, Round, Send, blocks, chunk
from parallel.sync.base import GradientSync

Node = tuple[int, int]  # the sum of the leaves lo .. hi - 1


def halves(node: Node) -> tuple[Node, Node]:
    """Return the two subtrees of a node; the left one is complete: its leaves are a power of two."""
    lo, hi = node
    middle = lo + (1 << ((hi - lo - 1).bit_length() - 1))
    return (lo, middle), (middle, hi)


def check_holders(leaves: int, holders: int) -> None:
    """Raise ValueError where a rank would hold no leaf."""
    if leaves < holders:
        raise ValueError(
            f"{leaves} virtual shards for {holders} ranks: {holders - leaves} would have nothing to do; "
            f"use at least {holders} shards or at most {leaves} ranks"
        )


def siblings(leaves: int) -> dict[Node, Node]:
    """Return right subtree -> left subtree, for every inner node of the tree."""
    found, todo = {}, [(0, leaves)]
    for node in todo:
        if node[1] - node[0] > 1:
            left, right = halves(node)
            found[right] = left
            todo += [left, right]
    return found


def cover(leaves: int, held: Node) -> list[Node]:
    """Return the largest subtrees that make up the leaves `held`, from left to right."""
    found, todo = [], [(0, leaves)]
    while todo:
        node = todo.pop()
        if held[0] <= node[0] and node[1] <= held[1]:
            found.append(node)
        elif node[0] < held[1] and held[0] < node[1]:
            todo += reversed(halves(node))
    return found


def dealt(leaves: int, holders: int, rank: int) -> Node:
    """Return the leaves of a rank, which are dealt to the first `holders` ranks."""
    return chunk(leaves, holders, rank) if rank < holders else (leaves, leaves)


def reduce_scatter(rank: int, size: int, count: Blocks, leaves: int, holders: int | None = None) -> Iterator[Round]:
    """Block `rank` of the tree's sum into x; (p-1) alpha + s (p-1)/p n beta for ranks that hold s subtrees each.

    x holds this rank's subtree sums one after the other, n elements each; the result lies where it lies in the first.
    Leaves are held by the first `holders` ranks, by default all.
    """
    block = blocks(count, size)
    n = block(size - 1)[1]
    held = [cover(leaves, dealt(leaves, holders or size, r)) for r in range(size)]
    lo, hi = block(rank)
    place = {node: ("x", i * n + lo) for i, node in enumerate(held[rank])}  # where this rank's slice of a sum lies
    foreign = [node for r in range(size) if r != rank for node in held[r]]
    place |= {node: ("got", i * (hi - lo)) for i, node in enumerate(foreign)}

    def slice_of(node: Node) -> tuple[str, int, int]:
        buf, at = place[node]
        return buf, at, at + hi - lo

    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        a, b = block(to)
        sends = (Send(to, "x", i * n + a, i * n + b) for i in range(len(held[rank])))
        yield (*sends, *(Recv(source, *slice_of(node)) for node in held[source]))
    left_of = siblings(leaves)
    while len(place) > 1:
        pairs = [(left, right) for right, left in left_of.items() if left in place and right in place]
        yield tuple(Reduce(*slice_of(left), *place[right], operand_left=False) for left, right in pairs)
        for left, right in pairs:
            place[left[0], right[1]] = place.pop(left)
            del place[right]
    if place[0, leaves] != ("x", lo):
        yield (Copy("x", lo, hi, *place[0, leaves]),)


def allreduce(rank: int, size: int, count: Blocks, leaves: int, holders: int | None = None) -> Iterator[Round]:
    """The tree's whole sum into the first n elements of every rank's x: `reduce_scatter`, then a ring allgather."""
    yield from reduce_scatter(rank, size, count, leaves, holders)
    yield from ring_allgather(rank, size, count)


class TreeSum:
    """Sums arrays, given one leaf at a time by the ranks that hold them.

        tree = TreeSum(8, n, np.float32, communicator)
        for leaf in range(*tree.mine):
            tree.add(gradient of that leaf)
        total = tree.allreduce()        # or tree.reduce_scatter() for a slice of it

    Parameters
    ----------
    leaves : int
        V; at least as many as ranks that hold some. Rank r of p holds chunk(V, p, r).
    count : int
        Elements of a leaf.
    dtype : float32 or float64
    communicator : collectives.Communicator or None
        None for one process.
    cuts : sequence of (lo, hi) or None
        The slice of every rank, in order; None cuts evenly. The bits do not depend on it.
    holders : int or None
        How many ranks hold leaves: the first ones; None for all.

    Attributes
    ----------
    mine : (first, last)
        This rank's leaves, half open.
    """

    def __init__(self, leaves: int, count: int, dtype, communicator=None, cuts=None, holders: int | None = None):
        rank, size = (communicator.rank, communicator.size) if communicator else (0, 1)
        holders = holders or size
        check_holders(leaves, holders)
        self.leaves, self.count, self.communicator, self.holders = leaves, count, communicator, holders
        self.mine = dealt(leaves, holders, rank)
        self.cuts = [chunk(count, size, r) for r in range(size)] if cuts is None else list(cuts)
        self.slice = slice(*self.cuts[rank])
        self._left_of = siblings(leaves)
        self._stack: list[Node] = []
        deepest = max((len(cover(leaves, (self.mine[0], leaf + 1))) for leaf in range(*self.mine)), default=1)
        self.sums = np.zeros((deepest, count), dtype)
        self._plans: dict = {}

    def reset(self) -> None:
        """Forget the leaves of a sum that is not complete: the step that gave them has failed."""
        self._stack.clear()

    def add(self, leaf: np.ndarray) -> None:
        """Add the next of this rank's leaves; it is copied or added, and may be used again."""
        stack, at = self._stack, self._stack[-1][1] if self._stack else self.mine[0]
        node, value = (at, at + 1), leaf
        while stack and stack[-1] == self._left_of.get(node):  # its left sibling is there: they are one
            left = self.sums[len(stack) - 1]
            left += value
            node, value = (stack.pop()[0], node[1]), left
        if value is leaf:
            np.copyto(self.sums[len(stack)], leaf)
        stack.append(node)

    def allreduce(self) -> np.ndarray:
        """Return the sum of all leaves, on every rank: an array that the next sum overwrites."""
        self._communicate(allreduce)
        return self.sums[0]

    def reduce_scatter(self) -> np.ndarray:
        """Return this rank's slice of the sum of all leaves."""
        self._communicate(reduce_scatter)
        return self.sums[0, self.slice]

    def _communicate(self, schedule) -> None:
        if (self._stack[-1][1] if self._stack else self.mine[0]) != self.mine[1]:
            raise RuntimeError(f"this rank holds the leaves {self.mine}, and was given those of {self._stack} so far")
        self.reset()  # the next leaf begins another sum
        if self.communicator is None or self.communicator.size == 1:
            return
        if schedule not in self._plans:
            rounds = schedule(self.communicator.rank, self.communicator.size, self.cuts, self.leaves, self.holders)
            self._plans[schedule] = self.communicator.compile(rounds, x=self.sums.reshape(-1))
        self.communicator.Run(self._plans[schedule], f"tree {schedule.__name__}")

    def release(self) -> None:
        """Free the plans."""
        for plan in self._plans.values():
            plan.free()
        self._plans = {}


class FixedTree(GradientSync):
    """Gradients and step messages of all virtual shards are summed in the tree, and every rank makes the same update.

    It is that of one process, too: with as many shards it computes the same bits.
    """

    def allocate(self):
        super().allocate()
        self.trees = (TreeSum(self.addends, len(self.flat_buffer), self.dtype, self.mesh.communicator),)

    def end_addend(self):
        self.trees[0].add(self.flat_buffer)

    def finish_step(self):
        np.copyto(self.flat_buffer, self.trees[0].allreduce())
        return super().finish_step()
