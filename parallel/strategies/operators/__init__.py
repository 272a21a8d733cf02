"""Inside and between operators: ranks compute an image's rows each, or a network's branches.

| file | holds |
|---|---|
| strategy.py | the two strategies, and the step that they have in common |
| replicated.py | layers that all these ranks compute identically, and what gathers their input |
| halo.py | the rows of an image that a rank needs of others: a schedule |
| rows.py | convolutions, pools and others of a part of the rows |
| space.py | which layers of a network are cut in height |
| branches.py | which branches are whose |
"""
