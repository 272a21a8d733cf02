"""Training on many ranks: strategies (strategies.py lists them), the launcher, the command line of scripts/train.py.

Names are imported when they are first used, so that launching and --help stay instant.
"""

import importlib

_HOME = {
    "CheckReplicas": "parallel.synchronous",
    "CompressedDataParallel": "parallel.compression.data_parallel",
    "CompressedParameterServer": "parallel.compression.parameter_server",
    "DataParallel": "parallel.master_worker",
    "DistributedDataParallel": "parallel.data_parallel",
    "FullyShardedDataParallel": "parallel.sharded",
    "ParameterServer": "parallel.parameter_server",
    "ReplicaError": "parallel.synchronous",
    "ReproducibleDataParallel": "parallel.reproducible.data_parallel",
    "ReproducibleFullyShardedDataParallel": "parallel.reproducible.sharded",
    "ReproducibleMasterWorker": "parallel.reproducible.master_worker",
    "ReproducibleParameterServer": "parallel.reproducible.parameter_server",
    "ReproducibleSerial": "parallel.reproducible.shards",
    "ReproducibleZeRO1": "parallel.reproducible.sharded",
    "ReproducibleZeRO2": "parallel.reproducible.sharded",
    "join": "parallel.uneven",
    "ZeRO1": "parallel.sharded",
    "ZeRO2": "parallel.sharded",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'parallel' has no attribute {name!r}")
