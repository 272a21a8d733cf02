"""Names and keywords of PyTorch and similar libraries, and what to write for them here: see nn/guesses.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

NAMES = {
    "ColwiseParallel": "parallel.TensorParallel(network, loss, optimizer, communicator) divides the layers in pairs",
    "DDP": "parallel.DistributedDataParallel",
    "DTensor": "parallel.TensorParallel(network, loss, optimizer, communicator) divides the layers in pairs",
    "DeviceMesh": "parallel.Mesh(communicator, data=2, tensor=2)",
    "DistributedSampler": "nn.fit(trainer, data) divides each batch among the ranks",
    "FSDP": "parallel.FullyShardedDataParallel",
    "Join": "parallel.join(batches, communicator)",
    "PipelineStage": "parallel.Pipeline(network, loss, optimizer, communicator, schedule='1f1b', micro_batches=4)",
    "PostLocalSGDOptimizer": "parallel.LocalSGD",
    "RowwiseParallel": "parallel.TensorParallel(network, loss, optimizer, communicator) divides the layers in pairs",
    "Schedule1F1B": "parallel.Pipeline(network, loss, optimizer, communicator, schedule='1f1b', micro_batches=4)",
    "ScheduleGPipe": "parallel.Pipeline(network, loss, optimizer, communicator, schedule='gpipe', micro_batches=4)",
    "ScheduleInterleaved1F1B": "parallel.Pipeline(..., schedule='interleaved', chunks=2, micro_batches=4)",
    "ScheduleInterleavedZeroBubble": "parallel.Pipeline(..., schedule='zb-h1', micro_batches=4)",
    "ScheduleZBVZeroBubble": "parallel.Pipeline(..., schedule='zb-v', micro_batches=4)",
    "ZeRO3": "parallel.FullyShardedDataParallel",
    "ZeroRedundancyOptimizer": "parallel.ZeRO1",
    "all_reduce": "collectives.Communicator(MPI.COMM_WORLD).Allreduce(x, y)",
    "checkpoint": "nn.Recompute(layer) computes activations again; parallel.ShardedCheckpoints writes files",
    "context_parallel": "parallel.ContextParallel",
    "fully_shard": "parallel.FullyShardedDataParallel",
    "init_device_mesh": "parallel.Mesh(communicator, data=2, tensor=2)",
    "init_process_group": "collectives.Communicator(MPI.COMM_WORLD)",
    "parallelize_module": "parallel.TensorParallel(network, loss, optimizer, communicator) divides the layers in pairs",
}
KEYWORDS = {
    "auto_wrap_policy": "write unit_bytes=: neighbouring layers form a unit of so many bytes",
    "broadcast_buffers": "leave it out: each step averages running statistics over the ranks",
    "bucket_cap_mb": "write bucket=, in MiB; where parameters are sharded unit_bytes=",
    "comm_hook": "write compressor=",
    "find_unused_parameters": "leave it out: every layer of a Network takes part in every step",
    "gradient_accumulation_steps": "write trainer.step(x, y, accumulate=4)",
    "gradient_as_bucket_view": "leave it out: gradients are always views of the buckets",
    "num_chunks": "write chunks=, the number of stages on each rank",
    "outer_optimizer": "write outer=, momentum= and nesterov= of the outer SGD",
    "parallelize_plan": "leave it out: layers are divided in pairs, automatically",
    "reshard_after_forward": "use parallel.FullyShardedDataParallel for True, parallel.ZeRO2 for False",
    "sharding_strategy": "use parallel.FullyShardedDataParallel for FULL_SHARD, parallel.ZeRO2 for SHARD_GRAD_OP",
    "split_points": "write cuts=, the numbers of the layers with which stages begin",
    "stage": "use parallel.ZeRO1, parallel.ZeRO2 or parallel.FullyShardedDataParallel",
    "static_graph": "leave it out: the graph is always static",
    "sync_module_states": "leave it out: all ranks draw the same first parameters from seed=",
    "use_orig_params": "leave it out: trainer.named_parameters() has the names of the layers",
} | {
    name: written
    for written, names in {
        "write data=": ("dp", "dp_size", "dp_shard", "dp_replicate", "data_parallel_size"),
        "write expert=": ("ep", "ep_size", "expert_parallel_size"),
        "write pipeline=": ("pp", "pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
        "write context=": ("cp", "cp_size", "context_parallel_size"),
        "write tensor=": ("tp", "tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
        "write a keyword for each axis: Mesh(communicator, data=2, tensor=2)": ("mesh_shape", "mesh_dim_names"),
        "write prefetch=, how many units are gathered ahead": (
            "backward_prefetch", "forward_prefetch", "limit_all_gathers",
        ),
        "write loss=, the second argument": ("criterion", "loss_fn"),
        "write communicator=, the fourth argument": ("comm", "device_mesh", "group", "mesh", "process_group"),
        "leave it out: everything is computed on processors": (
            "device", "device_id", "device_ids", "device_type", "output_device",
        ),
        "write every=, the number of steps between averages": ("H", "local_steps", "period", "sync_every"),
        "write micro_batches=": ("microbatches", "n_microbatches", "num_microbatches", "num_micro_batches"),
        "write nn.Network(layers, in_shape, mixed=True)": ("mixed_precision", "mp_policy"),
        "write network=, the first argument": ("model", "module"),
        "write offload=DIRECTORY: shards lie in memory-mapped files": ("cpu_offload", "offload_policy"),
    }.items()
    for name in names
}  # fmt: skip

ONE_PROCESS = (
    "one process has no other ranks to train with: use nn.Trainer, or give a communicator, such as "
    "Communicator(MPI.COMM_WORLD)"
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def refuse_keywords(function: Callable, given: Iterable[str]) -> None:
    """Refuse keywords that a function does not have: TypeError, with what to write instead, or with what there is."""
    known = {name: value for name, value in inspect.signature(function).parameters.items() if name != "self"}
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    public_name = function.__qualname__.removesuffix(".__init__")
    for name in given:
        if name in KEYWORDS and name not in known:
            raise TypeError(f"{public_name} takes no {name!r}: {KEYWORDS[name]}")
        if name not in known and not open_ended:
            raise TypeError(f"{public_name} takes no {name!r}; it takes {', '.join(known)}")


def refuse_none(function: Callable, values: Iterable[object], options: Mapping[str, object]) -> None:
    """Refuse None as the communicator of a function that needs one: TypeError, with what to write instead."""
    parameters = inspect.signature(function).parameters
    given = dict(zip(parameters, values, strict=False)) | options
    if given.get("communicator", ...) is None and parameters["communicator"].default is not None:
        raise TypeError(ONE_PROCESS)


def answer_keywords(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a public function or constructor: keywords of other libraries are refused with what to write instead.

    So is None as a communicator.
    """

    @functools.wraps(function)
    def answering(*values: Arguments.args, **options: Arguments.kwargs) -> Result:
        refuse_keywords(function, options)
        refuse_none(function, values, options)
        return function(*values, **options)

    return answering
