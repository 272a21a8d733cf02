"""An ONNX graph while it is being made: nodes, constants, and which values are there with channels first too.

Images have their channels last here and first in ONNX's operators, so these stand between two Transposes. Where one
undoes the other neither is written: a value remembers the form that it was made from, what works on each element is
done in that form, and what nobody reads is left out at the end. Numbers of fields are those of onnx.proto (ONNX 1.12,
opset 17).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nn.core.layer import Shape
from nn.protobuf import message

OPSET, IR_VERSION = 17, 8
TYPES = {"float32": 1, "uint8": 2, "int64": 7, "bool": 9}  # TensorProto.DataType
FLOAT, INT, STRING, INTS, STRINGS = 1, 2, 3, 7, 8  # AttributeProto.AttributeType
FIRST, LAST = (0, 3, 1, 2), (0, 2, 3, 1)  # how axes N H W C become N C H W, and back


class Graph:
    """Nodes and constants, by name.

    Attributes
    ----------
    padding : str or None
        The value that says which positions of the sequence are padding.
    """

    def __init__(self) -> None:
        self.nodes: list[tuple[str, tuple[str, ...], str, dict]] = []  # operator, inputs, output, attributes
        self.constants: dict[str, np.ndarray] = {}
        self.padding: str | None = None
        self._first: dict[str, str] = {}  # a value with channels last -> the same with channels first
        self._shared: dict[tuple, tuple[np.ndarray, str]] = {}  # arrays that several layers use

    def node(self, operator: str, *inputs: str | np.ndarray | float, **attributes) -> str:
        """Add a node with one output; return its name. Numbers and arrays among its inputs become constants."""
        names = tuple(value if isinstance(value, str) else self.constant(value) for value in inputs)
        output = f"{operator}_{len(self.nodes)}"
        self.nodes.append((operator, names, output, attributes))
        return output

    def constant(self, array: np.ndarray | float) -> str:
        """Add a constant, floats as float32, whole numbers as int64; an array that several layers use is added once."""
        array = np.asarray(array)
        key = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str
        if key not in self._shared:
            kind = {"f": np.float32, "b": np.bool_}.get(array.dtype.kind, np.int64)
            name = f"constant_{len(self.constants)}"
            self.constants[name] = np.array(array, kind, order="C")
            self._shared[key] = array, name  # a reference, so that no other array gets its address
        return self._shared[key][1]

    def channels_first(self, x: str) -> str:
        """Return an image's value as (N, C, H, W)."""
        if x not in self._first:
            self._first[x] = self.node("Transpose", x, perm=FIRST)
        return self._first[x]

    def channels_last(self, x: str) -> str:
        """Return the value of (N, C, H, W) as the layers have it."""
        y = self.node("Transpose", x, perm=LAST)
        self._first[y] = x
        return y

    def elementwise(self, make: Callable[..., str], *values: str) -> str:
        """Apply `make`, which works element by element, with channels first if all values exist so; return the node."""
        if all(value in self._first for value in values):
            return self.channels_last(make(*(self._first[value] for value in values)))
        return make(*values)

    def named(self, value: str, name: str) -> None:
        """Give a value another name, that of an output."""
        self.nodes.append(("Identity", (value,), name, {}))

    def used(self, output: str) -> tuple[list, dict[str, np.ndarray]]:
        """Return the nodes and constants that the output depends on, in their order."""
        wanted, nodes = {output}, []
        for node in reversed(self.nodes):
            if node[2] in wanted:
                nodes.append(node)
                wanted.update(node[1])
        return nodes[::-1], {name: array for name, array in self.constants.items() if name in wanted}

    def model(self, x: tuple[str, str, Shape], y: tuple[str, Shape], name: str, about: dict[str, str]) -> bytes:
        """Return the content of the file.

        Parameters
        ----------
        x : (name, dtype, shape)
            The input; `shape` is that of one sample.
        y : (name, shape)
            The output, in float32.
        name : str
            Name of the graph.
        about : dict of str
            Further properties that the file stores.
        """
        nodes, constants = self.used(y[0])
        graph = message(
            (1, [_node(*node) for node in nodes]),
            (2, name),
            (5, [_tensor(key, array) for key, array in constants.items()]),
            (11, _value(*x)),
            (12, _value(y[0], "float32", y[1])),
        )
        properties = [message((1, key), (2, value)) for key, value in about.items()]
        return message(
            (1, IR_VERSION), (2, "ringprop"), (7, graph), (8, message((1, ""), (2, OPSET))), (14, properties)
        )


def _node(operator: str, inputs: tuple[str, ...], output: str, attributes: dict) -> bytes:
    return message(
        (1, inputs), (2, output), (3, output), (4, operator), (5, [_attribute(*item) for item in attributes.items()])
    )


def _attribute(name: str, value) -> bytes:
    if isinstance(value, str):
        return message((1, name), (4, value), (20, STRING))
    if isinstance(value, float):
        return message((1, name), (2, value), (20, FLOAT))
    if isinstance(value, int):
        return message((1, name), (3, int(value)), (20, INT))
    if isinstance(value[0], str):
        return message((1, name), (9, list(value)), (20, STRINGS))
    return message((1, name), (8, [int(n) for n in value]), (20, INTS))


def _tensor(name: str, array: np.ndarray) -> bytes:
    return message(
        (1, list(array.shape)),
        (2, TYPES[array.dtype.name]),
        (8, name),
        (9, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()),
    )


def _value(name: str, dtype: str, shape: Shape) -> bytes:
    """An input or output: its type, and its shape with any number of samples."""
    sizes = [message((2, "N")), *(message((1, int(n))) for n in shape)]
    tensor = message((1, TYPES[dtype]), (2, message((1, sizes))))
    return message((1, name), (2, message((1, tensor))))
