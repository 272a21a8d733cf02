"""Runs that survive.

| file | holds |
|---|---|
| policy.py | --elastic: what is done when a rank dies |
| membership.py | the ranks of a run, as they come and go |
| newcomers.py | processes that take the places of lost ranks |
| recovery.py | the same run, begun again by those that live |
| points.py, mirrors.py | where a run could go on; copies of shards, with a neighbour |
| ledger.py | that every sample was trained exactly once |
| heartbeat.py | ranks that are there and do nothing |
| supervisor.py | starting a run again from its last whole checkpoint |
| chaos.py | blows at random moments, which a run is to survive |
"""
