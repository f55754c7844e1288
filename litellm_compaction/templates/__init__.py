"""Chat templates: compiled once, rendered in bounded time, a stranger's in a process of its own."""
