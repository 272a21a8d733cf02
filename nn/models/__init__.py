"""Networks of the literature, a file each: `models.resnet20((32, 32, 3), 10)`, or `build` from "mlp:784,30,10".

| file | holds |
|---|---|
| by_name.py | MODELS, and `build` from a text |
| mlp.py, cnn.py, lenet.py | small ones |
| alexnet.py, overfeat.py, vgg.py, googlenet.py, resnet.py | the classics of ImageNet, and their small kin |
| transformer.py, lstm.py | of bytes: causal, and encoder; recurrent |
| images.py | what those of images share |
"""

from nn.models.by_name import MODELS, build, first_values, lookup, network_function

alexnet = network_function("alexnet")
cnn = network_function("cnn")
encoder = network_function("encoder")
googlenet = network_function("googlenet")
lenet5 = network_function("lenet5")
lenet5_1998 = network_function("lenet5-1998")
lstm = network_function("lstm")
mlp = network_function("mlp")
overfeat_fast = network_function("overfeat-fast")
resnet20 = network_function("resnet20")
resnet50 = network_function("resnet50")
transformer = network_function("transformer")
vgg16 = network_function("vgg16")
vgg_small = network_function("vgg-small")

__all__ = [
    "MODELS",
    "alexnet",
    "build",
    "cnn",
    "encoder",
    "first_values",
    "googlenet",
    "lenet5",
    "lenet5_1998",
    "lookup",
    "lstm",
    "mlp",
    "overfeat_fast",
    "resnet20",
    "resnet50",
    "transformer",
    "vgg16",
    "vgg_small",
]
