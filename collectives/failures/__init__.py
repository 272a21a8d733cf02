"""When ranks do not come, disagree or end.

| file | holds |
|---|---|
| watchdog.py | a report of who waits for whom, when a call lasts too long |
| cycle.py | who waits for whom in a circle |
| agreement.py | debug=True: do all ranks call the same? |
| launch_check.py | all ranks start, and when one fails all end |
| aborted.py | what is raised after a call that was left before its end |
| awake.py | a clock that stands still where this process does |
| timer.py | one that is stopped when all others have ended is killed |
| revocation.py | the communicators to revoke when a rank has died |
"""
