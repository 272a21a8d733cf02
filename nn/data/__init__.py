"""Data: what is learned from. `load` gives a training and a test Dataset, a Loader gives batches of one."""

from .dataset import Data, DataError, DataNotFound, Dataset
from .loader import BatchTooSmall, Loader
from .sources import NAMES, load
from .transforms import RandomCrop, RandomFlip

__all__ = [
    "NAMES",
    "BatchTooSmall",
    "Data",
    "DataError",
    "DataNotFound",
    "Dataset",
    "Loader",
    "RandomCrop",
    "RandomFlip",
    "load",
]
