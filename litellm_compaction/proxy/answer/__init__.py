"""The answer on its way to the client: watched, stopped, compacted, continued."""
