"""Adds to a compacted request what was covered: pinned messages, quotations, or a tool that looks it up.

Excerpts stand in front of the newest words of a request without tools. The next turn comes without them: kept in place
they would fill the window, which costs more than to read one question and its answer again. A model with tools calls
ours, the proxy answers it, and the same response goes on: the client sees neither. The results stand before the answer
that they were looked up for until a later compaction covers that place, so that the server has read the next turn's
beginning already. Both search the client's own list of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

import anyio

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.compaction import Compaction, hidden_messages
from litellm_compaction.core.messages import (
    JsonObject,
    JsonValue,
    Message,
    ToolCall,
    clients_length,
    merged,
    newest_user_index,
    parse_message,
    visible_text,
    with_text,
)
from litellm_compaction.core.prompts import defused
from litellm_compaction.core.stretches import own_words
from litellm_compaction.core.view import View, is_persons
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest
from litellm_compaction.errors import BadWish
from litellm_compaction.recall import Beside, Index, Lookup, beside, search, told
from litellm_compaction.stores import Originals, Store

if TYPE_CHECKING:
    from litellm_compaction.engine.measure import RequestMeasurer

_Result = TypeVar("_Result")

logger = logging.getLogger("litellm_compaction")

RECALL = "recall"
RECALL_TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": RECALL,
        "description": "Searches the earlier part of this conversation, which is no longer shown.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
# The habit that the field has converged on: three look-ups a request, a twelfth of the window for an answer.
MOST_LOOKUPS = 3
_ANSWER_SHARE, _HITS, _LIMIT_S = 12, 5, 10.0
# 512 tokens of 8,192: three excerpts of English.
_EXCERPTS_SHARE = 16
# What a token that is written costs a local engine beside one that is read, about.
_WRITTEN_WEIGHT = 15
_MESSAGE_TOKENS, _MOST_REMEMBERED, _MOST_AT_ONE_PLACE, _MOST_QUERY_CHARS, _SAID_CHARS = 16, 512, 4, 1_000, 400
# Of a conversation, the newest: to index so much takes half a second, in a thread.
_MOST_CHARS = 1_000_000
_NO_MORE = "No more look-ups for this answer: answer with what is known."
_NO_ROOM = "There is no room to show what was found: answer with what is known."
_FAILED = "The earlier conversation cannot be searched now: answer with what is known."
# Of the window, for all pinned messages together; and how many are kept, of all conversations with one first message.
_PINNED_SHARE, _MOST_PINNED = 0.10, 512


class Recaller:
    """Shows compacted requests what was covered; without kept `originals`, in which people search, by excerpts only."""

    def __init__(self, originals: Originals | None = None) -> None:
        self.lookup = Lookup(originals) if originals is not None else None
        self._originals = originals
        # By scope and entry of the hash chain: calls with their results, which stand behind that entry's message.
        self._found: Bounded[tuple[str, str], tuple[tuple[Message, ...], ...]] = Bounded(_MOST_REMEMBERED)

    # ------------------------------------------------------------------ excerpts

    async def quoted(self, prepared: PreparedRequest, measurer: RequestMeasurer) -> PreparedRequest:
        """Returns a compacted request, below its trigger with excerpts in front of the newest words, or as it is."""
        measured, compaction, budget = prepared.measured, prepared.applied, prepared.budget
        at = _question(measured)
        limit_tokens = min(prepared.window.tokens // _EXCERPTS_SHARE, budget.trigger_tokens - prepared.count.tokens)
        if at is None or compaction is None or limit_tokens <= 0:
            return prepared
        try:
            text, excerpts = await asyncio.to_thread(_excerpts, measured, compaction, at, limit_tokens)
            if not excerpts:
                return prepared
            messages = list(measured.conversation.messages)
            messages[at] = merged([messages[at]], text)
            changed = replace(measured, conversation=replace(measured.conversation, messages=tuple(messages)))
            quoting = await measurer.applied(changed, compaction, "reused")
        except Exception as error:  # noqa: BLE001 - the request is whole without (P8)
            logger.warning("excerpts_failed model=%s error=%s", measured.context.label, type(error).__name__)
            return prepared
        if budget.triggers(quoting.count.tokens):
            return prepared
        tokens = measured.count_text(text)
        return replace(
            prepared, messages=quoting.messages, count=quoting.count, excerpts=excerpts, excerpt_tokens=tokens
        )

    # ------------------------------------------------------------------ our tool

    def tools(self, measured: MeasuredRequest) -> tuple[JsonValue, ...] | None:
        """Returns a compacted request's tools with ours; None if it is not offered.

        That depends on nothing that changes from turn to turn, since tools stand in front of everything.
        """
        tools, originals = measured.request.tools, self._originals
        functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
        names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
        may_offer = _may_recall(measured) and measured.context.carries_calls and None not in functions
        is_offered = may_offer and RECALL not in names and originals is not None and originals.are_kept
        return (*tools, RECALL_TOOL) if is_offered and tools else None

    def with_found(
        self, messages: Sequence[Message], measured: MeasuredRequest, covered: int, end: int
    ) -> tuple[Message, ...]:
        """Returns a compacted conversation up to `end`, the client's from `covered` on, with what was looked up."""
        shown = list(messages)
        # From the end, so that places before stay what they are.
        for at in range(end, covered, -1):
            key = measured.context.scope, measured.conversation.hashes[at]
            if key in self._found:
                self._found.move_to_end(key)
                place = len(messages) - (end - at)
                shown[place:place] = (message for exchange in self._found[key] for message in exchange)
        return tuple(shown)

    def forget(self, measured: MeasuredRequest) -> bool:
        """Forgets what was looked up in a request's conversation, first but for its place; False if nothing was."""
        keys = {(measured.context.scope, entry) for entry in measured.conversation.hashes} & self._found.keys()
        for key in keys:
            found = self._found.pop(key)
            # Without its last words before that the model would begin its answer again.
            if (short := tuple(map(_in_short, found))) != found:
                self._found[key] = short
        return bool(keys)

    async def look_up(self, prepared: PreparedRequest, said: str, calls: Sequence[ToolCall], left: int) -> None:
        """Looks up what a model asks for with `calls` behind what it `said`; its conversation's next request shows it.

        Only so many as are `left` for this answer to `prepared`.
        """
        if prepared.applied is None:
            return
        measured, conversation, count = prepared.measured, prepared.measured.conversation, prepared.count_text
        rest, label = conversation.rest, measured.context.label
        queries = [_query(call.arguments)[:_MOST_QUERY_CHARS] for call in calls]
        answered = queries[:left]
        room_tokens = prepared.budget.prompt_limit_tokens - prepared.count.tokens - count(said)
        room_tokens -= sum(count(query) + 2 * _MESSAGE_TOKENS for query in queries)
        limit_tokens = min(prepared.window.tokens // _ANSWER_SHARE, room_tokens // max(len(answered), 1))
        within = {conversation.hashes[at + 1] for at in hidden_messages(rest, prepared.applied)}

        def results() -> list[str]:
            index, defuse = _index(measured, len(rest)), measured.defuse
            found = (search(index, query, within=within, limit=_HITS) for query in answered)
            return [defused(defuse(told(each, limit_tokens=limit_tokens, count=count))) or _NO_ROOM for each in found]

        try:
            with anyio.fail_after(_LIMIT_S):
                texts = await asyncio.to_thread(results)
        except Exception as error:  # noqa: BLE001 - the answer goes on without (P8)
            logger.warning("recall_failed model=%s error=%s", label, type(error).__name__)
            texts = [_FAILED] * len(answered)
        texts += [_NO_MORE] * (len(calls) - len(texts))
        # Behind the newest message that is the client's.
        key = measured.context.scope, conversation.hashes[clients_length(rest)]
        self._found[key] = (*self._found.get(key, ()), _exchange(said, queries, texts))[-_MOST_AT_ONE_PLACE:]
        numbers = len(answered), sum(map(count, texts)), prepared.window.tokens
        logger.info("recall model=%s lookups=%d tokens=%d window=%d tokens", label, *numbers)


def _excerpts(measured: MeasuredRequest, compaction: Compaction, at: int, limit_tokens: int) -> Beside:
    """Quotes what was said about the question at index `at`, and is not shown."""
    view, end = measured.conversation, at - measured.conversation.prefix
    rest, entries = view.rest, view.hashes[1:]
    # A record quotes some messages in full.
    gone = {at for at in hidden_messages(rest, compaction) if visible_text(rest[at]).strip() not in compaction.record}
    sizes = list(zip(view.messages, view.sizes, strict=True))
    said_tokens, answer_tokens = (
        statistics.mean([size for message, size in sizes if message.role == role] or [0])
        for role in ("user", "assistant")
    )
    return beside(
        _index(measured, end),
        own_words(view.messages[at]),
        visible=[entries[place] for place in range(end) if place not in gone],
        within=[entries[place] for place in sorted(gone)],
        limit_tokens=limit_tokens,
        count=measured.count_text,
        turn_tokens=said_tokens + _WRITTEN_WEIGHT * answer_tokens,
        again_tokens=said_tokens + answer_tokens,
        defuse=lambda text: defused(measured.defuse(text)),
    )


def _index(measured: MeasuredRequest, end: int) -> Index:
    """The index of the newest of the first `end` messages of a conversation."""
    messages, hashes = measured.conversation.rest[:end], measured.conversation.hashes
    chars = accumulate(len(visible_text(message)) for message in reversed(messages))
    start, index = end - sum(total <= _MOST_CHARS for total in chars), Index(measured.redact)
    index.add(messages[start:], hashes[start : end + 1])
    return index


def _may_recall(measured: MeasuredRequest) -> bool:
    """A compacted request may be shown more of what is covered."""
    settings = measured.context.settings
    return settings.recall != "off" and settings.keep_originals != "off" and not measured.context.is_client_summary


def _question(measured: MeasuredRequest) -> int | None:
    """The index of a person's message that nothing answers yet; None if excerpts are not for this request."""
    context, messages = measured.context, measured.conversation.messages
    is_wanted = _may_recall(measured) and context.settings.recall == "auto" and not context.goes_on
    at = newest_user_index(messages) if is_wanted and not measured.request.tools else None
    is_last = at is not None and all(message.is_system for message in messages[at + 1 :])
    return at if at is not None and is_last and own_words(messages[at]) else None


def _query(arguments: str) -> str:
    """The query of a call; models write other names, or no JSON at all."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(parsed, dict):
        return next((text for text in (parsed.get("query"), *parsed.values()) if isinstance(text, str)), "")
    return parsed if isinstance(parsed, str) else arguments


def _exchange(said: str, queries: Sequence[str], texts: Sequence[str]) -> tuple[Message, ...]:
    """Calls and their results as servers take them: arguments as JSON, and ids of nine letters and digits (Mistral)."""
    ids = [uuid.uuid4().hex[:9] for _ in queries]
    calls: list[JsonValue] = [
        {"id": each, "type": "function", "function": {"name": RECALL, "arguments": json.dumps({"query": query})}}
        for each, query in zip(ids, queries, strict=True)
    ]
    results: list[JsonObject] = [
        {"role": "tool", "tool_call_id": each, "content": text} for each, text in zip(ids, texts, strict=True)
    ]
    return tuple(map(parse_message, ({"role": "assistant", "content": said, "tool_calls": calls}, *results)))


def _in_short(exchange: Sequence[Message]) -> tuple[Message, ...]:
    said, *results = exchange
    return with_text(said, said.text[-_SAID_CHARS:]), *(with_text(each, _NO_ROOM) for each in results)


# ------------------------------------------------------------------ pins


async def with_pins(store: Store, measured: MeasuredRequest) -> MeasuredRequest:
    """Returns a request, which has its hashes, with its pinned messages; a BadWish if one is not found, or too large.

    The list of a request is the conversation's from then on, kept as entries of the hash chain under its first message,
    without any text; a request without one goes by the last list.
    """
    view, pins, scope = measured.conversation, measured.context.pins, measured.context.scope
    entries, limit_tokens = view.hashes[1:], int(_PINNED_SHARE * measured.window.tokens)
    if not entries or measured.context.is_client_summary:
        return measured
    fact, pinned = f"pins:{entries[0]}", list[str]()
    # The store tells its own troubles; the request is too long either way.
    with contextlib.suppress(Exception):
        pinned = (await store.get_fact(scope, fact) or "").split()
    if pins is not None:
        # Those of conversations that only begin alike stay.
        others = [entry for entry in pinned if entry not in entries]
        before, pinned = pinned, [*others, *(entries[at - view.prefix] for at in _pinned(view, pins, limit_tokens))]
        pinned = pinned[-_MOST_PINNED:]
        if pinned != before:
            with contextlib.suppress(Exception):
                await store.put_fact(scope, fact, " ".join(pinned))
    places = {entry: view.prefix + at for at, entry in enumerate(entries)}
    indices = [places[entry] for entry in pinned if entry in places]
    # A window may have shrunk.
    tokens = accumulate(view.sizes[index] for index in indices)
    view = replace(view, pins=tuple(indices[: sum(total <= limit_tokens for total in tokens)]))
    if not view.pins:
        return measured
    return replace(measured, conversation=view, budget=replace(measured.budget, floor=lambda: view.floor_tokens))


def _pinned(conversation: View, pins: Sequence[str], limit_tokens: int) -> list[int]:
    """The indices of the person's messages that pins name: of each the newest with these words."""
    messages, indices = conversation.messages, dict[int, None]()
    persons = [at for at in range(len(messages) - 1, conversation.prefix - 1, -1) if is_persons(messages[at])]
    for number, pin in enumerate(pins, 1):
        words = " ".join(pin.split())
        index = next((at for at in persons if words in " ".join(messages[at].text.split())), None)
        if index is None:
            raise BadWish(f"Pin {number} is in no message of the user's: allowed are words of one.")
        indices[index] = None
    tokens = sum(conversation.sizes[index] for index in indices)
    if tokens > limit_tokens:
        raise BadWish(
            f"The pinned messages have {tokens} tokens; at most {limit_tokens} can stay pinned, a tenth of the "
            "window. Pin fewer or shorter messages."
        )
    return [*indices]
