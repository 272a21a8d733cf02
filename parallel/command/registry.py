"""Every strategy by its name on the command line: options, network, loss, optimizer, communicator -> trainer.

Each is imported where it is made: a rank that starts, in place of a lost one, too, loads no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from collectives.failures.launch_check import nodes_of
from parallel.command import axes
from parallel.command.rules import check_one_node, check_scattered, of_messages
from parallel.exchange import compression
from parallel.strategies import settings

if TYPE_CHECKING:
    from parallel.trainer import DistributedTrainer


def ddp(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Data parallelism: gradients are summed in node memory or by messages, dense, compressed, or in a fixed order."""
    from parallel.strategies import data_parallel

    if make := model_parallel(options):
        return make(options, network, loss, optimizer, communicator)
    arguments = network, loss, optimizer, communicator, options.seed
    if options.late:
        delay = settings.Consistency.parse(options.consistency, "ddp").bound
        if delay:
            return data_parallel.StaleDataParallel(*arguments, delay=delay)
    if options.compress:
        return data_parallel.CompressedDataParallel(*arguments, compressor=compression.parse(options.compress))
    if options.reproducible:
        return data_parallel.ReproducibleDataParallel(*arguments, shards=options.reproducible)
    return data_parallel.DistributedDataParallel(*arguments, **summing(options, communicator))


def model_parallel(options) -> Callable[..., DistributedTrainer] | None:
    """What makes the trainer where ranks have parts of the network, or of its images; None where each has all."""
    if axes.is_pipeline(options):
        return pipeline
    if axes.is_tensor(options):
        return tensor
    return together if axes.together(options) else None


def summing(options, communicator) -> dict:
    """In node memory or by messages, and how."""
    # On one node there is nothing in node memory that an allreduce could do; between nodes there is.
    if one_node := len(set(nodes_of(communicator))) == 1:
        check_one_node(options)
    asked = one_node and of_messages(options)
    return {
        "node_memory": "off" if options.node_memory == "auto" and asked else options.node_memory,
        "overlap": options.overlap,
        "bucket": options.bucket,
        "first_bucket": options.first_bucket,
        "limit": options.watch or math.inf,
        "survives": options.elastic is not None,
    }


