"""How ranks share the work: a file a strategy, and here the list of them.

`STRATEGIES` has the declaration of each by its name on the command line; declaration.py says what that is. A new
strategy is a file with a declaration, and its entry here.

| file | holds |
|---|---|
| data_parallel.py, zero.py | ddp; zero1, zero2, fsdp; gradient_sync.py chooses what sums their gradients |
| parameter_server.py, downpour.py, sandblaster.py | parameter servers; consistency.py, line_search.py |
| local_sgd.py, master_worker.py | averages now and then; one rank updates |
| pipeline/, tensor/, tensor_parallel.py | ranks with parts of the network; replica_pass.py: of a replica |
| one_weird_trick.py, weird_trick_pass.py | both, and activation_rounds.py, activation_transfer.py between them |
| expert/, context/, operators/, same_samples.py | the other axes; axes.py, axis_rules.py: what --mesh says, and may |
| declaration.py, table.py, check_strategy.py | what a strategy says, in docs/options.md, and must keep |
| auto.py, estimate.py, join.py | --strategy auto; prices of all; batches of uneven length |
"""

from __future__ import annotations

from parallel.strategies import (
    axes,
    data_parallel,
    downpour,
    local_sgd,
    master_worker,
    one_weird_trick,
    parameter_server,
    sandblaster,
    tensor_parallel,
    zero,
)
from parallel.strategies.declaration import Strategy
from parallel.strategies.pipeline.strategy import STRATEGY as PIPELINE

DECLARED: tuple[Strategy, ...] = (
    data_parallel.STRATEGY,
    zero.ZERO1,
    zero.ZERO2,
    zero.FSDP,
    parameter_server.STRATEGY,
    master_worker.STRATEGY,
    PIPELINE,
    tensor_parallel.STRATEGY,
    one_weird_trick.STRATEGY,
    downpour.STRATEGY,
    sandblaster.STRATEGY,
    local_sgd.LOCAL_SGD,
    local_sgd.DILOCO,
    local_sgd.ELASTIC_AVERAGING,
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in DECLARED}
ALIASES = {alias: strategy.name for strategy in DECLARED for alias in strategy.aliases}
AS_ONE = tuple(s.name for s in DECLARED if not s.supports.local_update)  # compute what one process computes


def build_trainer(options, network, loss, optimizer, communicator):
    """Return the DistributedTrainer of --strategy and --mesh on these ranks.

    Where ranks have parts of one network, or of its images, the axis of the mesh builds it, in place of ddp or ZeRO.
    Local-update replicas are built by their strategy, of however many ranks each is.
    """
    build = STRATEGIES[options.strategy_name].build
    if not axes.of_several_ranks(options):
        if axes.is_pipeline(options):
            build = STRATEGIES["pipeline"].build
        elif axes.has(options, "expert"):
            from parallel.strategies.expert.strategy import build
        elif axes.is_tensor(options):
            build = STRATEGIES["tensor"].build
        elif axes.same_samples_axis(options):
            from parallel.strategies.same_samples import build
    return build(options, network, loss, optimizer, communicator)
