"""Profiles: seconds and bytes of a network's layers for one mini-batch, and the file format that holds them.

layer,forward_ms,backward_ms,output_bytes,parameter_bytes
Linear(4096 1000),0.453,0.474,1024000,16388000

More columns are written, and optional when read: weight_gradient_ms, saved_bytes, tensor_sums, sum_bytes; and of
attention attention_ms, key_bytes, heads, positions, without which no axis "context" is predicted. Defaults: the
weights' gradient takes half of backward; a layer saves its output; a layer with parameters that is split among ranks
gathers its output forward and scatters its gradient backward, which is half a sum each way, of the output's bytes.
Mixed precision saves and sends outputs as float16, and sums them as float32.

`count_layers` makes a profile from multiply-accumulates alone, `layer_times.py` one from measurements.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from nn.analysis.workload import count
from nn.core.containers import Wrapper
from nn.core.network import Network
from nn.layers.attention import MultiHeadAttention, TransformerBlock
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear, TiedLinear
from nn.layers.experts import MixtureOfExperts
from nn.reading import TABLE, read_text

COLUMNS = ("layer", "forward_ms", "backward_ms", "output_bytes", "parameter_bytes")
HALF = 2  # bytes of a float16
MORE = ("weight_gradient_ms", "saved_bytes", "tensor_sums", "sum_bytes")
OF_ATTENTION = ("attention_ms", "key_bytes", "heads", "positions")
OF_EXPERTS = ("routed_bytes", "expert_bytes", "experts")


class LayerProfile(NamedTuple):
    """Cost of one layer for one mini-batch.

    Attributes
    ----------
    name : str
    forward, backward : float
        seconds
    output, parameters : float
        bytes of its output as sent to the next layer, and of its parameters
    weight_gradient : float
        seconds of backward that no other layer depends on
    saved : float
        bytes that are kept from forward until backward
    tensor_sums : float
        sums over the tensor group, of the output forward and as many backward (an allgather or a reduce-scatter is half
        a sum)
    summed : float
        bytes of such a sum; 0: those of the output
    attention : float
        seconds of forward in which scores of all positions with each other are computed, and their sums
    keys : float
        bytes of keys and values
    heads, positions : int
        of attention, and of a sequence; 0 without
    routed : float
        bytes of the positions that are sent to experts once, one for each choice; 0 without experts
    experts : float
        bytes of the experts, of those of the parameters
    expert_count : int
        how many experts a mixture has; 0 without
    """

    name: str
    forward: float
    backward: float
    output: float
    parameters: float
    weight_gradient: float = 0.0
    saved: float = 0.0
    tensor_sums: float = 0.0
    summed: float = 0.0
    attention: float = 0.0
    keys: float = 0.0
    heads: int = 0
    positions: int = 0
    routed: float = 0.0
    experts: float = 0.0
    expert_count: int = 0

    def of_samples(self, share: float) -> "LayerProfile":
        """Return the layer with `share` times the samples: all but its parameters is scaled."""
        scaled = {"forward", "backward", "output", "weight_gradient", "saved", "summed", "attention", "keys", "routed"}
        return self._replace(**{name: getattr(self, name) * share for name in scaled})

    def measured(self, forward: float, backward: float, weight_gradient: float) -> "LayerProfile":
        """Return the layer with measured seconds; attention has the share of forward that it has of the operations."""
        attention = self.attention / self.forward * forward if self.forward else 0.0
        return self._replace(forward=forward, backward=backward, weight_gradient=weight_gradient, attention=attention)


def read_profile(path: str | Path) -> list[LayerProfile]:
    """Read the layers of a profile, first to last.

    Raises
    ------
    ValueError
        no CSV, a missing column, a value that is no number, negative or not finite, no layers, no layer that takes
        time; with file and line
    """
    try:
        text = io.StringIO(read_text(path, TABLE, "utf-8-sig"), newline="")  # spreadsheets begin with a mark
        reader = csv.DictReader(text)
        there, rows = reader.fieldnames or (), [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected a table in CSV, as UTF-8: {error}") from None
    if missing := [name for name in COLUMNS if name not in there]:
        raise ValueError(f"{path}: expected columns {', '.join(COLUMNS)}; {', '.join(missing)} not there")
    layers = []
    for line, row in rows:
        value = {
            name: number(path, line, row, name)
            for name in COLUMNS[1:] + MORE + OF_ATTENTION + OF_EXPERTS
            if name in there
        }
        value |= {name[:-3]: value[name] / 1e3 for name in value if name.endswith("_ms")}
        with_weights = value["parameter_bytes"] > 0
        layers.append(
            LayerProfile(
                row["layer"] or "",
                value["forward"],
                value["backward"],
                value["output_bytes"],
                value["parameter_bytes"],
                value.get("weight_gradient", value["backward"] / 2 * with_weights),
                value.get("saved_bytes", value["output_bytes"]),
                value.get("tensor_sums", 0.5 * with_weights),
                value.get("sum_bytes", 0.0),
                value.get("attention", 0.0),
                value.get("key_bytes", 0.0),
                int(value.get("heads", 0)),
                int(value.get("positions", 0)),
                value.get("routed_bytes", 0.0),
                value.get("expert_bytes", 0.0),
                int(value.get("experts", 0)),
            )
        )
    checked(layers, path)
    if not any(layer.forward + layer.backward for layer in layers):
        raise ValueError(f"{path}: expected layers that take some time, given 0 ms for all")
    return layers


def write_profile(layers: Sequence[LayerProfile]) -> str:
    """Return a profile as text, which `read_profile` reads."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(COLUMNS + MORE + OF_ATTENTION + OF_EXPERTS)
    for layer in layers:
        times = (f"{1e3 * seconds:.6g}" for seconds in (layer.forward, layer.backward, layer.weight_gradient))
        forward, backward, weights = times
        output, parameters, *more = (f"{value:.12g}" for value in (layer.output, layer.parameters, *layer[6:9]))
        attention = f"{1e3 * layer.attention:.6g}", f"{layer.keys:.12g}", layer.heads, layer.positions
        experts = f"{layer.routed:.12g}", f"{layer.experts:.12g}", layer.expert_count
        more += [*attention, *experts]
        out.writerow((layer.name.replace(",", ""), forward, backward, output, parameters, weights, *more))
    return text.getvalue()


