"""What a strategy keeps for itself alone is no reason to refuse a state: its own takes it over, others ignore it."""

import numpy as np
import pytest
from equality import OPTIMIZERS, SEED, batches, mlp

import nn
from nn.training.state import PRIVATE
from parallel.command.options import Options

STRATEGIES = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "topk": {"compress": "topk:0.1"},
    "dgc": {"compress": "dgc:0.1"},
    "powersgd": {"compress": "powersgd:2"},
    "servers, topk": {"strategy": "ps", "server_place": "workers", "compress": "topk:0.1"},
    "asynchronous": {"strategy": "ps", "server_place": "workers", "consistency": "async"},
    "compensated": {
        "strategy": "ps", "server_place": "workers", "consistency": "async", "delay_compensation": True
    },
    "diloco": {"strategy": "diloco:2"},
    "easgd": {"strategy": "easgd:2"},
    "pipedream": {"strategy": "pipeline", "pipeline": "pipedream:micro=2"},
    "diloco in stages": {"strategy": "diloco:2", "mesh": "pipeline=2"},
}  # fmt: skip
KEEP = {"topk", "dgc", "powersgd", "servers, topk", "asynchronous", "compensated", "diloco", "easgd", "pipedream"}


def make(comm, options):
    from collectives import Communicator
    from parallel.strategies import build_trainer

    options = Options(seed=SEED, **options)
    parts = mlp(), nn.CrossEntropyLoss(), OPTIMIZERS["sgd"]()
    many = build_trainer(options, *parts, Communicator(comm))
    many.set_epoch_steps(3)
    return many


@pytest.mark.mpi(ranks=2)
def test_every_strategy_goes_on_from_every_other(comm):
    trainers, states = {name: make(comm, options) for name, options in STRATEGIES.items()}, {}
    for name, many in trainers.items():
        for batch in batches("mlp", many.shard, 2):
            many.step(*batch)
        many.synchronize()
        states[name] = many.digest(), comm.bcast(many.state_dict())
        assert any(key.startswith(PRIVATE) for key in states[name][1]) == (name in KEEP or "stages" in name), name
    for source, (digest, state) in states.items():
        for name, many in trainers.items():
            many.load_state_dict(state)
            assert many.digest() == digest and many.steps == 2, (source, name)
            again = comm.bcast(many.state_dict())
            if source == name:
                assert all(np.array_equal(array, again[key]) for key, array in state.items()), name
    wrong = {key: np.full((7, 7), 9.0) if key.startswith(PRIVATE) else a for key, a in states["ddp"][1].items()}
    for name, many in trainers.items():
        own = {key: np.full((7, 7), 9.0) for key in states[name][1] if key.startswith(PRIVATE)}
        many.load_state_dict(wrong | own)  # nothing that it could go on with
        assert many.digest() == states["ddp"][0], name
        with pytest.raises(ValueError, match="lacks"):  # control: what all strategies have is needed
            many.load_state_dict({key: a for key, a in states[name][1].items() if not key.startswith("param/1.")})
        for batch in batches("mlp", many.shard, 1):
            assert np.isfinite(many.step(*batch)), name
        many.synchronize()
    for many in trainers.values():
        many.close()
