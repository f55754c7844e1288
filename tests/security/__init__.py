"""Attacks: one file per threat area, each attack a row of a table, so that a new attack is one more row.

What is defended, and what is not, stands in SECURITY.md; here is how it is tried.
"""
