"""Trained networks in files, for whoever wants to use one.

| file | holds |
|---|---|
| description.py | a layer as plain text, and made again; `register` for layers of one's own |
| trained.py | `save`, `load`, and `Trained`: a network that predicts, without loss and optimizer |
| safetensors.py | that format, written and read |
| onnx.py | `export_onnx`; onnx_layers.py has a form for every layer, onnx_graph.py nodes, protobuf.py bytes |
"""