def count_layers(network: Network, samples: int, flops: float, copy: float) -> list[LayerProfile]:
    """Return a profile counted from the operations and activations of the root's children.

    A multiply-accumulate is two operations; an output is written and read once in forward and twice in backward.

    Parameters
    ----------
    samples : of the mini-batch
    flops : operations per second of a rank in matrix products
    copy : seconds per byte of operations bound by memory bandwidth
    """
    if not (flops > 0 and math.isfinite(flops)):
        raise ValueError(f"flops: expected operations a second above 0, given {flops}")
    item, found = network.dtype.itemsize, {}
    kept = HALF if network.mixed else item
    for row in count(network):
        found.setdefault(row.path.partition(".")[0], []).append(row)
    mixtures = mixtures_of(network)
    layers, sums = [], tensor_sums(network, {path: [row.parameters for row in rows] for path, rows in found.items()})
    for path, rows in found.items():
        count_of, summed = sums[path]
        core, keys, heads, positions = attention_of(network, path)
        experts = [each for each in mixtures if each[0].partition(".")[0] == path]
        stored = samples * sum(row.activation for row in rows)
        forward = samples * 2 * sum(row.forward for row in rows) / flops + 2 * stored * copy
        backward = samples * 2 * sum(row.backward for row in rows) / flops + 4 * stored * copy
        layers.append(
            LayerProfile(
                title(network, path),
                forward,
                backward,
                samples * math.prod(child_shape(network, path)) * kept,
                sum(row.parameters for row in rows) * item,
                min(backward, samples * 2 * sum(row.forward for row in rows) / flops),
                stored * kept / item,
                count_of,
                samples * math.prod(summed) * item,
                samples * 2 * core / flops,
                samples * keys * item,
                heads,
                positions,
                samples * item * sum(routed for _, routed, _, _ in experts),
                item * sum(parameters for _, _, parameters, _ in experts),
                math.gcd(*(count for _, _, _, count in experts)),
            )
        )
    return checked(layers)


