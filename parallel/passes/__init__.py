"""Passes: what one rank computes in a step."""
