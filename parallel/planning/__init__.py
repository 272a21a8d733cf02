"""Predict a run before it starts: which strategy, how fast, how much memory.

| file | holds |
|---|---|
| laws.py | Amdahl, Gustafson, Karp-Flatt, efficiencies; fitted to measured runs |
| profile.py | what layers cost: seconds and bytes of a mini-batch, counted or from a file |
| partition.py | which layers form a stage, and the ranks of each stage: PipeDream's dynamic programme |
| job.py | the training step to predict, the mesh, the prediction |
| layer_times.py | a measured profile: every layer, both halves of backward |
| choice.py | the options of a predicted run, and the reasons for choosing it |
| parts.py | layers and samples of the busiest rank |
| group_costs.py, topology_costs.py, context_costs.py | collectives on two levels, on topologies; shared attention |
| transformer.py | transformers of billions of parameters, by the formulas of their authors |
| tables.py, pictures.py | predictions in columns, and drawn |

Each strategy declares its cost in its own file; strategies/estimate.py evaluates all of them on every mesh.
"""
