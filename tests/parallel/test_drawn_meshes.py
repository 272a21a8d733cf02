"""Five to eight ranks on meshes that are drawn: each computes what one process computes.

RINGPROP_FUZZ=N draws N times as many.
"""

import os
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from pipelines import OPTIMIZERS, SCHEDULES, SEED, difference, train

import nn
from nn.core.layer import Sequential
from nn.models.transformer import transformer as layers_of
from parallel.command.options import Options

DRAWN = int(os.environ.get("RINGPROP_FUZZ", 1))
FEW_STAGES = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")  # schedules with one on each rank
SIZES = (19, 19, 7), (33, 33, 25)  # samples of the steps: of 7 some ranks have none, and no number of ranks divides 19


def mlp():
    layers = []
    for n, m in ((12, 11), (11, 10), (10, 9), (9, 9), (9, 8)):
        layers += [nn.Linear(n, m), nn.Sigmoid(), nn.Dropout(0.2)]
    return nn.Network(Sequential(*layers, nn.Linear(8, 4)), (12,), np.float64)


def cnn(synchronized=False):
    """Rows for eight ranks, of which no number below divides them all."""
    layers = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, synchronized=synchronized), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, (4, 3), padding=1), nn.ReLU(), nn.MaxPool2d(2, (1, 2)), nn.Dropout(0.3)]
    return nn.Network(Sequential(*layers, nn.Flatten(), nn.Linear(9 * 2 * 8, 4)), (11, 4, 1), np.float64)


def resnet(synchronized=False):
    def block(n, m):
        norm = nn.BatchNorm2d(m, synchronized=synchronized)
        body = nn.Conv2d(n, m, 3, padding=1, bias=False), norm, nn.ReLU(), nn.Conv2d(m, m, 1)
        return nn.Residual(Sequential(*body), None if n == m else nn.Conv2d(n, m, 1))

    layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), block(8, 8), nn.ReLU(), block(8, 9), nn.ReLU(), block(9, 9)
    return nn.Network(Sequential(*layers, nn.GlobalAvgPool2d(), nn.Linear(9, 4)), (10, 3, 1), np.float64)


def transformer(heads):
    """Tied embeddings, on the first and the last stage; nine ids."""
    return layers_of((6,), 9, heads, heads, 3, 1, dropout=0.2, dtype=np.float64)


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "transformer": transformer}


def meshes(ranks):
    """All that make so many ranks: data x pipeline x tensor, and data x space."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    found = [
        {"data": d, "pipeline": p, "tensor": ranks // d // p} for d, p in product(sizes, sizes) if ranks % (d * p) == 0
    ]
    return found + [{"data": ranks // size, "space": size} for size in sizes[1:]]


class Case(NamedTuple):
    """What is trained, and how: a network of NETWORKS with what it is given, an optimizer, micro-batches, samples."""

    options: Options
    network: str
    given: tuple
    optimizer: str
    parts: int
    sizes: tuple

    def build(self):
        return NETWORKS[self.network](*self.given)


def case_of(ranks, number):
    """One case of so many ranks."""
    rng = np.random.default_rng([ranks, number])
    mesh = meshes(ranks)[rng.integers(len(meshes(ranks)))]
    data, pipeline, tensor, space = (mesh.get(axis, 1) for axis in ("data", "pipeline", "tensor", "space"))
    network = str(rng.choice(["cnn", "resnet"] if space > 1 else list(NETWORKS)))
    normalized = network in ("cnn", "resnet")
    parts = 1 if normalized and data > 1 else int(rng.integers(1, 5))  # statistics are those of a micro-batch
    how = {"strategy": str(rng.choice(["ddp", "zero1"] if pipeline > 1 else ["ddp", "zero1", "zero2", "fsdp"]))}
    how["unit"] = float(rng.choice([1e-3, 1.0]))
    if pipeline > 1:
        how["pipeline"] = f"{rng.choice(SCHEDULES if pipeline <= 4 else FEW_STAGES)}:micro={parts}"
    if tensor > 1 and network == "transformer":
        how["tensor"] = str(rng.choice(["pairs", "sequence", "width"]))
    if pipeline == tensor == 1 and rng.random() < 0.3:
        how["compress"] = "none"
    given = (data > 1,) if normalized else (8 if 8 % tensor == 0 else 2 * tensor,) * (network == "transformer")
    sizes = SIZES[1] if normalized else SIZES[rng.integers(2)]
    text = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    options = Options(mesh=text, seed=SEED, batch=max(sizes), **how)
    return Case(options, network, given, str(rng.choice(list(OPTIMIZERS))), parts, sizes)


@cache
def reference(network, given, optimizer, parts, sizes):
    """(trainer, losses) of one process."""
    one = nn.Trainer(NETWORKS[network](*given), nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](), SEED)
    return one, train(one, parts, sizes)


def assert_as_one_process(communicator, case):
    from parallel.strategies import build_trainer

    one, losses = reference(*case[1:])
    given = case.options, case.build(), nn.CrossEntropyLoss(), OPTIMIZERS[case.optimizer]()
    many = build_trainer(*given, communicator)
    found = train(many, 1 if case.options.pipeline else case.parts, case.sizes)
    np.testing.assert_allclose(found, losses, rtol=1e-12, err_msg=f"{case}")
    many.check_replicas()
    state = many.state_dict()
    assert communicator.rank or difference(state, one.state_dict()) < 1e-12, case
    many.close()


@pytest.mark.mpi(ranks=[5], more=[6, 7, 8])
def test_drawn_meshes_compute_what_one_process_computes(comm, ranks):
    from collectives import Communicator

    for number in range(2 * DRAWN):
        assert_as_one_process(Communicator(comm), case_of(ranks, number))
