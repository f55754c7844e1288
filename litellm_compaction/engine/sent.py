"""Sends again what was sent before where a client has cleared or cut it since, as long as the window has room for it.

What a client changes behind a record changes the prompt from there on, and its server reads all of that again: with one
result cleared a turn more than half of each prompt. So results are remembered as they were sent, in this process only.
One in whose place a note or a piece has come is sent as it was until that is too much; then all that the client has
cleared goes at once.
"""

from __future__ import annotations

from collections import OrderedDict

from litellm_compaction.core.identity import edited
from litellm_compaction.core.messages import Message
from litellm_compaction.core.stretches import is_text_result
from litellm_compaction.core.view import View

# Of all results together, each with its own weight beside its text.
_MOST_CHARS, _CHARS_OF_AN_ENTRY = 32_000_000, 200
# Of one conversation.
_MOST_MESSAGES = 1000


class SentBefore:
    """The newest results that were sent, by the tenants' scope and all words up to them.

    If conversations of equal words had different data there, either may be another person's (promise P9): None.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[str, str], Message | None] = OrderedDict()
        self._chars = 0

    def restored(self, scope: str, conversation: View) -> tuple[Message, ...] | None:
        """Returns the messages with results as they were that the client has cleared or cut; None if there are none."""
        other = self._other(scope, conversation)
        does = edited([(conversation.rest[at], was) for at, was in other.items()])
        restored = {
            conversation.prefix + at: was for (at, was), is_edit in zip(other.items(), does, strict=True) if is_edit
        }
        return tuple(restored.get(at, each) for at, each in enumerate(conversation.messages)) if restored else None

    def note(self, scope: str, conversation: View) -> None:
        """Remembers the results of a conversation that is sent."""
        other = self._other(scope, conversation)
        pairs = [(conversation.rest[at], was) for at, was in other.items()]
        either = zip(other, edited(pairs), edited([(was, now) for now, was in pairs]), strict=True)
        strangers = {at for at, *is_edit in either if not any(is_edit)}
        for at in _newest(conversation):
            message = conversation.rest[at]
            if (message.role == "tool" or is_text_result(message)) and not message.other_parts:
                key = (scope, conversation.words_hashes[at + 1])
                is_strange = at in strangers or self._sent.get(key, message) is None
                self._forget(key)
                self._sent[key] = None if is_strange else message
                self._chars += _weight(self._sent[key])
        while self._chars > _MOST_CHARS:
            self._forget(next(iter(self._sent)))

    def _other(self, scope: str, conversation: View) -> dict[int, Message]:
        """The results, by position, that were something else when these words were sent before."""
        sent = ((at, self._sent.get((scope, conversation.words_hashes[at + 1]))) for at in _newest(conversation))
        return {at: was for at, was in sent if was is not None and was.raw != conversation.rest[at].raw}

    def _forget(self, key: tuple[str, str]) -> None:
        if key in self._sent:
            self._chars -= _weight(self._sent.pop(key))


def _newest(conversation: View) -> range:
    """The positions of the messages that are looked at: older ones are covered."""
    return range(max(len(conversation.rest) - _MOST_MESSAGES, 0), len(conversation.rest))


def _weight(message: Message | None) -> int:
    return _CHARS_OF_AN_ENTRY + (0 if message is None else len(message.text))
