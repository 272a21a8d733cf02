"""Networks of the literature, a file each; `build` makes one from a text such as "mlp:784,30,10".

| file | holds |
|---|---|
| by_name.py | MODELS, and `build` from a text |
| mlp.py, cnn.py, lenet.py | small ones |
| alexnet.py, overfeat.py, vgg.py, googlenet.py, resnet.py | the classics of ImageNet, and their small kin |
| transformer.py, lstm.py | of bytes: causal, and encoder; recurrent |
| images.py | what those of images share |
"""

from nn.models.by_name import MODELS, build, first_values, lookup

__all__ = ["MODELS", "build", "first_values", "lookup"]
