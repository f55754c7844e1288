"""Counts a running answer at a constant cost for each delta."""

from __future__ import annotations

from collections.abc import Callable

# A running answer is counted by so many characters: an encoding of everything again would be quadratic, and a count of
# chunks wrong by up to 75 % if several tokens come in one.
_SETTLED_CHARS = 256
# Between two counts: what the last pieces took, and never less than English takes.
_CHARS_PER_TOKEN = 4.0


class GeneratedTokens:
    """Counts a running answer at a constant cost for each delta.

    Text is counted once, in pieces of a few hundred characters that end between words if there are any.

    Attributes:
        tokens: so far; read several times for each delta, so worked out once for each.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._counted_tokens = 0
        self._counted_chars = 0
        self._chars_per_token = _CHARS_PER_TOKEN
        self.tokens = 0
        self._pending: list[str] = []
        self._pending_chars = 0

    def add(self, text: str) -> None:
        """Takes a delta: text, reasoning, or the arguments of a tool call."""
        if not text:
            return
        self._pending.append(text)
        self._pending_chars += len(text)
        if self._pending_chars >= _SETTLED_CHARS:
            self._settle(keep_word=True)
        self.tokens = self._counted_tokens + round(self._pending_chars / self._chars_per_token)

    def of(self, text: str) -> int:
        """The tokens of a text that is not added."""
        return self._count(text)

    def anew(self) -> GeneratedTokens:
        """A new count of the same kind."""
        return GeneratedTokens(self._count)

    def exact(self) -> int:
        """The tokens so far, with the last piece counted too."""
        self._settle()
        self.tokens = self._counted_tokens
        return self._counted_tokens

    def _settle(self, *, keep_word: bool = False) -> None:
        piece = "".join(self._pending)
        end = piece.rfind(" ", len(piece) - _SETTLED_CHARS // 2) if keep_word else -1
        piece, rest = (piece[:end], piece[end:]) if end > 0 else (piece, "")
        if piece:
            self._counted_tokens += self._count(piece)
            self._counted_chars += len(piece)
            if self._counted_tokens:
                self._chars_per_token = min(_CHARS_PER_TOKEN, self._counted_chars / self._counted_tokens)
        self._pending = [rest] if rest else []
        self._pending_chars = len(rest)
