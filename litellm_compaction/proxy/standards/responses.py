"""OpenAI's Responses: compaction items in a request, and in the stream or the body of its answer.

Shapes: openai 3.54.0 (`response_compact_params.py`, `compacted_response.py`), and Codex (`compact_remote_v2.rs`), which
wants exactly one compaction item and `response.completed` behind it (read 2026-11-23).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Orders

_TRIGGER = "compaction_trigger"
_ITEMS = ("compaction", "compaction_summary")
_CREATED = ("response.created", "response.in_progress", "response.queued")
_ENDED = ("response.completed", "response.incomplete", "response.failed")
_STAYS = ("system", "developer")
# In place of a conversation that is kept whole; a person does not write this.
_WHOLE = "[The conversation so far, as the client has kept it]"

Opened = Callable[[object, str], Awaitable[Portable]]


async def read_orders(body: Mapping[str, Any], opened: Opened) -> tuple[Orders, dict[str, Any]]:
    """Returns a request's orders, and the fields of its body as LiteLLM may have them; None for one that goes.

    Args:
        opened: reads a compaction item's `encrypted_content`, which stands at the named place.

    Raises:
        BadItem: an item or a field is not as the protocol has it.
    """
    items = body.get("input")
    threshold_tokens, wants_item = _threshold(body.get("context_management"))
    may_change = body.get("truncation") != "disabled"
    changed: dict[str, Any] = {key: None for key in ("context_management", "truncation") if body.get(key) is not None}
    orders = Orders(wants_item=wants_item, threshold_tokens=threshold_tokens, may_change=may_change)
    if not isinstance(items, list):
        return orders, changed
    kinds = [item.get("type") if isinstance(item, Mapping) else None for item in items]
    compacts_only = _TRIGGER in kinds
    if compacts_only and kinds.index(_TRIGGER) != len(kinds) - 1:
        raise BadItem(f"input[{kinds.index(_TRIGGER)}]", "is a compaction_trigger, which has to be the last item")
    kept = items[:-1] if compacts_only else items
    newest = max((at for at, kind in enumerate(kinds) if kind in _ITEMS), default=None)
    portable: Portable | None = None
    placeholder = ""
    if newest is not None:
        field = f"input[{newest}].encrypted_content"
        portable = await opened(kept[newest].get("encrypted_content"), field)
        placeholder = portable.record or _WHOLE
        text = [{"type": "input_text", "text": placeholder}]
        before = [item for item in kept[:newest] if _stays(item, spares_requests=portable.spares_requests)]
        kept = [*before, {"type": "message", "role": "user", "content": text}, *kept[newest + 1 :]]
    if compacts_only and not kept:
        raise BadItem("input", "has nothing to compact: the compaction_trigger is its only item")
    if compacts_only or newest is not None:
        changed["input"] = kept
    orders = Orders(
        portable=portable,
        placeholder=placeholder,
        compacts_only=compacts_only,
        wants_item=wants_item,
        spares_requests=compacts_only,
        threshold_tokens=threshold_tokens,
        may_change=may_change or compacts_only,
    )
    return orders, changed


def field_of_item(items: object) -> str:
    """Returns the place of the first compaction item or trigger of a request's `input`; "" if it has none."""
    for at, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Mapping) and item.get("type") in (_TRIGGER, *_ITEMS):
            return f"input[{at}]"
    return ""


def _stays(item: object, *, spares_requests: bool) -> bool:
    """Returns True for an item before a compaction item that it does not stand for."""
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        return False
    return item.get("role") in _STAYS or (spares_requests and item.get("role") == "user")


def _threshold(entries: object) -> tuple[int, bool]:
    """The threshold of `context_management` in tokens, 0 for the default, and if it is there."""
    if entries is None or entries == []:
        return 0, False
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], Mapping):
        raise BadItem(
            "context_management", 'is no list of one entry {"type": "compaction", "compact_threshold": 10000}'
        )
    [entry] = entries
    if entry.get("type") != "compaction":
        raise BadItem("context_management[0].type", 'is not "compaction"')
    threshold = entry.get("compact_threshold")
    if threshold is None:
        return 0, True
    if type(threshold) is not int or threshold < 1:
        raise BadItem("context_management[0].compact_threshold", "is no whole number of tokens from 1 on")
    return threshold, True


