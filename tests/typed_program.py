"""A program as a user writes it, with the types that the public names promise. Not run: `make lint` lets mypy read it.

Each call is one that a type checker must accept, and what is bound is annotated, so that a name without types fails.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import collectives
import nn
import parallel

Array = np.ndarray

data: nn.data.Data = nn.data.load("digits", validation=0.1)
layers: nn.Sequential = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding="same"),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.Residual(nn.Conv2d(8, 8, (3, 3), padding=1)),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Recompute(nn.Linear(128, 32)),
    nn.Dropout(0.1),
    nn.Linear(32, 10, bias=False),
)
network: nn.Network = nn.Network(layers, data.in_shape)
loss: nn.CrossEntropyLoss = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer: nn.AdamW = nn.AdamW(lr=0.001, weight_decay=0.1, clip=nn.ClipGlobalNorm(1.0))
trainer: nn.Trainer = nn.Trainer(network, loss, optimizer, seed=1)


class Count(nn.Callback):
    steps = 0

    def on_step(self, training: nn.Training, loss: float) -> None:
        self.steps += 1


loader: nn.Loader = nn.Loader(data.train, batch=32, shard=trainer.shard)
training: nn.Training = nn.fit(trainer, loader, epochs=2, callbacks=Count(), validation=data.validation, test=data.test)
arrays: tuple[Array, Array] = data.train.batch(slice(0, 100))
training = nn.fit(trainer, arrays, 1, [nn.Progress(), Count()], batch=16)
scores: dict[str, float] = nn.evaluate(trainer, data.test)
one: float = trainer.step(*arrays)
seen: Array = trainer.predict(arrays[0])
worst: float = nn.gradcheck(nn.Linear(3, 2), np.ones((4, 3)))
worst = nn.gradcheck(nn.MSELoss(), np.ones((4, 2)), target=np.zeros((4, 2)))
table: str = network.summary()

file: Path = nn.save(trainer, "digits.npz", about={"names": list(data.class_names)})
trained: nn.Model = nn.load(file)
outputs: Array = trained.predict(arrays[0], batch=50)
state: dict[str, Array] = trained.state_dict()
exported: Path = nn.export_onnx(trained, "digits.onnx")
kept: nn.Checkpoints = nn.Checkpoints("checkpoints", keep=3)
saved: Path = kept.save(trainer.state_dict(), training.progress())


@nn.register
class Scale(nn.Layer):
    def __init__(self, factor: float):
        self.factor = factor

    def forward(self, p: Any, x: Array, ctx: nn.LayerContext) -> tuple[Array, None]:
        return x * self.factor, None

    def backward(self, p: Any, gy: Array, saved: None, ctx: nn.LayerContext) -> tuple[Array, dict[str, nn.Gradient]]:
        return gy * self.factor, {}


def on_ranks(world: collectives.Communicator) -> None:
    many: nn.Trainer = parallel.DistributedDataParallel(network, loss, optimizer, world)
    many = parallel.FullyShardedDataParallel(network, loss, optimizer, world)
    nn.fit(many, nn.Loader(data.train, 32, shard=many.shard), 1)
    x, y = np.ones(4), np.empty(4)
    world.Allreduce(x, y)


def halved(step: int) -> float:
    return 0.1 * 0.5 ** (step // 100)


schedule: Callable[[int], float] = halved
nn.fit(trainer, data.train, 1, schedule=schedule)


# Controls: what is wrong is seen to be, or the checker complains of a comment without use.
def wrong(world: collectives.Communicator) -> None:
    nn.Network("cnn", (8, 8, 1))  # type: ignore[arg-type]
    nn.Linear("3", 2)  # type: ignore[arg-type]
    nn.load(3)  # type: ignore[arg-type]
    nn.fit(network, data.train, 1)  # type: ignore[arg-type]
    nn.fit(trainer, 3, 1)  # type: ignore[arg-type]
    nn.save(trainer)  # type: ignore[call-arg]
    parallel.DistributedDataParallel(layers, loss, optimizer, world)  # type: ignore[arg-type]
    text: str = nn.evaluate(trainer, data.test)  # type: ignore[assignment]
    text = trained.predict(arrays[0])  # type: ignore[assignment]
    print(text)
