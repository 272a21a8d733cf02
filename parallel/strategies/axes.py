"""What --mesh says: how many ranks each axis has.

--mesh data=2,pipeline=2          their product is the number of ranks; an axis that is left out has what is left
--mesh data=2,tensor=2            two groups of two ranks that compute every layer together
--mesh pipeline=2,tensor=2        two stages, of which two ranks each compute every layer together
--mesh data=2,context=2           every sequence is cut into positions; also beside pipeline and tensor
--mesh space=4                    every image is cut in height; branch=4: branches are dealt out
--mesh data=2,expert=2            of every mixture of experts a rank has half; four ranks share the samples
"""

from __future__ import annotations

import math

from parallel.axis import AXES, DIVIDE_NETWORK, DIVIDE_SAMPLES, combinable
from parallel.settings import OptionError
from parallel.strategies.declaration import ROUNDED, ROUNDING_ALIKE, TREE, Supports

# What ddp supports where the mesh has one of these axes; and ZeRO's stages, less what they do not support without.
SUPPORTS = {
    axis: Supports(mixed=True, elastic=True, axes=combinable(axis), reproducible=False, not_reproducible=TREE)
    for axis in DIVIDE_SAMPLES
}
SUPPORTS["expert"] = Supports(
    axes=combinable("expert"),
    mixed=True,
    elastic=True,
    compress=ROUNDING_ALIKE,
    not_compressed=ROUNDED,
    reproducible=False,
    not_reproducible="an expert computes the positions of all ranks in one product, whose rounding depends on how many "
    "come together",
)


def is_pipeline(options) -> bool:
    """Whether stages of the network lie on different ranks."""
    return options.strategy == "pipeline" or bool(options.pipeline) or has(options, "pipeline")


def is_tensor(options) -> bool:
    """Whether ranks compute layers together."""
    return options.strategy_name == "tensor" or has(options, "tensor")


def divides_network(options) -> bool:
    """Return whether ranks have parts of the network."""
    return is_pipeline(options) or is_tensor(options) or any(has(options, axis) for axis in DIVIDE_NETWORK)


def has(options, axis: str) -> bool:
    """Return whether --mesh gives several ranks to an axis."""
    return mesh(options).get(axis, 1) > 1


def has_server_ranks(options) -> bool:
    """Whether the last ranks only serve those on the axes."""
    from parallel.strategies import STRATEGIES

    strategy = STRATEGIES.get(options.strategy_name)
    return strategy is not None and strategy.serves and not strategy.searches and options.server_place == "dedicated"


def same_samples_axis(options) -> str:
    """Return the axis of ranks that compute parts of the same samples; "" without one."""
    return next((axis for axis in DIVIDE_SAMPLES if has(options, axis)), "")


def mesh(options) -> dict[str, int]:
    """The axes that --mesh names, and their ranks."""
    if not options.mesh:
        return {}
    from nn import option_strings

    try:
        found = option_strings.convert("it", options.mesh.split(","), dict.fromkeys(AXES, int), positional=False)
    except ValueError as error:
        raise OptionError(f"--mesh {options.mesh}: {error}; such as --mesh data=2,pipeline=2") from None
    if not found:
        raise OptionError(f"--mesh {options.mesh} names no axis; such as --mesh data=2,pipeline=2")
    for axis, size in found.items():
        if size < 1:
            raise OptionError(f"--mesh {options.mesh}: {axis} must have at least 1 rank")
    return found


def sizes(options, ranks: int) -> dict[str, int]:
    """Return the ranks of every axis, of `ranks` in all; an axis that is not named has what is left."""
    from parallel.mesh import sizes

    given, servers = mesh(options), options.servers if has_server_ranks(options) else 0
    if "pipeline" not in given and is_pipeline(options):
        given["pipeline"] = max(1, (ranks - servers) // math.prod(given.values()))
    if "tensor" not in given and options.strategy_name == "tensor":
        given["tensor"] = max(1, ranks // math.prod(given.values()))
    try:
        found = sizes(ranks - servers, **given, servers=servers)
    except ValueError as error:
        text = f"--mesh {options.mesh}" if options.mesh else f"--strategy {options.strategy}"
        raise OptionError(f"{text}: {str(error).removeprefix('mesh: ')}") from None
    return found


def fitting(options, ranks: int) -> tuple[int, str | None]:
    """(how many of so many ranks can train, --mesh for them) where ranks were lost: the axis "data" gets shorter.

    Raises
    ------
    OptionError
        The other axes need more.
    """
    given = {axis: size for axis, size in mesh(options).items() if axis != "data"}
    needed = math.prod(given.values())
    if ranks < needed:
        raise OptionError(f"--mesh {options.mesh}: {ranks} ranks are left, and the network is on {needed}: start more")
    if not given:
        return ranks, None
    return ranks - ranks % needed, ",".join(f"{axis}={size}" for axis, size in given.items())


def supported(options) -> Supports:
    """Return what the strategy of these options supports, with its --consistency."""
    from parallel.strategies import STRATEGIES

    return STRATEGIES[options.strategy_name].supported(options.late)


def shown(options) -> str:
    """Return the flag that puts a network on several ranks."""
    return f"--mesh {options.mesh}" if options.mesh else f"--pipeline {options.pipeline}"


def of_several_ranks(options) -> bool:
    """Return whether replicas make local updates, and may be several ranks each."""
    can = supported(options)
    return can.local_update and "pipeline" in can.axes
