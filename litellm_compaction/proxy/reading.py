"""Reads a client's request once, for all phases: its conversation, its wishes, and what kind of request it is.

A request beside a conversation (a title, tags, suggestions) is told from the conversation's next turn by its form: it
is one short message over a copy of the conversation's end, without tools, and its answer is bounded where the
conversation's own requests are not, or it has none of their tools. In doubt a request is an ordinary one. No summary is
made for one beside, and nothing is kept of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple

from litellm_compaction.concurrency import Bounded, is_long, off_loop_if
from litellm_compaction.config import Settings
from litellm_compaction.core.messages import Message, Request, cleaned
from litellm_compaction.core.transcripts import is_client_summary
from litellm_compaction.engine import Attempts
from litellm_compaction.errors import BadWish, CompactionError
from litellm_compaction.proxy import wire
from litellm_compaction.proxy.client import (
    NONE,
    is_off_for_owner,
    metadata_of,
    sent_body,
    tenant_of,
    told_headers,
    wish_of,
)
from litellm_compaction.proxy.exchange import ClientRequest, Exchange, Exchanges
from litellm_compaction.proxy.litellm_inside.application import keeps_responses
from litellm_compaction.proxy.standards.orders import NO_ORDERS

# No title and no list of suggestions is longer.
_MOST_ANSWER_TOKENS = 512
_MOST_CHARS = 4000
# Of a conversation's end, by which a copy of it is known; a copy of one message may be anybody's.
_END, _LEAST_COPIED = 32, 2
_MOST_TENANTS, _MOST_CONVERSATIONS = 4096, 16


class Reader:
    """Reads requests as the operator's settings want it; `exchanges` have what a protocol says of its context."""

    def __init__(self, settings: Settings, exchanges: Exchanges) -> None:
        self._settings = settings
        self._exchanges = exchanges
        self._conversations = Conversations()

    async def exchange(
        self, body: Mapping[str, Any], group: str, *, is_bridged: bool, is_chat: bool = False
    ) -> Exchange | None:
        """What is to be done for a request, filed under `group`, before anything is; None without a conversation.

        Args:
            body: of the request, with LiteLLM's metadata.
            is_bridged: LiteLLM makes a chat of a text completion.
            is_chat: the client speaks chat completions.
        """
        prompt = body.get("prompt")
        long = is_long(body.get("messages"), body.get("tools")) or is_long(prompt, [prompt])
        client = await off_loop_if(long, lambda: self._client(body, group, is_bridged=is_bridged, is_chat=is_chat))
        attempts = Attempts(summary_calls_left=self._settings.constants.max_summary_calls)
        return Exchange(client, attempts) if client is not None else None

    def _client(self, body: Mapping[str, Any], group: str, *, is_bridged: bool, is_chat: bool) -> ClientRequest | None:
        received, token_ids = wire.decode(body), None
        if received is None and "prompt" in body:
            received, token_ids = wire.decode_text(body, is_bridged=is_bridged)
            # Any other is for the transport, and the server, to judge.
            received = received or Request(messages=())
        if received is None:
            return None
        orders, metadata, sent = self._exchanges.orders(body), metadata_of(body), sent_body(body)
        unfolded, bases = (orders or NO_ORDERS).unfolded(received.messages)
        messages = tuple(map(cleaned, unfolded))
        is_same = unfolded is received.messages and all(map(is_, messages, unfolded))
        original = received if is_same else replace(received, messages=messages)
        route = str(metadata.get("user_api_key_request_route") or "")
        bad_wish: CompactionError | None = wire.not_served(
            sent, route, keeps_responses=keeps_responses(), is_read=orders is not None
        )
        try:
            wish = wish_of(body, metadata)
        except BadWish as error:
            # Told only if it is guarded: a deployment that is just observed answers as ever.
            wish, bad_wish = NONE, error
        tenant, asked_tokens = tenant_of(metadata), wire.asked_output_tokens(body)
        is_summary = is_beside = False
        if self._settings.mode == "guard":
            has_tools = bool(original.tools)
            is_summary = is_client_summary(original.messages, told_headers(body), has_tools=has_tools)
            is_beside = is_summary and _is_little(asked_tokens)
            if not is_summary:
                is_beside = self._conversations.is_beside(
                    tenant, original.messages, has_tools=has_tools, asked_tokens=asked_tokens
                )
        return ClientRequest(
            received=received,
            original=original,
            group=group,
            tenant=tenant,
            client_text=wire.client_texts(body),
            is_chat=is_chat,
            opted_out=(self._settings.allow_opt_out and wish.off) or is_off_for_owner(metadata),
            wish=wish,
            bad_wish=bad_wish,
            is_client_summary=is_summary or is_beside,
            is_beside=is_beside,
            orders=orders or NO_ORDERS,
            token_ids=token_ids,
            bases=bases,
        )


class _Seen(NamedTuple):
    """A conversation's newest request; `end` are its last messages, oldest first, as hashes of role and text."""

    length: int
    first: int
    end: tuple[int, ...]
    has_tools: bool
    is_bounded: bool


class Conversations:
    """The newest conversations of each tenant, without their texts."""

    def __init__(self) -> None:
        self._seen: Bounded[str, tuple[_Seen, ...]] = Bounded(_MOST_TENANTS)

    def is_beside(self, tenant: str, messages: Sequence[Message], *, has_tools: bool, asked_tokens: int | None) -> bool:
        """Returns True for a request beside a conversation of its tenant's; takes note of any other."""
        if not messages:
            return False
        hashes = tuple(hash((message.role, message.text, message.calls)) for message in messages)
        own = _Seen(len(messages), hashes[0], hashes[-_END:], has_tools, _is_little(asked_tokens))
        known = self._seen.get(tenant, ())
        if not has_tools and any(_is_beside(messages, hashes, each, is_bounded=own.is_bounded) for each in known):
            return True
        others = (each for each in known if each.end[-1] not in hashes or each.first != own.first)
        self._seen[tenant] = (own, *others)[:_MOST_CONVERSATIONS]
        return False


def _is_little(asked_tokens: int | None) -> bool:
    return asked_tokens is not None and 0 < asked_tokens <= _MOST_ANSWER_TOKENS


def _is_beside(messages: Sequence[Message], hashes: tuple[int, ...], seen: _Seen, *, is_bounded: bool) -> bool:
    says_little = is_bounded and not seen.is_bounded
    for added, start, end in ((messages[-1], 0, len(messages) - 1), (messages[0], 1, len(messages))):
        # The answer that the conversation's next turn will have.
        has_answer = end > start and messages[end - 1].role == "assistant" and not messages[end - 1].calls
        copy = hashes[start : end - has_answer]
        copied = min(len(copy), len(seen.end))
        is_copy = copied > 0 and copied + has_answer >= _LEAST_COPIED and copy[-copied:] == seen.end[-copied:]
        is_whole = is_copy and len(copy) == seen.length and copy[0] == seen.first
        is_short = (added.is_system or added.role == "user") and len(added.text) <= _MOST_CHARS
        is_copy = is_copy and (start == 0 or hashes[0] != seen.first)
        if is_copy and is_short and (says_little or (seen.has_tools and not is_whole)):
            return True
    return False
