"""Master and workers: one rank holds the batch, the model and the optimizer; the others only compute.

In every step the master scatters the batch and broadcasts the model; each rank computes the outputs of its samples; the
master gathers them, computes the loss, scatters its gradient; each rank backpropagates; the master sums the gradients
and updates. This is how PyTorch's DataParallel works, and the first picture of most courses.

It is kept because it shows why nobody trains like this on many ranks: the parameters leave the master and gradients
come back in every step, and while the master reads, computes the loss and updates, the workers wait. See it in the
picture that `--timeline` draws. Cost of a step over one process's, for n bytes of parameters and a batch of b bytes:
2 ceil(log2 p) (alpha + n beta) for model and gradients by binomial trees, (p-1)/p b beta for the batch, and the same
for outputs and their gradients, all of it through one rank. Source: PyTorch (torch.nn.DataParallel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.guesses import answer_keywords
from parallel.settings import OptionError
from parallel.strategies.declaration import Strategy, Supports

if TYPE_CHECKING:
    from collectives.pricing.networks import Network as CostNetwork
    from nn.core.network import Network
    from nn.losses import Loss
    from nn.optim.optimizers import Optimizer
    from parallel.planning.job import Axes, Job, Prediction
    from parallel.trainer import DistributedTrainer


@answer_keywords
def DataParallel(
    network: Network, loss: Loss, optimizer: Optimizer, communicator, seed: int = 0, *, shards: int = 0
) -> DistributedTrainer:
    """`Trainer` on many ranks, with rank 0 as the master; parameters are those of DistributedDataParallel.

    `shard` is the whole batch on the master and nothing elsewhere: workers get their samples from the master, in
    evaluation too. Their parameters are those of the last broadcast, and they have no moments. With virtual `shards`
    the ranks compute the outputs of one each, and so its gradients; the master computes the loss of each, and gets
    gradients and losses as the tree adds them.

    Examples
    --------
    With names as in the example of `DistributedDataParallel`:

    >>> trainer = parallel.DataParallel(network, loss, optimizer, communicator)
    >>> len(nn.fit(trainer, (x, y), epochs=2, batch=4).history)
    2
    >>> trainer.close()
    """
    from parallel.mesh import Mesh
    from parallel.passes.dealt import Dealt
    from parallel.passes.forward_backward import ForwardBackward
    from parallel.passes.virtual_shards import VirtualShards
    from parallel.sync.master import Master
    from parallel.trainer import DistributedTrainer

    forward_backward, mesh = Dealt(VirtualShards(shards) if shards else ForwardBackward()), Mesh(communicator)
    mesh.agree({"number of virtual shards": shards})
    return DistributedTrainer(network, loss, optimizer, mesh, forward_backward, Master(), seed, "DataParallel")


def check(options, ranks: int | None, network, optimizer) -> None:
    """Refuse batches of which some rank would get no sample from the master."""
    if ranks and options.batch < ranks:
        raise OptionError(
            f"--batch {options.batch} cannot be cut among {ranks} ranks: use a batch of at least {ranks}, "
            "or fewer ranks"
        )


def build(options, network, loss, optimizer, communicator) -> DistributedTrainer:
    """One master scatters samples and reduces gradients."""
    check(options, communicator.size, network, optimizer)
    return DataParallel(network, loss, optimizer, communicator, options.seed, shards=options.reproducible or 0)


def cost(job: Job, axes: Axes, network: CostNetwork, text: str, servers: int = 1) -> Prediction:
    """One master hands out samples and parameters, computes the loss, and updates."""
    from parallel.planning.job import Prediction
    from parallel.planning.parts import part_of

    mine, group = part_of(job, axes, network), axes.group("data", False)
    samples, answers = job.batch * job.sample_bytes, job.batch * job.answer_bytes
    parts = {
        "computation": mine.computation,
        "samples": group.scatter(samples, network),
        "parameters": group.broadcast(job.parameters, network),
        "outputs": group.gather(answers, network) + group.scatter(answers, network),
        "loss": job.loss(job.batch),
        "gradients": group.reduce(job.parameters, network),
        "update": job.update,
    }
    memory = (2 + job.moments) * job.parameters + mine.saved + samples + answers
    computing = mine.workers * mine.computation + parts["loss"] + parts["update"]
    return Prediction("dp", axes, parts, computing, job.parameters + group.sent(samples + answers), memory)


STRATEGY = Strategy(
    name="dp",
    title="Data parallelism with a master",
    sources=("PyTorch (torch.nn.DataParallel)",),
    build=build,
    supports=Supports(
        mixed=True, compress=(), not_compressed="the master receives one sum, which all ranks add up on the way"
    ),
    public=("DataParallel",),
    check=check,
    cost=cost,
    summary="one master scatters samples, broadcasts the model, gathers outputs, reduces gradients: `--timeline` shows "
    "why it does not scale",
    memory="16 Psi on the master, 8 Psi on workers",
    traffic="2 Psi and the samples, for each worker, through the master",
)
