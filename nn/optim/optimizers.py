"""Optimizers: in-place updates on flat buffers.

An optimizer holds hyper-parameters; its moments live in `slots`, flat buffers with the layout of the parameters. So a
slice of a buffer is updated by the same code, and a `Region` says what lies in it: where weight decay applies, and
which tensors need a norm. Biases and normalisation are exempt from decay and layer-wise rates (`Spec.decay`).

Every update runs over blocks that fit in the cache, without a temporary of full size. Cost, in passes over a buffer in
memory (reads and writes): SGD 3, with momentum 5, Adagrad and RMSprop 5, Adam 7, LARS 7, LAMB 12.

Sources: Robbins and Monro 1951, Polyak 1964, Nesterov 1983 in the form of Sutskever et al. 2013 (SGD); Duchi et al.
2011 (Adagrad); Tieleman and Hinton 2012 (RMSprop); Kingma and Ba 2015 (Adam); Loshchilov and Hutter 2019 (AdamW);
You et al. 2017 (LARS); You et al. 2020 (LAMB). Default rates are those of the papers (RMSprop's and Adam's 0.001; LARS
with 1, so that a layer's rate is `trust` times its norms' ratio), and 0.01 where they have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from nn.arguments import Configured, Number, Optional, call_text
from nn.core.layout import Region
from nn.optim.clipping import BLOCK_BYTES, Clip, SumOverSlices, squared_norms
from nn.optim.learning_rates import RATE
from nn.registry import register

Array = np.ndarray
Slots = dict[str, Array]


def _clip(what: str, value: object) -> Clip:
    if not isinstance(value, Clip):
        raise TypeError(f"{what} must be what clips, such as nn.ClipGlobalNorm(1.0), given {value!r:.80}")
    return value


def _rates(what: str, value: object) -> Mapping[str, float]:
    def is_factor(name, factor):
        return isinstance(name, str) and isinstance(factor, int | float | np.number) and 0 <= factor < math.inf

    if not (isinstance(value, Mapping) and all(is_factor(*entry) for entry in value.items())):
        raise ValueError(
            f"{what} are factors of lr by the names of layers, such as {{'0': 0.1, '2.W': 0}}, given {value!r:.80}"
        )
    return {name: float(factor) for name, factor in value.items()}  # a copy: changed later, it would not be checked


def _names(what: str, value: object) -> tuple[str, ...]:
    if not (isinstance(value, tuple) and all(isinstance(part, str) for part in value)):
        raise TypeError(f"{what} must be a tuple of names, such as ('0', '2.W'), given {value!r:.80}")
    return value


BELOW_ONE, POSITIVE = Number(0, below=1), Number(above=0, below=math.inf)


@dataclass(eq=False, repr=False)
class Optimizer(Configured):
    """Base: a learning rate, weight decay, clipping, named slots, and an update.

    Parameters
    ----------
    lr : float
        Learning rate; a schedule may set it between steps.
    weight_decay : float
        L2 coefficient: its product with a decayed parameter is added to the gradient.
    clip : Clip or None
        Applied to the gradients first; see nn/optim/clipping.py.
    rates : mapping of str to float
        Factors of `lr` by the name of a layer, such as {"0": 0.1}, or of an array, such as {"0.W": 0}; the longest name
        that fits counts. 0 freezes: parameters and moments stay as they are, and no norm counts the gradient.
    frozen : tuple of str
        Names of layers and arrays that are frozen whatever their rates, which they have again afterwards.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> class Signs(nn.Optimizer):
    ...     def apply(self, w, g, slots, step, region, sum_over_slices=None):
    ...         for part in region.decayed:
    ...             g[part] += self.weight_decay * w[part]
    ...         w -= self.lr * np.sign(g)
    >>> nn.check_optimizer(Signs(0.01))
    """

    constraints = {"lr": RATE, "weight_decay": RATE, "clip": Optional(_clip), "rates": _rates, "frozen": _names}
    decoupled = False  # weight decay shrinks the parameters instead of adding to the gradient
    norms = False  # the update of an element depends on the norm of its tensor
    searches = False  # an update evaluates the batch several times: only trainers that can do so take it
    rate_inside = ()  # slots that gather steps, not gradients: a new rate needs schedules.MomentumCorrection

    lr: float = 0.01
    _: KW_ONLY
    weight_decay: float = 0.0
    clip: Clip | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def __new__(cls, *values, **options):
        """Refuse parameters as the first argument, as other libraries' optimizers take them."""
        if values and not isinstance(values[0], int | float | np.number | str):
            raise TypeError(
                f"{cls.__name__}: the first argument is the learning rate, given {values[0]!r:.80}; the trainer gives "
                f"the parameters to the optimizer: nn.Trainer(network, loss, nn.{cls.__name__}(lr=0.01))"
            )
        return super().__new__(cls, *values, **options)

    def __repr__(self) -> str:
        return call_text(self, always={"lr"})

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the flat buffers that `update` needs besides parameters and gradients; they start at zero."""
        return ()

    def update(
        self,
        w: np.ndarray,
        g: np.ndarray,
        slots: Slots,
        step: int,
        region: Region,
        sum_over_slices: SumOverSlices | None = None,
    ) -> None:
        """Move w along -g. Called once a step, with all that this process holds.

        Parameters
        ----------
        w, g : flat arrays that cover `region`
            g may be overwritten. Padding is zero and stays so.
        slots : dict of such arrays
        step : int
            Updates made before this one: 0 at the first.
        sum_over_slices : callable or None
            Sums a small float64 array over all slices of the layout, in-place. Needed where this region is not all of
            it, by clipping, LARS and LAMB: a norm is that of a whole tensor.
        """
        if self.clip is not None:
            self.clip_gradients(g, region, sum_over_slices)
        self.apply(w, g, slots, step, region, sum_over_slices)

    def rate_of(self, name: str) -> float:
        """Return the factor of lr for an array, such as "0.W": 0 where it is frozen, 1 where nothing names it."""
        if any(lies_in(name, layer) for layer in self.frozen):
            return 0.0
        while name not in self.rates and name:
            name = name.rpartition(".")[0]
        return self.rates.get(name, 1.0)

    def clip_gradients(self, g: np.ndarray, region: Region, sum_over_slices: SumOverSlices | None = None) -> None:
        """Clip gradients in-place; those of frozen arrays become 0 first, so that no norm counts them."""
        if self.clip is None:
            return
        for name, part, _ in region.tensors if self.rates or self.frozen else ():
            if not self.rate_of(name):
                g[part] = 0
        self.clip(g, region, sum_over_slices)

    def apply(
        self,
        w: np.ndarray,
        g: np.ndarray,
        slots: Slots,
        step: int,
        region: Region,
        sum_over_slices: SumOverSlices | None = None,
    ) -> None:
        """`update`, whose arguments it has, without the clip: what a subclass defines. It writes into w and slots."""
        raise TypeError(f"{type(self).__name__} does not define apply")

    def moment(self, slots: Slots, name: str) -> Array:
        """Return a slot of the trainer; ValueError where a hyper-parameter that needs it was set after it was made."""
        if name not in slots:
            raise ValueError(
                f"{type(self).__name__}: the trainer was made without {name!r}, when momentum was 0: give momentum to "
                f"{type(self).__name__}(...) before a trainer is made with it"
            )
        return slots[name]

    def _blocks(
        self, w: np.ndarray, g: np.ndarray, region: Region
    ) -> Iterator[tuple[slice, Array, Array, Array, float]]:
        """(slice, parameters, gradient with weight decay, not to be written, workspace, rate), block by block.

        Operands are taken out of the buffers first: `w[part] -= x` would copy the block onto itself once more.
        """
        work, sums, lr = workspace(w), workspace(w) if self.weight_decay else None, float(self.lr)
        for part, decayed, factor in self._parts(region, len(w), len(work)):
            p, d, n, rate = w[part], g[part], part.stop - part.start, lr * factor
            if decayed and self.decoupled:
                p *= 1 - rate * self.weight_decay
            elif decayed:
                d = np.add(np.multiply(p, self.weight_decay, out=sums[:n]), d, out=sums[:n])
            yield part, p, d, work[:n], rate

    def _parts(self, region: Region, size: int, block: int) -> list[tuple[slice, bool, float]]:
        """(slice, whether decayed, factor of lr): the whole buffer in blocks, or all tensors that are not frozen.

        Made anew only where one of the settings that decide it has changed.
        """
        settings = size, block, self.weight_decay > 0, self.frozen, tuple(self.rates.items())
        if region.blocks[0] != settings:
            if self.rates or self.frozen:
                tensors = self._tensor_blocks(region, block)
                parts = [(part, not exempt and self.weight_decay > 0, factor) for _, exempt, part, factor in tensors]
            else:
                decayed = region.decayed if self.weight_decay else ()
                parts = [(part, inside, 1.0) for part, inside in blocks(size, decayed, block)]
            region.blocks = settings, parts
        return region.blocks[1]

    def _tensor_blocks(self, region: Region, block: int) -> Iterator[tuple[str, bool, slice, float]]:
        """(name, whether exempt, slice, factor of lr) for blocks of all tensors that are not frozen."""
        for name, part, spec in region.tensors:
            if factor := self.rate_of(name):
                for lo in range(part.start, part.stop, block):
                    yield name, not spec.decay, slice(lo, min(lo + block, part.stop)), factor


@register("optimizer", "sgd")
@dataclass(eq=False, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent: v = momentum v + g; w -= lr v, or with Nesterov's momentum w -= lr (g + momentum v).

    The rate stays outside v, so a change of it needs no correction. Without momentum there is no v.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.SGD(lr=0.1, momentum=0.9))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    constraints = Optimizer.constraints | {"momentum": BELOW_ONE}
    momentum: float = 0.0
    _: KW_ONLY
    nesterov: bool = False

    def check_arguments(self):
        if self.nesterov and not self.momentum:
            raise ValueError("SGD: nesterov needs a momentum above 0")

    @property
    def slots(self):
        return ("velocity",) if self.momentum else ()

    def apply(self, w, g, slots, step, region, sum_over_slices):
        velocity = self.moment(slots, "velocity") if self.momentum else None
        for part, p, d, t, lr in self._blocks(w, g, region):
            if self.momentum:
                v = velocity[part]
                v *= self.momentum
                v += d
                d = np.add(np.multiply(v, self.momentum, out=t), d, out=t) if self.nesterov else v
            p -= np.multiply(d, lr, out=t)


@register("optimizer", "adagrad")
@dataclass(eq=False, repr=False)
class Adagrad(Optimizer):
    """G += g^2; w -= lr g / (sqrt(G) + eps).

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.Adagrad(lr=0.1))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    constraints = Optimizer.constraints | {"eps": POSITIVE}
    _: KW_ONLY
    eps: float = 1e-10

    @property
    def slots(self):
        return ("squares",)

    def apply(self, w, g, slots, step, region, sum_over_slices):
        for part, p, d, t, lr in self._blocks(w, g, region):
            squares = slots["squares"][part]
            squares += np.multiply(d, d, out=t)
            np.sqrt(squares, out=t)
            t += self.eps
            np.divide(d, t, out=t)
            t *= lr
            p -= t


