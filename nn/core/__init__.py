"""The core: layers, their contexts and gradients, the layout of their arrays, networks.

| file | holds |
|---|---|
| layer.py | the contract of a layer, and `Sequential` |
| context.py | `ctx`: what a layer knows of the pass, and what it asks for while it computes |
| gradients.py | how a layer describes gradients, and the function that writes or adds them |
| checks.py | what is looked at in a layer's first passes |
| layout.py | where parameters lie: one order, many flat buffers |
| containers.py | layers made of layers: residual, branches, recomputation |
| network.py | a layer with an input shape: one pass forward and backward |
| mixed_precision.py | what is kept until backward, and sent, as float16 |
| memory_pool.py | memory for activations that is taken again at every step |
"""
