"""Memory that the ranks of a node share.

| file | holds |
|---|---|
| window.py | `SharedWindow`: arrays that all ranks of a node see, and slots |
| files.py | the anonymous files that they lie in |
| flags.py | barriers, published numbers and claims of work |
| plans.py | schedules of algorithms/shared.py, bound to arrays |
| reduction.py | sums of arrays side by side, as NumPy makes them |
"""
