"""Networks of the literature, a file each: `models.resnet20((32, 32, 3), 10)`, or `build` from "mlp:784,30,10".

| file | holds |
|---|---|
| by_name.py | `model` gives a builder its name; `build` from a text |
| mlp.py, cnn.py, lenet.py | small ones |
| alexnet.py, overfeat.py, vgg.py, googlenet.py, resnet.py | the classics of ImageNet, and their small kin |
| transformer.py, lstm.py | of bytes: causal, and encoder; recurrent |
| images.py | the check of the images' shape |
"""

from functools import partial

from nn.guesses import refuse_name
from nn.models.alexnet import alexnet
from nn.models.by_name import build, model
from nn.models.cnn import cnn
from nn.models.googlenet import googlenet
from nn.models.lenet import lenet5, lenet5_1998
from nn.models.lstm import lstm
from nn.models.mlp import mlp
from nn.models.overfeat import overfeat_fast
from nn.models.resnet import resnet20, resnet50
from nn.models.transformer import encoder, transformer
from nn.models.vgg import vgg16, vgg_small

__all__ = [
    "alexnet",
    "build",
    "cnn",
    "encoder",
    "googlenet",
    "lenet5",
    "lenet5_1998",
    "lstm",
    "mlp",
    "model",
    "overfeat_fast",
    "resnet20",
    "resnet50",
    "transformer",
    "vgg16",
    "vgg_small",
]

__getattr__ = partial(refuse_name, __name__)
