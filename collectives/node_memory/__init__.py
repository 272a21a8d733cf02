"""Memory that the ranks of a node share.

| file | holds |
|---|---|
| window.py | `SharedWindow`: arrays that all ranks of a node see, and slots |
| files.py | the anonymous files that they lie in |
| flags.py | flags that ranks show each other: barriers, published numbers, claims of work |
| plans.py | schedules of algorithms/shared.py, bound to arrays |
| barriers.py | the barriers of such plans; at the first one ranks must agree |
| reduction.py | sums of arrays side by side, as NumPy makes them |
"""