def dp(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """One master scatters samples and reduces gradients."""
    from parallel.strategies.master_worker import DataParallel, ReproducibleMasterWorker

    check_scattered(options, communicator.size)
    arguments = network, loss, optimizer, communicator, options.seed
    if options.reproducible:
        return ReproducibleMasterWorker(*arguments, shards=options.reproducible)
    return DataParallel(*arguments)


def ps(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Workers and parameter servers."""
    from parallel.strategies.parameter_server import ParameterServer

    arguments = network, loss, optimizer, communicator, options.seed, options.servers, options.server_place
    late = {"consistency": options.consistency, "delay_compensation": options.delay_compensation}
    how = late | several(options, communicator.size)
    return ParameterServer(*arguments, **summed(options), **how, limit=options.watch or math.inf)


def downpour(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Replicas and servers, each at a step of its own."""
    from parallel.strategies.downpour import Downpour

    arguments = network, loss, optimizer, communicator, options.seed, options.servers, options.server_place
    keys = vars(settings.Downpour.parse(options.strategy)) | several(options, communicator.size)
    compressor = compression.parse(options.compress) if options.compress else None
    return Downpour(*arguments, **keys, compressor=compressor, limit=options.watch or math.inf)


def replicas(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Replicas that meet now and then, by the name of the strategy."""
    from parallel.strategies import local_sgd

    make = getattr(local_sgd, REPLICAS[options.strategy_name])
    keys = vars(settings.OF_STRATEGIES[options.strategy_name].parse(options.strategy))
    how = several(options, communicator.size)
    limit = {"limit": options.watch or math.inf} if how else {}
    return make(network, loss, optimizer, communicator, options.seed, **keys, **how, **limit)


def several(options, ranks: int) -> dict:
    """How many ranks are one replica, where several are, and how they share its layers, or its stages follow."""
    found: dict = {}
    if axes.is_pipeline(options) or axes.is_tensor(options):
        sizes = axes.sizes(options, ranks)
    if axes.is_pipeline(options):
        found |= {"pipeline": sizes["pipeline"], **axes.arguments(options, sizes["data"])}
    if axes.is_tensor(options):
        found |= {"tensor": sizes["tensor"], "way": options.tensor}
    return found


def sandblaster(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """L-BFGS, by a coordinator, shards and replicas; on one process, too."""
    from parallel.strategies.sandblaster import Sandblaster

    arguments = network, loss, optimizer, communicator, options.seed, options.servers, options.server_place
    return Sandblaster(
        *arguments,
        chunk=settings.Sandblaster.parse(options.strategy).chunk,
        same_batch=False if options.augment else None,
        limit=options.watch or math.inf,
    )


def sharded(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """ZeRO: moments, gradients, parameters in shards, by the name of the strategy."""
    from parallel.strategies import zero

    if make := model_parallel(options):
        return make(options, network, loss, optimizer, communicator)
    make = getattr(zero, SHARDED[options.strategy_name])
    return make(network, loss, optimizer, communicator, options.seed, **cutting(options), **summed(options))


def cutting(options) -> dict:
    """How ZeRO cuts a network, and where shards lie."""
    more = {"prefetch": options.prefetch} if options.strategy_name == "fsdp" else {}
    return {"unit_bytes": int(options.unit * 2**20), "offload": options.offload, **more}


def together(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Ranks compute rows of the same images, or branches; several such groups share every batch."""
    from parallel.strategies.operators.strategy import BranchParallel, SpatialParallel

    axis, stage = axes.together(options), STAGES.get(options.strategy_name, 0)
    compressor = summed(options)["compressor"]
    if stage or compressor:
        how = {"stage": stage, "compressor": compressor, **(cutting(options) if stage else {})}
    else:
        how = summing(options, communicator)
    make = {"space": SpatialParallel, "branch": BranchParallel}[axis]
    ranks = axes.sizes(options, communicator.size)[axis]
    return make(network, loss, optimizer, communicator, options.seed, **{axis: ranks}, **how)


def pipeline(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Stages of the network on different ranks; several such pipelines share every batch."""
    from parallel.strategies.pipeline.pipedream import PipeDream
    from parallel.strategies.pipeline.strategy import Pipeline

    sizes = axes.sizes(options, communicator.size)
    given, limit = axes.arguments(options, sizes["data"]), options.watch or math.inf
    arguments = network, loss, optimizer, communicator, options.seed
    if given["schedule"] == "pipedream":
        keys = {name: given[name] for name in ("cuts", "vertical_sync", "replicas") if name in given}
        return PipeDream(
            *arguments, mini_batches=given["micro_batches"], bucketing=bucketing(options), limit=limit, **keys
        )
    return Pipeline(
        *arguments,
        data=sizes["data"],
        tensor=sizes["tensor"],
        way=options.tensor,
        zero1=options.strategy == "zero1",
        bucketing=bucketing(options),
        unit_bytes=int(options.unit * 2**20),
        compressor=summed(options)["compressor"],
        limit=limit,
        **given,
    )


def summed(options) -> dict:
    """How gradients are summed, where it is not the usual way."""
    compressor = compression.parse(options.compress) if options.compress else None
    return {"compressor": compressor, "shards": options.reproducible or 0}


def tensor(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Ranks compute every layer together; several such groups share every batch. Perhaps in a pipeline's stages."""
    from parallel.strategies.tensor.tensor_parallel import TensorParallel

    if axes.is_pipeline(options):
        return pipeline(options, network, loss, optimizer, communicator)
    ranks = axes.sizes(options, communicator.size)["tensor"]
    arguments = network, loss, optimizer, communicator, options.seed
    return TensorParallel(
        *arguments,
        tensor=ranks,
        way=options.tensor,
        stage=STAGES.get(options.strategy_name, 0),
        bucketing=bucketing(options),
        unit_bytes=int(options.unit * 2**20),
        prefetch=options.prefetch,
        compressor=summed(options)["compressor"],
    )


def owt(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """Convolutions data-parallel, linear layers model-parallel."""
    from parallel.strategies.one_weird_trick import OneWeirdTrick

    arguments = network, loss, optimizer, communicator, options.seed
    return OneWeirdTrick(*arguments, scheme=options.owt, bucketing=bucketing(options))


def bucketing(options) -> dict:
    """How gradients that are summed by messages are cut and moved."""
    overlap = "none" if options.overlap == "auto" else options.overlap
    return {"bucket": options.bucket, "first": options.first_bucket, "overlap": overlap}


SHARDED = {"zero1": "ZeRO1", "zero2": "ZeRO2", "fsdp": "FullyShardedDataParallel"}
STAGES = {"zero1": 1, "zero2": 2, "fsdp": 3}
REPLICAS = {"local-sgd": "LocalSGD", "diloco": "DiLoCo", "easgd": "EASGD"}
STRATEGIES = {
    "ddp": ddp, "dp": dp, "ps": ps, **dict.fromkeys(SHARDED, sharded), "pipeline": pipeline, "tensor": tensor,
    "owt": owt, "downpour": downpour, "sandblaster": sandblaster, **dict.fromkeys(REPLICAS, replicas),
}  # fmt: skip
