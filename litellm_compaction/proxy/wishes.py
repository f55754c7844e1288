"""What a client asks of the guard itself: to be left alone, or to be compacted now, with a topic to keep in detail.

Read once for each request by the gate, from the body's `metadata` and, for clients that cannot send any, from headers.
Words of a wish never reach a log or an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.errors import BadWish

NOW_HEADER = "x-litellm-compaction-now"
FOCUS_HEADER = "x-litellm-compaction-focus"
_ALLOWED = '"off", or an object such as {"now": true, "focus": "the database schema"}'
_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off", ""})


class Wish(NamedTuple):
    """What is asked: `off` to be left alone, `now` to be compacted whatever the fill, `focus` as a topic, or ""."""

    off: bool = False
    now: bool = False
    focus: str = ""


NONE = Wish()


def wish_of(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Wish:
    """The wish of a request.

    Args:
        body: of the request, with LiteLLM's additions.
        metadata: LiteLLM's own of the request, which holds the client's too.

    Raises:
        BadWish: its shape is none that is known.
    """
    found = NONE
    for value in _sent(body, metadata):
        wish = _read(value)
        found = Wish(found.off or wish.off, found.now or wish.now, found.focus or wish.focus)
    headers = _headers(body)
    now = _is_yes(headers.get(NOW_HEADER, ""))
    focus = _topic(_decoded(headers.get(FOCUS_HEADER, "")), FOCUS_HEADER)
    found = Wish(found.off, found.now or now, found.focus or focus)
    if found.focus and not found.now:
        raise BadWish(
            f'A focus is only used where the conversation is compacted now: add "now": true, or {NOW_HEADER}.'
        )
    return found


def _sent(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[object]:
    """What stands under `compaction` in the client's metadata, wherever LiteLLM keeps that on the request's route."""
    request = body.get("proxy_server_request")
    original = request.get("body") if isinstance(request, Mapping) else None
    holders = [metadata, body.get("metadata"), original.get("metadata") if isinstance(original, Mapping) else None]
    for holder in holders:
        if isinstance(holder, Mapping):
            yield holder.get("compaction")
            sent = holder.get("requester_metadata")
            yield sent.get("compaction") if isinstance(sent, Mapping) else None


def _read(value: object) -> Wish:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        # OpenAI's own metadata holds strings only.
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadWish(f"metadata.compaction is not valid JSON; allowed: {_ALLOWED}.") from None
    if value is None or value is True or value == "on":
        return NONE
    if value in ("off", False):
        return Wish(off=True)
    if not isinstance(value, Mapping):
        raise BadWish(f"metadata.compaction is of type {type(value).__name__}; allowed: {_ALLOWED}.")
    unknown = [str(key)[:40] for key in value if key not in ("now", "focus")]
    if unknown:
        raise BadWish(
            f"metadata.compaction has unknown keys: {', '.join(map(repr, unknown[:5]))}; allowed: {_ALLOWED}."
        )
    now, focus = value.get("now"), value.get("focus")
    if now is not None and not isinstance(now, bool):
        raise BadWish(f"metadata.compaction.now is of type {type(now).__name__}; allowed: true or false.")
    if focus is not None and not isinstance(focus, str):
        raise BadWish(f"metadata.compaction.focus is of type {type(focus).__name__}; allowed: a text.")
    return Wish(now=bool(now), focus=_topic(focus or "", "metadata.compaction.focus"))


def _topic(text: str, place: str) -> str:
    try:
        return one_line_topic(text)
    except ValueError as error:
        raise BadWish(f"{place} has {error}.") from None


def _is_yes(value: object) -> bool:
    said = str(value).strip().lower()
    if said not in _YES | _NO:
        raise BadWish(f"{NOW_HEADER} is neither true nor false; allowed: true, false.")
    return said in _YES


def _decoded(value: object) -> str:
    """A header's text: servers read its bytes as Latin-1, clients write UTF-8."""
    try:
        return str(value).encode("latin-1").decode("utf-8")
    except UnicodeError:
        return str(value)


def _headers(body: Mapping[str, Any]) -> Mapping[str, Any]:
    request = body.get("proxy_server_request")
    headers = request.get("headers") if isinstance(request, Mapping) else None
    return {str(name).lower(): value for name, value in headers.items()} if isinstance(headers, Mapping) else {}
