"""Strategies whose ranks train apart: what a step of local SGD, DiLoCo, EASGD and Downpour costs, on average.

    predict(job, "local-sgd:8", Axes(64), NETWORKS["gigabit"])      # keys as of train.py --strategy

n bytes of parameters on N ranks, k moments, F and B seconds of a rank's samples, U of the optimizer for all parameters.

| strategy | a step | n kept |
|---|---|---|
| local-sgd:H | F, B, U, and every H steps the mean of all | 2 + k |
| diloco:H | the same, then a step of the outer optimizer from where all last were | 4 + k |
| easgd:H | the same mean, then replica and centre move | 3 + k |
| downpour:push,fetch | F, B, U of the own copy, and now and then n to the servers, and n back | 2 |

A server takes each worker's push by itself; where that takes longer than the workers' steps, it sets the pace.

None waits for the slowest; who meets every H steps waits for it there, and that is not in here.
"""

from __future__ import annotations

from collectives.pricing.networks import Network
from parallel.planning.data_strategies import part_of
from parallel.planning.group_costs import Group, message
from parallel.planning.job import Axes, Job, Prediction
from parallel.strategies import STRATEGIES

COPIES = {"local-sgd": 0, "diloco": 2, "easgd": 1}  # of all parameters, beside a replica's own


def replicas(job: Job, strategy: str, axes: Axes, network: Network) -> Prediction:
    """All meet every so many steps."""
    keys = STRATEGIES[strategy.partition(":")[0]].keys.parse(strategy)
    mine, group, copies = part_of(job, axes, network), axes.group("data", job.node_memory), COPIES[keys.name]
    computation = mine.computation + job.loss(mine.samples)
    moved = network.copying((1 + copies) * job.parameters) if copies else 0.0  # what is moved, and what it moves to
    meeting = group.allreduce(job.parameters, network) + moved
    parts = {"computation": computation, "update": job.update, "meeting": meeting / keys.every}
    memory = (2 + job.moments + copies) * job.parameters + mine.saved
    computing = mine.workers * (computation + job.update)
    return Prediction(strategy, axes, parts, computing, 2 * group.sent(job.parameters) / keys.every, memory)


def downpour(job: Job, strategy: str, axes: Axes, network: Network, servers: int) -> Prediction:
    """Workers push and fetch now and then; servers update with what comes, one after the other."""
    keys, workers = STRATEGIES["downpour"].keys.parse(strategy), axes.ranks - servers
    if not 1 <= servers < axes.ranks:
        raise ValueError(
            f"{strategy}: {servers} servers leave no worker of {axes.ranks} ranks: use 1 to {axes.ranks - 1}"
        )
    mine, piece = part_of(job, axes, network, workers), job.parameters / servers
    link = network.between if Group(axes.ranks).nodes(network) > 1 else network.inside
    computation = mine.computation + job.loss(mine.samples)
    often = 1 / keys.push + 1 / keys.fetch
    own = {"computation": computation, "update": job.update, "push, fetch": often * message(link, piece, servers)}
    busy = workers * (
        often * link.cost(piece).held + job.update / servers / keys.push
    )  # of a server, for a step of all
    parts = own | {"servers": max(0.0, busy - sum(own.values()))}
    memory = max(2 * job.parameters + mine.saved, (1 + job.moments + workers) * piece)
    computing = mine.workers * (computation + job.update) + workers * job.update / keys.push
    sent = max(job.parameters / keys.push, workers * piece / keys.fetch)
    return Prediction(strategy, axes, parts, computing, sent, memory)
