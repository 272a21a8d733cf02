"""Memory that the ranks of a node share: windows, flags to meet by, schedules bound to arrays."""
