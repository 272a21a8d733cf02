"""A neural-network engine in NumPy, whose backprop you can read. It knows nothing of ranks or MPI.

Start with nn/layer.py (the contract of a layer) and nn/dense.py (the four equations of backprop), then nn/training.py.
"""

from nn import data, models
from nn.activations import ReLU, Sigmoid, Tanh
from nn.callbacks import EarlyStopping, KeepCheckpoints, Metrics, Progress
from nn.checkpoints import CheckpointError, Checkpoints
from nn.convolution import Conv2d
from nn.data import Loader
from nn.dense import Linear
from nn.gradcheck import gradcheck
from nn.layer import Layer, Run, Sequential, ShapeError, Spec
from nn.layout import Layout, Region
from nn.losses import CrossEntropyLoss, QuadraticLoss
from nn.memory import Memory
from nn.network import Network
from nn.optimizers import SGD
from nn.pooling import MaxPool2d
from nn.reshaping import Flatten
from nn.training import Callback, NonFiniteLoss, Serial, Training, evaluate, fit

__all__ = [
    "SGD",
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "Conv2d",
    "CrossEntropyLoss",
    "EarlyStopping",
    "Flatten",
    "KeepCheckpoints",
    "Layer",
    "Layout",
    "Linear",
    "Loader",
    "MaxPool2d",
    "Memory",
    "Metrics",
    "Network",
    "NonFiniteLoss",
    "Progress",
    "QuadraticLoss",
    "ReLU",
    "Region",
    "Run",
    "Sequential",
    "Serial",
    "ShapeError",
    "Sigmoid",
    "Spec",
    "Tanh",
    "Training",
    "data",
    "evaluate",
    "fit",
    "gradcheck",
    "models",
]
