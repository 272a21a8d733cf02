"""Callbacks for the argument `callbacks` of `fit`; write one of your own as a subclass of Callback."""

from functools import partial

from nn.guesses import refuse_name
from nn.training.callbacks import EarlyStopping, ExpertLoad, Metrics, Progress, RestoreBest
from nn.training.checkpoint_callback import KeepCheckpoints
from nn.training.schedules import MomentumCorrection, Plateau
from nn.training.tensorboard import TensorBoard
from nn.training.training import Callback

__all__ = [
    "Callback",
    "EarlyStopping",
    "ExpertLoad",
    "KeepCheckpoints",
    "Metrics",
    "MomentumCorrection",
    "Plateau",
    "Progress",
    "RestoreBest",
    "TensorBoard",
]

__getattr__ = partial(refuse_name, __name__)
