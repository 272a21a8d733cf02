"""Every strategy by its name on the command line: options, network, loss, optimizer, communicator -> trainer."""

from __future__ import annotations

import math

from collectives.world import nodes_of
from parallel import compression
from parallel.compression.data_parallel import CompressedDataParallel
from parallel.compression.parameter_server import CompressedParameterServer
from parallel.data_parallel import DistributedDataParallel
from parallel.master_worker import DataParallel
from parallel.options import check_one_node, of_messages
from parallel.parameter_server import ParameterServer
from parallel.reproducible.data_parallel import ReproducibleDataParallel
from parallel.reproducible.master_worker import ReproducibleMasterWorker
from parallel.reproducible.parameter_server import ReproducibleParameterServer
from parallel.reproducible.sharded import ReproducibleFullyShardedDataParallel, ReproducibleZeRO1, ReproducibleZeRO2
from parallel.sharded import FullyShardedDataParallel, Sharded, ZeRO1, ZeRO2
from parallel.synchronous import Synchronous


def ddp(options, network, loss, optimizer, communicator) -> Synchronous:
    if options.compress:
        method = compression.parse(options.compress)
        return CompressedDataParallel(network, loss, optimizer, communicator, options.seed, compressor=method)
    if options.reproducible:
        return ReproducibleDataParallel(
            network, loss, optimizer, communicator, options.seed, shards=options.reproducible
        )
    # On one node there is nothing in node memory that an allreduce could do; between nodes there is.
    if one_node := len(set(nodes_of(communicator))) == 1:
        check_one_node(options)
    asked = one_node and of_messages(options)
    return DistributedDataParallel(
        network,
        loss,
        optimizer,
        communicator,
        options.seed,
        node_memory="off" if options.node_memory == "auto" and asked else options.node_memory,
        overlap=options.overlap,
        bucket=options.bucket,
        first_bucket=options.first_bucket,
        limit=options.watch or math.inf,
    )


def dp(options, network, loss, optimizer, communicator) -> DataParallel:
    if options.batch < communicator.size:
        raise ValueError(
            f"--batch {options.batch} cannot be cut among {communicator.size} ranks: use a batch of at least "
            f"{communicator.size}, or fewer ranks"
        )
    if options.reproducible:
        return ReproducibleMasterWorker(
            network, loss, optimizer, communicator, options.seed, shards=options.reproducible
        )
    return DataParallel(network, loss, optimizer, communicator, options.seed)


def ps(options, network, loss, optimizer, communicator) -> ParameterServer:
    arguments = network, loss, optimizer, communicator, options.seed, options.servers, options.server_place
    if options.compress:
        return CompressedParameterServer(*arguments, compressor=compression.parse(options.compress))
    if options.reproducible:
        return ReproducibleParameterServer(*arguments, shards=options.reproducible)
    return ParameterServer(*arguments)


def sharded(options, network, loss, optimizer, communicator) -> Sharded:
    plain, reproducible = SHARDED[options.strategy]
    kind, more = plain, {}
    if options.reproducible:
        kind, more = reproducible, {"shards": options.reproducible}
    if plain is FullyShardedDataParallel:
        more["prefetch"] = options.prefetch
    unit = int(options.unit * 2**20)
    return kind(network, loss, optimizer, communicator, options.seed, unit, options.offload, **more)


SHARDED = {
    "zero1": (ZeRO1, ReproducibleZeRO1),
    "zero2": (ZeRO2, ReproducibleZeRO2),
    "fsdp": (FullyShardedDataParallel, ReproducibleFullyShardedDataParallel),
}
STRATEGIES = {"ddp": ddp, "dp": dp, "ps": ps, **dict.fromkeys(SHARDED, sharded)}
