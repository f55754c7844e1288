"""OpenAI's Responses: compaction items in a request, and in the stream or the body of its answer.

Source: openai-python (`response_compact_params.py`, `compacted_response.py`), and Codex (`compact_remote_v2.rs`), which
wants exactly one compaction item and `response.completed` behind it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Opened, Orders, Told, checked, record_of

TRIGGER = {"type": "compaction_trigger"}
_ITEMS = ("compaction", "compaction_summary")


class _Threshold(BaseModel):
    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(strict=True, ge=1)] | None = None


class _Management(RootModel[list[_Threshold]]):
    root: Annotated[list[_Threshold], Field(max_length=1)]


async def read_orders(body: Mapping[str, Any], opened: Opened) -> tuple[Orders, dict[str, Any]]:
    """Returns a request's orders, and the fields of its body as LiteLLM may have them; None for one that goes.

    Raises:
        BadItem: an item or a field is not as the protocol has it.
    """
    changed: dict[str, Any] = {key: None for key in ("context_management", "truncation") if body.get(key) is not None}
    management = checked(_Management, body.get("context_management") or [], "context_management", "[{}]").root
    items = body.get("input")
    kinds = [_kind(item) for item in items] if isinstance(items, list) else []
    items, compacts_only = messages_of(items), TRIGGER["type"] in kinds
    if compacts_only:
        if (at := kinds.index(TRIGGER["type"])) != len(items) - 1:
            raise BadItem(f"input[{at}]", "is a compaction_trigger, which has to be the last item")
        if not at:
            raise BadItem("input", "has nothing to compact: the compaction_trigger is its only item")
        changed["input"] = items = items[:-1]
    newest = max((at for at, kind in enumerate(kinds) if kind in _ITEMS), default=None)
    portable: Portable | None = None
    if newest is not None:
        portable = await opened(items[newest].get("encrypted_content"), f"input[{newest}].encrypted_content")
        stays = ("system", "developer", *(["user"] if portable.spares_requests else []))
        before = [item for item in items[:newest] if _kind(item) == "message" and item.get("role") in stays]
        changed["input"] = [*before, *messages_of(record_of(portable)), *items[newest + 1 :]]
    orders = Orders(
        portable=portable,
        compacts_only=compacts_only,
        wants_item=bool(management),
        spares_requests=compacts_only,
        threshold_tokens=management[0].compact_threshold or 0 if management else 0,
        may_change=body.get("truncation") != "disabled" or compacts_only,
    )
    return orders, changed


def _kind(item: object) -> object:
    return item.get("type", "message") if isinstance(item, Mapping) else None


def field_of_item(items: object) -> str:
    """Returns the place of the first compaction item or trigger of a request's `input`; "" if it has none."""
    places = enumerate(items if isinstance(items, list) else ())
    return next((f"input[{at}]" for at, item in places if _kind(item) in (TRIGGER["type"], *_ITEMS)), "")


def messages_of(given: object) -> list[Any]:
    """Returns the items of a request's `input`, which may be a text alone."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given) if isinstance(given, list) else []


class Stream:
    """The events of one answer, numbered anew.

    Attributes:
        at_once: kinds of events that are no part of what the model says.
        at_end: kinds of those that come behind it.
        index: the field with the place of an event's part in the answer.
    """

    at_once = frozenset({"response.created", "response.in_progress", "response.queued", "response.failed"})
    at_end = frozenset({"response.completed", "response.incomplete"})
    index = "output_index"

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def events(self, frame: object) -> Iterable[object]:
        """Returns the events of a frame of LiteLLM's, as dictionaries; as they came where they cannot be read."""
        if isinstance(frame, BaseModel):
            fields = json.loads(frame.model_dump_json(exclude_none=True, exclude_unset=True))
            if str(fields.get("type", "")).startswith("response."):
                return [fields]
        return [frame]

    def frame(self, event: dict[str, Any]) -> str:
        """Returns an event as LiteLLM sends it on."""
        return json.dumps({**event, "sequence_number": next(self._numbers)}, ensure_ascii=False)

    def part(self, told: Told) -> list[dict[str, Any]]:
        """Returns the events of the part that says it, at place 0; none if there is none."""
        return [
            {"type": f"response.output_item.{each}", "output_index": 0, "item": item}
            for item in _items(told)
            for each in ("added", "done")
        ]

    def ended(self, event: dict[str, Any], told: Told | None) -> dict[str, Any]:
        """Returns an event of the end with what is to be said there."""
        response = event.get("response")
        if told is None or not isinstance(response, dict):
            return event
        whole = {**response, **_output(told, response.get("output"))}
        if not told.is_alone:
            return {**event, "response": whole}
        whole.pop("incomplete_details", None)
        return {**event, "type": "response.completed", "response": {**whole, "usage": _usage(told)}}


def answered(response: Any, told: Told | None) -> Any:
    """Returns a whole answer with the compaction item first; LiteLLM's own object is not changed."""
    if told is None or not isinstance(response, BaseModel) or not (told.text or told.is_alone):
        return None
    usage = getattr(response, "usage", None)
    counted = {"usage": type(usage)(**_usage(told))} if told.is_alone and usage is not None else {}
    return response.model_copy(update={**_output(told, getattr(response, "output", None)), **counted})


def _output(told: Told, output: Any) -> dict[str, Any]:
    items = _items(told)
    return {"output": items, "status": "completed"} if told.is_alone else {"output": [*items, *(output or [])]}


def _items(told: Told) -> list[dict[str, Any]]:
    if not told.text:
        return []
    # An id that says nothing else, and is the same for the same text.
    digest = hashlib.blake2b(told.text.encode(), digest_size=16).hexdigest()
    return [{"type": "compaction", "id": f"cmp_{digest}", "encrypted_content": told.text}]


def _usage(told: Told) -> dict[str, Any]:
    return {
        "input_tokens": told.read_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": told.written_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": told.read_tokens + told.written_tokens,
    }


def compacted_response(body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of `POST /v1/responses/compact`: the user's messages, and the item behind them.

    Args:
        body: of the client's request.
        answer: to the same request with a trigger.
    """
    items = messages_of(body.get("input"))
    own = [item for item in items if _kind(item) == "message" and item.get("role") == "user"]
    return {
        "id": answer.get("id"),
        "object": "response.compaction",
        "created_at": int(answer.get("created_at") or 0),
        "output": [*map(_output_message, own), *(answer.get("output") or [])],
        "usage": answer.get("usage"),
    }


def _output_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """A user's message as the protocol gives it back: in parts."""
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"status": "completed", **item, "type": "message", "content": parts}
