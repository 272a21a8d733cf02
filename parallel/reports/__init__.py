"""What a run tells of itself.

| file | holds |
|---|---|
| breakdown.py | where the time of a step goes, on every rank; always on |
| curves.py | loss and accuracy over the epochs |
| timeline.py, clock_offsets.py | what every rank did when; by one clock |
| memory_report.py | bytes that every rank keeps and sends, beside the formulas |
| traffic.py | bytes on the wire, counted |
| staleness.py | how old parameters were, of every update; how often replicas met |
| runs.py, page.py | what runs have left, on one page |
| figures.py | a picture into a file, there whole or not at all |
| inspection.py | what the network confuses, time of its layers, which rate it takes |
"""
