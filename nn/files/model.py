"""A trained network in one file, and out of it again: to predict takes neither loss nor optimizer, nor the program.

    nn.save(trainer, "digits.npz")
    model = nn.load("digits.npz")
    model.predict(x)                          # (N, *out_shape)

The file is an .npz archive (no pickle, ever): `network` is a text, the layers by name and arguments (description.py)
with input shape and dtype; the arrays are called as in checkpoints, param/2.W and state/1.mean. A name that ends in
.safetensors has the same in that format. Nothing that a file says is believed before it is checked: first the layers
are made, which takes no memory, then each array must be there with the shape that they have, then it is read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nn.arguments import Closed
from nn.core.context import LayerContext
from nn.core.memory_pool import MemoryPool
from nn.core.network import Network
from nn.data.arrays import NUMBERS, TEXT, Archive, ArrayError
from nn.files import safetensors
from nn.files.description import brief, describe, make_layer
from nn.reading import free_memory
from nn.training.checkpoints import replacing, write_npz
from nn.training.prediction import BATCH, predict_in_batches
from nn.training.state import state_kinds
from nn.training.trainer import Trainer

FORMAT = 1
MAX_CHARACTERS = 1 << 18  # characters of a description; ResNet-50's has 22,000
MEMORY_FACTOR = 8  # free memory must hold the largest activation of a sample this many times
DEEPEST = 60  # layers inside layers


class FileError(ValueError):
    """A file that does not hold the network that it says it holds; the message names it, and what is wrong.

    Examples
    --------
    >>> import nn
    >>> try:
    ...     nn.load("missing.npz")
    ... except (nn.FileError, OSError) as error:
    ...     print("not there")
    not there
    """


class Model(Closed):
    """A network with its weights and running statistics: what is left when training is over, without an optimizer.

    Several threads may predict at the same time. Copies and pickles predict alike.

    Parameters
    ----------
    network : Network
        The whole one.
    weights : mapping or iterator of pairs, trainer, Model or flat array
        Arrays by name, as `state_dict` returns them and checkpoints hold them (moments are left out), or what has them.
        A flat array in network.layout, where there are no running statistics. They are copied.
    about : dict or None
        What else is known, such as the names of classes; anything JSON can hold.

    Attributes
    ----------
    network, about
        As given.
    flat_parameters, buffers : flat arrays in network.layout and network.buffer_layout

    Raises
    ------
    TypeError, ValueError
        The weights are not those of this network: which, expected and given.

    Examples
    --------
    >>> import numpy as np
    >>> import nn
    >>> weights = {"param/W": np.array([[1], [2]], "f4"), "param/b": np.zeros(1, "f4")}
    >>> model = nn.Model(nn.Network(nn.Linear(2, 1), (2,)), weights)
    >>> model.predict([[3.0, 4.0]]).tolist()
    [[11.0]]
    """

    def __init__(self, network: Network, weights: Any, about: Mapping[str, Any] | None = None):
        if not isinstance(network, Network):
            raise TypeError(f"expected a Network first, given {brief(network)}: nn.Network(layers, in_shape)")
        self.network, self.about = network, dict(about or {})
        self.flat_parameters = network.layout.zeros(network.dtype)
        self.buffers = network.buffer_layout.zeros(network.dtype)
        if isinstance(weights, np.ndarray):
            self._copy_flat(weights)
        elif isinstance(weights, Mapping):
            self._copy((name, weights[name]) for name in weights if not str(name).startswith("optimizer/"))
        elif isinstance(weights, Iterator):
            self._copy(weights)
        elif isinstance(weights, Trainer):
            with weights.lock:  # another thread may train it
                self._copy(weights.state_items())
        elif callable(getattr(weights, "state_items", None)):
            self._copy(weights.state_items())
        else:
            raise TypeError(f"expected a trainer, the arrays of a checkpoint or a flat array, given {brief(weights)}")
        self._make_views()

    def _copy_flat(self, parameters: np.ndarray) -> None:
        network = self.network
        if network.buffer_layout.count:
            raise ValueError(
                f"{network.name} has running statistics, such as {next(iter(network.buffer_layout.specs))}: give a "
                "trainer, or the arrays by name, which have them too"
            )
        if parameters.shape != self.flat_parameters.shape or parameters.dtype != network.dtype:
            raise ValueError(
                f"expected a flat {network.dtype} array of {network.layout.size} elements, as the layout has it, given "
                f"{parameters.dtype}{parameters.shape}"
            )
        self.flat_parameters[:] = parameters

    def _copy(self, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        """Copy each array as it comes: it may change with the next one."""
        views, kinds = self.state_dict(), {}
        for name, array in arrays:
            if not isinstance(name, str) or not isinstance(array, np.ndarray):
                raise TypeError(
                    f"expected arrays by name, as a checkpoint has them, given {brief(array)} by {brief(name)}"
                )
            if name.startswith(("param/", "state/")):
                kinds[name] = array.shape, array.dtype
                if name in views and array.shape == views[name].shape:
                    views[name][...] = array
        if problem := _mismatch(_kinds(self.network), kinds):
            raise ValueError(f"these weights are not those of {self.network.name}: {problem}")

    def _make_views(self) -> None:
        self._p = self.network.layout.views(self.flat_parameters)
        self._idle: list[LayerContext] = []  # one for each thread that has predicted at the same time as others

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_p", "_idle")}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._make_views()

    @contextlib.contextmanager
    def _context(self) -> Iterator[LayerContext]:
        """Lend a LayerContext, with memory of its own: no two threads have the same one at the same time."""
        try:
            ctx = self._idle.pop()
        except IndexError:
            ctx = self.network.context(self.buffers, pool=MemoryPool())
            ctx.micro_batch.training = False
        try:
            yield ctx
        finally:
            self._idle.append(ctx)

    def __repr__(self) -> str:
        return f"Model({self.network!r})"

    def predict(self, x: np.ndarray, batch: int = BATCH) -> np.ndarray:
        """Return the outputs (N, *out_shape) for samples (N, *in_shape), `batch` at a time, in evaluation mode.

        Raises
        ------
        TypeError, ShapeError
            x is no array of samples of this network; the message says how to make one. `batch` is no whole number.
        ValueError
            `batch` is below 1.
        """
        with self._context() as ctx:
            return predict_in_batches(self.network, lambda part: self.network.forward(self._p, part, ctx)[0], x, batch)

    def state_items(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over (name, array) of all that was learned, as checkpoints have it: param/2.W, state/1.mean."""
        yield from ((f"param/{name}", array) for name, array in self.named_parameters())
        yield from ((f"state/{name}", array) for name, array in self.network.buffer_layout.items(self.buffers))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return `state_items` as a dict; `trainer.load_weights(model)` takes them to train on."""
        return dict(self.state_items())

    def parameters(self) -> Iterator[np.ndarray]:
        """Iterate over the arrays of parameters."""
        yield from (array for _, array in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over (name, array), such as ("0.W", the first layer's weights)."""
        yield from self.network.layout.items(self.flat_parameters)

    def summary(self) -> str:
        """Return a table of the layers."""
        return self.network.summary()


