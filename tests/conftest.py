"""Tests marked `mpi` run on ranks that pytest launches itself: tests/ranks.py."""

pytest_plugins = ["ranks"]
