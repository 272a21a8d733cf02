"""A recurrent network on ranks: samples, layers or the rest's parts are shared, and it is what one process trains."""

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED, batches, difference

import nn
from nn.models import build


def network():
    return build("lstm:8,2,3", (8,), 32, "float64")


@pytest.mark.mpi(ranks=2)
def test_every_way_of_sharing_is_one_process(comm):
    from collectives import Communicator
    from parallel.command.options import Options
    from parallel.strategies import build_trainer

    one = nn.Trainer(network(), nn.CrossEntropyLoss(), OPTIMIZERS["adam"](), SEED)
    losses = [one.step(*batch) for batch in batches("transformer", (0, 1), 3)]
    ways = (
        {},
        {"strategy": "fsdp", "unit": 0.001},
        {"mesh": "tensor=2"},
        {"mesh": "pipeline=2", "pipeline": "zb-h1:micro=3"},
    )
    for given in ways:
        options = Options(batch=16, seed=SEED, **given)
        rule = OPTIMIZERS["adam"]()
        make = build_trainer
        many = make(options, network(), nn.CrossEntropyLoss(), rule, Communicator(comm))
        found = [many.step(*batch) for batch in batches("transformer", many.shard, 3)]
        np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=str(given))
        alone = many.alone()
        assert alone is None or difference(alone.flat_parameters, one.flat_parameters) < 1e-12, given
        many.close()