def save(model: Any, file: str | Path, about: Mapping[str, Any] | None = None) -> Path:
    """Write a network and what it has learned into one file, which `load` reads without knowing anything else.

    Parameters
    ----------
    model : trainer or Model
        `Trainer`, that of several processes too (then all call this, and one writes); of arrays alone
        `nn.Model(network, arrays)` makes one.
    file : path
        .npz, or .safetensors for that format. It is there whole or not at all.
    about : dict or None
        What else `load` should return as `about`, such as the names of classes; anything JSON can hold.

    Returns
    -------
    Path

    Raises
    ------
    TypeError, ValueError
        A layer that is not registered (`register`), or weights that are not this network's.
    OSError
        The file cannot be written; what was there before is kept.

    Examples
    --------
    >>> import tempfile
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.SGD())
    >>> directory = tempfile.TemporaryDirectory()
    >>> file = nn.save(trainer, directory.name + "/network.npz")
    >>> nn.load(file).predict([[1.0, 2.0]]).shape
    (1, 1)
    >>> directory.cleanup()
    """
    check_model("save", model)
    file = as_path(file)
    write = _writer(file)
    text = _text(model.network, model.about if about is None and isinstance(model, Model) else about)
    on_writer(model, lambda whole: write(file, text, whole.state_dict()))
    return file


