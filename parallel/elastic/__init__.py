"""Runs that survive: what ends too early goes on, and what is broken on purpose shows that it does."""
