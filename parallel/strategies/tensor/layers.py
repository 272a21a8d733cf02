"""The layers of tensor parallelism under the literature's names: each is a layer of `nn`, cut, between two moves.

    Z = RowLinear(B)(gelu(ColumnLinear(A)(X)))      # one sum forward, in g; one backward, in f

Source: Shoeybi et al. 2019, sections 3 and 4.
"""

from __future__ import annotations

from nn.layers.attention import MultiHeadAttention
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear, TiedLinear
from nn.layers.embedding import Embedding
from parallel.state.splits import Split
from parallel.strategies.tensor.move_wrapper import MoveWrapper
from parallel.strategies.tensor.moves import CopyTo, Move, ReduceFrom, ReduceScatter
from parallel.strategies.tensor.parts import SplitEmbedding


def ColumnLinear(layer: Linear | TiedLinear, enter: Move | None = None) -> MoveWrapper:
    """Some of the outputs on each rank: x W[:, mine] + b[mine]; of a tied matrix some of its rows."""
    splits = {"W": Split(1), "b": Split(0)} if isinstance(layer, Linear) else {}
    return MoveWrapper(layer, enter or CopyTo(), splits=splits)


def RowLinear(layer: Linear, leave: Move | None = None, blocks: int = 1) -> MoveWrapper:
    """Some of the inputs on each rank: the partial outputs x[:, mine] W[mine] are summed; b is added after it, once.

    `blocks`: in how many blocks the inputs are cut, such as the positions of an image that was flattened.
    """
    return _summed(layer, None, leave, {"W": Split(0, blocks)}, "b")


def HeadParallelAttention(
    layer: MultiHeadAttention, enter: Move | None = None, leave: Move | None = None
) -> MoveWrapper:
    """Some of the heads on each rank: queries, keys and values by columns, the projection behind them by rows."""
    heads = layer.heads
    splits = {"Wqkv": Split(1, 3, heads), "bqkv": Split(0, 3, heads), "Wo": Split(0, units=heads)}
    return _summed(layer, enter or CopyTo(), leave, splits, "bo")


def VocabularyParallelEmbedding(layer: Embedding, leave: Move | None = None) -> MoveWrapper:
    """The vectors of some ids on each rank; ids that are elsewhere give zeros, and a sum has all."""
    return _summed(SplitEmbedding(layer), None, leave, {"W": Split(0)}, "")


def ChannelParallelConv2d(layer: Conv2d, enter: Move | None = None) -> MoveWrapper:
    """Some of the channels, of every group, on each rank."""
    return MoveWrapper(layer, enter or CopyTo(), splits={"W": Split(3, layer.groups), "b": Split(0, layer.groups)})


def _summed(layer, enter: Move | None, leave: Move | None, splits: dict[str, Split], late: str) -> MoveWrapper:
    """Where the sum is cut, what is added after it is added to parts: then its gradient is partial."""
    leave = leave or ReduceFrom()
    return MoveWrapper(layer, enter, leave, splits, late, partial=isinstance(leave, ReduceScatter))
