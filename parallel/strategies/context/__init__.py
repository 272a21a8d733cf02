"""Context parallelism: every rank has some positions of each sequence, in all layers.

| file | holds |
|---|---|
| positions.py | which positions are whose: zigzag chunks, cut again for Ulysses |
| ring.py | keys and values travel around a ring while blocks are computed: a schedule, forward and backward |
| attention.py | attention of some positions: by the ring, by heads (Ulysses), or both |
| layers.py | the other layers that have to know which positions they are given |
| cutting.py | a network rewritten for one rank: which layer is replaced by what |
| strategy.py | the strategy, and its step |
"""