def attention_of(network: Network, path: str) -> tuple[int, int, int, int]:
    """Of a child of the root: operations of scores and sums, elements of keys and values, heads, positions."""
    core = keys = heads = positions = 0
    for inner, layer, shape, _ in network.layers():
        if isinstance(layer, MultiHeadAttention) and (inner == path or inner.startswith(f"{path}.")):
            T, D = shape
            core, keys, heads, positions = core + 2 * T * T * D, keys + 2 * T * D, layer.heads, T
    return core, keys, heads, positions


def mixtures_of(network: Network) -> list[tuple[str, int, int, int]]:
    """(path, numbers that a sample sends to experts, their parameters, how many there are) of every mixture."""
    found = []
    for path, layer, in_shape, _ in network.layers():
        while isinstance(layer, Wrapper):
            layer = layer.layer
        if isinstance(layer, MixtureOfExperts):
            specs = layer.specs(in_shape)[0]
            parameters = sum(math.prod(specs[name].shape) for name in ("A", "B"))
            found.append((path, math.prod(in_shape) * layer.top, parameters, layer.experts))
    return found


def child_shape(network: Network, path: str) -> tuple[int, ...]:
    """Shape of what a child of the root gives for one sample; the network's own where the root has no children."""
    shapes = [out for p, _, _, out in network.layers() if p == path or p.startswith(path + ".")]
    if hasattr(network.root, "child_shapes") and path.isdecimal():
        inner = list(network.root.child_shapes(network.in_shape))
        place = int(path) - network.root.first
        return inner[place + 1] if place + 1 < len(inner) else network.out_shape
    return shapes[-1]


def child(network: Network, path: str):
    """The child of the root at a path; the root itself where it has none."""
    return network.root.children().get(path, network.root)


def title(network: Network, path: str) -> str:
    """A child's place and what it is, in one cell of a table."""
    layer = child(network, path)
    text = type(layer).__name__ if layer.children() else repr(layer)
    return f"{path} {text}".strip()


def tensor_sums(network: Network, parameters: dict[str, Iterable[int]]) -> dict[str, tuple[float, tuple[int, ...]]]:
    """Of each child of the root, given its parameters: `LayerProfile.tensor_sums`, and the shape of what is summed.

    As parallel/strategies/tensor/rewriting.py cuts them. A transformer's block: two each way. Linear layers in pairs:
    the first has the gradient of its input to sum, if anybody wants it, the second its output. A convolution gathers
    its input, and scatters that one's gradient, if channels of it are on other ranks. Any other with weights counts
    as half a sum of its output each way. Of these halves the one forward sums nothing: in mixed precision it moves
    half the bytes.
    """
    half = 0.375 if network.mixed else 0.5
    found, shape, whole, learned = {}, network.in_shape, True, False
    for path in parameters:
        layer, before, shape = child(network, path), shape, child_shape(network, path)
        inside = [each for p, each, given, _ in network.layers() if p.partition(".")[0] == path and each.macs(given)]
        if isinstance(layer, TransformerBlock):
            found[path], whole = (2.0, shape), True
        elif isinstance(layer, Linear | TiedLinear):
            found[path] = (0.5 * learned, before) if whole else (0.5, shape)
            whole = not whole
        elif isinstance(layer, Conv2d):
            found[path], whole = (0.0 if whole else half, before), False
        else:
            found[path] = half * bool(inside), shape
            if inside:
                whole = not any(isinstance(each, Conv2d) for each in inside)
        learned = learned or any(parameters[path])
    return found


def number(path, line: int, row: dict, column: str) -> float:
    """The number in a column of a row."""
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise ValueError(f"{path}, line {line}: {column} must be a number, given {row[column]!r:.80}") from None


def checked(layers: Sequence[LayerProfile], where="profile") -> list[LayerProfile]:
    """The layers, if there are any and all their figures are finite and at least 0."""
    layers = [LayerProfile(*layer) for layer in layers]
    if not layers:
        raise ValueError(f"{where}: no layers")
    for i, layer in enumerate(layers):
        for field, value in zip(LayerProfile._fields[1:], layer[1:], strict=True):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{where}: layer {i} ({layer.name:.80}): {field} must be at least 0, given {value}")
        if layer.weight_gradient > layer.backward * (1 + 1e-9):
            raise ValueError(
                f"{where}: layer {i} ({layer.name:.80}): weight_gradient is part of backward's "
                f"{layer.backward:g} s, given {layer.weight_gradient:g}"
            )
    return layers
