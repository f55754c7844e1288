"""Adds to a compacted request: a tool that looks up what was covered, and what it has found.

The model calls the tool, the proxy answers it, and the same response goes on: the client sees neither. What was found
stands before the answer that it was looked up for until a later compaction covers that place, so that the next turn
begins with the bytes that the server has read already.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence

from litellm_compaction.concurrency import Bounded
from litellm_compaction.core.compaction import Compaction
from litellm_compaction.core.messages import JsonObject, JsonValue, Message, ToolCall, parse_message
from litellm_compaction.core.prompts import defused
from litellm_compaction.core.secrets import plain, redactor
from litellm_compaction.core.view import View
from litellm_compaction.engine.context import MeasuredRequest, PreparedRequest, RequestContext
from litellm_compaction.recall import Found, Lookup, of_request, search, told
from litellm_compaction.stores import Originals
from litellm_compaction.tokenizers.registry import is_loaded, vocabulary

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
_WINDOW_SHARE, _HITS = 12, 5
_LIMIT_S = 10.0
# Of a message, beside its words.
_MESSAGE_TOKENS = 16
_MOST_REMEMBERED, _MOST_AT_ONE_PLACE = 512, 4
_MOST_QUERY_CHARS = 1_000
_NO_MORE = "No more look-ups for this answer: answer with what is known."
_NO_ROOM = "There is no room to show what was found: answer with what is known."
_FAILED = "The earlier conversation cannot be searched now: answer with what is known."


class Recaller:
    """Adds to compacted requests, and looks up what their models ask for.

    Args:
        originals: of covered messages; ends with the compactor.
    """

    def __init__(self, originals: Originals) -> None:
        self.lookup = Lookup(originals)
        self._originals = originals
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
        is_offered = (
            may_recall(context)
            and context.carries_calls
            and self._originals.are_kept
            and bool(tools)
            and all(isinstance(tool, Mapping) and "function" in tool for tool in tools)
            and RECALL not in map(_name, tools)
        )
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
        room_tokens = prepared.budget.prompt_limit_tokens - prepared.count.tokens - prepared.count_text(said)
        room_tokens -= sum(prepared.count_text(_readable(call.arguments)) + 2 * _MESSAGE_TOKENS for call in calls)
        limit_tokens = min(prepared.window.tokens // _WINDOW_SHARE, room_tokens // max(len(calls[:left]), 1))
        texts = [await self._result(context, prepared, call, limit_tokens) for call in calls[:left]]
        texts += [_NO_MORE] * (len(calls) - len(texts))
        key = context.scope, _newest_entry(prepared.measured.conversation)
        self._found[key] = (*self._found.get(key, ()), _exchange(said, calls, texts))[-_MOST_AT_ONE_PLACE:]
        logger.info(
            "recall model=%s lookups=%d tokens=%d window=%d tokens",
            context.label,
            len(calls[:left]),
            sum(map(prepared.count_text, texts)),
            prepared.window.tokens,
        )

    async def _result(
        self, context: RequestContext, prepared: PreparedRequest, call: ToolCall, limit_tokens: int
    ) -> str:
        try:
            found = await asyncio.wait_for(self._search(context.tenant, _query(call.arguments), prepared), _LIMIT_S)
        except Exception as error:  # noqa: BLE001 - the answer goes on without (P8)
            logger.warning("recall_failed model=%s error=%s", context.label, type(error).__name__)
            return _FAILED
        text = told(found, limit_tokens=limit_tokens, count=prepared.count_text)
        return defuser(prepared.measured)(text) or _NO_ROOM

    async def _search(self, tenant: str, query: str, prepared: PreparedRequest) -> Found:
        # What this very request has covered may still be on its way.
        await self._originals.settle()
        conversation, settings = prepared.measured.conversation, prepared.measured.context.settings
        covered = prepared.applied.hidden if prepared.applied is not None else ()
        hidden = frozenset(conversation.hashes[at + 1] for at in covered)
        found = await self.lookup.search(tenant, query, limit=_HITS, within=hidden)
        if found.hits or not found.missing:
            return found

        def in_request() -> Found:
            # What is not kept, or no more, its client has just sent again.
            index = of_request(conversation.rest, conversation.hashes, redactor(settings.redact_patterns))
            in_it = search(index, query, within=found.missing, limit=_HITS)
            return in_it._replace(missing=index.lacks(found.missing))

        return await asyncio.to_thread(in_request)


def may_recall(context: RequestContext) -> bool:
    """Returns True if a compacted request may be shown more of what is covered."""
    settings = context.settings
    return settings.recall != "off" and settings.keep_originals != "off" and not context.is_client_summary


def defuser(measured: MeasuredRequest) -> Callable[[str], str]:
    """Returns what breaks control tokens of a request's model, and marks of ours, in a text that it is shown."""
    name = measured.family.vocabulary
    own = vocabulary(name).defused if is_loaded(name) else plain
    return lambda text: defused(own(text))


def _newest_entry(conversation: View) -> str:
    """The entry of the hash chain of the newest message that is the client's."""
    rest = conversation.rest
    return conversation.hashes[next((at for at in range(len(rest), 0, -1) if not rest[at - 1].is_synthetic), 0)]


def _name(tool: JsonValue) -> JsonValue:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _query(arguments: str) -> str:
    """The query of a call; models write other names, or no JSON at all."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(parsed, Mapping):
        texts = [value for value in (parsed.get("query"), *parsed.values()) if isinstance(value, str)]
        return texts[0] if texts else ""
    return parsed if isinstance(parsed, str) else arguments


def _readable(arguments: str) -> str:
    """Servers read them again to show them to the model, and fail where they are no JSON object."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if is_object and len(arguments) <= _MOST_QUERY_CHARS:
        return arguments
    return json.dumps({"query": _query(arguments)[:_MOST_QUERY_CHARS]}, ensure_ascii=False)


def _exchange(said: str, calls: Sequence[ToolCall], texts: Sequence[str]) -> tuple[Message, ...]:
    """The calls as the model made them, and a result for each; with ids of ours if the model's do not tell them apart.

    Mistral's templates take ids of nine letters and digits only.
    """
    ids = [call.id for call in calls]
    if "" in ids or len({*ids}) < len(ids):
        ids = [f"recall{number:03}" for number in range(len(ids))]
    written: list[JsonValue] = [
        {"id": each, "type": "function", "function": {"name": RECALL, "arguments": _readable(call.arguments)}}
        for each, call in zip(ids, calls, strict=True)
    ]
    results: list[JsonObject] = [
        {"role": "tool", "tool_call_id": each, "content": text} for each, text in zip(ids, texts, strict=True)
    ]
    return tuple(map(parse_message, ({"role": "assistant", "content": said, "tool_calls": written}, *results)))
