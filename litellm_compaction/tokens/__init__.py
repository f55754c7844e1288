"""How many tokens a request takes, and what servers' own counts teach. Others import `counter` and `count`."""
