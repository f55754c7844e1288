"""An MCP server over kept originals: three tools that look up what one owner's conversations lost.

The proxy's route and `litellm-compaction mcp` make one. Whose conversations it shows is fixed when it is made: nothing
that a client or a model says can widen it. It needs version 2 of the `mcp` SDK, which LiteLLM 1.103 and newer bring.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server

from litellm_compaction.core.compaction import compaction_id
from litellm_compaction.core.messages import JsonObject
from litellm_compaction.events import CompactionEvent, event_from_json
from litellm_compaction.recall import NOT_KEPT, Found, Hit, Lookup, Piece, QueryTooLong, told, written
from litellm_compaction.stores import Store

_HITS, _MOST_HITS = 5, 20
# A client shows a model all of an answer; Claude Code warns of more (guides of others, 2026-06).
_MOST_TOKENS = 10_000
_MOST_EVENTS, _MOST_ROWS = 1000, 20
_NOTHING_KEPT = "Nothing is kept here: no conversation was compacted yet, or the proxy does not keep_originals."
_EMPTY = "query is empty: give words, an id, a handle, or /a regular expression/."


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallScope:
    """The conversations that one server shows.

    Attributes:
        tenant: as `lookup` knows it; all that is found is its own.
        shows: says of an event if it may be told, of a compaction whose messages are not kept.
        events_with: characters that stand in each event that may be told; "" for all.
    """

    lookup: Lookup
    store: Store
    tenant: str
    shows: Callable[[CompactionEvent], bool]
    events_with: str = ""


def recall_server(scope: RecallScope, failed: Callable[[Exception], str]) -> Server:
    """Returns a server whose tools never raise, for one connection or many.

    Args:
        failed: notes an error, and gives what the client is told of it; its own words may quote a conversation.
    """
    answers: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[str]]] = {
        "search_history": lambda given: _search(scope, given),
        "get_message": lambda given: _message(scope, given),
        "describe_compactions": lambda given: _compactions(scope),
    }

    async def tools(context: object, params: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=TOOLS)

    async def call(context: object, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            return _result(await answers.get(params.name, _no_tool)(params.arguments or {}))
        except (_NotAnswered, QueryTooLong) as refused:
            return _result(str(refused), is_error=True)
        except Exception as error:  # noqa: BLE001 - the SDK would log it, with its words
            return _result(failed(error), is_error=True)

    return Server("litellm-compaction", on_list_tools=tools, on_call_tool=call)


class _NotAnswered(Exception):
    """Tells a model in plain words why there is no answer."""


def _tool(name: str, description: str, required: str = "", **properties: JsonObject) -> types.Tool:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = [required]
    only_reads = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)
    return types.Tool(name=name, description=description, input_schema=schema, annotations=only_reads)


# Short: a model reads them in every prompt. 154 tokens as tools of a chat completion (o200k_base, 2026-11-27).
TOOLS = [
    _tool(
        "search_history",
        "Search earlier messages that compaction removed. Gives quotations with handles.",
        required="query",
        query={"type": "string", "description": "words, id, path or /regex/"},
        limit={"type": "integer", "default": _HITS},
    ),
    _tool("get_message", "A whole message by its handle.", required="handle", handle={"type": "string"}),
    _tool("describe_compactions", "When conversations were compacted, with token counts and handles; no text."),
]


async def _no_tool(given: Mapping[str, Any]) -> str:
    raise _NotAnswered("no such tool")


async def _search(scope: RecallScope, given: Mapping[str, Any]) -> str:
    query, limit = given.get("query"), given.get("limit", _HITS)
    if not isinstance(query, str) or not query.strip():
        raise _NotAnswered(_EMPTY)
    if type(limit) is not int or not 1 <= limit <= _MOST_HITS:
        raise _NotAnswered(f"limit is a whole number from 1 to {_MOST_HITS}.")
    found = await scope.lookup.search(scope.tenant, query, limit=limit)
    if not found.hits and not await scope.lookup.ranges(scope.tenant):
        raise _NotAnswered(_NOTHING_KEPT)
    return told(found, limit_tokens=_MOST_TOKENS, count=_about_tokens, is_all=False)


async def _message(scope: RecallScope, given: Mapping[str, Any]) -> str:
    handle = given.get("handle")
    parts = await scope.lookup.find(scope.tenant, handle) if isinstance(handle, str) else ()
    if not parts:
        raise _NotAnswered(NOT_KEPT)
    whole = Hit(original=parts[0], pieces=tuple(Piece(part.role, part.text) for part in parts), share=1.0)
    return written(Found([whole], ()), limit_tokens=_MOST_TOKENS, count=_about_tokens)


async def _compactions(scope: RecallScope) -> str:
    """The newest compactions as JSON, oldest first; those of one conversation name the first of them."""
    ranges = {compaction_id(*name): ends for name, ends in (await scope.lookup.ranges(scope.tenant)).items()}
    rows: dict[str, JsonObject] = {}
    for stored in await scope.store.events(limit=_MOST_EVENTS, containing=scope.events_with):
        event = event_from_json(stored.text)
        if not isinstance(event, CompactionEvent) or not event.compaction_id or event.compaction_id in rows:
            continue
        if event.compaction_id in ranges or scope.shows(event):
            before = rows.get(event.continues_id, {}).get("conversation", event.continues_id)
            rows[event.compaction_id] = _row(event, str(before), ranges.get(event.compaction_id))
    if not rows:
        raise _NotAnswered(_NOTHING_KEPT)
    return json.dumps({"compactions": list(rows.values())[-_MOST_ROWS:]}, separators=(",", ":"))


def _row(event: CompactionEvent, conversation: str, ends: tuple[str, str] | None) -> JsonObject:
    row: JsonObject = {
        "when": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(event.when_s)),
        "conversation": conversation or event.compaction_id,
        "model": event.model,
        "round": event.round,
        "level": event.rung,
        "messages": event.covered_messages,
        "tokens_before": event.tokens_before,
        "tokens_after": event.tokens_after,
    }
    return row if ends is None else {**row, "first_handle": ends[0], "last_handle": ends[1]}


def _about_tokens(text: str) -> int:
    # It is not known which model reads it.
    return len(text.encode("utf-8", "surrogatepass")) // 4


def _result(text: str, *, is_error: bool = False) -> types.CallToolResult:
    # Clients send half surrogate pairs, too, and the SDK writes none.
    whole = text.encode("utf-8", "replace").decode()
    return types.CallToolResult(content=[types.TextContent(text=whole)], is_error=is_error)
