"""Training on many ranks: strategies (parallel/strategies/__init__.py lists them), launcher, scripts/train.py.

Names are imported when they are first used, so that launching and --help stay instant.
"""

from __future__ import annotations

import functools
import importlib
import os
from importlib.util import find_spec

# Public names that are of no strategy on the command line; each strategy declares its own.
_MODULES = {
    "BranchParallel": "parallel.strategies.operators.strategy",
    "CheckReplicas": "parallel.trainer",
    "ContextParallel": "parallel.strategies.context.strategy",
    "DistributedTrainer": "parallel.trainer",
    "ExpertParallel": "parallel.strategies.expert.strategy",
    "Mesh": "parallel.mesh",
    "QuasiNewton": "parallel.sync.coordinator.quasi_newton",
    "ReplicaError": "parallel.mesh",
    "ShardedCheckpoints": "parallel.state.sharded_checkpoints",
    "SpatialParallel": "parallel.strategies.operators.strategy",
    "check_death": "parallel.strategies.check_strategy",
    "check_strategy": "parallel.strategies.check_strategy",
    "join": "parallel.strategies.join",
}


def _check_neighbours() -> None:
    """Refuse an nn or collectives that is not the one beside this package: another file of that name comes first."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("nn", "collectives"):
        spec = find_spec(name)
        if spec is None:
            continue
        place = spec.origin or next(iter(spec.submodule_search_locations or [""]))
        if os.path.realpath(place) != os.path.realpath(os.path.join(here, name, "__init__.py")):
            raise ImportError(
                f"{place} hides ringprop's {name}, which is in {here}: rename it, or take its place out of sys.path",
                name=name,
                path=place,
            )


_check_neighbours()


@functools.cache
def _modules() -> dict[str, str]:
    """Return the public names and the modules that they are in."""
    from parallel.strategies import DECLARED

    return _MODULES | {name: strategy.build.__module__ for strategy in DECLARED for name in strategy.public}


def __getattr__(name: str):
    if name == "__all__":
        return sorted(_modules())
    if not name.startswith("_") and name in (modules := _modules()):
        return getattr(importlib.import_module(modules[name]), name)
    if name.startswith("_"):  # as inspect asks for: not worth an import of nn
        raise AttributeError(f"parallel has no {name!r}", name=name)
    from nn.guesses import refuse_name
    from parallel.guesses import NAMES

    refuse_name("parallel", name, NAMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
