"""Ranks begin with the parameters and running statistics of rank 0, whatever they have drawn themselves."""

import numpy as np
import pytest
from equality import SEED, cnn

import nn
from nn.core.layout import Layout
from parallel.command.options import Options


@pytest.mark.mpi(ranks=4)
def test_first_values_are_those_of_rank_0(comm, monkeypatch):
    from collectives import Communicator
    from parallel.strategies import build_trainer, data_parallel, gradient_sync

    want = nn.Trainer(cnn(), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    draw = Layout.draw
    monkeypatch.setattr(Layout, "draw", lambda layout, name, seed: draw(layout, name, seed) + comm.rank // 2)
    control = nn.Trainer(cnn(), nn.CrossEntropyLoss(), nn.SGD(0.1), SEED)
    assert (control.flat_parameters == want.flat_parameters).all() == (control.buffers == want.buffers).all()
    assert (control.flat_parameters == want.flat_parameters).all() == (comm.rank < 2)
    network = lambda: cnn(synchronized=False)  # reproducible trainers refuse the other
    cases = [{"strategy": "ddp", "node_memory": way} for way in ("on", "off")]
    cases += [{"strategy": name, "compress": "topk:0.1"} for name in ("ddp", "ps")]
    cases += [{"strategy": name, "reproducible": 4} for name in ("ddp", "ps", "dp")]
    cases += [{"strategy": "ps", "servers": 2, "server_place": "workers"}, {"strategy": "dp"}]
    for case in cases:
        with monkeypatch.context() as patch:  # where parameters are shared, both ranks of a node draw the same
            for module in data_parallel, gradient_sync:
                patch.setattr(module, "nodes_of", lambda communicator: [0, 0, 2, 2])
            options = Options(**case, seed=SEED)
            trainer = build_trainer(options, network(), nn.CrossEntropyLoss(), nn.SGD(0.1), Communicator(comm))
        trainer.check_replicas()
        if getattr(trainer, "works", True):
            np.testing.assert_array_equal(trainer.flat_parameters, want.flat_parameters, err_msg=str(case))
            np.testing.assert_array_equal(trainer.buffers, want.buffers, err_msg=str(case))
        trainer.close()
        trainer.communicator.release()