@register("optimizer", "rmsprop")
@dataclass(eq=False, repr=False)
class RMSprop(Optimizer):
    """s = alpha s + (1-alpha) g^2; u = g / (sqrt(s) + eps); w -= lr u, or with v = momentum v + u; w -= lr v.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.RMSprop(lr=0.01))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    constraints = Optimizer.constraints | {"alpha": BELOW_ONE, "momentum": BELOW_ONE, "eps": POSITIVE}
    lr: float = 0.001
    alpha: float = 0.99
    _: KW_ONLY
    momentum: float = 0.0
    eps: float = 1e-8

    @property
    def slots(self):
        return ("squares", "velocity") if self.momentum else ("squares",)

    def apply(self, w, g, slots, step, region, sum_over_slices):
        velocity = self.moment(slots, "velocity") if self.momentum else None
        for part, p, d, t, lr in self._blocks(w, g, region):
            squares = slots["squares"][part]
            average(squares, np.multiply(d, d, out=t), self.alpha, t)
            np.sqrt(squares, out=t)
            t += self.eps
            u = np.divide(d, t, out=t)
            if self.momentum:
                v = velocity[part]
                v *= self.momentum
                v += u
                u = v
            p -= np.multiply(u, lr, out=t)


@register("optimizer", "adam")
@dataclass(eq=False, repr=False)
class Adam(Optimizer):
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps), with t = step + 1.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.Adam(lr=0.01))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    constraints = Optimizer.constraints | {"beta1": BELOW_ONE, "beta2": BELOW_ONE, "eps": POSITIVE}
    lr: float = 0.001
    _: KW_ONLY
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    @property
    def slots(self):
        return ("mean", "squares")

    def apply(self, w, g, slots, step, region, sum_over_slices):
        correction, eps = self._corrected(step)
        for part, p, d, t, lr in self._blocks(w, g, region):
            p -= self._direction(d, slots["mean"][part], slots["squares"][part], correction * lr, eps, t)

    def _corrected(self, step: int) -> tuple[float, float]:
        """(r, e) such that r m / (sqrt(v) + e) has both averages corrected for their start at zero."""
        root = math.sqrt(1 - self.beta2 ** (step + 1))
        return root / (1 - self.beta1 ** (step + 1)), self.eps * root

    def _direction(self, d, m, v, rate: float, eps: float, t: np.ndarray) -> np.ndarray:
        """Take the gradient d into the averages m and v; returns rate m / (sqrt(v) + eps), in t."""
        average(m, d, self.beta1, t)
        average(v, np.multiply(d, d, out=t), self.beta2, t)
        np.sqrt(v, out=t)
        t += eps
        np.divide(m, t, out=t)
        t *= rate
        return t


@register("optimizer", "adamw")
@dataclass(eq=False, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay: w *= 1 - lr weight_decay, and the gradient stays as it is.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.AdamW(lr=0.01, weight_decay=0.1))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    decoupled = True
    _: KW_ONLY
    weight_decay: float = 0.01


@register("optimizer", "lars")
@dataclass(eq=False, repr=False)
class LARS(Optimizer):
    """v = momentum v + lr r (g + weight_decay w); w -= v; r = trust |w| / (|g| + weight_decay |w|) for each tensor.

    r is 1 for exempt tensors and where a norm is 0. The rate is inside v: see schedules.MomentumCorrection.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.LARS(lr=0.5))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    constraints = Optimizer.constraints | {"momentum": BELOW_ONE, "trust": RATE}
    rate_inside = ("velocity",)
    norms = True

    lr: float = 1.0
    momentum: float = 0.9
    _: KW_ONLY
    trust: float = 0.001

    @property
    def slots(self):
        return ("velocity",)

    def apply(self, w, g, slots, step, region, sum_over_slices):
        squares = squared_norms([w, g], region, sum_over_slices)
        t = workspace(w)
        for name, exempt, part, factor in self._tensor_blocks(region, len(t)):
            p, v, u, rate = w[part], slots["velocity"][part], t[: part.stop - part.start], float(self.lr) * factor
            if exempt:
                np.multiply(g[part], rate, out=u)
            else:
                w_norm, g_norm = (math.sqrt(square[name]) for square in squares)
                if w_norm and g_norm:
                    rate *= self.trust * w_norm / (g_norm + self.weight_decay * w_norm)
                np.multiply(p, self.weight_decay, out=u)
                u += g[part]
                u *= rate
            v *= self.momentum
            v += u
            p -= v


