"""Every strategy by its name on the command line: options, network, loss, optimizer, communicator -> trainer."""

from __future__ import annotations

from parallel.data_parallel import DistributedDataParallel


def ddp(options, network, loss, optimizer, communicator) -> DistributedDataParallel:
    return DistributedDataParallel(network, loss, optimizer, communicator, options.seed)


STRATEGIES = {"ddp": ddp}
