"""Training on many ranks: strategies (strategies/capabilities.py says what each can), launcher, scripts/train.py.

Names are imported when they are first used, so that launching and --help stay instant.
"""

import importlib

_HOME = {
    "CheckReplicas": "parallel.trainer",
    "CompressedDataParallel": "parallel.strategies.data_parallel",
    "CompressedParameterServer": "parallel.strategies.parameter_server",
    "DataParallel": "parallel.strategies.master_worker",
    "DistributedDataParallel": "parallel.strategies.data_parallel",
    "FullyShardedDataParallel": "parallel.strategies.zero",
    "Mesh": "parallel.mesh",
    "OneWeirdTrick": "parallel.strategies.one_weird_trick",
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
    "Sandblaster": "parallel.strategies.sandblaster",
    "TensorParallel": "parallel.strategies.tensor.tensor_parallel",
    "Trainer": "parallel.trainer",
    "join": "parallel.strategies.join",
    "ZeRO1": "parallel.strategies.zero",
    "ZeRO2": "parallel.strategies.zero",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'parallel' has no attribute {name!r}")
