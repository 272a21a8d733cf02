"""What does a schedule cost?

| file | holds |
|---|---|
| price.py | `price`: seconds, rounds, bytes |
| event_loop.py | the clock: every rank through its rounds, every message through its ports |
| networks.py | links and networks as numbers; those that have a name |
| measure.py | the network under the ranks, measured |
| critical_path.py | what the last rank waited for |
| lower_bounds.py | seconds below which no algorithm can finish |
"""
