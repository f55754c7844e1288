"""One loaded context that several answers fill, of this process and of others."""
