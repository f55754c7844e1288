"""Lessons of servers: their counts, and their ways to go on."""
