"""OpenAI's Responses: compaction items in a request, and in the stream or the body of its answer.

Source: openai-python (`response_compact_params.py`, `compacted_response.py`), and Codex (`compact_remote_v2.rs`), which
wants exactly one compaction item and `response.completed` behind it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, RootModel

from litellm_compaction.core.portable import Portable
from litellm_compaction.errors import BadItem
from litellm_compaction.proxy.standards.orders import Opened, Orders, Told, checked

TRIGGER = {"type": "compaction_trigger"}
_ITEMS = ("compaction", "compaction_summary")
_STAYS = ("system", "developer")
# In place of a conversation that is kept whole; a person does not write this.
_WHOLE = "[The conversation so far, as the client has kept it]"


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
    given = body.get("input")
    items = given if isinstance(given, list) else []
    changed: dict[str, Any] = {key: None for key in ("context_management", "truncation") if body.get(key) is not None}
    management = checked(_Management, body.get("context_management") or [], "context_management", "[{}]").root
    kinds = [item.get("type") if isinstance(item, Mapping) else None for item in items]
    compacts_only = TRIGGER["type"] in kinds
    kept = _without_trigger(items, kinds) if compacts_only else items
    newest = max((at for at, kind in enumerate(kinds) if kind in _ITEMS), default=None)
    portable: Portable | None = None
    placeholder = ""
    if newest is not None:
        portable = await opened(kept[newest].get("encrypted_content"), f"input[{newest}].encrypted_content")
        placeholder = portable.record or _WHOLE
        before = [item for item in kept[:newest] if _stays(item, spares_requests=portable.spares_requests)]
        kept = [*before, *messages_of(placeholder), *kept[newest + 1 :]]
    if compacts_only or newest is not None:
        changed["input"] = kept
    orders = Orders(
        portable=portable,
        placeholder=placeholder,
        compacts_only=compacts_only,
        wants_item=bool(management),
        spares_requests=compacts_only,
        threshold_tokens=management[0].compact_threshold or 0 if management else 0,
        may_change=body.get("truncation") != "disabled" or compacts_only,
    )
    return orders, changed


def _without_trigger(items: Sequence[Any], kinds: Sequence[object]) -> Sequence[Any]:
    at = kinds.index(TRIGGER["type"])
    if at != len(items) - 1:
        raise BadItem(f"input[{at}]", "is a compaction_trigger, which has to be the last item")
    if not at:
        raise BadItem("input", "has nothing to compact: the compaction_trigger is its only item")
    return items[:-1]


def _stays(item: object, *, spares_requests: bool) -> bool:
    """Returns True for an item before a compaction item that it does not stand for."""
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        return False
    return item.get("role") in _STAYS or (spares_requests and item.get("role") == "user")


def field_of_item(items: object) -> str:
    """Returns the place of the first compaction item or trigger of a request's `input`; "" if it has none."""
    for at, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, Mapping) and item.get("type") in (TRIGGER["type"], *_ITEMS):
            return f"input[{at}]"
    return ""


def messages_of(given: object) -> list[Any]:
    """Returns the items of a request's `input`, which may be a text alone."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given) if isinstance(given, list) else []


def _item(text: str) -> dict[str, Any]:
    return {"type": "compaction", "id": f"cmp_{_digest(text)}", "encrypted_content": text}


def _digest(text: str) -> str:
    """An id that says nothing else, and is the same for the same text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Stream:
    """The events of one answer, numbered anew."""

    at_once = frozenset({"response.created", "response.in_progress", "response.queued", "response.failed"})
    at_end = frozenset({"response.completed", "response.incomplete"})
    index = "output_index"

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def events(self, frame: object) -> Iterable[object]:
        if isinstance(frame, BaseModel):
            fields = json.loads(frame.model_dump_json(exclude_none=True, exclude_unset=True))
            if str(fields.get("type", "")).startswith("response."):
                return [fields]
        return [frame]

    def frame(self, event: dict[str, Any]) -> str:
        return json.dumps({**event, "sequence_number": next(self._numbers)}, ensure_ascii=False)

    def part(self, told: Told) -> list[dict[str, Any]]:
        names = ("added", "done") if told.text else ()
        return [{"type": f"response.output_item.{each}", "output_index": 0, "item": _item(told.text)} for each in names]

    def ended(self, event: dict[str, Any], told: Told | None) -> dict[str, Any]:
        response = event.get("response")
        if told is None or not isinstance(response, dict) or not (told.text or told.is_alone):
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
    items = [_item(told.text)] if told.text else []
    return {"output": items, "status": "completed"} if told.is_alone else {"output": [*items, *(output or [])]}


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
    own = [
        _output_message(item)
        for item in messages_of(body.get("input"))
        if isinstance(item, Mapping) and item.get("type", "message") == "message" and item.get("role") == "user"
    ]
    return {
        "id": answer.get("id"),
        "object": "response.compaction",
        "created_at": int(answer.get("created_at") or 0),
        "output": [*own, *(answer.get("output") or [])],
        "usage": answer.get("usage"),
    }


def _output_message(item: Mapping[str, Any]) -> dict[str, Any]:
    """A user's message as the protocol gives it back: in parts, with an id."""
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {
        "id": f"msg_{_digest(json.dumps(parts))}",
        "status": "completed",
        **item,
        "type": "message",
        "content": parts,
    }
