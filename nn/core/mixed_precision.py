"""Half precision: activations are kept and sent as float16, products and sums are float32 (Micikevicius et al. 2018).

A layer computes in the network's dtype and knows nothing of this. `MixedPrecision.keep` makes float16 of the
activations that a layer has saved, and before the layer's backward `MixedPrecision.restore` makes them what they were:
so the activations of a network take half the memory until backward comes. The input of a layer with parameters is
rounded to float16, too, and so is the gradient that it gets, as on a machine that multiplies float16: operands of
products fit float16, their results are float32. The same is done between the children of the root, so that an
activation that passes from stage to stage of a pipeline is a float16 already.

Gradients are small, and float16 ends at 6e-8; so they are multiplied by a **loss scale**, a power of two, when they
become float16, and divided by it when they are float32 again. That is the same, bit for bit, as a loss multiplied by it
and gradients divided by it in the end; and nothing that is summed, clipped or kept from step to step is ever scaled. It
also ends at 65504: what is larger becomes that and sets `overflowed`, and whoever trains makes no update.

NumPy converts one number at a time, 4.5 ns down and 2 ns up, and below 6e-5 70 ns. Here whole blocks are converted by
integer arithmetic on their bits, which takes 1.2 and 0.6 ns (measured, one core). Rounding is to nearest, ties away
from zero.

Left as they are: integers, masks, statistics (vectors, or one number a row), the batch that the network is given, which
whoever gave it has anyway, its outputs, and all of evaluation.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from nn.core.memory_pool import MemoryPool

BLOCK = 1 << 15  # elements: three arrays of four bytes that stay in a second-level cache
LARGEST = 65504.0  # of float16
# A float32 times 2^-112 has the exponent of a float16: its bits are those of the float16, but for 13 more behind and 3
# zeros behind the sign. Smaller numbers become subnormal in both at the same bit.
SHIFT, UP, DOWN = 13, np.float32(2.0**112), np.float32(2.0**-112)
INFINITE, MINUS_INFINITE = 0x7C00, 0xFC00  # the bits of a float16; larger ones with that sign are no numbers
HALF_UNIT, SIGN, MAGNITUDE = 1 << (SHIFT - 1), np.int32(-1 << 31), np.int32(-0x70000001)


class MixedPrecision:
    """Conversions of one thread's passes, and whether a number was too large for float16.

    Parameters
    ----------
    memory : MemoryPool
        Where arrays come from.

    Attributes
    ----------
    scale : float
        The loss scale, a power of two.
    overflowed : bool
        True if any value overflowed float16 (above 65504) or is NaN. The trainer clears it before each step.
    """

    def __init__(self, memory: MemoryPool):
        self.memory, self.scale, self.overflowed = memory, 1.0, False
        self.batch: np.ndarray | None = None
        self.training = False
        self.halves: dict[int, tuple[weakref.ref, weakref.ref]] = {}  # id of an array -> itself, its float16
        self.last: tuple[np.ndarray, np.ndarray] | None = None  # a float16 array, and what it became
        self.taken: np.ndarray | None = None  # what a layer has taken, as float16: it may be about to save it

    def begin(self, x: np.ndarray | None, training: bool) -> None:
        """Begin a forward pass of the batch x; None where its input is an activation, of a stage before."""
        self.batch, self.training, self.last, self.taken = x, training, None, None
        self.halves.clear()

    def round_input(self, p: Any, x: np.ndarray, ctx) -> np.ndarray:
        """Return an activation as a layer takes it, forward; p: its parameters."""
        if not self.training or x.dtype not in WIDE or not _rounds(p, ctx) or self._is_batch(x):
            return x
        if ctx.may_overwrite_input:
            x = np.ascontiguousarray(x)
            return self._round(x, x)
        self.taken = self._packed(x)  # who made it has often saved it, and the layer will: as the same float16
        x = self.unpack(self.taken, x.dtype)
        self.halves[id(x)] = weakref.ref(x), weakref.ref(self.taken)
        return x

    def keep(self, saved: Any, y: np.ndarray, x: np.ndarray) -> Any:
        """Return what a layer has saved that made y of x, activations as float16; one that two save stays one."""
        if not self.training:
            return saved
        half, whole = self._half_of(x), y.size == x.size and x.flags.c_contiguous and y.flags.c_contiguous
        if half is not None and whole and np.may_share_memory(x, y):  # in another shape, such as Flatten's
            self.halves[id(y)] = weakref.ref(y), weakref.ref(half)
        least = min(2, y.shape[-1])  # of an output of one channel, an activation has one number a row, too
        return _map_arrays(saved, lambda array: self._kept(array, least))

    def restore(self, p: Any, gy: np.ndarray, saved: Any, ctx) -> tuple[np.ndarray, Any]:
        """Return (gradient, what was saved) as the backward of a layer takes them; p: its parameters."""
        if _rounds(p, ctx):
            gy = self.rounded(gy, ctx)
        return gy, saved if ctx.children else self.restored(saved, gy.dtype)

    def restored(self, saved: Any, dtype) -> Any:
        """Return the argument of `keep` again, as arrays of `dtype`."""
        return _map_arrays(saved, lambda array: self._restored(array, dtype))

    def rounded(self, gy: np.ndarray, ctx) -> np.ndarray:
        """Return a gradient as it comes out of float16, with the loss scale: in its own memory where that is free."""
        gy = np.ascontiguousarray(gy)
        return self._round(gy, ctx.reuse_grad(gy), self.scale)

    def _round(self, x: np.ndarray, out: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Return x as it would be after `pack` and `unpack`."""
        if x.dtype != np.float32:
            return self.unpack(self.pack(x, scale), x.dtype, scale, out)
        for part, target in _blocks(x, out):
            if not self._fits(part, scale):
                target[...] = _within(part, scale).astype(np.float32) / scale
                continue
            np.multiply(part, DOWN * np.float32(scale), target)
            bits = target.view(np.int32)
            bits += HALF_UNIT
            bits &= -2 * HALF_UNIT
            target *= UP / np.float32(scale)
        return out

    def _kept(self, array: np.ndarray, least: int) -> np.ndarray:
        if array.dtype not in WIDE or array.ndim < 2 or array.shape[-1] < least or self._is_batch(array):
            return array
        return self._packed(array)

    def _packed(self, array: np.ndarray) -> np.ndarray:
        """An activation as float16: the array that was made of it before, if there is one."""
        half = self._half_of(array)
        if half is None:
            half = self.pack(array)
            self.halves[id(array)] = weakref.ref(array), weakref.ref(half)
        return half if half.shape == array.shape else half.reshape(array.shape)

    def _half_of(self, array: np.ndarray) -> np.ndarray | None:
        """Return the float16 that was made of an activation before, or of the array that it is a view of."""
        known, half = self.halves.get(id(array), (None, None))
        return half() if known is not None and known() is array else None

    def _is_batch(self, array: np.ndarray) -> bool:
        """Return whether an array is the batch, or shares memory with it."""
        batch = self.batch
        return batch is not None and (
            array is batch or array.base is batch or (batch.base is not None and array.base is batch.base)
        )

    def _restored(self, array: np.ndarray, dtype) -> np.ndarray:
        if array.dtype != np.float16:
            return array
        if self.last is None or self.last[0] is not array:  # else the layer above has just had it
            self.last = array, self.unpack(array, dtype)
        return self.last[1]

    def pack(self, x: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """scale x as float16, in an array of its own; a number beyond its range is noted."""
        out = self.memory.empty(x.shape, np.float16)
        if x.dtype != np.float32:
            with np.errstate(over="ignore"):
                np.multiply(x, scale, out=out, casting="unsafe")
            if not np.isfinite(out).all():
                self.overflowed = True
                out[...] = _within(x, scale)
            return out
        values, signs = (self.memory.workspace(name, (BLOCK,), kind) for name, kind in SCRATCH)
        for part, target in _blocks(np.ascontiguousarray(x), out.view(np.int16)):
            if not self._fits(part, scale):
                target.view(np.float16)[...] = _within(part, scale)
                continue
            value, sign = values[: part.size], signs[: part.size]
            np.multiply(part, DOWN * np.float32(scale), value)
            bits = value.view(np.int32)
            bits += HALF_UNIT
            np.bitwise_and(bits, SIGN, sign)
            sign >>= 3  # into the zeros behind it
            bits |= sign
            np.right_shift(bits, SHIFT, target, casting="unsafe")
        return out

    def _fits(self, part: np.ndarray, scale: float) -> bool:
        """Whether no number is too large, times scale, or is none; else that is noted."""
        limit = LARGEST / scale
        with np.errstate(over="ignore"):
            squares = float(part @ part)
        fit = squares < limit * limit or (part.max() <= limit and part.min() >= -limit)  # of the first each is smaller
        self.overflowed |= not fit
        return bool(fit)

    def unpack(self, half: np.ndarray, dtype, scale: float = 1.0, out: np.ndarray | None = None) -> np.ndarray:
        """Return a packed array as one of `dtype`."""
        out = self.memory.empty(half.shape, dtype) if out is None else out
        if out.dtype != np.float32:
            return np.divide(half, scale, out=out, dtype=out.dtype)
        for part, target in _blocks(half.view(np.int16), out):
            if part.max() >= INFINITE or part.view(np.uint16).max() >= MINUS_INFINITE:
                np.divide(part.view(np.float16), scale, out=target, dtype=target.dtype)
                continue
            bits = target.view(np.int32)
            np.copyto(bits, part)
            bits <<= SHIFT
            bits &= MAGNITUDE
            target *= UP / np.float32(scale)
        return out


def _rounds(p: Any, ctx) -> bool:
    """Whether a layer takes, and gets, float16 numbers: one with parameters, and every child of the root."""
    if not ctx.path:
        return not ctx.children
    return "." not in ctx.path or (not ctx.children and bool(vars(p)))


WIDE = (np.float32, np.float64)
SCRATCH = ("half, as float32", np.float32), ("half, its signs", np.int32)


def _within(x: np.ndarray, scale: float) -> np.ndarray:
    """scale x as float16, where some is too large: as large as there is; what is not finite stays so."""
    with np.errstate(over="ignore"):
        fitting = np.clip(x * x.dtype.type(scale), -LARGEST, LARGEST)
    return np.where(np.isfinite(x), fitting, x).astype(np.float16)


def _blocks(*arrays: np.ndarray):
    """Contiguous arrays cut alike into flat pieces that stay in the cache."""
    flat = [array.reshape(-1) for array in arrays]
    for lo in range(0, flat[0].size, BLOCK):
        yield tuple(array[lo : lo + BLOCK] for array in flat)


def _map_arrays(saved: Any, change) -> Any:
    """Return a tree of tuples and lists with change(array) for every array."""
    if isinstance(saved, np.ndarray):
        return change(saved)
    if isinstance(saved, (tuple, list)):
        items = [_map_arrays(item, change) for item in saved]
        return type(saved)(*items) if hasattr(saved, "_fields") else type(saved)(items)  # a named tuple or not
    return saved


def nbytes(saved: Any, floats: bool = False) -> int:
    """Bytes of all arrays, or of floats only, in what a forward pass has saved, each counted once."""
    sizes: dict[int, int] = {}

    def note(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "f" or not floats:
            sizes[array.__array_interface__["data"][0]] = array.nbytes
        return array

    _map_arrays(saved, note)
    return sum(sizes.values())
