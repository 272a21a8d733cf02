"""Before a run: which strategy, how fast; profile.py reads what layers cost, partition.py cuts networks into stages."""
