"""When ranks do not come, disagree or end: watchdog, comparison of calls, checks at the start."""
