"""Runs that survive.

| file | holds |
|---|---|
| supervisor.py | starting a run again from its last whole checkpoint |
| chaos.py | blows at random moments, which a run is to survive |
"""
