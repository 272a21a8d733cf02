"""Passes: what one rank computes in a step.

| file | holds |
|---|---|
| forward_backward.py | forward and backward of a rank's samples, at once or in micro-batches |
| virtual_shards.py | micro-batches of which each is an addend: the same bits on any number of ranks |
| dealt.py | samples that a master deals out |
| chunks.py | chunks of a batch that a coordinator deals out |
"""
