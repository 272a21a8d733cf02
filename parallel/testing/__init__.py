"""A pytest plugin: plain `pytest` runs a test on MPI ranks that it launches itself (docs/howto/testing.md).

| file | holds |
|---|---|
| plugin.py | the options, the fixtures, the hooks that have marked tests run on ranks |
| mark.py | what the mark says of a test |
| launch.py | the side of the user's pytest: start ranks for some tests, read their logs, end them |
| rank.py | the side of a rank: run the tests that it is sent, write the log |
| report.py | one report of a test from those of its ranks |
| faults.py | faults where a process comes to a place, for any program |
| grade.py | points for a project of the course, by tests that carry them |
"""
