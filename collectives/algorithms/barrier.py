"""Barrier: no rank leaves before every rank has entered."""

from collectives.algorithms.registry import Cost, algorithm, log2
from collectives.steps import Recv, Send


@algorithm("barrier", cost=lambda p, n: Cost(log2(p), log2(p)))
def dissemination(rank, size):
    """In round k each rank sends to the one 2**k to the right: ceil(lg p) alpha for any p.

    After round k a rank knows that the 2**(k+1) - 1 ranks to its left have entered. Source: Hensgen, Finkel and Manber
    1988. A message is one element of scratch, and says only that it has come.
    """
    bit = 1
    while bit < size:
        yield Send((rank + bit) % size, "x", 0, 1), Recv((rank - bit) % size, "tmp", 0, 1)
        bit *= 2
