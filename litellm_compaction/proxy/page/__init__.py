"""The settings and history page at `/compaction`."""
