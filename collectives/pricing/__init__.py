"""What does a schedule cost? Networks, the clock that walks every rank, measuring, lower bounds."""
