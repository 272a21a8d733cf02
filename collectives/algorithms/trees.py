"""Two binary trees over the same ranks, in which no rank but at most one is inside both.

Source: Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Tree:
    """For every rank its parent (None for the root), children, height over the leaves below, and depth."""

    root: int
    parent: list[int | None]
    children: list[list[int]]
    height: list[int]
    depth: list[int]


def binary_tree(size: int, name=lambda i: i) -> Tree:
    """The tree in which odd places are leaves and a place has as many levels below it as trailing zeros.

    The parent of place i is (i ^ bit) | (bit << 1), with bit its lowest set bit, or i ^ bit where that is beyond the
    last; place 0 is the root, over one child. `name` gives the rank at a place.
    """
    parent: list[int | None] = [None] * size
    children: list[list[int]] = [[] for _ in range(size)]
    height, depth = [0] * size, [0] * size
    for i in range(1, size):
        bit = i & -i
        up = i ^ bit | bit << 1
        up = i ^ bit if up >= size else up
        parent[name(i)] = name(up)
        children[name(up)].append(name(i))
    order = [name(0)]
    for rank in order:
        for child in children[rank]:
            depth[child] = depth[rank] + 1
            order.append(child)
    for rank in reversed(order):
        height[rank] = max((height[child] + 1 for child in children[rank]), default=0)
    return Tree(name(0), parent, children, height, depth)


@lru_cache(maxsize=8)
def two_trees(size: int) -> tuple[Tree, Tree]:
    """The tree and its mirror image, or for an odd number of ranks the tree shifted by one."""
    if size % 2 == 0:
        return binary_tree(size), binary_tree(size, lambda i: size - 1 - i)
    return binary_tree(size), binary_tree(size, lambda i: (i + 1) % size)
