"""How many tokens a running answer has taken so far, at a constant cost for each delta.

Called for every delta of a guarded stream. Counting chunks would be wrong by up to 75 % where several tokens come in
one; encoding everything again would be quadratic. Text is counted once, in pieces of a few hundred characters that end
between words where there are any, with the vocabulary of the model's family.
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
        if self._pending_chars >= _PIECE_CHARS:
            self._settle(keep_word=True)
        self.tokens = self._counted_tokens + round(self._pending_chars / self._chars_per_token)

    def of(self, text: str) -> int:
        """The tokens of a text, which is not added."""
        return self._count(text)

    def anew(self) -> GeneratedTokens:
        """A count that begins, of the same kind."""
        return GeneratedTokens(self._count)

    def exact(self) -> int:
        """The tokens so far, with the last piece counted too."""
        self._settle()
        self.tokens = self._counted_tokens
        return self._counted_tokens

    def _settle(self, *, keep_word: bool = False) -> None:
        """Counts what is pending; the last word, which may go on, stays for the next piece when asked for."""
        piece = "".join(self._pending)
        end = piece.rfind(" ", len(piece) - _PIECE_CHARS // 2) if keep_word else -1
        piece, rest = (piece[:end], piece[end:]) if end > 0 else (piece, "")
        if piece:
            self._counted_tokens += self._count(piece)
            self._counted_chars += len(piece)
            if self._counted_tokens:
                self._chars_per_token = min(_CHARS_PER_TOKEN, self._counted_chars / self._counted_tokens)
        self._pending = [rest] if rest else []
        self._pending_chars = len(rest)
