"""Values of arguments: each text becomes what it means, or argparse's own error that says what is allowed."""

from __future__ import annotations

import argparse

_DEMO_TOKENS = 4096
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def port(text: str) -> int:
    """A TCP port; 0 for any that is free."""
    return _whole(text, 0, 65_535, "a port (0–65535)")


def positive(text: str) -> int:
    """How many of something."""
    return _whole(text, 1, 10**9, "a number from 1")


def tokens(text: str) -> int:
    """A context length that a record and a request fit into."""
    return _whole(text, 1024, 100_000_000, "a number of tokens from 1024")


def demo_tokens(text: str) -> int:
    """A context length that the demo's conversation fits into."""
    least = _DEMO_TOKENS
    return _whole(text, least, 100_000_000, f"a number of tokens from {least}")


def age_s(text: str) -> float:
    """An age, in seconds."""
    if not (text[:-1].isdecimal() and text[-1:] in _UNITS_S):
        raise argparse.ArgumentTypeError(f"{text!r} is not an age like 90s, 15m, 12h, 30d or 8w")
    return float(int(text[:-1]) * _UNITS_S[text[-1]])


def _whole(text: str, least: int, most: int, what: str) -> int:
    # `isdigit` alone takes "²", which `int` does not.
    if not (text.isascii() and text.isdigit() and len(text) <= 12 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return int(text)
