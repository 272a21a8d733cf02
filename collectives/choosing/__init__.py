"""Which algorithm runs: tables by size, derived or measured."""
