"""The axes of a mesh: one table, from which meshes, groups of ranks, options and their refusals follow.

What ranks at different places of one axis have determines who sums what:

    data, expert                   other samples of a global batch, so an epoch is divided among them
    expert, pipeline, tensor       other parts of the network: together they have its parameters (and of each array, on
                                   expert and tensor)
    context, space, branch         parts of the same samples: each has all parameters, and a term of their gradients

Nothing here imports NumPy or MPI, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """What ranks at different places of an axis have.

    Attributes
    ----------
    summary : str
        What is divided among them, for --help.
    shares_batch : bool
        Other samples of every global batch.
    divides_network : bool
        Other parts of the network's parameters. Without it the gradients of all ranks of the axis are summed.
    divides_arrays : bool
        Other parts of the same arrays.
    divides_samples : bool
        Parts of the same samples.
    in_layers : bool
        Whether layers ask the ranks along it while they compute.
    only_beside_data : bool
        Whether it can be combined with "data" alone.
    reason : str
        Why such axes cannot be combined with it.
    """

    summary: str
    shares_batch: bool = False
    divides_network: bool = False
    divides_arrays: bool = False
    divides_samples: bool = False
    in_layers: bool = True
    only_beside_data: bool = False
    reason: str = ""


PARTS = "ranks that share images have all parameters and sum the gradients of all, others have parts of them"
ONE_CUT = "samples are cut in one way: rows, branches or positions"
# In the order of ranks: neighbours on the last axis are neighbours in the communicator.
AXES: dict[str, Axis] = {
    "data": Axis("samples", shares_batch=True),
    "expert": Axis(
        "samples and experts",
        shares_batch=True,
        divides_network=True,
        divides_arrays=True,
        reason="experts are chosen for positions of sequences, and these axes cut images; use data, pipeline, context "
        "or tensor",
    ),
    "pipeline": Axis("layers", divides_network=True, in_layers=False, reason=PARTS),
    "context": Axis("positions of sequences", divides_samples=True, reason=ONE_CUT),
    "tensor": Axis("arrays of layers", divides_network=True, divides_arrays=True, reason=PARTS),
    "space": Axis("rows of images", divides_samples=True, only_beside_data=True, reason=ONE_CUT),
    "branch": Axis("branches of modules", divides_samples=True, only_beside_data=True, reason=ONE_CUT),
}
SHARE_BATCH = tuple(name for name, axis in AXES.items() if axis.shares_batch)
DIVIDE_NETWORK = tuple(name for name, axis in AXES.items() if axis.divides_network)
DIVIDE_ARRAYS = tuple(name for name, axis in AXES.items() if axis.divides_arrays)
DIVIDE_SAMPLES = tuple(name for name, axis in AXES.items() if axis.divides_samples)
IN_LAYERS = tuple(name for name, axis in AXES.items() if axis.in_layers)


def combinable(name: str) -> tuple[str, ...]:
    """Return the axes that a mesh with this one may have, itself included.

    Examples
    --------
    >>> combinable("space")
    ('data', 'space')
    """

    def together(other: str) -> bool:
        either = AXES[name].only_beside_data or AXES[other].only_beside_data
        return other == name or "data" in (name, other) or not either

    return tuple(other for other in AXES if together(other))


def conflict(sizes: Mapping[str, int]) -> str:
    """Return which axes with several ranks cannot be combined, and why; empty if all can.

    Examples
    --------
    >>> conflict({"data": 2, "space": 2, "branch": 2})
    'the axes space and branch cannot be combined: samples are cut in one way: rows, branches or positions'
    """
    used = [name for name in AXES if name != "data" and sizes.get(name, 1) > 1]
    for name in used:
        if AXES[name].only_beside_data and len(used) > 1:
            other = next(other for other in used if other != name)
            return f"the axes {name} and {other} cannot be combined: {AXES[other].reason}"
    return ""
