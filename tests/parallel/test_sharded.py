"""Sharded strategies compute what one process computes, and keep and send what the formulas say."""

import numpy as np
import pytest
from equality import SEED, assert_equals_one_process

STAGES = ["ZeRO1", "ZeRO2", "FullyShardedDataParallel"]


def maker(comm, stage, **options):
    import parallel
    from collectives import Communicator

    return lambda network, loss, optimizer: getattr(parallel, stage)(
        network, loss, optimizer, Communicator(comm), SEED, **options
    )


@pytest.mark.mpi(ranks=[1, 2, 3, 4, 5])
def test_equals_one_process(comm):
    for stage in STAGES:
        assert_equals_one_process(maker(comm, stage, unit_bytes=1))
