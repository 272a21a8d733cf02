"""Which algorithm runs?

| file | holds |
|---|---|
| selection.py | what the caller says, else the environment, else a table by size |
| derive.py | the tables that the simulation derives for a network |
"""
