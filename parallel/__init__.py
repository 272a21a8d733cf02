"""Training on many ranks: strategies (strategies/capabilities.py says what each can), launcher, scripts/train.py.

Names are imported when they are first used, so that launching and --help stay instant.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec

_HOME = {
    "BranchParallel": "parallel.strategies.operators.strategy",
    "CheckReplicas": "parallel.trainer",
    "CompressedDataParallel": "parallel.strategies.data_parallel",
    "CompressedParameterServer": "parallel.strategies.parameter_server",
    "DiLoCo": "parallel.strategies.local_sgd",
    "DataParallel": "parallel.strategies.master_worker",
    "DistributedDataParallel": "parallel.strategies.data_parallel",
    "DistributedTrainer": "parallel.trainer",
    "Downpour": "parallel.strategies.downpour",
    "EASGD": "parallel.strategies.local_sgd",
    "FullyShardedDataParallel": "parallel.strategies.zero",
    "LocalSGD": "parallel.strategies.local_sgd",
    "Mesh": "parallel.mesh",
    "OneWeirdTrick": "parallel.strategies.one_weird_trick",
    "PipeDream": "parallel.strategies.pipeline.pipedream",
    "Pipeline": "parallel.strategies.pipeline.strategy",
    "ParameterServer": "parallel.strategies.parameter_server",
    "ReplicaError": "parallel.mesh",
    "ReproducibleDataParallel": "parallel.strategies.data_parallel",
    "ReproducibleFullyShardedDataParallel": "parallel.strategies.zero",
    "ReproducibleMasterWorker": "parallel.strategies.master_worker",
    "ReproducibleParameterServer": "parallel.strategies.parameter_server",
    "ReproducibleSerial": "parallel.strategies.serial",
    "ReproducibleZeRO1": "parallel.strategies.zero",
    "ReproducibleZeRO2": "parallel.strategies.zero",
    "SpatialParallel": "parallel.strategies.operators.strategy",
    "StaleDataParallel": "parallel.strategies.data_parallel",
    "Sandblaster": "parallel.strategies.sandblaster",
    "TensorParallel": "parallel.strategies.tensor.tensor_parallel",
    "join": "parallel.strategies.join",
    "ZeRO1": "parallel.strategies.zero",
    "ZeRO2": "parallel.strategies.zero",
}

__all__ = sorted(_HOME)


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


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'parallel' has no attribute {name!r}")