@register("optimizer", "lamb")
@dataclass(eq=False, repr=False)
class LAMB(Adam):
    """u = m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps) + weight_decay w; w -= lr r u, with r = |w| / |u| a tensor.

    r is 1 for exempt tensors and where a norm is 0. The gradients are overwritten by u.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.LAMB(lr=0.01))
    >>> x, y = np.array([[1.0, 2.0]], "f4"), np.array([[3.0]], "f4")
    >>> first = trainer.step(x, y)
    >>> trainer.step(x, y) < first
    True
    """

    norms = True

    _: KW_ONLY
    eps: float = 1e-6
    weight_decay: float = 0.01

    def apply(self, w, g, slots, step, region, sum_over_slices):
        rate, eps = self._corrected(step)
        t, decay = workspace(w), workspace(w)
        for _, exempt, part, _ in self._tensor_blocks(region, len(t)):
            n = part.stop - part.start
            u = self._direction(g[part], slots["mean"][part], slots["squares"][part], rate, eps, t[:n])
            if not exempt:
                u += np.multiply(w[part], self.weight_decay, out=decay[:n])
            g[part] = u
        w_squares, u_squares = squared_norms([w, g], region, sum_over_slices)
        for name, exempt, part, factor in self._tensor_blocks(region, len(t)):
            w_norm, u_norm = math.sqrt(w_squares[name]), math.sqrt(u_squares[name])
            ratio = 1.0 if exempt or not w_norm or not u_norm else w_norm / u_norm
            p = w[part]
            p -= np.multiply(g[part], float(self.lr) * factor * ratio, out=t[: len(p)])


def lies_in(name: str, layer: str) -> bool:
    """Return whether an array or layer is `layer`, or lies inside it; "" is the whole network."""
    return not layer or f"{name}.".startswith(f"{layer}.")


def workspace(w: np.ndarray) -> np.ndarray:
    """Return an array of a block's length: small enough for the allocator to reuse memory."""
    return np.empty(max(1, min(len(w), BLOCK_BYTES // w.itemsize)), w.dtype)


def blocks(size: int, decayed: Iterable[slice], block: int) -> Iterator[tuple[slice, bool]]:
    """Yield blocks that cover range(size), and whether each is decayed, in whole or not at all."""
    at = 0
    for part in (*decayed, slice(size, size)):
        for a, b, inside in ((at, part.start, False), (part.start, part.stop, True)):
            for lo in range(a, b, block):
                yield slice(lo, min(lo + block, b)), inside
        at = part.stop


def average(a: np.ndarray, x: np.ndarray, beta: float, work: np.ndarray) -> None:
    """Compute a = beta a + (1-beta) x in-place; work may be x."""
    np.multiply(x, 1 - beta, out=work)
    a *= beta
    a += work
