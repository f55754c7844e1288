"""The terms of the loop and its carriers: chunks, an upstream that gives them, the client's wishes, places of notices.

A client is told of compactions in its answer's text, in its thoughts, or not in the stream at all. A line in the text
is for people who read it; a program takes it for the model's words. Of twenty clients one
committed it into a source file, one took it for the agent's result, several parsed no JSON any more.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.continuation.request import Way
from litellm_compaction.core.messages import JsonValue, Message, Request
from litellm_compaction.engine import CompactionNeeded, PreparedRequest, RequestContext
from litellm_compaction.errors import CompactionError, is_crash
from litellm_compaction.proxy.client import headers_of, metadata_of, sections_of_owners
from litellm_compaction.tokens.begun import BegunPrompt
from litellm_compaction.windows.windows import server_of

logger = logging.getLogger("litellm_compaction")

Place: TypeAlias = Literal["content", "reasoning", "off"]
Choice: TypeAlias = Literal["auto", "content", "reasoning", "off"]

# Open WebUI forwards the user's identity by headers of these names if ENABLE_FORWARD_USER_INFO_HEADERS is on.
_CHAT_HEADER_PREFIX = "x-openwebui-"
# Every browser begins so; Electron's programs too, and many of those are editors with an agent inside.
_BROWSER_PREFIX, _NO_BROWSER = "mozilla/", "electron/"
# Routes on which thoughts are a delta of their own. LiteLLM makes a malformed item of them on responses,
# and text completions have none.
_ROUTES_WITH_THOUGHTS = ("/chat/completions", "/messages")
# The route on which the thoughts of a whole answer have a field of their own. On messages they are the first block,
# where programs look for the text.
_ROUTE_WITH_THOUGHTS_APART = "/chat/completions"
_MAX_REMEMBERED = 4096
# Too slow, too early, too many requests.
_PASSING_STATUSES = frozenset({408, 425, 429})
_NOT_IMPLEMENTED = 501


class Notices(NamedTuple):
    """The places of notices in one answer.

    Attributes:
        before: while nothing of the answer has been sent.
        within: after its beginning. The seam can lie in a code block, a diff or JSON.
        after: at its end, if the window has cut it. Nothing follows that a thought could break.
    """

    before: Place
    within: Place
    after: Place

    @property
    def at_the_end_only(self) -> Notices:
        """The same for JSON and for whole answers: nothing before the end, and no text."""
        return Notices("off", "off", "reasoning" if self.after == "reasoning" else "off")

    @property
    def out_of_thoughts(self) -> Notices:
        """The same for a stream that LiteLLM may have another model go on with: it does not if there was a thought.

        LiteLLM's `enable_mid_stream_fallback_continuation` ("streams that emitted thinking blocks"). An empty
        chunk takes a notice's place; a last thought comes when nothing is left to go on with.
        """
        before, within = ("off" if place == "reasoning" else place for place in (self.before, self.within))
        return self._replace(before=before, within=within)


SILENT = Notices("off", "off", "off")


def notices_for(
    configured: Choice, body: Mapping[str, Any], *, is_document: bool = False, is_whole: bool = False
) -> Notices:
    """The places of notices for the client of a request.

    Args:
        configured: the setting in force for the deployment.
        body: of the request, with LiteLLM's metadata and `proxy_server_request`.
        is_document: the answer is JSON.
        is_whole: the answer comes in one piece; its headers report the work before it.
    """
    metadata = metadata_of(body)
    chosen = _chosen_for_owner(metadata) or configured
    route = str(metadata.get("user_api_key_request_route") or "")
    # LiteLLM's own option writes thoughts into the text.
    has_thoughts = route.endswith(_ROUTES_WITH_THOUGHTS) and not body.get("merge_reasoning_content_in_choices")
    thought: Place = "reasoning" if has_thoughts and chosen != "off" else "off"
    if is_whole and not route.endswith(_ROUTE_WITH_THOUGHTS_APART):
        return SILENT
    if is_document or is_whole:
        return Notices("off", "off", thought)
    if chosen != "auto":
        return Notices(chosen, chosen, chosen)
    if shows_text_to_people(headers_of(body)):
        return Notices("content", "content", "content")
    return Notices(thought, "off", thought)


def shows_text_to_people(headers: Mapping[str, Any]) -> bool:
    """Returns True if a client says that a person reads its answers as they are; it is a program otherwise."""
    for name, value in headers.items():
        if name.lower().startswith(_CHAT_HEADER_PREFIX):
            return True
        if name.lower() == "user-agent":
            agent = str(value).lower()
            if agent.startswith(_BROWSER_PREFIX) and _NO_BROWSER not in agent:
                return True
    return False


class Announced:
    """Requests that were compacted, so that the next of the same conversation does not tell it again.

    If system and tools take nearly the whole target, every turn is compacted: one notice says that, seven are noise.
    """

    def __init__(self) -> None:
        self._known: Bounded[tuple[str, str], None] = Bounded(_MAX_REMEMBERED)

    def is_next_in_a_row(self, needed: CompactionNeeded) -> bool:
        """Returns True if the request before this one of its conversation was compacted, too; remembers this one."""
        scope, conversation = needed.measured.context.scope, needed.measured.conversation
        roles = [message.role for message in conversation.rest]
        if not roles:
            return False
        self._known[scope, conversation.hashes[-1]] = None
        # The messages before the newest answer were its request.
        answer = next((at for at in range(len(roles) - 1, -1, -1) if roles[at] == "assistant"), 0)
        return answer > 0 and (scope, conversation.hashes[answer]) in self._known


def _chosen_for_owner(metadata: Mapping[str, Any]) -> Choice | None:
    """The operator's choice for the key, else for its team: `{"compaction": {"notices": "content"}}`."""
    for section in sections_of_owners(metadata):
        choice = section.get("notices") if isinstance(section, Mapping) else None
        if choice is False:
            return "off"
        if choice is not None and choice in get_args(Choice):
            found: Choice = choice
            return found
        if choice is not None:
            logger.warning("notices of a key or team are not one of %s; the setting holds", ", ".join(get_args(Choice)))
    return None


