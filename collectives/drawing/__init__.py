"""Space-time diagrams, buffers, films and timelines."""
