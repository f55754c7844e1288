"""Finds the real size of a model's context, the source of that number, and its age."""
