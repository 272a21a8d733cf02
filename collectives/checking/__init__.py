"""Is a schedule right? All ranks run in one process, on symbols.

| file | holds |
|---|---|
| simulator.py | one run: broken rules, races, deadlocks, and what was counted |
| definitions.py | what each operation must end with; `prove`: one case, held against that |

`check`, many cases, and its report: collectives/report.py.
"""
