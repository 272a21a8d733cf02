"""Looking into networks.

| file | holds |
|---|---|
| gradcheck.py | is backward the derivative of forward? |
| check_layer.py, check_loss.py, check_optimizer.py | can the engine rely on one of your own? |
| inspection.py | what a network confuses, what its layers do, where the time goes |
| sampling.py | text from a language model |
| pictures.py | figures of what inspection.py finds |
| workload.py | weights, multiply-accumulates and activations, counted |
"""
