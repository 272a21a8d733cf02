"""Data: what is learned from. `load` gives Datasets, a Loader gives batches of one.

| file | holds |
|---|---|
| sources.py | data sets by name |
| dataset.py, splitting.py | samples and targets; what is held out to choose by |
| loader.py | batches in a seeded order, cut into shards, read ahead |
| transforms.py, masking.py | random changes of images; hidden bytes of texts |
| images.py | an image file as a sample |
| arrays.py, idx.py, cifar.py, text.py | readers of files, none of which trusts what it reads |
| synthetic.py | made-up data |
"""

from functools import partial

from nn.data.dataset import Data, DataError, DataNotFound, Dataset
from nn.data.loader import BatchTooSmall, Loader
from nn.data.sources import NAMES, load
from nn.data.splitting import hold_out
from nn.data.transforms import RandomCrop, RandomFlip
from nn.guesses import refuse_name

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
    "hold_out",
    "load",
]

__getattr__ = partial(refuse_name, __name__)
