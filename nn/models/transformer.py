"""Transformers: a language model (GPT, Radford et al. 2018) and an encoder (BERT, Devlin et al. 2018).

Samples are sequences of T ids, `classes` is the size of the vocabulary, and every position has its own output.
"""

from nn.arguments import OneOf
from nn.core.containers import Residual
from nn.core.layer import Layer, Sequential, Shape, ShapeError
from nn.layers.activations import GELU
from nn.layers.attention import TransformerBlock
from nn.layers.dense import Linear, TiedLinear
from nn.layers.dropout import Dropout
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions
from nn.layers.experts import MixtureOfExperts
from nn.layers.normalization import LayerNorm
from nn.models.by_name import model

POSITIONS = "learned", "sinusoidal", "rotary"
MAX_BLOCKS = 1000  # each is made before its parameters are counted


@model("transformer")
def transformer(
    in_shape: Shape,
    classes: int,
    features: int = 128,
    heads: int = 4,
    blocks: int = 2,
    tied: bool = False,
    *,
    dropout: float = 0.0,
    positions: str = "learned",
    attention: str = "whole",
    hidden: int = 0,
    experts: int = 0,
    top: int = 2,
    shared: bool = False,
    gate: str = "softmax",
    capacity: float = 0.0,
    auxiliary: float = 0.01,
    z_loss: float = 0.0,
    noise: float = 0.0,
) -> Sequential:
    """Predicts the next id at every position: causal pre-norm blocks.

    `tied` 1 takes the embedding's matrix for the output too; `positions` are learned, sinusoidal or rotary; `attention`
    is whole, or computed by blocks, such as blocks:128. `hidden` features are between the two linear layers of a block,
    0 for 4 times its features. With `experts` a `MixtureOfExperts` replaces these layers in every block, with as many
    in each expert; each position takes `top` of the experts, and with `shared` 1 one more expert, which all take.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.transformer((12,), 256, 32, 4, 2)
    >>> network.out_shape, network.layout.count
    ((12, 256), 42240)
    """
    length = _length("transformer", in_shape, blocks)
    OneOf(POSITIONS)("transformer: positions", positions)
    layers: list[Layer] = [Embedding(classes, features)]
    layers += [LearnedPositions(length, features)] if positions == "learned" else []
    layers += [SinusoidalPositions()] if positions == "sinusoidal" else []
    layers += [Dropout(dropout)] if dropout else []
    options = {"dropout": dropout, "attention": attention, "rotary": positions == "rotary", "hidden": hidden}
    between = hidden or 4 * features
    for _ in range(blocks):
        mixture: Layer | None = None
        if experts:
            mixture = MixtureOfExperts(features, experts, top, hidden, gate, capacity, auxiliary, z_loss, noise)
        if experts and shared:
            every = Linear(features, between), GELU(), Linear(between, features)
            mixture = Residual(mixture, Sequential(*every))
        layers += [TransformerBlock(features, heads, causal=True, feed_forward=mixture, **options)]
    layers += [LayerNorm(features)]
    layers += [TiedLinear("0.W", features, classes) if tied else Linear(features, classes, bias=False)]
    return Sequential(*layers)


@model("encoder")
def encoder(
    in_shape: Shape,
    classes: int,
    features: int = 128,
    heads: int = 4,
    blocks: int = 2,
    *,
    dropout: float = 0.1,
    attention: str = "whole",
) -> Sequential:
    """Predicts the id at each position from those at all others: post-norm blocks; id 0 is padding.

    Examples
    --------
    >>> import nn
    >>> network = nn.models.encoder((12,), 256, 32, 4, 2)
    >>> network.out_shape, network.layout.count
    ((12, 256), 35168)
    """
    length = _length("encoder", in_shape, blocks)
    return Sequential(
        *(Embedding(classes, features, padding=0), LearnedPositions(length, features), LayerNorm(features)),
        *([Dropout(dropout)] if dropout else []),
        *(TransformerBlock(features, heads, False, False, dropout=dropout, attention=attention) for _ in range(blocks)),
        *(Linear(features, features), GELU(), LayerNorm(features), TiedLinear("0.W", features, classes)),
    )


def _length(model: str, in_shape: Shape, blocks: int) -> int:
    if blocks > MAX_BLOCKS:
        raise ShapeError(f"{model} has at most {MAX_BLOCKS} blocks, given {blocks}")
    if len(in_shape) != 1:
        raise ShapeError(
            f"{model} takes sequences of ids (positions,), such as --data stdlib, given samples of shape {in_shape}"
        )
    return in_shape[0]