def item_of(text: str) -> dict[str, Any]:
    """Returns the compaction item with a text; its id says nothing else, and is the same for the same text."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"type": "compaction", "id": f"cmp_{digest}", "encrypted_content": text}


async def with_item(
    events: AsyncIterator[Any],
    made: Callable[[], Awaitable[str | None]],
    *,
    is_settled: Callable[[], bool],
    is_alone: Callable[[], bool],
    usage: Callable[[], Mapping[str, Any]],
) -> AsyncGenerator[Any, None]:
    """Yields a stream's events with a compaction item before what the model says, or in its place.

    Args:
        events: LiteLLM's, typed, or text of its own.
        made: the item's text; None if there is none.
        is_settled: the request was sent, so that `made` knows.
        is_alone: nothing else is the answer.
        usage: of the compaction alone.
    """
    numbers = itertools.count()
    # Events before it is known if an item comes before theirs.
    waiting: list[dict[str, Any]] | None = []
    first: list[dict[str, Any]] = []
    async for each in events:
        event = _fields(each)
        if event is None:
            yield each
            continue
        kind, shift = str(event.get("type")), len(first)
        if kind in _CREATED:
            yield _written(event, numbers)
            continue
        has_ended = kind in _ENDED
        if waiting is not None and (has_ended or is_settled()):
            text = await made() if is_settled() and kind != "response.failed" else None
            first = [] if text is None else [item_of(text)]
            shift = len(first)
            for name, item in itertools.product(("added", "done"), first):
                added = {"type": f"response.output_item.{name}", "output_index": 0, "item": item}
                yield _written(added, numbers)
            for early in () if is_alone() else waiting:
                yield _written(early, numbers, shift)
            waiting = None
        if has_ended:
            yield _written(_ended(event, first, usage(), is_alone=is_alone()), numbers)
        elif waiting is not None:
            waiting.append(event)
        elif not is_alone():
            yield _written(event, numbers, shift)


def _written(event: dict[str, Any], numbers: Iterator[int], shift: int = 0) -> str:
    if "output_index" in event:
        event = {**event, "output_index": event["output_index"] + shift}
    return json.dumps({**event, "sequence_number": next(numbers)}, ensure_ascii=False)


def _ended(event: dict[str, Any], first: Sequence[Any], usage: Mapping[str, Any], *, is_alone: bool) -> dict[str, Any]:
    """The last event, whose response holds the whole output."""
    response = event.get("response")
    if not first or not isinstance(response, dict):
        return event
    whole = {**response, "output": [*first, *([] if is_alone else response.get("output") or [])]}
    if not is_alone:
        return {**event, "response": whole}
    whole.pop("incomplete_details", None)
    return {**event, "type": "response.completed", "response": {**whole, "status": "completed", "usage": usage}}


def usage_of(read_tokens: int, written_tokens: int) -> dict[str, Any]:
    """Returns a usage as the protocol has it."""
    return {
        "input_tokens": read_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": written_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read_tokens + written_tokens,
    }


def answered(response: Any, text: str | None, usage: Mapping[str, Any], *, is_alone: bool) -> Any:
    """Returns a whole answer with the compaction item first; LiteLLM's own object is not changed."""
    if text is None or not isinstance(response, BaseModel):
        return None
    copy: Any = response.model_copy()
    others = [] if is_alone else list(copy.output or [])
    copy.output = [item_of(text), *others]
    if is_alone:
        copy.status = "completed"
        copy.usage = type(copy.usage)(**usage) if copy.usage is not None else None
    return copy


def compacted_response(answer: Mapping[str, Any], input_items: Sequence[Any]) -> dict[str, Any]:
    """Returns the body of `POST /v1/responses/compact`: the user's messages, and the item behind them.

    Args:
        answer: the body that a trigger is answered with.
        input_items: of the request, as the client sent them.
    """
    own = [
        item
        for item in input_items
        if isinstance(item, Mapping) and item.get("type", "message") == "message" and item.get("role") == "user"
    ]
    return {
        "id": answer.get("id"),
        "object": "response.compaction",
        "created_at": int(answer.get("created_at") or 0),
        "output": [*map(_output_message, own), *(answer.get("output") or [])],
        "usage": answer.get("usage"),
    }


def _output_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """A user's message as the protocol gives it back: in parts, with an id."""
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
    return {"id": f"msg_{digest}", "status": "completed", **item, "type": "message", "content": parts}


def _fields(event: object) -> dict[str, Any] | None:
    if not isinstance(event, BaseModel):
        return None
    fields = json.loads(event.model_dump_json(exclude_none=True, exclude_unset=True))
    return fields if isinstance(fields, dict) and str(fields.get("type", "")).startswith("response.") else None
