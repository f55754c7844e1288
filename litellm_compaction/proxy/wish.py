"""Reads what a client may ask of its compaction: in its metadata or, for clients that cannot send any, in headers.

Read once for each request. Its words never reach a log or an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from litellm_compaction.core.prompts import one_line_topic
from litellm_compaction.errors import BadWish
from litellm_compaction.proxy.client import headers_of, sent_body

_HEADER = "x-litellm-compaction-"
_PLACE = "metadata.compaction"
_ALLOWED = '"off", or an object such as {"now": true, "focus": "the database schema", "pin": ["Never touch prod."]}'
_TYPES: Mapping[str, tuple[type, str]] = {
    "now": (bool, "true or false"),
    "focus": (str, "a text"),
    "pin": (list, "a list of texts"),
}
# Bounds of a list; a sentence is shorter.
_MAX_PINS, _MAX_PIN_CHARS = 32, 1000
_YES, _NO = frozenset({"true", "1", "yes", "on"}), frozenset({"false", "0", "no", "off", ""})


class Wish(NamedTuple):
    """`off` to be left alone, `now` to be compacted whatever the fill, with `focus` as a topic, or "".

    `pins` name messages that are to stay verbatim, by handle or words; None for no word about that.
    """

    off: bool = False
    now: bool = False
    focus: str = ""
    pins: tuple[str, ...] | None = None


NONE = Wish()


def wish_of(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Wish:
    """The wish of a request; `metadata` is LiteLLM's own, which holds the client's too. Metadata goes before headers.

    Raises:
        BadWish: its shape is unknown.
    """
    value = _parsed(next((found for found in _places(body, metadata) if found is not None), None))
    is_off = value in ("off", False)
    said = value if isinstance(value, Mapping) else {}
    _check(value, said)
    headers = {name: _decoded(value) for name, value in headers_of(body).items() if name.startswith(_HEADER)}
    now = bool(said.get("now")) or _is_yes(headers.get(f"{_HEADER}now", ""))
    focus = _topic(said.get("focus") or "", f"{_PLACE}.focus") or _topic(
        headers.get(f"{_HEADER}focus", ""), f"{_HEADER}focus"
    )
    pins, pin = said.get("pin"), headers.get(f"{_HEADER}pin")
    if pins is not None:
        pins = _pins(pins, f"{_PLACE}.pin")
    elif pin is not None:
        pins = _pins([pin], f"{_HEADER}pin")
    if focus and not now:
        raise BadWish(
            f'A focus is only used where the conversation is compacted now: add "now": true, or {_HEADER}now.'
        )
    return Wish(is_off, now, focus, pins)


def _places(body: Mapping[str, Any], metadata: Mapping[str, Any]) -> Iterator[object]:
    """The values of `compaction` in the client's metadata, at LiteLLM's places for it on the request's route."""
    for holder in (metadata, body.get("metadata"), sent_body(body).get("metadata")):
        if isinstance(holder, Mapping):
            yield holder.get("compaction")
            sent = holder.get("requester_metadata")
            yield sent.get("compaction") if isinstance(sent, Mapping) else None


def _parsed(value: object) -> object:
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    # OpenAI's own metadata holds strings only.
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadWish(f"{_PLACE} is not valid JSON; allowed: {_ALLOWED}.") from None


def _check(value: object, said: Mapping[Any, Any]) -> None:
    if not isinstance(value, Mapping) and value is not None and value not in ("on", "off", True, False):
        raise BadWish(f"{_PLACE} is of type {type(value).__name__}; allowed: {_ALLOWED}.")
    unknown = [repr(str(key)[:40]) for key in said if key not in _TYPES]
    if unknown:
        raise BadWish(f"{_PLACE} has unknown keys: {', '.join(unknown[:5])}; allowed: {_ALLOWED}.")
    for key, (kind, allowed) in _TYPES.items():
        found = said.get(key)
        if found is not None and not isinstance(found, kind):
            raise BadWish(f"{_PLACE}.{key} is of type {type(found).__name__}; allowed: {allowed}.")


def _pins(values: list[object], place: str) -> tuple[str, ...]:
    pins = [value.strip() for value in values if isinstance(value, str) and 0 < len(value.strip()) <= _MAX_PIN_CHARS]
    if len(pins) < len(values) or len(pins) > _MAX_PINS:
        raise BadWish(
            f"{place} has a list that is not allowed; allowed: at most {_MAX_PINS} texts of 1 to {_MAX_PIN_CHARS} "
            "characters, each with words of a message of the user's, or its handle."
        )
    return tuple(pins)


def _topic(text: str, place: str) -> str:
    try:
        return one_line_topic(text)
    except ValueError as error:
        raise BadWish(f"{place} has {error}.") from None


def _is_yes(said: str) -> bool:
    word = said.strip().lower()
    if word not in _YES | _NO:
        raise BadWish(f"{_HEADER}now is neither true nor false; allowed: true, false.")
    return word in _YES


def _decoded(value: object) -> str:
    """A header's text: servers read its bytes as Latin-1, clients write UTF-8."""
    try:
        return str(value).encode("latin-1").decode("utf-8")
    except UnicodeError:
        return str(value)
