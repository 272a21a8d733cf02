"""Reports about a run.

| file | holds |
|---|---|
| breakdown.py | where the time of a step goes, on every rank; always on |
| curves.py | loss and accuracy over the epochs |
| timeline.py, clock_offsets.py | what every rank did and when, on one clock |
| memory_report.py | bytes that every rank allocates and sends, beside the formulas |
| traffic.py | bytes on the wire, counted |
| staleness.py | the age of the parameters behind every update; how often replicas were averaged |
| runs.py, page.py | the files of runs, as one page |
| figures.py | pictures, written atomically |
| inspection.py | misclassified samples, time by layer, a good learning rate |
"""
