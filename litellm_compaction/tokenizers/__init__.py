"""Finds a model's vocabulary and chat template, and the programs that count with them."""
