"""Every strategy by its name on the command line: options, network, loss, optimizer, communicator -> trainer."""

from __future__ import annotations

from parallel.data_parallel import DistributedDataParallel
from parallel.reproducible_data_parallel import ReproducibleDataParallel
from parallel.synchronous import Synchronous


def ddp(options, network, loss, optimizer, communicator) -> Synchronous:
    if options.reproducible:
        return ReproducibleDataParallel(network, loss, optimizer, communicator, options.seed, options.reproducible)
    return DistributedDataParallel(network, loss, optimizer, communicator, options.seed)


STRATEGIES = {"ddp": ddp}
