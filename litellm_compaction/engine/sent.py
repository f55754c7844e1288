"""Sends again what was sent before where a client has cleared or cut it since, as long as the window has room for it.

What a client changes behind a record changes the prompt from there on, and its server reads all of that again: with one
result cleared a turn more than half of each prompt. So of the newest conversations their results are remembered, in
this process only. A result in whose place a note or a piece has come is sent as it was until that is too much; then
all that the client has cleared goes at once.
"""

from __future__ import annotations

from typing import NamedTuple

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.identity import edited
from litellm_compaction.core.messages import Message
from litellm_compaction.core.stretches import is_text_result
from litellm_compaction.core.view import View
from litellm_compaction.engine.context import MeasuredRequest

_MOST_SCOPES, _MOST_CONVERSATIONS = 256, 8
# Of a conversation about as much as a window holds, since older results are covered; and of all of them.
_CHARS_PER_TOKEN, _MOST_CHARS = 8, 32_000_000


class _Sent(NamedTuple):
    """The newest results of a conversation, by position, its chain of words up to each, and their characters."""

    results: dict[int, Message]
    entries: dict[int, str]
    chars: int


class SentBefore:
    """The newest conversations of each scope as they were sent."""

    def __init__(self) -> None:
        self._sent: Bounded[str, tuple[_Sent, ...]] = Bounded(_MOST_SCOPES)

    def restored(self, scope: str, conversation: View) -> tuple[Message, ...] | None:
        """Returns the messages with results as they were that the client has cleared or cut; None if there are none.

        If two conversations of equal words had different data there, either may be another person's (promise P9), and
        the result stays as the client sends it.
        """
        other: dict[int, Message] = {}
        for at, message in enumerate(conversation.rest):
            were = [each.results[at] for each in self._sent.get(scope, ()) if _is_of(conversation, each, at)]
            if were and all(was.raw == were[0].raw != message.raw for was in were):
                other[at] = were[0]
        does = edited([(conversation.rest[at], was) for at, was in other.items()])
        restored = {
            conversation.prefix + at: was for (at, was), is_edit in zip(other.items(), does, strict=True) if is_edit
        }
        return tuple(restored.get(at, each) for at, each in enumerate(conversation.messages)) if restored else None

    def note(self, scope: str, measured: MeasuredRequest) -> None:
        """Remembers a conversation in place of those that it goes on from."""
        conversation = measured.conversation
        chars, most_chars = 0, min(_CHARS_PER_TOKEN * measured.window.tokens, _MOST_CHARS)
        results: dict[int, Message] = {}
        for at in reversed(range(len(conversation.rest))):
            message = conversation.rest[at]
            chars += len(message.text)
            if chars > most_chars:
                break
            if (message.role == "tool" or is_text_result(message)) and not message.other_parts:
                results[at] = message
        if not results:
            return
        own = _Sent(results, {at: conversation.words_hashes[at + 1] for at in results}, chars)
        others = (each for each in self._sent.get(scope, ()) if not _goes_on(own, conversation, each))
        self._sent[scope] = (own, *others)[:_MOST_CONVERSATIONS]
        while sum(each.chars for known in self._sent.values() for each in known) > _MOST_CHARS:
            self._sent.popitem(last=False)


def _is_of(conversation: View, sent: _Sent, at: int) -> bool:
    """Returns True if a conversation has, up to a position, the words of one that was sent."""
    return sent.entries.get(at) == conversation.words_hashes[at + 1]


def _goes_on(own: _Sent, conversation: View, sent: _Sent) -> bool:
    last = max(sent.results)
    if last >= len(conversation.rest) or not _is_of(conversation, sent, last):
        return False
    pairs = [(own.results[at], was) for at, was in sent.results.items() if at in own.results]
    other = [(now, was) for now, was in pairs if now.raw != was.raw]
    return all(edited(other)) or all(edited([(was, now) for now, was in other]))