def check_model(function: str, model: Any) -> None:
    """Refuse what has no network and weights: TypeError."""
    if isinstance(model, Network):
        raise TypeError(
            f"{function}: a Network has no weights: give the trainer, or nn.Model(network, arrays), then the file"
        )
    if not isinstance(model, Trainer | Model):
        raise TypeError(f"{function}: expected a trainer or a nn.Model first, given {brief(model)}")


def as_path(file: str | os.PathLike) -> Path:
    """Return the path of a file; TypeError for anything that is no path."""
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f'file must be a path, such as "digits.npz", given {brief(file)}')
    return Path(file)


def as_json(what: str, about: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `about` as JSON holds it: names are texts; TypeError where it cannot."""
    if not isinstance(about, Mapping | None):
        raise TypeError(f"{what}: about must be a dict, given {about!r:.80}")
    try:
        return json.loads(json.dumps(dict(about or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: about must hold what JSON can, {brief(error)}") from None


def on_writer(model: Trainer | Model, write: Callable[[Model], None]) -> None:
    """Call write(Model) in the process that writes files."""
    if isinstance(model, Model):
        write(model)
    else:
        model.run_on_writer(lambda trainer: write(Model(trainer.network, trainer)))


def load(file: str | Path) -> Model:
    """Return the network, with its weights, that `save` wrote.

    Raises
    ------
    FileError
        The file is not what it says, or has a layer that is not registered here.
    OSError
        It is not there, or cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.SGD())
    >>> directory = tempfile.TemporaryDirectory()
    >>> file = nn.save(trainer, directory.name + "/network.safetensors", about={"note": "an example"})
    >>> model = nn.load(file)
    >>> model.about["note"], bool((model.predict([[1.0, 2.0]]) == trainer.predict([[1.0, 2.0]])).all())
    ('an example', True)
    >>> directory.cleanup()
    """
    file = as_path(file)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a directory: name the file in it, such as {file / 'network.npz'}")
    read = _read_safetensors if file.suffix == ".safetensors" else _read_npz
    try:
        with read(file) as (text, kinds, array):
            network, about = _network(text)
            expected = _kinds(network)
            if problem := _mismatch(expected, kinds) or _too_large(network):
                raise ValueError(problem)
            model = Model(network, ((name, array(name)) for name in expected), about)
    except (ValueError, RecursionError, MemoryError) as error:
        named = isinstance(error, safetensors.TensorError)  # its messages begin with the file
        raise FileError(brief(error, 1000) if named else f"{file}: {brief(error, 1000)}") from error
    return model


# ----------------------------------------------------------------------------------------------- what is in the file


def _text(network: Network, about: Mapping[str, Any] | None) -> str:
    """Return the description of a network, after making it again of that: the two must agree."""
    if network.layout.borrowed or not network.checks_shapes:
        raise ValueError(f"{network.name} is a part of a network: save the whole one")
    description = {"format": FORMAT, "name": network.name, "in_shape": network.in_shape, "dtype": network.dtype.name}
    description["mixed"] = network.mixed
    text = json.dumps(description | {"root": describe(network.root), "about": as_json("save", about)})
    again, _ = _network(text)
    if problem := _mismatch(_kinds(network), _kinds(again)) or _changed(describe(network.root), describe(again.root)):
        raise ValueError(
            f"{network.name}: its layers are no longer what their constructors made, and files hold the constructors' "
            f"arguments: {problem}"
        )
    return text


def _changed(before: Any, after: Any, where: str = "") -> str:
    """Return how two descriptions of a network differ, in words; '' if they are equal."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        inside = before.get("layer", "")
        pairs = ((before[key], after[key], inside or (f"{where}: {key}" if where else key)) for key in before)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = ((a, b, where) for a, b in zip(before, after, strict=True))
    elif before == after:
        return ""
    else:
        return (
            f"{where} is {brief(before)}, of which the constructor makes {brief(after)}: it should keep its arguments "
            "as they are given, under their names"
        )
    return next(filter(None, (_changed(*pair) for pair in pairs)), "")


