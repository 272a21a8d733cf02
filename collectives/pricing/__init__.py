"""What does a schedule cost?

| file | holds |
|---|---|
| price.py | `price`: seconds, rounds, bytes |
| event_simulation.py | event-driven simulation: ranks go through their rounds, messages through ports or channels |
| ports.py, memory.py | messages one after the other through a port; copies and reductions in a node |
| topology.py, flows.py | hosts, switches, channels, routes; messages that share channels: max-min fair rates |
| symmetry.py, progress_bar.py | blocks of ranks that stand for all; a bar from two seconds on |
| networks.py, measure.py | links and networks as numbers, some with a name; the network under the ranks, measured |
| trace.py, trace_formats.py | what happened in a simulation; GOAL and Chrome trace events, written and read |
| critical_path.py | what the last rank waited for |
| lower_bounds.py | seconds below which no algorithm can finish |
"""
