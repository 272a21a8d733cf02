"""Before a run: which strategy, how fast.

| file | holds |
|---|---|
| laws.py | Amdahl, Gustafson, Karp-Flatt, efficiencies; fitted to measured runs |
| profile.py | what layers cost: seconds and bytes of a mini-batch, and the file they come in |
| partition.py | which layers form a stage, and on how many ranks each stage lies |
"""
