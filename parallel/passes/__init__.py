"""What one rank computes in a step."""
