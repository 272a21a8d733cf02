"""A recurrent language model: what came before transformers (Graves 2013; Karpathy 2015, characters of Shakespeare).

Samples are sequences of T ids, `classes` is the size of the vocabulary, and every position has its own output.
"""

from nn.core.layer import Layer, Sequential, Shape, ShapeError
from nn.initializers import normal
from nn.layers.dense import Linear
from nn.layers.dropout import Dropout
from nn.layers.embedding import Embedding
from nn.layers.recurrent import LSTM
from nn.models.by_name import model

MAX_LAYERS = 1000  # each is made before its parameters are counted


@model("lstm")
def lstm(
    in_shape: Shape, classes: int, features: int = 128, layers: int = 2, truncate: int = 0, *, dropout: float = 0.0
) -> Sequential:
    """Predicts the next id at every position: LSTMs one above the other.

    Vectors of ids are drawn from N(0, 1): from smaller ones, as transformers have them, two layers take long to see
    anything but how frequent each id is. Gradients of states do not go back beyond a multiple of `truncate` steps;
    0: they go back to the first.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.lstm((12,), 256, 32, 1)
    >>> network.out_shape, network.layout.count
    ((12, 256), 24960)
    """
    if layers > MAX_LAYERS:
        raise ShapeError(f"lstm has at most {MAX_LAYERS} layers, given {layers}")
    if len(in_shape) != 1:
        raise ShapeError(
            f"lstm takes sequences of ids (positions,), such as --data stdlib, given samples of shape {in_shape}"
        )
    stack: list[Layer] = [Embedding(classes, features, init=normal())]
    for _ in range(layers):
        stack += [LSTM(features, features, truncate=truncate), *([Dropout(dropout)] if dropout else [])]
    return Sequential(*stack, Linear(features, classes))
