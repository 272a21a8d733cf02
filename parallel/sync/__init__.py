"""Gradient synchronizers: how gradients and parameters of different ranks are brought together."""
