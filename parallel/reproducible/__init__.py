"""The same bits on any number of ranks: shards.py says how, tree_sum.py adds up; then a file for each strategy."""
