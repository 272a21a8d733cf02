"""When ranks do not come, disagree or end.

| file | holds |
|---|---|
| watchdog.py | a report of who waits for whom, when a call lasts too long |
| cycle.py | who waits for whom in a circle |
| agreement.py | debug=True: do all ranks call the same? |
| launch_check.py | all ranks start as one program |
| job_end.py | when one rank fails all end, within seconds, with rank and cause |
| aborted.py | what later calls raise on a communicator on which a rank has aborted one |
| awake.py | a clock that stands still where this process does |
| deadline.py | how long ranks wait for each other: the loop of every wait that lasts |
| unfinished.py | memory of messages that not all ranks have come to |
| revocation.py | the communicators to revoke when a rank has died |
"""
