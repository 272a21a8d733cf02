"""Small networks and batches for tests of pipelines, and what they are compared with."""

import numpy as np

import nn
from collectives.steps import chunk
from nn.core.layer import Sequential
from nn.optim import clipping

SEED = 5
SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipev"]
EPS = 1e-4  # of Adam: see equality.py


def mlp():
    layers = []
    for n, m in ((12, 10), (10, 9), (9, 8), (8, 7), (7, 6)):
        layers += [nn.Linear(n, m), nn.Sigmoid(), nn.Dropout(0.2)]
    return nn.Network(Sequential(*layers, nn.Linear(6, 4)), (12,), np.float64)


def cnn(synchronized=False):
    layers = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, synchronized=synchronized), nn.ReLU()]
    layers += [nn.Residual(nn.Conv2d(4, 4, 1)), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Network(Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 4)), (4, 4, 1), np.float64)


def resnet():
    def block(n, m):
        body = nn.Conv2d(n, m, 3, padding=1, bias=False), nn.BatchNorm2d(m), nn.ReLU(), nn.Conv2d(m, m, 1)
        return nn.Residual(Sequential(*body), None if n == m else nn.Conv2d(n, m, 1))

    layers = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), block(3, 3), nn.ReLU(), block(3, 5), nn.ReLU(), block(5, 5)
    return nn.Network(Sequential(*layers, nn.GlobalAvgPool2d(), nn.Linear(5, 4)), (4, 4, 1), np.float64)


def transformer():
    """Its embedding is also that of the output, on the last stage."""
    layers = [nn.Embedding(9, 8), nn.LearnedPositions(6, 8), nn.Dropout(0.1)]
    layers += [nn.TransformerBlock(8, 2, causal=True, dropout=0.2) for _ in range(3)]
    return nn.Network(Sequential(*layers, nn.LayerNorm(8), nn.TiedLinear("0.W", 8, 9)), (6,), np.float64)


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet": resnet, "transformer": transformer}
OPTIMIZERS = {
    "sgd": lambda clip=None: nn.SGD(0.3, 0.9, clip=clip),
    "adam": lambda clip=None: nn.Adam(0.01, eps=EPS, clip=clip),
}
OF_NORMS = [  # what needs norms of whole tensors, or of the whole network
    lambda: nn.SGD(0.3, 0.9, clip=clipping.ClipGlobalNorm(0.1)),
    lambda: nn.SGD(0.3, 0.9, clip=clipping.ClipNorm(0.05)),
    lambda: nn.LARS(0.5, weight_decay=1e-3),
    lambda: nn.LAMB(0.01, eps=EPS, clip=clipping.ClipGlobalNorm(0.1)),
]


def batches(network, shard=(0, 1), sizes=(10, 10, 3)):
    """(x, y, total) of batches that micro-batches do not divide; of the last one some are empty."""
    rng = np.random.default_rng(1)
    index, count = shard
    for n in sizes:
        mine = slice(*chunk(n, count, index))
        if network.takes_ids:
            x, y = rng.integers(0, 9, (n, 6)), rng.integers(0, 9, (n, 6))
        else:
            x, y = rng.random((n, *network.in_shape)), rng.integers(0, 4, n)
        yield x[mine], y[mine], n


def train(trainer, parts=1, sizes=(10, 10, 3)):
    """Losses of some steps."""
    return [trainer.step(*batch, parts) for batch in batches(trainer.network, trainer.shard, sizes)]


def one_process(network, optimizer, micro_batches):
    """(trainer, losses): the same micro-batches, one after the other."""
    trainer = nn.Trainer(network, nn.CrossEntropyLoss(), optimizer, SEED)
    return trainer, train(trainer, micro_batches)


def pipeline(comm, network, optimizer=None, loss=None, **options):
    from parallel import Pipeline

    optimizer = optimizer or OPTIMIZERS["sgd"]()
    return Pipeline(network, loss or nn.CrossEntropyLoss(), optimizer, comm, SEED, **options)


def difference(state, expected):
    """The largest difference of two states, relative to an entry's largest value."""
    assert state.keys() == expected.keys()
    worst = 0.0
    for name, array in expected.items():
        if array.size:
            worst = max(worst, float(np.abs(state[name] - array).max() / max(1e-3, np.abs(array).max())))
    return worst
