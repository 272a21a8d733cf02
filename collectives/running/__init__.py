"""From a schedule to the wire: program, plan, persistent requests; found again by their arguments."""
