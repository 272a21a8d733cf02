"""Parameter servers that wait for nobody, or not for long.

clock.py         who may go on: a server's table of its workers' clocks, and what a worker knows of its cached slices
checking.py      every order of arrival of small cases: do bounds hold, is each gradient applied once, does it end?
compensation.py  delayed gradients, compensated for what has changed since (DC-ASGD)
replica.py       ranks that are one worker together
worker.py        what a worker does in a step: read, gather, push
server.py        what a server does: apply, answer
served.py        the sync of the two
"""
