"""A network rewritten for ranks that compute its layers together: which layer is cut how, and what moves between them.

    shared, loss, cuts = share(network, loss, 4)    # the same layers, names, arrays and random numbers
    mine = NetworkPart(shared, rank, 4)             # with this rank's part of the arrays

The layers are walked through in their order, with what is known of the activation that comes: whole on every rank, or
cut along its features, or along its places. The rules:

Linear        of something whole: some of the outputs each (by columns). Of something cut along its features: these
              inputs (by rows), and the partial outputs are summed. So of two layers only the second sends, once.
attention     some of the heads each, and the partial outputs are summed.
Conv2d        some of the channels each; of something cut, the channels of all ranks are gathered first.
Embedding     some of the ids each, and the partial outputs are summed; a matrix tied to it is cut as it is.
channelwise   layers take what they are given: activations, pools, batch normalisation, dropout.
any other     takes what is whole, and every rank does the same.

With `sequence` what is between two such sums is cut along the places: normalisation, dropout, and what a residual
connection adds up are not done by all ranks alike, and the sums are moved in halves. With `width` every Linear has some
of the outputs, and gathers its inputs, as convolutions do. Sources: Shoeybi et al. 2019, Korthikanti et al. 2022.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from nn.core.containers import Parallel, Recompute, Residual
from nn.core.layer import Layer, Sequential, Shape, child_path
from nn.core.network import Network
from nn.layers.attention import MultiHeadAttention
from nn.layers.batch_normalization import BatchNorm
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear, TiedLinear
from nn.layers.dropout import Dropout
from nn.layers.embedding import Embedding, LearnedPositions, SinusoidalPositions
from nn.layers.normalization import LayerNorm, RMSNorm
from nn.layers.reshaping import Flatten
from nn.losses import CrossEntropyLoss, Loss
from nn.models.googlenet import Auxiliary
from parallel.state.splits import Split, split_of
from parallel.strategies.tensor.layers import (
    ChannelParallelConv2d,
    ColumnLinear,
    HeadParallelAttention,
    RowLinear,
    VocabularyParallelEmbedding,
)
from parallel.strategies.tensor.loss import SplitCrossEntropy
from parallel.strategies.tensor.move_wrapper import MoveWrapper, behind, with_children
from parallel.strategies.tensor.moves import (
    AllGather,
    CopyTo,
    Cut,
    FirstRankGradient,
    GatherInEvaluation,
    Identity,
    Move,
    ReduceFrom,
    ReduceScatter,
    Scatter,
)
from parallel.strategies.tensor.parts import OfPositions, SplitDropout, SplitPositions, SplitSinusoids

WAYS = ("pairs", "width", "sequence")
State = Cut | None  # of an activation: cut, or whole
Found = tuple[Layer, State]


PARTIAL_GRADIENT = Cut(0, 0)  # the state of something replicated, whose gradient is wanted as partial


class Shared(NamedTuple):
    """A network for several ranks.

    Attributes
    ----------
    network : Network
        Of which `NetworkPart(network, index, ranks)` is what one of them has.
    loss : Loss
        A cross-entropy of outputs that are cut takes them so; any other gets all.
    cuts : dict of Cut
        How the input of a child of the root comes, by the child's number; that of the others is whole.
    """

    network: Network
    loss: Loss
    cuts: dict[int, Cut]


def share(network: Network, loss: Loss, ranks: int, way: str = "pairs", start: int = 0, given: State = None) -> Shared:
    """The network for so many ranks.

    Parameters
    ----------
    network : Network
        Stays as it is; the other one has copies of its layers.
    loss : Loss
    ranks : int
    way : {"pairs", "width", "sequence"}
    start : int
        The number of the root's child with which it begins; those before are whole on every rank.
    given : Cut or None
        How that child's input is cut; PARTIAL_GRADIENT: not at all, but its gradient is wanted as partial.

    Raises
    ------
    ValueError
        Heads that cannot be dealt out, or nothing that can be cut: which layer, and how many ranks would do; nothing
        that is cut along places, by "sequence".
    """
    if way not in WAYS:
        raise ValueError(f"tensor parallelism by {way!r}: expected one of {', '.join(WAYS)}")
    if ranks == 1:
        return Shared(network, loss, {})
    keep: set[str] = set()  # what is left whole
    while True:
        sharing = _Sharing(network, ranks, way, keep)
        root = sharing.root(isinstance(loss, CrossEntropyLoss), start, given)
        if not (separated := sharing.separated()):
            break
        keep |= separated
    if not sharing.cut:
        raise ValueError(
            f"{network.name} has nothing that {ranks} ranks could share: no linear layer or convolution of so many "
            "outputs, no attention; use fewer ranks, or data parallelism"
        )
    if way == "sequence" and not sharing.along_places:
        raise ValueError(
            f"{network.name} has nothing to be cut along the places of a sequence by {ranks} ranks, and would be "
            "computed as by pairs: use that way (--tensor pairs)"
        )
    shared = Network(root, network.in_shape, network.dtype, network.name, mixed=network.mixed)
    loss = SplitCrossEntropy(loss, network.out_shape[-1]) if sharing.parts_out else loss
    return Shared(shared, loss, sharing.cuts)


def in_words(ranks: int, way: str) -> str:
    """Who computes layers, for the log."""
    more = {"pairs": "", "width": ", each layer by its outputs", "sequence": ", activations cut along the places"}
    return f"every layer computed by {ranks} ranks together{more[way]}"


def partial_gradients(network: Network) -> list[str]:
    """Return the names of the replicated arrays whose gradients are partial, to be summed over the ranks."""
    found = []
    for path, layer, shape, _ in network.layers():
        if isinstance(layer, MoveWrapper) and layer.partial:
            found += [
                child_path(path, name)
                for name, spec in layer.specs(shape)[0].items()
                if split_of(spec) is None and not spec.buffer
            ]
    return found


class _Sharing:
    """One walk through a network.

    Attributes
    ----------
    cut : set of str
        Paths of the layers whose arrays are cut.
    ties : list of (str, str)
        Paths of a layer whose array is another one's (Spec.tied), and of that.
    along_places : bool
        Whether an activation is cut along the places of a sequence.
    parts_out : bool
        Whether the outputs are cut in training.
    cuts : dict of Cut
        As of Shared.
    """

    def __init__(self, network: Network, ranks: int, way: str, keep: set[str]):
        self.network, self.ranks, self.way, self.keep = network, ranks, way, keep
        self.cut: set[str] = set()
        self.ties: list[tuple[str, str]] = []
        self.along_places, self.parts_out, self.cuts = False, False, {}

    def root(self, parts_out: bool, start: int, given: State) -> Layer:
        """The root; its outputs are whole, or in training cut along the last axis."""
        network, self.start = self.network, start
        self._find_ties(network.specs, "")
        layer, state = self.layer(network.root, "", network.in_shape, given)
        if state is None:
            return layer
        self.parts_out = parts_out and state == Cut(-1, network.out_shape[-1])
        return behind(
            layer, GatherInEvaluation(state) if self.parts_out else AllGather(state, replicated=True, rounded=False)
        )

    def _find_ties(self, tree: dict, prefix: str) -> None:
        for name, entry in tree.items():
            if isinstance(entry, dict):
                self._find_ties(entry, f"{prefix}{name}.")
            elif entry.tied:
                self.ties.append((prefix[:-1], entry.tied.rpartition(".")[0]))

    def separated(self) -> set[str]:
        """Paths of layers that share an array of which one is cut and the other is not."""
        return {path for tie in self.ties if len(self.cut.intersection(tie)) == 1 for path in tie}

    # ------------------------------------------------------------------------------------------------ containers

    def layer(self, layer: Layer, path: str, in_shape: Shape, state: State) -> Found:
        """What stands in a layer's place, and how its output is cut."""
        if isinstance(layer, Sequential) and type(layer).forward is Sequential.forward:
            return self.sequential(layer, path, in_shape, state)
        if state is PARTIAL_GRADIENT and not isinstance(
            layer, (Recompute, Linear, TiedLinear, Conv2d, MultiHeadAttention)
        ):
            inner, out = self.layer(layer, path, in_shape, None)
            return MoveWrapper(inner, FirstRankGradient()), out
        if isinstance(layer, Residual) and type(layer).forward is Residual.forward:
            return self.residual(layer, path, in_shape, state)
        if type(layer) in (Parallel, Auxiliary):
            return with_children(layer, self.side_by_side(layer, path, in_shape, state)), None
        if type(layer) is Recompute:
            inner, out = self.layer(layer.layer, path, in_shape, state)
            return Recompute(inner), out
        if isinstance(layer, MoveWrapper):
            return self.move_wrapper(layer, path, in_shape, state)
        for kind, rule in RULES:
            if isinstance(layer, kind) and type(layer).forward is kind.forward and path not in self.keep:
                return rule(self, layer, path, in_shape, state)
        if layer.channelwise and (state is None or state.axis == -1) and not layer.specs(in_shape)[0]:
            size = layer.specs(in_shape)[1][-1]
            return layer, state and Cut(-1, size, state.blocks)
        return self.replicated(layer, state)

    def sequential(self, layer: Sequential, path: str, in_shape: Shape, state: State) -> Found:
        layers, shape = [], in_shape
        for name, child in layer.children().items():
            if not path and state not in (None, PARTIAL_GRADIENT):
                self.cuts[int(name)] = state
            if not path and int(name) < self.start:
                layers.append(MoveWrapper(child, splits={}))
            else:
                found, state = self.layer(child, child_path(path, name), shape, state)
                layers.append(found)
            shape = child.specs(shape)[1]
        return with_children(layer, layers), state

    def residual(self, layer: Residual, path: str, in_shape: Shape, state: State) -> Found:
        """Both branches end alike: cut in the same way, or whole."""
        other = copy.copy(layer)
        other.body, body = self.layer(layer.body, child_path(path, "body"), in_shape, state)
        short: State = state
        if layer.shortcut:
            other.shortcut, short = self.layer(layer.shortcut, child_path(path, "shortcut"), in_shape, state)
        if body == short:
            return other, body
        if body:
            other.body = behind(other.body, AllGather(body, replicated=True, rounded=False))
        if short and layer.shortcut:
            other.shortcut = behind(other.shortcut, AllGather(short, replicated=True, rounded=False))
        elif short:  # x itself comes cut: the body's result is cut alike
            other.body = behind(other.body, Scatter(short))
            return other, short
        return other, None

    def side_by_side(self, layer: Layer, path: str, in_shape: Shape, state: State) -> tuple[Layer, ...]:
        """Layers on the same input, all of whose outputs are whole."""
        found, root = [], self.network.root
        rounded = isinstance(root, Sequential) and path in [*root.children()][:-1]  # the next child takes the outputs
        for name, child in layer.children().items():
            inner, out = self.layer(child, child_path(path, name), in_shape, state)
            found.append(behind(inner, AllGather(out, replicated=True, rounded=rounded)) if out else inner)
        return tuple(found)

    def move_wrapper(self, layer: MoveWrapper, path: str, in_shape: Shape, state: State) -> Found:
        """Moves of the axis "context", which are of whole features, and of all positions that a rank has."""
        inside = layer.enter.out_shape(in_shape, True) if layer.enter else in_shape
        inner, state = self.layer(layer.layer, path, inside, state)
        if layer.leave and _places(state):
            inner, state = behind(inner, AllGather(state, replicated=True, rounded=False)), None
        return MoveWrapper(inner, layer.enter, layer.leave), state

    # ------------------------------------------------------------------------------------------------ layers

    def replicated(self, layer: Layer, state: State) -> Found:
        """Every rank does the same."""
        enter = (
            FirstRankGradient() if state is PARTIAL_GRADIENT else AllGather(state, replicated=True) if state else None
        )
        return MoveWrapper(layer, enter, splits={}), None

    def linear(self, layer: Linear, path: str, in_shape: Shape, state: State) -> Found:
        if state is not None and state.axis == -1 and self.way != "width":
            self.cut.add(path)
            leave, out = self._leaving(layer.specs(in_shape)[1])
            return RowLinear(layer, leave, state.blocks), out
        return self.columns(layer, path, in_shape, state)

    def columns(self, layer: Linear | TiedLinear, path: str, in_shape: Shape, state: State) -> Found:
        if layer.out_features < self.ranks:
            return self.replicated(layer, state)
        self.cut.add(path)
        return ColumnLinear(layer, self._entering(state)), Cut(-1, layer.out_features)

    def convolution(self, layer: Conv2d, path: str, in_shape: Shape, state: State) -> Found:
        if layer.out_channels // layer.groups < self.ranks:
            return self.replicated(layer, state)
        self.cut.add(path)
        return ChannelParallelConv2d(layer, self._entering(state)), Cut(-1, layer.out_channels, layer.groups)

    def attention(self, layer: MultiHeadAttention, path: str, in_shape: Shape, state: State) -> Found:
        if layer.heads % self.ranks:
            good = [str(n) for n in range(1, layer.heads + 1) if layer.heads % n == 0]
            raise ValueError(
                f"layer {path} ({layer!r}): its {layer.heads} heads cannot be dealt out to {self.ranks} ranks evenly: "
                f"use {', '.join(good)} of them for an axis tensor, or a number of heads that {self.ranks} divides"
            )
        self.cut.add(path)
        leave, out = self._leaving(in_shape)
        return HeadParallelAttention(layer, self._entering(state), leave), out

    def embedding(self, layer: Embedding, path: str, in_shape: Shape, state: State) -> Found:
        if layer.vocabulary < self.ranks:
            return self.replicated(layer, state)
        self.cut.add(path)
        leave, out = self._leaving(layer.specs(in_shape)[1])
        return VocabularyParallelEmbedding(layer, leave), out

    def positions(self, layer: LearnedPositions, path: str, in_shape: Shape, state: State) -> Found:
        if not _places(state):
            return self.replicated(layer, state)
        return self.some_positions(SplitPositions(layer, np.arange(in_shape[0])), path, in_shape, state)

    def sinusoids(self, layer: SinusoidalPositions, path: str, in_shape: Shape, state: State) -> Found:
        if not _places(state):
            return self.replicated(layer, state)
        return self.some_positions(SplitSinusoids(layer, np.arange(in_shape[0])), path, in_shape, state)

    def some_positions(self, layer: OfPositions, path: str, in_shape: Shape, state: State) -> Found:
        if not _places(state):
            return self.replicated(layer, state)
        return MoveWrapper(type(layer)(layer.layer, layer.positions, state), partial=True), state

    def normalization(self, layer: LayerNorm | RMSNorm, path: str, in_shape: Shape, state: State) -> Found:
        """Every place by itself."""
        return (MoveWrapper(layer, partial=True), state) if _places(state) else self.replicated(layer, state)

    def batch_norm(self, layer: BatchNorm, path: str, in_shape: Shape, state: State) -> Found:
        """Every channel by itself."""
        if state is None or state.axis != -1:
            return self.replicated(layer, state)
        self.cut.add(path)
        splits = dict.fromkeys(("gamma", "beta", "mean", "var"), Split(0, state.blocks))
        return MoveWrapper(layer, splits=splits), state

    def dropout(self, layer: Dropout, path: str, in_shape: Shape, state: State) -> Found:
        return (SplitDropout(layer, state) if state else layer), state

    def some_dropout(self, layer: SplitDropout, path: str, in_shape: Shape, state: State) -> Found:
        return SplitDropout(layer.layer, state, layer.axis, layer.positions, layer.length), state

    def flatten(self, layer: Flatten, path: str, in_shape: Shape, state: State) -> Found:
        """Each position's channels are blocks of the features."""
        if state is None or state.axis != -1:
            return self.replicated(layer, state)
        size = layer.specs(in_shape)[1][0]
        return layer, Cut(-1, size, size // state.size * state.blocks)

    # ------------------------------------------------------------------------------------------------ what moves

    def _entering(self, state: State) -> Move:
        """What brings a whole activation to ranks of which each goes on in its own way."""
        return Identity() if state is PARTIAL_GRADIENT else AllGather(state) if state else CopyTo()

    def _leaving(self, out_shape: Shape) -> tuple[Move, State]:
        """What sums a partial output, to a replicated one or one that is cut along the places."""
        places = Cut(1, out_shape[0]) if self.way == "sequence" and len(out_shape) == 2 else None
        if places is None or places.size < self.ranks:
            return ReduceFrom(), None
        self.along_places = True
        return ReduceScatter(places), places


def _places(state: State) -> bool:
    return state is not None and state.axis == 1


_S = _Sharing
RULES = (
    (Linear, _S.linear),
    (TiedLinear, _S.columns),
    (Conv2d, _S.convolution),
    (MultiHeadAttention, _S.attention),
    (Embedding, _S.embedding),
    (LearnedPositions, _S.positions),
    (SinusoidalPositions, _S.sinusoids),
    (SplitPositions, _S.some_positions),
    (SplitSinusoids, _S.some_positions),
    (LayerNorm, _S.normalization),
    (RMSNorm, _S.normalization),
    (BatchNorm, _S.batch_norm),
    (Dropout, _S.dropout),
    (SplitDropout, _S.some_dropout),
    (Flatten, _S.flatten),
)
