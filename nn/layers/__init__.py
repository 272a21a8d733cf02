"""Layers, a family a file; each is a forward and a backward.

| file | holds |
|---|---|
| dense.py | y = x W + b: begin here |
| activations.py | ReLU, Sigmoid, Tanh, GELU, ... and gaussian.py, the normal distribution that GELU needs |
| convolution.py | Conv2d, which chooses among im2col.py, winograd.py and winograd_rows.py |
| pooling.py | maximum and mean over windows of an image |
| normalization.py, batch_normalization.py | within a sample; over the batch, perhaps a group's |
| attention.py, blockwise.py | multi-head attention and the transformer block; its softmax by blocks of keys |
| experts.py | a router and the experts among which it chooses |
| embedding.py | words and positions as vectors |
| recurrent.py | a plain recurrent layer and the LSTM: backpropagation through time |
| dropout.py, reshaping.py | what has no parameters |
"""

from functools import partial

from nn.guesses import refuse_name

__getattr__ = partial(refuse_name, __name__)
