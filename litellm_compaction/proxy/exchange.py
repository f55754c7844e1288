"""What the restart loop and its carriers agree on: chunks, an upstream that gives them, and what was asked.

`restart.py` is the loop; `upstream.py` and `hooked.py` carry it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import Message, Request
from litellm_compaction.engine import Case, Guarded
from litellm_compaction.errors import CompactionError, is_crash
from litellm_compaction.proxy.notices import Notices
from litellm_compaction.tokens.prompt import BegunPrompt

# OpenAI's `chat.completion.chunk` as JSON.
Chunk: TypeAlias = dict[str, Any]
# Too slow, too early, too many requests.
_PASSING_STATUSES = frozenset({408, 425, 429})
_NOT_IMPLEMENTED = 501


class Received(dict[str, Any]):
    """A chunk with what it came as, which can go on to the client where nothing has to be changed.

    Attributes:
        origin: the carrier's own: the bytes of an event, or LiteLLM's object.
    """

    __slots__ = ("origin",)

    def __init__(self, chunk: Chunk, origin: Any) -> None:
        super().__init__(chunk)
        self.origin = origin


class UpstreamError(Exception):
    """The server refused a request before its first chunk, or reported an error inside the stream.

    Attributes:
        text: the body, for recognizing an overflow; never logged.
        response: the carrier's own error object, to be passed on unchanged.
        status: of HTTP, or in the error itself; None where there is none.
    """

    def __init__(self, text: str, response: Any = None, *, status: int | None = None) -> None:
        super().__init__("the upstream server reported an error")
        self.text = text
        self.response = response
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the server has failed just now, or is too busy, and does not refuse requests like this one.

        RFC 9110, sections 15.5 and 15.6: 4xx is the request's fault, 5xx the server's, except for 501, which says that
        it knows nothing of the kind.
        """
        if is_crash(self.text) or self.status in _PASSING_STATUSES:
            return True
        return self.status is not None and self.status >= 500 and self.status != _NOT_IMPLEMENTED


class UpstreamDropped(UpstreamError):
    """The connection broke; the carrier's own exception is the cause."""

    @property
    def may_pass(self) -> bool:
        """Always."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a server is made to go on with an answer.

    Attributes:
        way: by a request of ours at the end of the messages, by their last one, or by `prompt`.
        prompt: instead of the messages, for the way `raw`; it ends inside the answer.
        needs_word: the server has to be told that the last message goes on (vLLM).
    """

    way: Way
    prompt: BegunPrompt | None = None
    needs_word: bool = False

    @property
    def is_the_servers_own(self) -> bool:
        """Whether the server itself goes on with the answer, so that there is another way where it does not."""
        return self.way != "turn"


class Upstream(Protocol):
    """The server of one deployment, asked for one client request."""

    @property
    def ways(self) -> frozenset[Way]:
        """Those by which it can be made to go on."""

    def open(
        self, messages: Sequence[Message] | None, max_tokens: int, *, continuation: Continuation | None
    ) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """The chunks of an answer; leaving the context aborts it.

        Args:
            messages: what to send; None for the client's own list.
            max_tokens: bound on the answer.
            continuation: how an answer goes on, where what shapes a whole document is left out; None for one that
                begins.

        Raises:
            UpstreamError: refused.
        """


class Listener(Protocol):
    """Who has to know how an answer goes on."""

    may_pause: bool

    def sent(self, case: Case, guarded: Guarded) -> None:
        """Something goes out."""

    def answered(self, case: Case, guarded: Guarded, prompt_tokens: int, completion_tokens: int) -> None:
        """The server has counted what was sent, and what it gave."""

    def refused(self, error: CompactionError) -> None:
        """It cannot be sent."""

    def restarted(self, details: Mapping[str, Any]) -> None:
        """The answer has ended after restarts, which cost `details`."""

    def filled(self) -> None:
        """The answer ends where its window does, and not because it was finished, or as long as its client wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the client asked for, as far as the loop has to know.

    Attributes:
        request: the conversation, as the client sent it.
        output_tokens: its limit for the answer, None for none.
        is_json: structured output: no notices, one document.
        notices: where a client is told of compactions.
        wants_usage: whether the stream must end with a usage chunk.
        stops: strings at which the answer ends.
        is_whole: whether the client gets the answer in one piece, so that nothing of it can be out before its end.
        said: gives every text that the client sent, in whatever field.
    """

    request: Request
    output_tokens: int | None
    is_json: bool
    notices: Notices
    wants_usage: bool
    stops: tuple[str, ...] = ()
    is_whole: bool = False
    said: Callable[[], str] = str