def _network(text: str) -> tuple[Network, dict]:
    """Return the network of a description, and `about`; ValueError where it describes none."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a description of {len(text):,} characters, and the longest has {MAX_CHARACTERS:,}")
    description = json.loads(text)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        version = description.get("format") if isinstance(description, dict) else description
        raise ValueError(f"format {brief(version)}, but this ringprop reads {FORMAT}")
    shape, dtype, name, about = (description.get(key) for key in ("in_shape", "dtype", "name", "about"))
    mixed = description.get("mixed", False)
    if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise ValueError(f"in_shape must be a list of sizes, given {brief(shape)}")
    if (
        dtype not in ("float32", "float64")
        or not isinstance(name, str)
        or not isinstance(about, dict)
        or type(mixed) is not bool
    ):
        raise ValueError(f"expected dtype, name, about and mixed, given {brief((dtype, name, about, mixed))}")
    if (depth := _depth(description.get("root"))) > DEEPEST:
        raise ValueError(f"{depth} layers inside each other, and at most {DEEPEST} are read")
    root = make_layer(description.get("root"))
    try:
        return Network(root, tuple(shape), dtype, name, mixed=mixed), about
    except Exception as error:  # of layers that no program puts together
        raise ValueError(f"its layers do not fit together: {brief(error, 400)}") from error


def _depth(description: Any) -> int:
    """Return how deeply lists and dicts are nested in a value read from JSON."""
    deepest, waiting = 0, [(description, 0)]
    while waiting:
        value, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict | list):
            items = value.values() if isinstance(value, dict) else value
            waiting += [(item, depth + isinstance(value, dict) / 2) for item in items]
    return int(deepest)


def _kinds(network: Network) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return name -> (shape, dtype) of parameters and running statistics."""
    kinds = state_kinds(network, ())
    return {name: kind for name, kind in kinds.items() if name.startswith(("param/", "state/"))}


def _mismatch(expected: dict, kinds: dict) -> str:
    """Return how shapes and dtypes of arrays differ from those expected, in words; '' if they agree."""
    if missing := sorted(expected.keys() - kinds.keys()):
        return f"it lacks {', '.join(missing[:5]):.200}"
    if foreign := sorted(kinds.keys() - expected.keys()):
        return f"it has {', '.join(foreign[:5]):.200}, which its layers do not need"
    for name, (shape, dtype) in expected.items():
        if kinds[name] != (shape, dtype):
            return f"{name}: its layers need {dtype}{shape}, given {kinds[name][1]}{kinds[name][0]}"
    return ""


def _too_large(network: Network) -> str:
    """Return which layer would take too much memory for one sample, in words; '' if none would.

    A layer without weights makes values of any size out of a few characters of a description.
    """
    sizes = ((math.prod(shape), path) for path, _, *shapes in network.layers() for shape in shapes)
    values, path = max(sizes, default=(0, ""))
    needed, free = values * network.dtype.itemsize, free_memory()
    if needed <= free // MEMORY_FACTOR:
        return ""
    return (
        f"layer {path} takes or makes {needed / 2**30:,.1f} GiB for one sample, and {free / 2**30:,.1f} GiB of memory "
        "are free"
    )


# -------------------------------------------------------------------------------------------------- the two formats


def _writer(file: Path) -> Callable[[Path, str, dict], None]:
    if file.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{file}: the name must end in .npz or .safetensors, which says the format")
    return _write_safetensors if file.suffix == ".safetensors" else _write_npz


def _write_npz(file: Path, text: str, arrays: dict[str, np.ndarray]) -> None:
    with replacing(file) as out:
        write_npz(out, [("network", np.array(text)), *arrays.items()])


def _write_safetensors(file: Path, text: str, arrays: dict[str, np.ndarray]) -> None:
    safetensors.write(file, arrays, {"ringprop": text})


@contextlib.contextmanager
def _read_npz(file: Path):
    with contextlib.closing(Archive(file, NUMBERS + TEXT, compressed=False)) as archive:
        if "network" not in archive:
            raise ArrayError(
                "it describes no network: nn.save writes one that does; a checkpoint's arrays alone do not"
            )
        kinds = {name: archive.check(name) for name in archive}
        del kinds["network"]
        yield archive.text("network", MAX_CHARACTERS), kinds, archive.__getitem__


@contextlib.contextmanager
def _read_safetensors(file: Path):
    tensors = safetensors.Tensors(file)
    if (text := tensors.metadata.get("ringprop")) is None:
        raise ValueError(
            "it describes no network of ringprop's, only arrays: nn.files.safetensors.Tensors(FILE) reads these by name"
        )
    yield text, {name: (array.shape, array.dtype) for name, array in tensors.items()}, tensors.__getitem__
