"""Adds to a compacted request what was covered: quotations for a person, or a tool that looks it up and its results.

Excerpts stand in front of the newest words of a request without tools, whose model cannot look anything up. The next
turn comes without them: kept in place they would fill the window, which costs more than to read one question and its
answer again. A model with tools calls ours, the proxy answers it, and the same response goes on: the client sees
neither. The results stand before the answer that they were looked up for until a later compaction covers that place, so
that the next turn begins with the bytes that the server has read already.

Both search the client's own list of messages, so that nothing has to be stored for them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import (
    JsonObject,
    JsonValue,
    Message,
    ToolCall,
    merged,
    newest_user_index,
    parse_message,
    visible_text,
)
from litellm_compaction.core.prompts import defused
from litellm_compaction.core.secrets import plain, redactor
from litellm_compaction.core.stretches import own_words
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest, RequestContext
from litellm_compaction.recall import Beside, Found, Index, Lookup, QueryTooLong, beside, search, told
from litellm_compaction.recall.hits import checked
from litellm_compaction.stores import Originals
from litellm_compaction.tokenizers.registry import is_loaded, vocabulary

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
# Of a message, beside its words.
_MESSAGE_TOKENS = 16
_MOST_REMEMBERED, _MOST_AT_ONE_PLACE, _MOST_QUERY_CHARS = 512, 4, 1_000
# A question and its answer tell most conversations apart; those that begin alike add to one index.
_BEGINNING = 2
# Of a conversation, the newest: to index so much takes half a second, in a thread; and of an index that grows, until it
# is made anew.
_MOST_INDEXES, _MOST_CHARS, _MOST_PASSAGES = 64, 1_000_000, 50_000
_NO_MORE = "No more look-ups for this answer: answer with what is known."
_NO_ROOM = "There is no room to show what was found: answer with what is known."
_FAILED = "The earlier conversation cannot be searched now: answer with what is known."


class _Indexes:
    """By scope and the first messages of a conversation; what comes after them is added turn by turn."""

    def __init__(self) -> None:
        self._indexes: Bounded[tuple[str, str], tuple[Index, threading.Lock]] = Bounded(_MOST_INDEXES)

    async def asked(self, measured: MeasuredRequest, end: int, ask: Callable[[Index], _Result]) -> _Result:
        """Returns what `ask` finds in the first `end` messages of a conversation; it runs in a thread."""
        return await asyncio.to_thread(self._asked, measured, end, ask)

    def _asked(self, measured: MeasuredRequest, end: int, ask: Callable[[Index], _Result]) -> _Result:
        messages, hashes = measured.conversation.rest[:end], measured.conversation.hashes
        chars = itertools.accumulate(len(visible_text(message)) for message in reversed(messages))
        start = end - sum(total <= _MOST_CHARS for total in chars)
        key = measured.context.scope, hashes[: _BEGINNING + 1][-1]
        index, lock = self._indexes.get(key) or (None, threading.Lock())
        if index is None or len(index.passages) > _MOST_PASSAGES:
            index = Index(redactor(measured.context.settings.redact_patterns))
        # Those that are used stay.
        self._indexes[key] = index, lock
        with lock:
            index.add(messages[start:], hashes[start : end + 1])
            return ask(index)


class Quoter:
    def __init__(self, measurer: RequestMeasurer) -> None:
        self._measurer = measurer
        self._indexes = _Indexes()

    async def added(self, prepared: PreparedRequest) -> PreparedRequest:
        """Returns a compacted request with excerpts in front of the newest words, or as it is.

        The prompt never outgrows its trigger by them, and nothing in front of that message changes.
        """
        measured, compaction, budget = prepared.measured, prepared.applied, prepared.budget
        at = _question(measured)
        limit_tokens = min(prepared.window.tokens // _EXCERPTS_SHARE, budget.trigger_tokens - prepared.count.tokens)
        if at is None or compaction is None or limit_tokens <= 0:
            return prepared
        try:
            found = await self._found(measured, compaction, at, limit_tokens)
            if not found.excerpts:
                return prepared
            messages = list(measured.conversation.messages)
            messages[at] = merged([messages[at]], found.text)
            changed = replace(measured, conversation=replace(measured.conversation, messages=tuple(messages)))
            quoting = await self._measurer.applied(changed, compaction, "reused")
        except Exception as error:  # noqa: BLE001 - the request is whole without (P8)
            logger.warning("excerpts_failed model=%s error=%s", measured.context.label, type(error).__name__)
            return prepared
        if budget.triggers(quoting.count.tokens):
            return prepared
        return replace(
            prepared,
            messages=quoting.messages,
            count=quoting.count,
            excerpts=found.excerpts,
            excerpt_tokens=measured.count_text(found.text),
        )

    async def _found(self, measured: MeasuredRequest, compaction: Compaction, at: int, limit_tokens: int) -> Beside:
        conversation = measured.conversation
        hashes, end = conversation.hashes, at - conversation.prefix
        # A record quotes some messages in full.
        gone = {
            place for place in compaction.hidden
            if visible_text(conversation.rest[place]).strip() not in compaction.record
        }  # fmt: skip
        sized = list(zip(conversation.messages, conversation.sizes, strict=True))
        words, answers = ([size for message, size in sized if message.role == role] for role in ("user", "assistant"))
        words_tokens, answer_tokens = statistics.mean(words or [0]), statistics.mean(answers or [0])

        def ask(index: Index) -> Beside:
            return beside(
                index,
                own_words(conversation.messages[at]),
                visible=[hashes[place + 1] for place in range(end) if place not in gone],
                within=[hashes[place + 1] for place in sorted(gone)],
                limit_tokens=limit_tokens,
                count=measured.count_text,
                turn_tokens=words_tokens + _WRITTEN_WEIGHT * answer_tokens,
                again_tokens=words_tokens + answer_tokens,
                defuse=_defuser(measured),
            )

        return await self._indexes.asked(measured, end, ask)


class Recaller:
    """Adds to compacted requests, and looks up what their models ask for.

    Args:
        originals: of covered messages, in which people search; ends with the compactor.
    """

    def __init__(self, originals: Originals) -> None:
        self.lookup = Lookup(originals)
        self._originals = originals
        self._indexes = _Indexes()
        # By scope and entry of the hash chain: calls with their results, which stand behind that entry's message.
        self._found: Bounded[tuple[str, str], tuple[tuple[Message, ...], ...]] = Bounded(_MOST_REMEMBERED)

    def added(
        self, measured: MeasuredRequest, compaction: Compaction, messages: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], tuple[JsonValue, ...] | None]:
        """Returns `messages`, which `compaction` has left of a request, and its tools, both with what is added.

        As they are, and None for the client's own tools, if nothing can be looked up.
        """
        tools = self.tools(measured)
        if tools is None:
            return messages, None
        end = len(measured.conversation.rest)
        return self.with_found(messages, measured, compaction.covered_messages, end), tools

    def tools(self, measured: MeasuredRequest) -> tuple[JsonValue, ...] | None:
        """Returns a compacted request's tools with ours; None if it is not offered.

        That depends on nothing that changes from turn to turn, since tools stand in front of everything.
        """
        context, tools = measured.context, measured.request.tools
        functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
        names = [function.get("name") if isinstance(function, Mapping) else None for function in functions]
        may_offer = _may_recall(context) and context.carries_calls and self._originals.are_kept
        is_offered = may_offer and bool(tools) and None not in functions and RECALL not in names
        return (*tools, RECALL_TOOL) if is_offered else None

    def with_found(
        self, messages: Sequence[Message], measured: MeasuredRequest, covered: int, end: int
    ) -> tuple[Message, ...]:
        """Returns messages with what was looked up between them.

        Args:
            messages: a compacted conversation up to position `end`; from `covered` on they are the client's.
            measured: its request.
        """
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
        """Forgets what was looked up in a request's conversation; returns False if nothing was."""
        keys = {(measured.context.scope, entry) for entry in measured.conversation.hashes} & self._found.keys()
        for key in keys:
            del self._found[key]
        return bool(keys)

    async def look_up(
        self, context: RequestContext, prepared: PreparedRequest, said: str, calls: Sequence[ToolCall], left: int
    ) -> None:
        """Looks up what a model asks for; the next request of its conversation shows it.

        Args:
            prepared: as it was sent; it offers the tool.
            said: the words of the answer before its calls.
            calls: of the tool, in their order.
            left: how many of them may still be looked up for this answer.
        """
        if prepared.applied is None:
            return
        queries = [_query(call.arguments) for call in calls]
        room_tokens = prepared.budget.prompt_limit_tokens - prepared.count.tokens - prepared.count_text(said)
        room_tokens -= sum(prepared.count_text(written) + 2 * _MESSAGE_TOKENS for _, written in queries)
        limit_tokens = min(prepared.window.tokens // _ANSWER_SHARE, room_tokens // max(len(calls[:left]), 1))
        texts = [await self._result(context, prepared, query, limit_tokens) for query, _ in queries[:left]]
        texts += [_NO_MORE] * (len(calls) - len(texts))
        # Behind the newest message that is the client's.
        conversation, rest = prepared.measured.conversation, prepared.measured.conversation.rest
        at = next((at for at in range(len(rest), 0, -1) if not rest[at - 1].is_synthetic), 0)
        key, exchange = (context.scope, conversation.hashes[at]), _exchange(said, calls, queries, texts)
        self._found[key] = (*self._found.get(key, ()), exchange)[-_MOST_AT_ONE_PLACE:]
        logger.info(
            "recall model=%s lookups=%d tokens=%d window=%d tokens",
            context.label,
            len(calls[:left]),
            sum(map(prepared.count_text, texts)),
            prepared.window.tokens,
        )

    async def _result(self, context: RequestContext, prepared: PreparedRequest, query: str, limit_tokens: int) -> str:
        measured, hidden = prepared.measured, prepared.applied.hidden if prepared.applied is not None else ()
        within = {measured.conversation.hashes[at + 1] for at in hidden}

        def ask(index: Index) -> Found:
            return search(index, checked(query), within=within, limit=_HITS)._replace(missing=index.lacks(within))

        try:
            found = await asyncio.wait_for(
                self._indexes.asked(measured, len(measured.conversation.rest), ask), _LIMIT_S
            )
        except QueryTooLong as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - the answer goes on without (P8)
            logger.warning("recall_failed model=%s error=%s", context.label, type(error).__name__)
            return _FAILED
        # What its client has compacted itself is in no request any more.
        is_all = not (context.portable or found.missing)
        text = told(found, limit_tokens=limit_tokens, count=prepared.count_text, is_all=is_all)
        return _defuser(measured)(text) or _NO_ROOM


def _may_recall(context: RequestContext) -> bool:
    """A compacted request may be shown more of what is covered."""
    settings = context.settings
    return settings.recall != "off" and settings.keep_originals != "off" and not context.is_client_summary


def _defuser(measured: MeasuredRequest) -> Callable[[str], str]:
    """What breaks control tokens of a request's model, and marks of ours, in a text that it is shown."""
    name = measured.family.vocabulary
    own = vocabulary(name).defused if is_loaded(name) else plain
    return lambda text: defused(own(text))


def _question(measured: MeasuredRequest) -> int | None:
    """The index of a person's message that nothing answers yet; None if excerpts are not for this request."""
    context, messages = measured.context, measured.conversation.messages
    is_wanted = _may_recall(context) and context.settings.recall == "auto" and not context.goes_on
    at = newest_user_index(messages) if is_wanted and not measured.request.tools else None
    if at is None or not all(message.is_system for message in messages[at + 1 :]):
        return None
    return at if own_words(messages[at]) else None


def _query(arguments: str) -> tuple[str, str]:
    """The query of a call, whose model may write other names or no JSON at all, and arguments as a server reads them.

    Servers read them again to show them to the model, and fail where they are no JSON object.
    """
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = arguments
    query = parsed if isinstance(parsed, str) else arguments
    if isinstance(parsed, dict):
        query = next((text for text in (parsed.get("query"), *parsed.values()) if isinstance(text, str)), "")
        if len(arguments) <= _MOST_QUERY_CHARS:
            return query, arguments
    return query, json.dumps({"query": query[:_MOST_QUERY_CHARS]}, ensure_ascii=False)


def _exchange(
    said: str, calls: Sequence[ToolCall], queries: Sequence[tuple[str, str]], texts: Sequence[str]
) -> tuple[Message, ...]:
    """The calls as the model made them, and a result for each; with ids of ours if the model's do not tell them apart.

    Mistral's templates take ids of nine letters and digits only.
    """
    ids = [call.id for call in calls]
    if "" in ids or len({*ids}) < len(ids):
        ids = [f"recall{number:03}" for number in range(len(ids))]
    written: list[JsonValue] = [
        {"id": each, "type": "function", "function": {"name": RECALL, "arguments": arguments}}
        for each, (_, arguments) in zip(ids, queries, strict=True)
    ]
    results: list[JsonObject] = [
        {"role": "tool", "tool_call_id": each, "content": text} for each, text in zip(ids, texts, strict=True)
    ]
    return tuple(map(parse_message, ({"role": "assistant", "content": said, "tool_calls": written}, *results)))
