"""Mixture of experts: for every position a router picks a few of many small networks (Shazeer et al. 2017).

    z = x Wr          p = softmax(z)          the `top` experts with the largest p are chosen
    y = sum over the chosen of w_j B_j^T gelu(A_j^T x),     w_j = p_j / (sum of the chosen p)

So parameters grow with the number of experts, and the work of a position does not. With one chosen expert w is p
itself: divided by its own sum it would be 1, and the router would have no gradient (Fedus et al. 2022). The choice has
none.

Positions are sorted by expert, and each expert is one product of matrices. Nothing depends on which samples share a
micro-batch: the router's scores are computed position by position (np.einsum; a product of matrices rounds
differently for other numbers of rows, and a choice that flips is no small error), and what the experts share, their
capacity and the auxiliary losses, is counted for each sample by itself.

Sources: Shazeer et al. 2017; Lepikhin et al. 2020 (capacity, two choices); Fedus et al. 2022 (one choice, auxiliary
loss); Zoph et al. 2022 (z-loss); DeepSeek-AI 2024 and Wang et al. 2024 (sigmoid gate, balanced by a bias).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nn.arguments import COUNT, SIZE, Number, OneOf
from nn.core.gradients import Product
from nn.core.layer import Initializer, Layer, ShapeError, Spec
from nn.initializers import glorot, normal, zeros
from nn.layers.activations import softmax
from nn.registry import lookup, register

GATES = "softmax", "sigmoid"
ACTIVATIONS = "gelu", "relu", "silu"


@dataclass(frozen=True)  # no tuple: mixed precision would keep its numbers as float16
class Routing:
    """Which expert takes which position.

    Attributes
    ----------
    z : (n, E) array
        The router's output.
    scores : (n, E) array
        The router's probabilities, or with the sigmoid gate numbers in (0, 1).
    chosen : (n, k) int array
        The experts of each position, the first choice first.
    weights : (n, k) array
        Weights of the experts' outputs.
    slots : int array
        Positions of `chosen.ravel()`, sorted by expert: those that are computed. A dropped one is missing.
    counts : (E,) int array
        How many of them each expert has.
    """

    z: np.ndarray
    scores: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    slots: np.ndarray
    counts: np.ndarray


@register("layer")
class MixtureOfExperts(Layer):
    """y = the weighted sum of the outputs of the `top` experts that a router chooses for each position.

    A shared expert, which takes every position, is a residual's shortcut:
    `Residual(MixtureOfExperts(64, 8), Sequential(Linear(64, 256), GELU(), Linear(256, 64)))`.

    Parameters
    ----------
    features : int
        D, of x and y: samples (T, D) or (D,).
    experts : int
        E.
    top : int
        k, how many experts a position has.
    hidden : int
        F, of each expert; 0 takes 4 features.
    gate : {"softmax", "sigmoid"}
        "sigmoid": each expert's score by itself; the choice is that of score + bias, and after every step the bias of
        an expert with less than the mean load grows by `bias_rate`, of one with more shrinks. Nothing is learned for
        the balance, so take auxiliary=0 with it.
    capacity : float
        0: every expert takes all positions that choose it. c: of a sample of T positions at most ceil(c k T / E); first
        choices before second ones, then in order. What is dropped adds nothing to y, so put the layer in a `Residual`.
    auxiliary : float
        Weight of the auxiliary loss of each sample, E sum_i f_i P_i, where f is each expert's fraction of the choices
        and P its mean score: 1 where the load is even. Like `z_loss`, it adds its gradient to the router's, as mean
        over the samples of the batch, and is no part of the loss that a step returns.
    z_loss : float
        Weight of the mean square of log sum exp(z), which keeps the router's numbers small.
    noise : float
        In training the router is given x times numbers that are drawn uniformly from 1 - noise to 1 + noise, so that it
        tries other experts, too. The experts are given x.
    activation : {"gelu", "relu", "silu"}
    bias_rate : float
    init : initializer
        For each expert's matrices (D, F) and (F, D).

    Examples
    --------
    >>> import nn
    >>> network = nn.Network(nn.MixtureOfExperts(16, experts=8, top=2), (32, 16))
    >>> network.out_shape, network.layout.size
    ((32, 16), 16512)
    """

    output = gradient = "new"
    constraints = {
        **{"features": SIZE, "experts": SIZE, "top": SIZE, "hidden": COUNT},
        **{"gate": OneOf(GATES), "activation": OneOf(ACTIVATIONS)},
        **dict.fromkeys(("capacity", "auxiliary", "z_loss", "bias_rate"), Number(0)),
        "noise": Number(0, below=1),
    }

    def __init__(
        self,
        features: int,
        experts: int,
        top: int = 2,
        hidden: int = 0,
        gate: str = "softmax",
        capacity: float = 0.0,
        auxiliary: float = 0.01,
        z_loss: float = 0.0,
        noise: float = 0.0,
        activation: str = "gelu",
        bias_rate: float = 0.001,
        init: Initializer = glorot,
    ):
        self.features, self.experts, self.top, self.hidden = features, experts, top, hidden
        self.gate, self.capacity, self.auxiliary, self.z_loss = gate, capacity, auxiliary, z_loss
        self.noise, self.activation, self.bias_rate, self.init = noise, activation, bias_rate, init

    def check_arguments(self):
        if self.top > self.experts:
            raise ValueError(
                f"MixtureOfExperts: top must be 1 to {self.experts}, the number of experts, given {self.top}"
            )

    @property
    def updates_without_samples(self) -> bool:
        """Whether there is a bias, which moves once a step."""
        return self.gate == "sigmoid"

    @property
    def apply(self) -> Layer:
        """The activation layer of the experts."""
        return lookup("activation", self.activation)()

    def specs(self, in_shape):
        if len(in_shape) not in (1, 2) or in_shape[-1] != self.features:
            raise ShapeError(
                f"expects samples (positions, {self.features}) or ({self.features},), given samples of shape {in_shape}"
            )
        D, F, E = self.features, self.hidden or 4 * self.features, self.experts
        positions = math.prod(in_shape[:-1])
        if self.capacity and self.capacity * self.top * positions < E:
            least = math.ceil(1000 * E / (self.top * positions)) / 1000  # rounded up: the number shown is accepted
            raise ShapeError(
                f"capacity={self.capacity:g} leaves an expert room for {self.capacity * self.top * positions / E:.2g} "
                f"of a sample's {positions} positions: it needs at least {least:g} for one, or 0 for no limit"
            )
        specs = {
            "router": Spec((D, E), normal(0.02)),
            "A": Spec((E, D, F), EachExpert(self.init)),
            "B": Spec((E, F, D), EachExpert(self.init)),
        }
        if self.gate == "sigmoid":
            specs |= {name: Spec((E,), zeros, buffer=True) for name in ("bias", "load")}
            specs["step"] = Spec((1,), zeros, buffer=True)
        return specs, in_shape

    def macs(self, in_shape):
        positions = math.prod(in_shape[:-1])
        F = self.hidden or 4 * self.features
        return positions * self.features * (self.experts + 2 * self.top * F)

    # ------------------------------------------------------------------------------------------------- forward

    def forward(self, p, x, ctx):
        return self.mix(p, x, self.draw_noise(x.shape, ctx), ctx)

    def draw_noise(self, shape: tuple[int, ...], ctx) -> np.ndarray | None:
        """Return the factors of what the router is given, of a batch of `shape`; None: there are none."""
        if not (self.noise and ctx.training):
            return None
        return 1 + self.noise * (2 * ctx.random(shape, "noise") - 1)

    def mix(self, p, x: np.ndarray, noise: np.ndarray | None, ctx) -> tuple[np.ndarray, tuple]:
        """Return (y, saved) of x, with the factors `noise` of what the router is given."""
        rows = np.ascontiguousarray(x).reshape(-1, self.features)
        positions = x.shape[1] if x.ndim == 3 else 1
        noise = None if noise is None else noise.reshape(rows.shape)
        z = np.einsum("nd,de->ne", rows if noise is None else rows * noise, p.router)
        routing = self.route(z, positions, ctx)
        dispatched = rows[routing.slots // self.top]
        expert_outputs, saved_by_expert = self.run_experts(p, dispatched, routing.counts, ctx)
        outputs = ctx.empty((*routing.chosen.shape, self.features), x.dtype)
        flat = outputs.reshape(-1, self.features)
        if len(routing.slots) < len(flat):
            flat[...] = 0
        flat[routing.slots] = expert_outputs
        y = ctx.empty(rows.shape, x.dtype)
        np.einsum("nk,nkd->nd", routing.weights, outputs, out=y)
        return y.reshape(x.shape), (rows, noise, routing, dispatched, saved_by_expert, outputs)

    def route(self, z: np.ndarray, positions: int, ctx) -> Routing:
        """Choose the experts of n positions by their scores z (n, E); `positions` of them are a sample each."""
        n, k = len(z), self.top
        if self.gate == "softmax":
            scores = wanted = softmax(z, np.empty_like(z)) if n else z.copy()
        else:
            scores = 1 / (1 + np.exp(-z))
            wanted = scores + self._balanced(ctx)
        chosen = np.argsort(-wanted, axis=1, kind="stable")[:, :k]  # ties: the first expert
        weights = np.take_along_axis(scores, chosen, axis=1)
        if k > 1:
            weights /= weights.sum(axis=1, keepdims=True)
        flat = chosen.ravel()
        slots = np.argsort(flat, kind="stable")
        if self.capacity:
            slots = slots[self._fits(chosen, positions)[slots]]
        counts = np.bincount(flat[slots], minlength=self.experts)
        on_routing = ctx.network_context.on_routing
        if ctx.training and (self.gate == "sigmoid" or on_routing):
            choices = np.bincount(flat, minlength=self.experts) if self.capacity else counts
            if self.gate == "sigmoid":
                ctx.buffers.load += self.count_load(choices, ctx)
            if on_routing:
                on_routing(ctx.path, choices, counts)
        return Routing(z, scores, chosen, weights, slots, counts)

    def _fits(self, chosen: np.ndarray, positions: int) -> np.ndarray:
        """Whether each slot's expert was below its limit: in the sample, first choices before second ones."""
        limit = math.ceil(self.capacity * self.top * positions / self.experts)
        by_choice = chosen.reshape(-1, positions, self.top).swapaxes(1, 2).reshape(-1, self.top * positions)
        taken = by_choice[..., None] == np.arange(self.experts)
        queue = np.take_along_axis(np.cumsum(taken, axis=1), by_choice[..., None], axis=2)[..., 0]
        return (queue <= limit).reshape(-1, self.top, positions).swapaxes(1, 2).ravel()

    def _balanced(self, ctx) -> np.ndarray:
        """The bias of each expert, moved once a step by the load of the step before, of all micro-batches.

        Processes that share a batch have the mean of their buffers after each step, as in batch normalisation; the
        load's is proportional to the sum.
        """
        state = ctx.buffers
        if ctx.training and state.step[0] != ctx.micro_batch.step:
            surplus = state.load * self.experts - state.load.sum()
            surplus[np.abs(surplus) < 1e-5 * state.load.sum()] = 0  # even, but for the rounding of the mean
            state.bias -= self.bias_rate * np.sign(surplus)
            state.load[...], state.step[...] = 0, ctx.micro_batch.step
        return state.bias

    def run_experts(self, p, dispatched: np.ndarray, counts: np.ndarray, ctx) -> tuple[np.ndarray, list]:
        """Return (outputs, saved) of rows that are sorted by expert, counts[e] of them for expert e."""
        expert_outputs, saved_by_expert, start = ctx.empty(dispatched.shape, dispatched.dtype), [], 0
        for A, B, count in zip(p.A, p.B, counts.tolist(), strict=True):
            rows = slice(start, start + count)
            before = np.matmul(dispatched[rows], A, ctx.empty((count, A.shape[1]), dispatched.dtype))
            hidden, slope = self.apply.forward(None, before, ctx)
            np.matmul(hidden, B, expert_outputs[rows])
            saved_by_expert.append((hidden, slope))
            start += count
        return expert_outputs, saved_by_expert

    # ------------------------------------------------------------------------------------------------- backward

    def backward(self, p, gy, saved, ctx):
        rows, noise, routing, dispatched, saved_by_expert, outputs = saved
        upstream = np.ascontiguousarray(gy).reshape(rows.shape)
        gweights = np.einsum("nd,nkd->nk", upstream, outputs)  # of the output before the weight
        gexperts = upstream[routing.slots // self.top]
        gexperts *= routing.weights.reshape(-1, 1)[routing.slots]
        gdispatched, gradients = self.experts_backward(p, gexperts, dispatched, saved_by_expert, routing.counts, ctx)

        gz = self._router_backward(gweights, routing, len(gy), ctx)
        gradients["router"] = Product((rows if noise is None else rows * noise).T, gz)
        if not ctx.needs_input_grad:
            return None, gradients
        slots = np.zeros(outputs.shape, gy.dtype)
        slots.reshape(-1, self.features)[routing.slots] = gdispatched
        gx = slots.sum(axis=1, out=ctx.empty(rows.shape, gy.dtype))
        from_router = gz @ p.router.T
        gx += from_router if noise is None else from_router * noise
        return gx.reshape(gy.shape), gradients

    def experts_backward(self, p, gexperts, dispatched, saved_by_expert, counts, ctx) -> tuple[np.ndarray, dict]:
        """Return the gradient of the rows `dispatched`, and those of A and B: as `run_experts`, backward."""
        gdispatched, start, pairs = ctx.empty(dispatched.shape, dispatched.dtype), 0, []
        for A, B, count, (hidden, slope) in zip(p.A, p.B, counts.tolist(), saved_by_expert, strict=True):
            rows = slice(start, start + count)
            ghidden = np.matmul(gexperts[rows], B.T, ctx.empty((count, len(B)), dispatched.dtype))
            ghidden, _ = self.apply.backward(None, ghidden, slope, ctx)
            np.matmul(ghidden, A.T, gdispatched[rows])
            pairs.append((dispatched[rows], ghidden, hidden, gexperts[rows]))
            start += count

        def add_to_A(array):
            for expert, (x, ghidden, _, _) in zip(array, pairs, strict=True):
                expert += x.T @ ghidden

        def add_to_B(array):
            for expert, (_, _, hidden, gout) in zip(array, pairs, strict=True):
                expert += hidden.T @ gout

        return gdispatched, {"A": add_to_A, "B": add_to_B}

    def count_choices(self, chosen: np.ndarray, samples: int, ctx) -> np.ndarray:
        """Return how often each sample chose each expert, (N, E), of the chosen experts (n, k) of all positions."""
        counts = np.zeros((samples, self.experts))
        np.add.at(counts, (np.repeat(np.arange(samples), chosen.size // max(1, samples)), chosen.ravel()), 1)
        return counts

    def count_load(self, counts: np.ndarray, ctx) -> np.ndarray:
        """Return how often positions chose each expert, (E,), of `counts` of those that forward was given."""
        return counts

    def sample_length(self, positions: int) -> int:
        """Return the positions of a whole sample, of which forward was given `positions`."""
        return positions

    def _router_backward(self, gweights, routing: Routing, samples: int, ctx) -> np.ndarray:
        """The gradient of the router's scores z, with those of the auxiliary losses."""
        k, z, scores = self.top, routing.z, routing.scores
        positions = len(z) // max(1, samples)  # of a sample, which this process has
        length, total_samples = self.sample_length(positions), ctx.micro_batch.total or samples
        gchosen = gweights
        if k > 1:
            total = np.take_along_axis(scores, routing.chosen, axis=1).sum(axis=1, keepdims=True)
            gchosen = (gweights - (gweights * routing.weights).sum(axis=1, keepdims=True)) / total
        gscores = np.zeros_like(scores)
        np.put_along_axis(gscores, routing.chosen, gchosen, axis=1)
        if self.auxiliary and samples:
            choices = self.count_choices(routing.chosen, samples, ctx).astype(scores.dtype)
            choices *= self.auxiliary * self.experts / (length * length * k * total_samples)
            gshare = np.repeat(choices, positions, axis=0)
            if self.gate == "sigmoid":  # P is the mean of each position's scores divided by their sum
                total = scores.sum(axis=1, keepdims=True)
                gshare = (gshare - (gshare * scores).sum(axis=1, keepdims=True) / total) / total
            gscores += gshare
        if self.gate == "sigmoid":
            gz = gscores * scores * (1 - scores)
        else:
            gz = scores * (gscores - (gscores * scores).sum(axis=1, keepdims=True))
        if self.z_loss and len(z):
            top = z.max(axis=1, keepdims=True)
            exponentials = np.exp(z - top)
            total = exponentials.sum(axis=1, keepdims=True)
            gz += (2 * self.z_loss / (length * total_samples)) * (top + np.log(total)) * exponentials / total
        return gz


class EachExpert:
    """Draws (E, ...) as E arrays, each by `init`: no initializer then counts experts among the inputs."""

    def __init__(self, init: Initializer):
        self.init = init

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.stack([self.init(rng, shape[1:]) for _ in range(shape[0])])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EachExpert) and self.init == other.init

    def __hash__(self) -> int:
        return hash((EachExpert, self.init))
