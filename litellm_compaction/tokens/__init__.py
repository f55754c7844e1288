"""Counts the tokens of a request, and learns from servers' own counts. Others import `counter` and `count`."""
