"""What does a schedule cost?

| file | holds |
|---|---|
| price.py | `price`: seconds, rounds, bytes |
| event_simulation.py | event-driven simulation: ranks go through their rounds, messages through ports or channels |
| ports.py | messages one after the other through a port |
| topology.py | hosts, switches, channels and routes |
| flows.py | messages that share channels: max-min fair rates |
| memory.py | copies and reductions in the memory of a node |
| trace.py | what happened in a simulation |
| networks.py | links and networks as numbers; those that have a name |
| measure.py | the network under the ranks, measured |
| traces.py | GOAL and Chrome trace events, written and read |
| critical_path.py | what the last rank waited for |
| lower_bounds.py | seconds below which no algorithm can finish |
"""
