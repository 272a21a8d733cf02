"""A trained network as an ONNX file, which other programs run: onnxruntime, and through it phones and browsers.

    nn.export_onnx(trainer, "digits.onnx")

The input is called x, (N, *in_shape) with channels last as here, float32 or int64 ids; the output y. It computes what
the network computes in evaluation, in float32, with operators of opset 17; layers without one of their own are put
together of several. Source: Open Neural Network Exchange, 2017.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nn.files.model import Model, as_json, as_path, check_model, on_writer
from nn.files.onnx_graph import Graph
from nn.files.onnx_layers import nodes_of
from nn.training.checkpoints import write_atomically

LARGEST = 2**31 - 1  # bytes of a message in Protocol Buffers


def export_onnx(model: Any, file: str | Path, about: Mapping[str, Any] | None = None) -> Path:
    """Write a network and its weights as ONNX.

    Parameters
    ----------
    model : trainer or Model
        As `save` takes it.
    file : path
        It is there whole or not at all.
    about : dict or None
        What the file says of itself: texts as they are, all else as JSON.

    Raises
    ------
    TypeError, ValueError
        A layer for which no form in ONNX is known, weights of another network, or more than 2 GiB.
    OSError
        The file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> import nn
    >>> trainer = nn.Trainer(nn.Network(nn.Linear(2, 1), (2,)), nn.MSELoss(), nn.SGD())
    >>> directory = tempfile.TemporaryDirectory()
    >>> nn.export_onnx(trainer, directory.name + "/network.onnx").name
    'network.onnx'
    >>> directory.cleanup()
    """
    check_model("export_onnx", model)
    file = as_path(file)
    about = as_json("export_onnx", about)
    on_writer(model, lambda whole: _write(whole, file, about))
    return file


def _write(model: Model, file: Path, about: Mapping[str, Any]) -> None:
    network = model.network
    if 4 * network.layout.count > LARGEST:
        raise ValueError(
            f"{file}: {network.layout.count:,} parameters are more than the 2 GiB that one ONNX file holds"
        )
    graph = Graph()
    p, s = network.layout.views(model.flat_parameters), network.buffer_layout.views(model.buffers)
    out = nodes_of(network.root, "x", p, s, network.in_shape, graph)
    graph.named(out, "y")
    properties = {key: value if isinstance(value, str) else json.dumps(value) for key, value in about.items()}
    x = "x", "int64" if network.takes_ids else "float32", network.in_shape
    write_atomically(file, graph.model(x, ("y", network.out_shape), network.name, properties))
