"""Sharded trainers for tests: with a unit for every layer where nothing else is asked for."""

from equality import CLIPS, MODELS, OPTIMIZERS, SEED

import nn

STAGES = ["ZeRO1", "ZeRO2", "FullyShardedDataParallel"]
FSDP = STAGES[2]


def maker(comm, stage, **options):
    """(network, loss, optimizer) -> trainer; by default with a unit for every layer."""
    import parallel
    from collectives import Communicator

    options = {"unit_bytes": 1} | options
    return lambda network, loss, optimizer: getattr(parallel, stage)(
        network, loss, optimizer, Communicator(comm), SEED, **options
    )


def sharded(comm, stage, model="mlp", optimizer="adam", clip=0, **options):
    network = MODELS[model]() if isinstance(model, str) else model
    return maker(comm, stage, **options)(network, nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](CLIPS[clip]))
