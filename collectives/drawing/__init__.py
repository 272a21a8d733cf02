"""Pictures of schedules and of runs.

| file | holds |
|---|---|
| diagrams.py | `draw`, `draw_buffers`, and what is wrong with a schedule |
| film.py | `animate`: messages travel while buffers fill |
| race.py | `draw_race`: algorithms by the length of the vector |
| networks.py | networks: ranks, load of channels, critical path, found trees, a film of flows |
| timeline.py | `draw_timeline`: what ranks did when, measured or priced; the palette |
| arrows.py | what each step looks like, and the legend |
| contents.py | what every buffer held after every round |
| marks.py | axes, headings, buffers as squares, colours |
"""