# OpenAI's `chat.completion.chunk` as JSON.
Chunk: TypeAlias = dict[str, Any]
# Chunks that came in one read, or go out in one write; at least one. A fast server sends hundreds at once, and a step
# through all carriers for each would be most of what they cost (a tenth of a proxy's time for a chunk).
Batch: TypeAlias = Sequence[Chunk]


class Received(dict[str, Any]):
    """A chunk with its origin, which can go on to the client if nothing has to be changed.

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
        status: of HTTP, or in the error itself; None for none.
        is_inside: it came inside an answer, whose request the server had accepted.
    """

    def __init__(self, text: str, response: Any = None, *, status: int | None = None, is_inside: bool = False) -> None:
        super().__init__("the upstream server reported an error")
        self.text = text
        self.response = response
        self.status = status
        self.is_inside = is_inside

    @property
    def may_pass(self) -> bool:
        """Returns True if the server has failed just now, or is too busy, and does not refuse requests like this one.

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
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The way to make a server go on with an answer.

    Attributes:
        way: by a request of ours at the end of the messages, by their last one, or by `prompt`.
        prompt: instead of the messages, for the way `raw`; it ends inside the answer.
        needs_word: the server needs to be told that the last message goes on (vLLM).
        closing: fields of the body that make the server think no more; None for an answer that may think.
    """

    way: Way
    prompt: BegunPrompt | None = None
    needs_word: bool = False
    closing: Mapping[str, JsonValue] | None = None

    @property
    def has_another_way(self) -> bool:
        """Returns True if the server may not know this way, so that there is another one."""
        return self.way != "turn" or bool(self.closing)

    @property
    def begins_anew(self) -> bool:
        """Returns True if the answer so far is only thoughts, so that all of it is still to come.

        Otherwise a format that shapes a whole document is left out: servers apply it from the first token that they
        generate, and would begin a new document (llama.cpp, common/sampling.cpp; vLLM, structured outputs).
        """
        return self.closing is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegRequest:
    """One request to a server.

    Attributes:
        messages: None for the client's own list; `tools` likewise.
        max_tokens: bound on the answer.
        continuation: how an answer goes on; None for one that begins.
        can_end_thoughts: `end_thoughts` may be called for this answer.
    """

    messages: Sequence[Message] | None = None
    tools: Sequence[JsonValue] | None = None
    max_tokens: int
    continuation: Continuation | None = None
    can_end_thoughts: bool = False


class Upstream(Protocol):
    """The server of one deployment, asked for one client request."""

    @property
    def ways(self) -> frozenset[Way]:
        """Ways to make it go on."""

    def open(
        self, leg: LegRequest, on_end: Callable[[], object] = bool
    ) -> AbstractAsyncContextManager[AsyncIterator[Batch]]:
        """The chunks of an answer as they come; leaving the context aborts it.

        Args:
            on_end: called when the server has ended the answer, even if it has not been read so far. A carrier that
                reads only what is pulled does not call it.

        Raises:
            UpstreamError: refused.
        """

    async def end_thoughts(self, answer_id: str) -> bool:
        """Has the server end the thoughts of an answer that it is writing, in the same stream.

        Returns:
            False if it does not, or does not say so.
        """


_USAGE_DETAILS = "completion_tokens_details"


def continuation_of(prepared: PreparedRequest) -> Continuation | None:
    """None if an answer begins."""
    if prepared.way is None:
        return None
    server = server_of(prepared.window.source)
    needs_word = prepared.way == "prefill" and server is not None and server.continues_when_told
    return Continuation(way=prepared.way, prompt=prepared.prompt, needs_word=needs_word, closing=prepared.closing)


def added_up(usages: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """The details of all parts' usage, as far as they are numbers; {} if the server gave none."""
    total: Counter[str] = Counter()
    for usage in usages:
        details = usage.get(_USAGE_DETAILS)
        if isinstance(details, Mapping):
            total.update({key: value for key, value in details.items() if isinstance(value, int)})
    return {_USAGE_DETAILS: dict(total)} if total else {}


class Listener(Protocol):
    """Is told how an answer goes on."""

    may_pause: bool

    @property
    def late_receipt(self) -> Mapping[str, str]:
        """The receipt of a record that was applied after the headers had gone; {} for none."""

    def sent(self, context: RequestContext, prepared: PreparedRequest) -> None:
        """Something goes out."""

    def refused(self, error: CompactionError) -> None:
        """It cannot be sent."""

    def ended(self, details: Mapping[str, Any]) -> None:
        """The answer has ended after restarts, or because its window did; `details` are those of its usage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The client's wishes, as far as the loop has to know.

    Attributes:
        request: the conversation, as the client sent it.
        output_tokens: its limit for the answer, None for none.
        is_json: structured output: one document, no notice in it.
        wants_usage: the stream must end with a usage chunk.
        stops: strings at which the answer ends.
        thoughts_tokens: its own bound on thinking, infinite for as much as the model likes; None if it names none.
        is_whole: the client gets the answer in one piece, so that nothing of it can be out before its end.
        client_text: gives every text that the client sent, in whatever field.
    """

    request: Request
    output_tokens: int | None
    is_json: bool
    notices: Notices
    wants_usage: bool
    stops: tuple[str, ...] = ()
    thoughts_tokens: float | None = None
    is_whole: bool = False
    client_text: Callable[[], str] = str
