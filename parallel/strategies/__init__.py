"""How ranks share the work: a file a strategy."""
