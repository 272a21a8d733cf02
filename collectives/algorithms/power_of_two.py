"""Any number of ranks as a power of two: what doubling and halving need.

Of the first 2 * surplus ranks each odd one stands for its left neighbour too; those that stand are numbered anew, in
rank order. It costs a message before and one after.
"""

from typing import NamedTuple

from collectives.steps import Recv, RecvReduce, Send, chunk


class Fold(NamedTuple):
    """How `size` ranks are folded, seen from one of them.

    Attributes
    ----------
    power : int
        how many ranks stand, numbered 0 ... power - 1
    surplus : int
        how many of them stand for two ranks: those of the lowest numbers
    number : int or None
        of this rank; None where its right neighbour stands for it
    """

    power: int
    surplus: int
    number: int | None

    def rank(self, number: int) -> int:
        """The rank that stands under a number."""
        return 2 * number + 1 if number < self.surplus else number + self.surplus

    def first(self, number: int) -> int:
        """The first rank that a number stands for."""
        return 2 * number if number < self.surplus else number + self.surplus

    def swaps(self, block, bit: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(lo, hi) of the blocks of this rank's group of `bit` numbers, and of the group that it swaps with."""
        groups = self.number & -bit, (self.number ^ bit) & -bit
        return tuple((block(self.first(a))[0], block(self.first(a + bit) - 1)[1]) for a in groups)


def fold(rank: int, size: int) -> Fold:
    power = 1 << (size.bit_length() - 1)
    surplus = size - power
    if rank >= 2 * surplus:
        return Fold(power, surplus, rank - surplus)
    return Fold(power, surplus, rank // 2 if rank % 2 else None)


def on_power_of_two(rank, size, exchange, send_slice, result_slice, receive=RecvReduce):
    """Run exchange(folded) on the ranks that stand.

    Before it a rank r for which its neighbour stands sends x[slice(*send_slice(r))] to it, for `receive`; after it r
    receives x[slice(*result_slice(r))].
    """
    folded = fold(rank, size)
    if folded.number is None:
        yield (Send(rank + 1, "x", *send_slice(rank)),)
        yield (Recv(rank + 1, "x", *result_slice(rank)),)
        return
    for_two = folded.number < folded.surplus
    if for_two:
        yield (receive(rank - 1, "x", *send_slice(rank - 1)),)
    yield from exchange(folded)
    if for_two:
        yield (Send(rank - 1, "x", *result_slice(rank - 1)),)


def halves(folded: Fold, count: int) -> list[tuple[int, int, tuple[int, int], tuple[int, int]]]:
    """(bit, peer, slice kept, slice given away) of each round of halving x.

    The nearest partner comes first, which keeps rank order: what is added are always neighbouring groups of ranks.
    """
    lo, hi, bit, path = 0, folded.power, 1, []
    while bit < folded.power:
        middle = (lo + hi) // 2
        lower, upper = (lo, middle), (middle, hi)
        keep, give = (upper, lower) if folded.number & bit else (lower, upper)
        slices = [(chunk(count, folded.power, a)[0], chunk(count, folded.power, b - 1)[1]) for a, b in (keep, give)]
        path.append((bit, folded.rank(folded.number ^ bit), *slices))
        (lo, hi), bit = keep, bit * 2
    return path
