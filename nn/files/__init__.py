"""Models in files: a network with its weights, to use it or to train on.

| file | holds |
|---|---|
| description.py | a layer as plain text, and made again; `register` for layers of one's own |
| model.py | `save`, `load`, and `Model`: a network with weights, which predicts without loss and optimizer |
| safetensors.py | that format, written and read |
| onnx.py | `export_onnx`; onnx_layers.py has a form for every layer, onnx_graph.py nodes, nn/protobuf.py bytes |
"""
