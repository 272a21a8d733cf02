"""Tensor parallelism: ranks compute every layer together, each with a part of its parameters.

The declaration, and `parallel.TensorParallel`, are in tensor_parallel.py beside this folder.

| file | holds |
|---|---|
| shared_pass.py | what a rank computes in a step |
| rewriting.py | which layer of a network is cut how, and what moves between them |
| boundary.py | where convolutions end and linear layers begin, for the one weird trick |
| layers.py | ColumnLinear, RowLinear and the like |
| move_wrapper.py, moves.py | a layer with a move before and behind it; f and g, and other moves |
| parts.py, loss.py | layers that know which part they have; cross-entropy of outputs that are cut |
"""
