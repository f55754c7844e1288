"""The pure core: messages in, messages out. No clock, log, await or randomness."""
