"""What does a schedule cost?

| file | holds |
|---|---|
| price.py | `price`: seconds, rounds, bytes |
| event_loop.py | the clock: every rank through its rounds, every message through its ports |
| topology.py | hosts, switches, channels and routes |
| flows.py | messages that share channels: max-min fair rates |
| networks.py | links and networks as numbers; those that have a name |
| measure.py | the network under the ranks, measured |
| traces.py | GOAL and Chrome trace events, written and read |
| critical_path.py | what the last rank waited for |
| lower_bounds.py | seconds below which no algorithm can finish |
"""
