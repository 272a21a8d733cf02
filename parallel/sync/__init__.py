"""How gradients and parameters of different ranks meet."""
