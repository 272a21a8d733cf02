"""A neural-network engine in NumPy, whose backprop you can read. It knows nothing of ranks or MPI.

Start with nn/layer.py (the contract of a layer) and nn/dense.py (the four equations of backprop), then nn/serial.py.
"""

from nn import data, models
from nn.activations import GELU, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from nn.attention import MultiHeadAttention, TransformerBlock
from nn.batch_normalization import BatchNorm1d, BatchNorm2d
from nn.callbacks import EarlyStopping, KeepCheckpoints, Metrics, Progress
from nn.checkpoints import CheckpointError, Checkpoints
from nn.clipping import ClipGlobalNorm, ClipNorm, ClipValue
from nn.containers import Branches, Recompute, Residual
from nn.convolution import Conv2d
from nn.data import Loader
from nn.dense import Linear, TiedLinear
from nn.dropout import Dropout
from nn.embedding import Embedding, LearnedPositions, SinusoidalPositions
from nn.gradcheck import gradcheck
from nn.layer import Layer, Run, Sequential, ShapeError, Spec
from nn.layout import Layout, Region
from nn.lbfgs import LBFGS, Vectors
from nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    MAELoss,
    MaskedCrossEntropyLoss,
    MSELoss,
    NLLLoss,
    QuadraticLoss,
)
from nn.memory import Memory
from nn.network import Network
from nn.normalization import LayerNorm, LocalResponseNorm, RMSNorm
from nn.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, RMSprop
from nn.pooling import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, GlobalMaxPool2d, MaxPool2d
from nn.reshaping import Flatten, Reshape
from nn.serial import NonFiniteLoss, Serial
from nn.training import Callback, Training, evaluate, fit

__all__ = [
    "GELU",
    "LAMB",
    "LARS",
    "LBFGS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "Branches",
    "Callback",
    "CheckpointError",
    "Checkpoints",
    "ClipGlobalNorm",
    "ClipNorm",
    "ClipValue",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "EarlyStopping",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2d",
    "GlobalMaxPool2d",
    "HuberLoss",
    "KeepCheckpoints",
    "Layer",
    "LayerNorm",
    "Layout",
    "LeakyReLU",
    "LearnedPositions",
    "Linear",
    "Loader",
    "LocalResponseNorm",
    "LogSoftmax",
    "MAELoss",
    "MSELoss",
    "MaskedCrossEntropyLoss",
    "MaxPool2d",
    "Memory",
    "Metrics",
    "MultiHeadAttention",
    "NLLLoss",
    "Network",
    "NonFiniteLoss",
    "Progress",
    "QuadraticLoss",
    "RMSNorm",
    "RMSprop",
    "ReLU",
    "Recompute",
    "Region",
    "Reshape",
    "Residual",
    "Run",
    "Sequential",
    "Serial",
    "ShapeError",
    "SiLU",
    "Sigmoid",
    "SinusoidalPositions",
    "Softmax",
    "Spec",
    "Tanh",
    "TiedLinear",
    "Training",
    "TransformerBlock",
    "Vectors",
    "data",
    "evaluate",
    "fit",
    "gradcheck",
    "models",
]
