"""One layout, many flat buffers: name -> (offset, shape).

The same layout serves parameters, gradients, optimizer moments and checkpoints. Arrays are in **backward completion
order** (last layer first), so that the gradients that are finished at any moment are a growing prefix of the buffer,
and a bucket of gradients is a slice.

Layouts of a pipeline's stages, last stage first, are the whole network's, except for what a stage borrows: an array
that its layers are tied to and that belongs to an earlier stage stands at the end, under its owner's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from nn.core.layer import ShapeError, Spec

ALIGN = 16  # elements: a cache line of float32


class Layout:
    """Offsets of all arrays of a nested dict of Specs in one flat buffer.

    Parameters
    ----------
    specs : nested dict
        As `Layer.specs` returns it: names -> Spec for a layer, names -> dict for a container.
    buffers : bool
        Lay out the buffers (running statistics) instead of the trained parameters.
    borrowed : dict of Spec
        By full name, arrays of layers that are elsewhere, in an earlier stage of a pipeline, for instance: space is
        reserved here, too, for those that a layer here is tied to.
    names : iterable of str
        Names of all arrays of the network of which these are a stage; empty if they are the whole network.
    reserve : dict of int, or None
        By full name, the number of elements to reserve, where that is more than an array has.
    duplicates : iterable of str
        Names of arrays that another layout has as well, and counts.

    Attributes
    ----------
    size : int
        Elements of a buffer, padding included. Padding is always zero.
    own : int
        Where the arrays of the layers here end; behind are those that they borrow.
    count : int
        Elements of these without padding: the number of parameters.
    specs, slices : dict
        Full name such as "2.W" -> Spec, and -> slice of the buffer. A tied array is there once, under its owner's name.
    borrowed : set of str
        Names of the arrays that another layout has as well, and counts: their owner's.
    duplicates : set of str
        As given.
    shared : set of str
        Paths of the layers whose array has had a user before them in the backward pass (Spec.tied).
    names : tuple of str
        Names of all arrays of the whole network: the order of anything that its stages keep together.

    Raises
    ------
    ShapeError
        If an array is tied to one that is missing, comes later in the network, has another shape or has company.

    Examples
    --------
    >>> import nn
    >>> network = nn.Network(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), (3,))
    >>> gradients = network.layout.zeros("f4")
    >>> [(name, array.shape) for name, array in network.layout.items(gradients)]
    [('1.W', (2, 1)), ('1.b', (1,)), ('0.W', (3, 2)), ('0.b', (2,))]
    """

    def __init__(
        self,
        specs: dict,
        buffers: bool = False,
        borrowed: Mapping[str, Spec] | None = None,
        names: Iterable[str] = (),
        reserve: Mapping[str, int] | None = None,
        duplicates: Iterable[str] = (),
    ):
        self._tree = specs
        self._buffers, self._reserve = buffers, reserve or {}
        self.specs: dict[str, Spec] = {}
        self.slices: dict[str, slice] = {}
        self.ends: dict[str, int] = {}  # path of a layer -> length of the prefix that holds it and all after it
        self.size = 0
        self.shared: set[str] = set()
        self._ties: dict[str, tuple[str, Spec]] = {}  # full name of a tied array -> that of its owner, and its Spec
        self._add_tree(specs, "")
        self.own, self.count = self.size, sum(math.prod(spec.shape) for spec in self.specs.values())
        self.borrowed: set[str] = set()
        self.duplicates = set(duplicates)
        if not buffers:
            owners = {owner for owner, _ in self._ties.values()} - self.specs.keys()
            self._borrow({name: spec for name, spec in (borrowed or {}).items() if name in owners})
            self._tie()
        self.names = tuple(names) or tuple(self.specs)

    def _add_tree(self, tree: dict, prefix: str) -> None:
        for name, entry in reversed(tree.items()) if _is_container(tree) else tree.items():
            if isinstance(entry, dict):
                self._add_tree(entry, f"{prefix}{name}.")
            elif entry.tied:
                self._ties[prefix + name] = entry.tied, entry
            elif entry.buffer == self._buffers:
                self._add(prefix + name, entry)
        self.ends[prefix[:-1]] = self.size

    def _add(self, name: str, spec: Spec) -> None:
        """Reserve the space of one array."""
        size = math.prod(spec.shape)
        self.specs[name] = spec
        self.slices[name] = slice(self.size, self.size + size)
        self.size += -(-max(size, self._reserve.get(name, 0)) // ALIGN) * ALIGN

    def _borrow(self, specs: dict[str, Spec]) -> None:
        """Reserve space at the end for arrays of layers elsewhere."""
        for name, spec in specs.items():
            self._add(name, spec)
            self.borrowed.add(name)

    def _tie(self) -> None:
        """Check the ties; find the layers that add their gradient: all users of an array but the network's last."""
        written = set()
        parents = [name.rpartition(".")[0] for name in [*self.specs, *self._ties]]
        for name, (owner, spec) in self._ties.items():
            path, owner_path = name.rpartition(".")[0], owner.rpartition(".")[0]
            if owner not in self.specs or (owner not in self.borrowed and self.ends[owner_path] <= self.ends[path]):
                raise ShapeError(f"layer {path}: its {name} is tied to {owner!r}, which no earlier layer has")
            if self.specs[owner].shape != spec.shape:
                raise ShapeError(
                    f"layer {path}: needs shape {spec.shape}, tied to {owner}, which has {self.specs[owner].shape}"
                )
            if parents.count(path) > 1 or parents.count(owner_path) > 1:
                raise ShapeError(f"{name} is tied to {owner}: neither layer may have other parameters")
            self.shared |= {path} if owner in written else set()
            if owner not in self.borrowed:
                self.shared.add(owner_path)
            written.add(owner)

    def views(self, buffer: np.ndarray):
        """Return the buffer as a tree of arrays: a namespace for a layer (p.W, p.b), a tuple for a container."""
        if buffer.ndim != 1 or len(buffer) < self.size:
            raise ValueError(f"this layout needs a flat buffer of {self.size} elements, given shape {buffer.shape}")
        return self.tree({name: buffer[part] for name, part in self.slices.items()})

    def tree(self, flat: dict[str, np.ndarray]):
        """Return the same tree of flat arrays by full name, which may lie anywhere."""
        return self._views(self._tree, "", flat)

    def flat(self, tree) -> dict[str, np.ndarray]:
        """Return {full name: array} of such a tree."""
        arrays: dict[str, np.ndarray] = {}
        self._collect(self._tree, "", tree, arrays)
        return arrays

    def _collect(self, specs: dict, prefix: str, views, arrays: dict[str, np.ndarray]) -> None:
        if _is_container(specs):
            for (name, entry), inside in zip(specs.items(), views, strict=True):
                self._collect(entry, f"{prefix}{name}.", inside, arrays)
            return
        for name, spec in specs.items():
            if spec.buffer == self._buffers:
                arrays[spec.tied or prefix + name] = getattr(views, name)

    def _views(self, tree: dict, prefix: str, flat: dict[str, np.ndarray]):
        if _is_container(tree):
            return tuple(self._views(entry, f"{prefix}{name}.", flat) for name, entry in tree.items())
        arrays = {}
        for name, spec in tree.items():
            if spec.buffer == self._buffers:
                arrays[name] = flat[spec.tied or prefix + name].reshape(spec.shape)
        return Views(**arrays)

    def items(self, buffer: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Iterate over (full name, array) of all arrays, as views of the buffer."""
        for name, spec in self.specs.items():
            yield name, buffer[self.slices[name]].reshape(spec.shape)

    def zeros(self, dtype) -> np.ndarray:
        """Return a flat array of zeros, of this layout."""
        return np.zeros(self.size, dtype)

    def initialize(self, buffer: np.ndarray, seed: int) -> None:
        """Draw every array from SeedSequence(seed, its name): the same whatever else the layout holds."""
        buffer[...] = 0
        for name, array in self.items(buffer):
            array[...] = self.draw(name, seed)

    def draw(self, name: str, seed: int) -> np.ndarray:
        """Return the first value of one array.

        Raises
        ------
        TypeError, ShapeError
            Its initializer cannot be called as it has to be, or makes an array of another shape.
        """
        rng = np.random.default_rng(np.random.SeedSequence([seed, *name.encode()]))
        spec = self.specs[name]
        try:
            value = spec.init(rng, spec.shape)
        except TypeError as error:
            raise TypeError(
                f"{name}: its init is called as init(rng, shape), with a random generator and {spec.shape}, such as "
                f"nn.initializers.zeros; {spec.init!r:.80} says: {error}"
            ) from error
        if np.shape(value) not in (spec.shape, ()):
            raise ShapeError(f"{name}: its init must make an array of shape {spec.shape}, given {np.shape(value)}")
        return value

    def region(self, lo: int = 0, hi: int | None = None) -> Region:
        """Return the region buffer[lo:hi]."""
        return Region(self, lo, self.size if hi is None else hi)


class Region:
    """The arrays in a slice of a buffer, for optimizers that update only that.

    Attributes
    ----------
    names : tuple of str
        Names of all arrays of the network, also outside the region: the order of anything kept by array.
    tensors : list of (name, slice, Spec)
        Slices are relative to the region; an array that a cut divides is there with the slice inside.
    decayed : list of slice
        Where weight decay applies, neighbours joined (padding included: it is zero and stays so).
    elsewhere : set of str
        Names of arrays that another layout has as well, and counts: what is borrowed, and duplicates.
    owned : list of slice
        Slices that count in a norm over several layouts, such as those of a pipeline's stages: all but `elsewhere`.
    blocks : (settings, list)
        How an optimizer with these settings goes through the region: kept from update to update.

    Examples
    --------
    >>> import nn
    >>> network = nn.Network(nn.Linear(3, 2), (3,))
    >>> region = network.layout.region()
    >>> [(part.start, part.stop) for part in region.decayed]  # W, and not b
    [(0, 6)]
    """

    def __init__(self, layout: Layout, lo: int, hi: int):
        self.lo, self.hi = lo, hi
        self.names = layout.names
        self.elsewhere = layout.duplicates | layout.borrowed
        self.owned = [slice(0, max(0, min(hi, layout.own) - lo))]
        self.tensors = []
        self.decayed: list[slice] = []
        self.blocks: tuple[tuple, list] = ((), [])
        for name, array in layout.slices.items():
            a, b = max(array.start, lo) - lo, min(array.stop, hi) - lo
            if a >= b:
                continue
            spec = layout.specs[name]
            self.tensors.append((name, slice(a, b), spec))
            if spec.decay:
                if self.decayed and a - self.decayed[-1].stop < ALIGN:
                    a = self.decayed.pop().start
                self.decayed.append(slice(a, b))
        if layout.duplicates:
            self.owned = [part for name, part, _ in self.tensors if name not in self.elsewhere]


class Views:
    """Arrays of one layer by name, such as p.W and p.b: views of a buffer.

    To set one writes to the buffer, `p.W = array` as `p.W[...] = array`: what is not in the buffer is neither trained
    nor saved.
    """

    def __init__(self, **arrays: np.ndarray):
        vars(self).update(arrays)

    def __setattr__(self, name: str, value: np.ndarray) -> None:
        array = vars(self).get(name)
        if array is None:
            raise AttributeError(f"there is no array {name!r} here, only {', '.join(vars(self)) or 'none'}")
        if value is array:  # after p.W += 1
            return
        if np.shape(value) != array.shape:
            raise ValueError(f"{name}: expected an array of shape {array.shape}, given shape {np.shape(value)}")
        array[...] = value

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"there is no array {name!r} here, only {', '.join(vars(self)) or 'none'}")

    def __getitem__(self, name: str):
        raise TypeError(f"arrays are attributes: p.{name}, not p[{name!r}]")

    def __repr__(self):
        return f"Views({', '.join(f'{name}={array.dtype}{array.shape}' for name, array in vars(self).items())})"


def _is_container(tree: dict) -> bool:
    return any(isinstance(entry, dict) for entry in tree.values())
