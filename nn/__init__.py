"""A neural-network engine in NumPy, whose backprop you can read. It knows nothing of MPI.

Start with nn/core/layer.py (the contract of a layer), nn/core/context.py (what a layer asks for) and nn/layers/dense.py
(the four equations of backprop), then nn/training/trainer.py.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nn import callbacks, data, metrics, models, schedules
from nn.core.containers import Parallel, Recompute, Residual
from nn.core.context import Group, LayerContext, MicroBatch, NetworkContext
from nn.core.gradients import Gradient, Product, RowSum, ScatterAdd
from nn.core.layer import Layer, Sequential, ShapeError, Spec
from nn.core.layout import Layout, Region
from nn.core.memory_pool import MemoryPool
from nn.core.network import Network
from nn.data import Loader
from nn.files.description import register
from nn.files.model import FileError, Model, load, save
from nn.guesses import refuse_name
from nn.layers.activations import GELU, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from nn.layers.attention import MultiHeadAttention, TransformerBlock
from nn.layers.batch_normalization import BatchNorm1d, BatchNorm2d
from nn.layers.convolution import Conv2d
from nn.layers.dense import Linear, TiedLinear
from nn.layers.dropout import Dropout
from nn.layers.embedding import Embedding, LearnedPositions, RotaryPositions, SinusoidalPositions
from nn.layers.experts import MixtureOfExperts
from nn.layers.normalization import LayerNorm, LocalResponseNorm, RMSNorm
from nn.layers.pooling import AdaptiveAvgPool2d, AvgPool2d, GlobalAvgPool2d, GlobalMaxPool2d, MaxPool2d
from nn.layers.recurrent import LSTM, RNN
from nn.layers.reshaping import Flatten, Reshape
from nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    Loss,
    MAELoss,
    MaskedCrossEntropyLoss,
    MSELoss,
    NLLLoss,
    QuadraticLoss,
)
from nn.optim.clipping import ClipGlobalNorm, ClipNorm, ClipValue
from nn.optim.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from nn.training.callbacks import EarlyStopping, Metrics, Progress, RestoreBest
from nn.training.checkpoint_callback import KeepCheckpoints
from nn.training.checkpoints import CheckpointError, Checkpoints
from nn.training.fit import Callback, Training, evaluate, fit
from nn.training.trainer import NonFiniteLoss, Trainer

if TYPE_CHECKING:
    from nn.analysis.check_layer import check_layer
    from nn.analysis.check_loss import check_loss
    from nn.analysis.check_optimizer import check_optimizer
    from nn.analysis.gradcheck import gradcheck
    from nn.files.onnx import export_onnx
    from nn.optim.lbfgs import LBFGS, Vectors

__all__ = [
    "GELU",
    "LAMB",
    "LARS",
    "LBFGS",
    "LSTM",
    "RNN",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
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
    "FileError",
    "Flatten",
    "GlobalAvgPool2d",
    "GlobalMaxPool2d",
    "Gradient",
    "Group",
    "HuberLoss",
    "KeepCheckpoints",
    "Layer",
    "LayerContext",
    "LayerNorm",
    "Layout",
    "LeakyReLU",
    "LearnedPositions",
    "Linear",
    "Loader",
    "LocalResponseNorm",
    "LogSoftmax",
    "Loss",
    "MAELoss",
    "MSELoss",
    "MaskedCrossEntropyLoss",
    "MaxPool2d",
    "MemoryPool",
    "Metrics",
    "MicroBatch",
    "MixtureOfExperts",
    "Model",
    "MultiHeadAttention",
    "NLLLoss",
    "Network",
    "NetworkContext",
    "NonFiniteLoss",
    "Optimizer",
    "Parallel",
    "Product",
    "Progress",
    "QuadraticLoss",
    "RMSNorm",
    "RMSprop",
    "ReLU",
    "Recompute",
    "Region",
    "Reshape",
    "Residual",
    "RestoreBest",
    "RotaryPositions",
    "RowSum",
    "ScatterAdd",
    "Sequential",
    "ShapeError",
    "SiLU",
    "Sigmoid",
    "SinusoidalPositions",
    "Softmax",
    "Spec",
    "Tanh",
    "TiedLinear",
    "Trainer",
    "Training",
    "TransformerBlock",
    "Vectors",
    "callbacks",
    "check_layer",
    "check_loss",
    "check_optimizer",
    "data",
    "evaluate",
    "export_onnx",
    "fit",
    "gradcheck",
    "load",
    "metrics",
    "models",
    "register",
    "save",
    "schedules",
]

_ON_FIRST_USE = {  # training needs none of them
    "LBFGS": "nn.optim.lbfgs",
    "Vectors": "nn.optim.lbfgs",
    "check_layer": "nn.analysis.check_layer",
    "check_loss": "nn.analysis.check_loss",
    "check_optimizer": "nn.analysis.check_optimizer",
    "export_onnx": "nn.files.onnx",
    "gradcheck": "nn.analysis.gradcheck",
}


def __getattr__(name: str) -> object:
    if name in _ON_FIRST_USE:
        return getattr(import_module(_ON_FIRST_USE[name]), name)
    refuse_name(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_FIRST_USE})
