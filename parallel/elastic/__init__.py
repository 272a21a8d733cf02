"""Runs that survive.

| file | holds |
|---|---|
| policy.py | --elastic: what is done when a rank dies |
| membership.py | the ranks of a run, as they leave and join |
| replacements.py | processes that replace lost ranks |
| recovery.py | the same run, started again by the ranks that live |
| recovery_points.py, partner_checkpoints.py | steps from which a run can continue; copies of shards on a neighbour |
| sample_log.py | a check that every sample was trained exactly once |
| heartbeat.py | stall detection: ranks that are stopped, or in an endless loop |
| supervisor.py | starting a run again from its last whole checkpoint |
| chaos.py | faults at random moments, which a run must survive |
"""
