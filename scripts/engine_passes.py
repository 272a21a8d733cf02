"""Where a training step reads and writes memory: every call of NumPy in it, its bytes and its seconds.

The pool of a trainer hands out arrays of a subclass that sees the calls made with them (NEP 13 and NEP 18). Beside each
sum stands what the same bytes take at the streaming speed of this machine, measured in the same process: from the
second-level cache where the arrays of a call fit into it, else from memory.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from nn.analysis.inspection import calls
from nn.core import gradients
from nn.layers import dense

CACHE = 1 << 20  # bytes: a second-level cache of today
PRODUCTS = ("matmul", "dot")


@dataclass
class Pass:
    """Calls of one NumPy function in one layer and direction, of a step: their number, bytes, seconds."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    streaming: float = 0.0  # seconds at streaming speed


class Recorder:
    """Passes by (layer, direction, function)."""

    def __init__(self):
        self.passes: dict[tuple[str, str, str], Pass] = defaultdict(Pass)
        self.layers = [("engine", "")]
        self.seconds_a_byte = {from_cache: _streaming(from_cache) for from_cache in (True, False)}

    def call(self, name: str, function: Callable, args: tuple, kwargs: dict):
        """Call a function of NumPy with plain arrays, and record it; an array that it makes is seen, too."""
        arrays = [a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray)]
        arrays += [a for group in (*args, *kwargs.values()) if isinstance(group, tuple | list) for a in group]
        arrays = [a for a in arrays if isinstance(a, np.ndarray)]
        args, kwargs = _plain(args), {key: _plain(value) for key, value in kwargs.items()}
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = time.perf_counter() - start
        has_out = kwargs.get("out") is not None
        if isinstance(result, np.ndarray) and not has_out and result.ndim:
            arrays.append(result)
            result = Seen.of(result, self)
        self.add(name, sum(a.nbytes for a in arrays), seconds)
        return result

    def add(self, name: str, nbytes: int, seconds: float) -> None:
        entry = self.passes[(*self.layers[-1], name)]
        entry.calls += 1
        entry.nbytes += nbytes
        entry.seconds += seconds
        entry.streaming += nbytes * self.seconds_a_byte[nbytes <= CACHE]


class Seen(np.ndarray):
    """An array whose use a Recorder sees."""

    recorder: Recorder

    @staticmethod
    def of(array: np.ndarray, recorder: Recorder) -> Seen:
        view = array.view(Seen)
        view.recorder = recorder
        return view

    def __array_finalize__(self, source):
        self.recorder = getattr(source, "recorder", None)

    def __array_ufunc__(self, ufunc, method, *args, out=None, **kwargs):
        recorder = next(a.recorder for a in (*args, *(out or ())) if isinstance(a, Seen))
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if out is None:
            return recorder.call(name, getattr(ufunc, method), args, kwargs)
        recorder.call(name, getattr(ufunc, method), args, kwargs | {"out": out})
        return out[0] if len(out) == 1 else out

    def __array_function__(self, function, types, args, kwargs):
        result = self.recorder.call(function.__name__, function, args, kwargs)
        return kwargs["out"] if kwargs.get("out") is not None else result

    def __setitem__(self, key, value):
        plain, value = np.asarray(self.view(np.ndarray)), _plain(value)
        start = time.perf_counter()
        plain[key] = value
        seconds = time.perf_counter() - start
        written = plain[key] if not isinstance(key, np.ndarray | list) else np.asarray(value)
        self.recorder.add("assignment", written.nbytes + getattr(value, "nbytes", 0), seconds)


def passes_of_a_step(trainer, batches: list[tuple], steps: int = 5) -> tuple[float, dict[tuple[str, str, str], Pass]]:
    """Seconds of a step that nobody watches (the median of some), and the passes of a watched one (the mean)."""
    times = []
    for x, y in batches[:1] + batches * steps:
        start = time.perf_counter()
        trainer.step(x, y)
        times.append(time.perf_counter() - start)
    recorder = Recorder()
    with _recorded(trainer, recorder):
        trainer.step(*batches[0])
        recorder.passes.clear()
        for i in range(steps):
            trainer.step(*batches[i % len(batches)])
    for entry in recorder.passes.values():
        entry.calls, entry.nbytes = round(entry.calls / steps), entry.nbytes // steps
        entry.seconds, entry.streaming = entry.seconds / steps, entry.streaming / steps
    return float(np.median(times[1:])), dict(recorder.passes)


@contextmanager
def _recorded(trainer, recorder: Recorder) -> Iterator[None]:
    """Within this context the trainer's arrays are seen, and layers announce their calls."""
    pool = trainer.ctx.network_context.pool
    pool.clear()

    def around(path: str, name: str, kind: str, call: Callable):
        recorder.layers.append((name.partition("(")[0], kind))
        try:
            return call()
        finally:
            recorder.layers.pop()

    def dot(a, b, out=None):
        target = {} if out is None else {"out": out}
        recorder.call("dot", np.dot, (a, b), target)
        return out

    plain_dot, empty, workspace = gradients.dot, pool.empty, pool.workspace
    gradients.dot = dense.dot = dot
    pool.empty = lambda *args: Seen.of(empty(*args), recorder)
    pool.workspace = lambda *args: Seen.of(workspace(*args), recorder)
    try:
        with calls(trainer, around):
            yield
    finally:
        gradients.dot = dense.dot = plain_dot
        del pool.empty, pool.workspace
        pool.clear()


def _plain(value):
    """The arrays in an argument as NumPy's own."""
    if isinstance(value, Seen):
        return value.view(np.ndarray)
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _streaming(from_cache: bool, repeats: int = 7) -> float:
    """Seconds a byte of a product of two arrays written to a third, the best of several."""
    n = (CACHE // 4 if from_cache else 16 * CACHE) // 4
    a, b, out = np.ones((3, n), np.float32)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        np.multiply(a, b, out=out)
        best = min(best, time.perf_counter() - start)
    return best / (3 * a.nbytes)
