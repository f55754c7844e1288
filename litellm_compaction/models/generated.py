"""How many tokens a running answer has taken so far, at a constant cost for each delta.

Called for every delta of a guarded stream. Counting chunks would be wrong by up to 75 % where several tokens come in
one; encoding everything again would be quadratic. Text is counted once, in pieces of a few hundred characters.
"""

from __future__ import annotations

from collections.abc import Callable

_PIECE_CHARS = 256
# Between two counts: what the last pieces took, and never less than English takes.
_CHARS_PER_TOKEN = 4.0


class GeneratedTokens:
    """A running count.

    Args:
        count: tokens of a text.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._counted_tokens = 0
        self._counted_chars = 0
        self._pending: list[str] = []
        self._pending_chars = 0

    def add(self, text: str) -> None:
        """Takes a delta: text, reasoning, or the arguments of a tool call."""
        if not text:
            return
        self._pending.append(text)
        self._pending_chars += len(text)
        if self._pending_chars >= _PIECE_CHARS:
            self._settle()

    @property
    def tokens(self) -> int:
        """The tokens so far."""
        rate = _CHARS_PER_TOKEN
        if self._counted_tokens:
            rate = min(rate, self._counted_chars / self._counted_tokens)
        return self._counted_tokens + round(self._pending_chars / rate)

    def exact(self) -> int:
        """The tokens so far, with the last piece counted too."""
        self._settle()
        return self._counted_tokens

    def _settle(self) -> None:
        piece = "".join(self._pending)
        if piece:
            self._counted_tokens += self._count(piece)
            self._counted_chars += len(piece)
        self._pending.clear()
        self._pending_chars = 0
