"""Before a run: which strategy, how fast.

| file | holds |
|---|---|
| laws.py | Amdahl, Gustafson, Karp-Flatt, efficiencies; fitted to measured runs |
| profile.py | what layers cost: seconds and bytes of a mini-batch, counted or from a file |
| partition.py | which layers form a stage, and on how many ranks each stage lies: PipeDream's programme |
| job.py | a step to be predicted, a mesh, a prediction |
| layer_times.py | a profile by measurement: every layer, both halves of backward |
| choice.py | a prediction as options of a run, and why it is taken |
| parts.py | what the busiest rank has of a step |
| group_costs.py, topology_costs.py | collectives on two levels of a network, on topologies |
| transformer.py | transformers of billions of parameters, by the formulas of their authors |
| tables.py, pictures.py | predictions in columns, and drawn |

Each strategy declares what it costs in its own file; strategies/estimate.py asks all of them on every mesh.
"""
